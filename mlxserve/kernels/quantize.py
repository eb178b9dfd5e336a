"""Affine quantisation of a matrix into MLX's packed layout."""

from types import ModuleType

import mlx.core as mx

from mlxserve.kernels.registry import native


def quantize(w: mx.array, bits: int, group_size: int) -> tuple[mx.array, mx.array, mx.array]:
    """Groups of `group_size` weights along K as `w = scale * q + bias`, q of `bits` bits.

    w: `[N, K]`, floating; bits: 2, 3, 4, 5, 6 or 8; group_size: 32, 64 or 128. Returns the words,
    uint32 `[N, K * bits / 32]`, low bits first, then scales and biases, `[N, K / group_size]` in
    w's dtype: bit for bit what `mx.quantize` gives on a CPU. Raises ValueError for anything else.
    """
    kernels = native("quantize")
    if kernels is None:
        weight, scales, biases = mx.quantize(w, group_size=group_size, bits=bits)
    else:
        weight, scales, biases = kernels.quantize(w, bits, group_size)
    return weight, scales, biases


def check(kernels: ModuleType) -> None:
    """Kernel against reference, bit for bit. Raises ArithmeticError."""
    w = mx.random.normal((6, 256), key=mx.random.key(0))
    # A row of zeros, one that is all positive, and one below the smallest step between weights.
    w = w * mx.array([0.0, 1.0, 1.0, 1e-9, 1e4, 1.0])[:, None]
    w = mx.where(mx.arange(6)[:, None] == 1, mx.abs(w), w)
    for bits, group_size, dtype in (
        (2, 32, mx.float32),
        (3, 64, mx.bfloat16),
        (4, 64, mx.float32),
        (5, 32, mx.float16),
        (6, 128, mx.bfloat16),
        (8, 64, mx.float16),
    ):
        x = w.astype(dtype)
        got = kernels.quantize(x, bits, group_size)
        expected = mx.quantize(x, group_size=group_size, bits=bits)
        if not all(mx.array_equal(a, b) for a, b in zip(got, expected, strict=True)):
            raise ArithmeticError(f"quantize to {bits} bits differs from mx.quantize")
