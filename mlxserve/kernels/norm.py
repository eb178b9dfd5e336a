"""Norms over the last axis."""

from types import ModuleType

import mlx.core as mx

from mlxserve.kernels.registry import check_close, native


def rms_norm(x: mx.array, weight: mx.array, eps: float, add: mx.array | None = None) -> mx.array:
    """`x / sqrt(mean(x^2) + eps) * weight + add` (Zhang and Sennrich 2019, arXiv:1910.07467).

    x, add: `[T, D]` or `[T, H, D]`; weight: `[D]`. Returns x's shape and dtype. The native kernel
    is for float32. Raises ValueError for other shapes and weights.
    """
    kernels = native("norm") if x.dtype == mx.float32 else None
    if kernels is not None:
        return kernels.rms_norm(x, weight, eps, add)
    normed = mx.fast.rms_norm(x, weight, eps)
    return normed if add is None else normed + add


def layer_norm(x: mx.array, weight: mx.array, bias: mx.array | None, eps: float) -> mx.array:
    """`(x - mean(x)) / sqrt(variance(x) + eps) * weight + bias` (Ba et al. 2016, arXiv:1607.06450).

    x: `[T, D]` or `[T, H, D]`; weight, bias: `[D]`. Returns x's shape and dtype. Raises ValueError
    as `rms_norm` does.
    """
    kernels = native("norm") if x.dtype == mx.float32 else None
    if kernels is None:
        return mx.fast.layer_norm(x, weight, bias, eps)
    return kernels.layer_norm(x, weight, bias, eps)


def check(kernels: ModuleType) -> None:
    """Kernels against references on widths that fill no vector. Raises ArithmeticError."""
    for width in (1, 7, 83):
        x, residual = mx.random.normal((2, 3, width), key=mx.random.key(width)) + 1.0
        weight, bias = residual[0], residual[1]
        expected = mx.fast.rms_norm(x, weight, 1e-5)
        check_close("rms_norm", kernels.rms_norm(x, weight, 1e-5), expected, 1e-5)
        added = kernels.rms_norm(x, weight, 1e-5, residual)
        check_close("rms_norm with add", added, expected + residual, 1e-5)
        expected = mx.fast.layer_norm(x, weight, bias, 1e-5)
        check_close("layer_norm", kernels.layer_norm(x, weight, bias, 1e-5), expected, 1e-5)
