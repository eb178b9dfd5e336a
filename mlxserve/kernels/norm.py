"""Norms over the last axis, with the residual addition that comes before one."""

from types import ModuleType

import mlx.core as mx

from mlxserve.kernels.registry import check_close, native


def rms_norm(x: mx.array, weight: mx.array, eps: float) -> mx.array:
    """`x / sqrt(mean(x^2) + eps) * weight` (Zhang and Sennrich 2019, arXiv:1910.07467).

    x: `[T, D]` or `[T, H, D]`; weight: `[D]`. Returns x's shape and dtype. The native kernel is
    for float32. Raises ValueError for other shapes and weights.
    """
    kernels = native("norm") if x.dtype == mx.float32 else None
    if kernels is None:
        return mx.fast.rms_norm(x, weight, eps)
    return kernels.rms_norm(x, weight, eps)


def add_rms_norm(
    x: mx.array, residual: mx.array, weight: mx.array, eps: float
) -> tuple[mx.array, mx.array]:
    """`x + residual`, and the same after `rms_norm`.

    x, residual: `[T, D]` or `[T, H, D]`; weight: `[D]`. Returns both in x's shape and dtype. Raises
    ValueError as `rms_norm` does, and where residual's shape is another.
    """
    kernels = native("norm") if x.dtype == mx.float32 else None
    if kernels is None:
        return _add_rms_norm(x, residual, weight, eps)
    total, normed = kernels.add_rms_norm(x, residual, weight, eps)
    return total, normed


def layer_norm(x: mx.array, weight: mx.array, bias: mx.array | None, eps: float) -> mx.array:
    """`(x - mean(x)) / sqrt(variance(x) + eps) * weight + bias` (Ba et al. 2016, arXiv:1607.06450).

    x: `[T, D]` or `[T, H, D]`; weight, bias: `[D]`. Returns x's shape and dtype. Raises ValueError
    as `rms_norm` does.
    """
    kernels = native("norm") if x.dtype == mx.float32 else None
    if kernels is None:
        return mx.fast.layer_norm(x, weight, bias, eps)
    return kernels.layer_norm(x, weight, bias, eps)


def _add_rms_norm(
    x: mx.array, residual: mx.array, weight: mx.array, eps: float
) -> tuple[mx.array, mx.array]:
    if x.shape != residual.shape:
        raise ValueError(f"add_rms_norm: residual is {residual.shape}, expected {x.shape}")
    total = x + residual
    return total, mx.fast.rms_norm(total, weight, eps)


def check(kernels: ModuleType) -> None:
    """Kernels against references on widths that fill no vector. Raises ArithmeticError."""
    for width in (1, 7, 83):
        x, residual = mx.random.normal((2, 3, width), key=mx.random.key(width)) + 1.0
        weight, bias = residual[0], residual[1]
        expected = _add_rms_norm(x, residual, weight, 1e-5)
        got = kernels.add_rms_norm(x, residual, weight, 1e-5)
        check_close("add_rms_norm", got[0], expected[0], 1e-6)
        check_close("add_rms_norm", got[1], expected[1], 1e-5)
        expected = mx.fast.rms_norm(x, weight, 1e-5)
        check_close("rms_norm", kernels.rms_norm(x, weight, 1e-5), expected, 1e-5)
        expected = mx.fast.layer_norm(x, weight, bias, 1e-5)
        check_close("layer_norm", kernels.layer_norm(x, weight, bias, 1e-5), expected, 1e-5)
