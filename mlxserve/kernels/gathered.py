"""Matmuls of mixture-of-experts layers: each token with the experts that were chosen for it.

The experts' weights of one kind are a stack `[E, N, K]`, prepared by `matmul.prepare` as a single
weight is.
"""

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import mlx.core as mx

from mlxserve import device
from mlxserve.kernels import registry
from mlxserve.kernels.matmul import PanelWeight, Stack, to_panels
from mlxserve.kernels.quantized import PackedWeight, dequantize

OP = "gathered_matmul"


def gathered_matmul(
    x: mx.array,
    weights: Sequence[Stack],
    experts: mx.array,
    biases: Sequence[mx.array | None] | None = None,
) -> list[mx.array]:
    """`out[t, a] = x[t] @ weight[experts[t, a]].T + bias[experts[t, a]]` for each weight.

    x: `[T, K]`, the same for all experts of a token, or `[T, A, K]`, a row for each; floating.
    weights: stacks `[E, N, K]` of one E and K, in any form of `kernels.matmul`. experts: int32
    `[T, A]`. biases: `[E, N]` or None for each weight. Returns for each weight `[T, A, N]` in x's
    dtype; an expert outside 0 .. E - 1 gives a row of NaN. The native kernels go through the chosen
    experts one by one, and give a row the bits that `matmul` gives it with that expert alone.
    Raises ValueError for shapes and dtypes that don't fit.
    """
    if biases is None:
        biases = [None] * len(weights)
    _check(x, weights, experts, biases)
    kernels: Any = registry.native("gathered")
    if all(isinstance(weight, PanelWeight) for weight in weights):
        return _native(kernels, x, weights, experts, biases)
    outs = []
    for weight, bias in zip(weights, biases, strict=True):
        if isinstance(weight, PanelWeight):
            outs += _native(kernels, x, [weight], experts, [bias])
        else:
            outs.append(_reference(x, weight, experts, bias))
    return outs


def _check(
    x: mx.array,
    weights: Sequence[Stack],
    experts: mx.array,
    biases: Sequence[mx.array | None],
) -> None:
    if not mx.issubdtype(x.dtype, mx.floating):
        raise ValueError(f"{OP}: x is {x.dtype}, expected a floating type")
    if experts.dtype != mx.int32 or experts.ndim != 2:
        given = f"{experts.dtype} {list(experts.shape)}"
        raise ValueError(f"{OP}: experts is {given}, expected int32 [T, A]")
    if x.ndim not in (2, 3) or x.shape[:-1] != experts.shape[: x.ndim - 1]:
        tokens, chosen = experts.shape
        fits = f"[{tokens}, K] or [{tokens}, {chosen}, K]"
        raise ValueError(f"{OP}: x is {list(x.shape)}, expected {fits}")
    if not weights:
        raise ValueError(f"{OP}: there are no weights")
    if len(weights) != len(biases):
        raise ValueError(f"{OP}: {len(biases)} biases for {len(weights)} weights")
    for weight, bias in zip(weights, biases, strict=True):
        n_experts, n, k = _stack_shape(weight)
        if k != x.shape[-1]:
            raise ValueError(f"{OP}: x has K={x.shape[-1]}, the weight has K={k}")
        if n_experts != weights[0].shape[0]:
            other = weights[0].shape[0]
            raise ValueError(f"{OP}: a weight has E={n_experts}, the first has E={other}")
        if bias is not None and bias.shape != (n_experts, n):
            raise ValueError(f"{OP}: bias is {list(bias.shape)}, expected {[n_experts, n]}")


def _stack_shape(weight: Stack) -> tuple[int, int, int]:
    if len(weight.shape) != 3:
        raise ValueError(f"{OP}: a weight is {list(weight.shape)}, expected a stack [E, N, K]")
    n_experts, n, k = weight.shape
    return n_experts, n, k


def _native(
    kernels: Any,
    x: mx.array,
    weights: Sequence[Any],
    experts: mx.array,
    biases: Sequence[mx.array | None],
) -> list[mx.array]:
    handles = [weight.handle for weight in weights]
    wide = [None if bias is None else bias.astype(mx.float32) for bias in biases]
    outs = kernels.gathered_matmul(x.astype(mx.float32), handles, experts, wide)
    return [out.astype(x.dtype) for out in outs]


def _reference(
    x: mx.array, weight: mx.array | PackedWeight, experts: mx.array, bias: mx.array | None
) -> mx.array:
    exists = (experts >= 0) & (experts < weight.shape[0])
    ids = mx.where(exists, experts, 0)
    rows = x[..., None, :] if x.ndim == 3 else x[:, None, None, :]  # [T, A or 1, 1, K]
    if not device.has_metal():
        rows = rows.astype(mx.float32)  # MLX's CPU kernel takes no other type
    if isinstance(weight, PackedWeight):
        out = mx.gather_qmm(
            rows,
            weight.weight,
            weight.scales,
            weight.biases,
            rhs_indices=ids,
            transpose=True,
            group_size=weight.group_size,
            bits=weight.bits,
            mode=weight.mode,
        )
    else:
        out = mx.gather_mm(rows, weight.swapaxes(-1, -2), rhs_indices=ids)
    out = out.squeeze(-2)
    if bias is not None:
        out = out + bias[ids]
    return mx.where(exists[..., None], out, mx.nan).astype(x.dtype)


def check(kernels: ModuleType) -> None:
    """Compare the kernel with the reference. Raises ArithmeticError where they differ."""
    with mx.stream(mx.cpu):
        shared = mx.random.normal((3, 64), key=mx.random.key(0))
        own = mx.random.normal((3, 2, 64), key=mx.random.key(1))
        w = mx.random.normal((4, 21, 64), key=mx.random.key(2)).astype(mx.float16)
        bias = mx.random.normal((4, 21), key=mx.random.key(3))
        experts = mx.array([[3, 0], [3, 3], [2, 3]], mx.int32)
        words, scales, offsets = mx.quantize(w, 32, 4)
        for form in (w, PackedWeight(words, scales, offsets, 4, 32)):
            panels = to_panels(kernels, form)
            dense = dequantize(form, mx.float32) if isinstance(form, PackedWeight) else form
            for x in (shared, own):
                (got,) = _native(kernels, x, [panels], experts, [bias])
                registry.check_close("gathered", got, _reference(x, dense, experts, bias), 1e-4)
