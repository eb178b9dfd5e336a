"""Quantisation of a matrix into MLX's packed layouts."""

from types import ModuleType

import mlx.core as mx

from mlxserve.kernels.registry import native


def quantize(
    w: mx.array, bits: int, group_size: int, mode: str = "affine"
) -> tuple[mx.array, mx.array, mx.array | None]:
    """The words, scales and biases of `w`, in groups of `group_size` along K.

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
        parts = mx.quantize(w, group_size=group_size, bits=bits, mode=mode)
    elif mode == "affine":
        parts = kernels.quantize(w, bits, group_size)
    else:
        parts = kernels.quantize_floats(w, bits, group_size)
    return parts[0], parts[1], parts[2] if len(parts) > 2 else None


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
        got = run(x, bits, group_size)
        expected = mx.quantize(x, group_size=group_size, bits=bits, mode=mode)
        if not all(mx.array_equal(a, b) for a, b in zip(got, expected, strict=True)):
            raise ArithmeticError(f"quantize to {mode} of {bits} bits differs from mx.quantize")
