"""Norms over the last axis."""

from functools import cache
from types import ModuleType

import mlx.core as mx

from mlxserve.kernels.metal.add_rms_norm import sum_and_norm
from mlxserve.kernels.pages import dtype_name
from mlxserve.kernels.registry import check_close, metal, native
from mlxserve.kernels.uses import NormUse


def rms_norm(x: mx.array, weight: mx.array, eps: float) -> mx.array:
    """`x / sqrt(mean(x^2) + eps) * weight` (Zhang and Sennrich 2019, arXiv:1910.07467).

    x: `[T, D]` or `[T, H, D]`; weight: `[D]`. Returns x's shape and dtype. The native kernel is for
    float32. Raises ValueError for other shapes and weights.
    """
    kernels = native("norm") if x.dtype == mx.float32 else None
    if kernels is not None:
        return kernels.rms_norm(x, weight, eps)
    return mx.fast.rms_norm(x, weight, eps)


def add_rms_norm(
    y: mx.array, stream: mx.array, weight: mx.array, eps: float, inner: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    """What a layer adds to the residual stream, and the norm of the sum: what the next one reads.

    y, stream: `[T, D]`, of one dtype; weight, inner: `[D]`. Returns `stream + y` and its `rms_norm`
    with `weight`; with `inner`, `rms_norm(y, inner, eps)` is added in y's place (Gemma 2,
    arXiv:2408.00118). The native kernel is for float32, the Metal kernel for 16 bits. Raises
    ValueError for other shapes.
    """
    kernels = native("norm") if y.dtype == mx.float32 else None
    if kernels is not None:
        total, normed = kernels.add_rms_norm(y, stream, weight, eps, inner)
        return total, normed
    if (run := metal(use(y.shape[-1], y.dtype, inner is not None))) is not None:
        total, normed = run(sum_and_norm(y, stream, weight, eps, inner))
        return total, normed
    return reference(y, stream, weight, eps, inner)


def reference(
    y: mx.array, stream: mx.array, weight: mx.array, eps: float, inner: mx.array | None
) -> tuple[mx.array, mx.array]:
    """`add_rms_norm` in MLX operations."""
    total = stream + (y if inner is None else mx.fast.rms_norm(y, inner, eps))
    return total, mx.fast.rms_norm(total, weight, eps)


@cache
def use(width: int, dtype: mx.Dtype, inner: bool) -> NormUse:
    """What a layer of such a width asks of `add_rms_norm`."""
    return NormUse(width, dtype_name(dtype), inner)


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
        x, stream = mx.random.normal((2, 3, width), key=mx.random.key(width)) + 1.0
        weight, bias = stream[0], stream[1]
        normed = mx.fast.rms_norm(x, weight, 1e-5)
        check_close("rms_norm", kernels.rms_norm(x, weight, 1e-5), normed, 1e-5)
        for inner, total in ((None, stream + x), (weight, stream + normed)):
            made = kernels.add_rms_norm(x, stream, bias, 1e-5, inner)
            expected = total, mx.fast.rms_norm(total, bias, 1e-5)
            for got, right in zip(made, expected, strict=True):
                check_close("add_rms_norm", got, right, 1e-5)
        expected = mx.fast.layer_norm(x, weight, bias, 1e-5)
        check_close("layer_norm", kernels.layer_norm(x, weight, bias, 1e-5), expected, 1e-5)
