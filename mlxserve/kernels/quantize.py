"""Quantisation of a matrix into MLX's packed layouts, and what it costs."""

from types import ModuleType
from typing import NamedTuple

import mlx.core as mx

from mlxserve.kernels.quantized import PackedWeight, dequantize
from mlxserve.kernels.registry import native


class Rounded(NamedTuple):
    """A matrix `[N, K]` in groups along K: MLX's words, scales and perhaps biases, and its error.

    errors: float32 `[parts, 2]`, sums of squares over parts of the matrix: of what rounding
    changed, and of the numbers themselves.
    """

    words: mx.array
    scales: mx.array
    biases: mx.array | None
    errors: mx.array


def quantize(w: mx.array, bits: int, group_size: int, mode: str = "affine") -> Rounded:
    """`w` in groups of `group_size` along K. Native kernels compute it at once, on this thread.

    w: `[N, K]`, floating. affine: `w = scale * q + bias`, q of 2, 3, 4, 5, 6 or 8 bits in groups of
    32, 64 or 128; scales and biases `[N, K / group_size]` in w's dtype. mxfp4 and mxfp8: floats of
    4 or 8 bits in groups of 32, times a power of two, and nvfp4: floats of 4 bits in groups of 16,
    times one of 8 bits; scales are uint8, and biases None. The words are uint32
    `[N, K * bits / 32]`, low bits first.

    Bit for bit what `mx.quantize` gives on this device, but for mxfp groups that are smaller than
    any scale: those become 0, as on Metal, and not huge. Raises ValueError for anything else.
    """
    kernels = native("quantize")
    if kernels is None:
        return reference(w, bits, group_size, mode)
    run = kernels.quantize if mode == "affine" else kernels.quantize_floats
    words, scales, *biases, errors = run(w, bits, group_size)
    return Rounded(words, scales, biases[0] if biases else None, errors)


def reference(w: mx.array, bits: int, group_size: int, mode: str = "affine") -> Rounded:
    """`quantize` by MLX's own operations."""
    words, scales, *biases = mx.quantize(w, group_size=group_size, bits=bits, mode=mode)
    packed = PackedWeight(words, scales, biases[0] if biases else None, bits, group_size, mode)
    w = w.astype(mx.float32)
    off = w - dequantize(packed, mx.float32)
    errors = mx.stack([mx.square(off).sum(axis=1), mx.square(w).sum(axis=1)], axis=1)
    return Rounded(words, scales, packed.biases, errors)


def check(kernels: ModuleType) -> None:
    """Kernels against reference, bit for bit. Raises ArithmeticError."""
    w = mx.random.normal((6, 256), key=mx.random.key(0))
    # A row of zeros, one that is all positive, and one below the smallest step between weights.
    w = w * mx.array([0.0, 1.0, 1.0, 1e-9, 1e4, 1.0])[:, None]
    w = mx.where(mx.arange(6)[:, None] == 1, mx.abs(w), w)
    for mode, bits, group_size, dtype in (
        ("affine", 2, 32, mx.float32),
        ("affine", 3, 64, mx.bfloat16),
        ("affine", 4, 64, mx.float32),
        ("affine", 5, 32, mx.float16),
        ("affine", 6, 128, mx.bfloat16),
        ("affine", 8, 64, mx.float16),
        ("mxfp4", 4, 32, mx.bfloat16),
        ("mxfp8", 8, 32, mx.float16),
        ("nvfp4", 4, 16, mx.float32),
    ):
        x = w.astype(dtype)
        run = kernels.quantize if mode == "affine" else kernels.quantize_floats
        *got, errors = run(x, bits, group_size)
        *expected, expected_errors = reference(x, bits, group_size, mode)
        known = [part for part in expected if part is not None]
        if not all(mx.array_equal(a, b) for a, b in zip(got, known, strict=True)):
            raise ArithmeticError(f"quantize to {mode} of {bits} bits differs from mx.quantize")
        if not mx.allclose(errors.sum(axis=0), expected_errors.sum(axis=0), rtol=1e-3, atol=0):
            raise ArithmeticError(f"quantize to {mode} of {bits} bits has another error")
