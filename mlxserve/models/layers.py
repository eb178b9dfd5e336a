"""Building blocks shared by all models. Weights are placeholders until `models.load` fills them."""

from collections.abc import Mapping
from typing import Protocol

import mlx.core as mx
import mlx.nn as nn

from mlxserve.errors import InvariantError
from mlxserve.kernels.gates import gated
from mlxserve.kernels.matmul import Weight, matmul, matmuls, rows
from mlxserve.kernels.norm import add_rms_norm, rms_norm
from mlxserve.models.base import ALONE, Group, LayerView, View


class Linear(nn.Module):
    """`x @ weight.T + bias`. weight: `[outputs, inputs]`, in any form of `kernels.matmul`.

    group: of the processes that each have some of the inputs; their results are added up.
    """

    def __init__(
        self, inputs: int, outputs: int, *, bias: bool = False, group: Group = ALONE
    ) -> None:
        super().__init__()
        self.weight: Weight = mx.zeros((outputs, inputs))
        self.bias = mx.zeros((outputs,)) if bias else None
        self.group = group

    def __call__(self, x: mx.array) -> mx.array:
        """x: `[T, inputs]`. Returns `[T, outputs]` in x's dtype."""
        if self.group.size == 1:
            return matmul(x, self.weight, self.bias)
        total = self.group.sum(matmul(x, self.weight))
        return total if self.bias is None else total + self.bias


def project(x: mx.array, *layers: Linear) -> list[mx.array]:
    """The same x through several layers. x: `[T, inputs]`. Returns `[T, outputs]` of each."""
    return matmuls(x, [layer.weight for layer in layers], [layer.bias for layer in layers])


class Embedding(nn.Module):
    """A row per token id, times `scale`. weight: `[V, D]`, in any form; packed rows have `dtype`.

    The output head that shares the weight has no scale. group: of the processes that each have
    some of the rows; first: the id of this one's first row.
    """

    def __init__(
        self,
        vocab_size: int,
        width: int,
        *,
        scale: float = 1.0,
        first: int = 0,
        group: Group = ALONE,
    ) -> None:
        super().__init__()
        self.scale = scale
        self.first = first
        self.group = group
        self.weight: Weight = mx.zeros((vocab_size, width))
        self.dtype = mx.float32

    def __call__(self, ids: mx.array) -> mx.array:
        """ids: integers `[T]`. Returns `[T, D]`."""
        if self.group.size == 1:
            return rows(self.weight, ids, self.dtype, self.scale)
        row = ids.astype(mx.int32) - self.first
        here = (row >= 0) & (row < self.weight.shape[0])
        found = rows(self.weight, mx.where(here, row, 0), self.dtype, self.scale)
        return self.group.sum(mx.where(here[:, None], found, 0))

    def as_linear(self, h: mx.array) -> mx.array:
        """The tied output head. h: `[..., D]`. Returns `[..., V]`, of the rows that are here."""
        return matmul(h, self.weight)


def output_head(h: mx.array, head: Linear | None, embedding: Embedding | None) -> mx.array:
    """Logits of the ids that are here: of a head of its own, or the embedding's rows.

    h: `[..., D]`. Returns `[..., V]`. Raises InvariantError in a part of a model without either.
    """
    if head is not None:
        return head(h)
    if embedding is None:
        raise InvariantError("only the part of a model with its first layer makes logits")
    return embedding.as_linear(h)


class RMSNorm(nn.Module):
    """`x / rms(x) * weight` over the last axis (Zhang and Sennrich 2019, arXiv:1910.07467).

    Gemma stores its weights as offsets from 1: its `sanitize` adds the 1, once, at load.
    """

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = mx.ones((width,))
        self.eps = eps

    def __call__(self, x: mx.array) -> mx.array:
        """x: `[T, D]`."""
        return rms_norm(x, self.weight, self.eps)

    def of_sum(
        self, y: mx.array, stream: mx.array, inner: "InnerNorm | None" = None
    ) -> tuple[mx.array, mx.array]:
        """`stream + y`, or with the norm of y in its place, and the norm of that. All `[T, D]`."""
        weight = None if inner is None else inner.weight
        return add_rms_norm(y, stream, self.weight, self.eps, weight)


class InnerNorm(nn.Module):
    """The norm of what a layer adds to the stream: part of `RMSNorm.of_sum`, which has its eps."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = mx.ones((width,))


class GatedMLP(nn.Module):
    """`down(activation(gate(x)) * up(x))` (Shazeer 2020, arXiv:2002.05202).

    activation: a key of `kernels.gates.GATES`, the name that config files give it. group: of the
    processes that each have some of the inner channels.
    """

    def __init__(
        self,
        width: int,
        inner: int,
        activation: str,
        *,
        bias: bool = False,
        group: Group = ALONE,
    ) -> None:
        super().__init__()
        self.gate_proj = Linear(width, inner, bias=bias)
        self.up_proj = Linear(width, inner, bias=bias)
        self.down_proj = Linear(inner, width, bias=bias, group=group)
        self.activation = activation

    def __call__(self, x: mx.array) -> mx.array:
        """x: `[T, D]`. Returns `[T, D]`."""
        gate, up = project(x, self.gate_proj, self.up_proj)
        return self.down_proj(gated(gate, up, self.activation))


class NoNorm:
    """In place of the next layer's norm, where another process has that layer."""

    def __init__(self, eps: float) -> None:
        self.eps = eps

    def of_sum(
        self, y: mx.array, stream: mx.array, inner: InnerNorm | None = None
    ) -> tuple[mx.array, mx.array]:
        """See `RMSNorm.of_sum`; both are the sum."""
        total = stream + (y if inner is None else rms_norm(y, inner.weight, self.eps))
        return total, total


NextNorm = RMSNorm | NoNorm


class Block(Protocol):
    """A layer: what it reads is normalised, what it makes is added to the residual stream."""

    input_layernorm: RMSNorm

    def __call__(
        self, x: mx.array, h: mx.array, positions: mx.array, layer: LayerView, norm: NextNorm
    ) -> tuple[mx.array, mx.array]:
        """x: the stream, `[T, D]`; h: its norm; norm: of what comes next, for the h it returns."""
        ...


def run_blocks(blocks: Mapping[str, Block], norm: NextNorm, x: mx.array, view: View) -> mx.array:
    """Consecutive layers, by their numbers, and what follows them. x: the stream, `[T, D]`.

    norm: the model's last, or NoNorm. Returns `[T, D]`. A layer's last sum and the norm that the
    next one begins with are one operation.
    """
    first, *others = blocks.values()
    norms = [*(block.input_layernorm for block in others), norm]
    h = first.input_layernorm(x)
    for (index, block), following in zip(blocks.items(), norms, strict=True):
        x, h = block(x, h, view.positions, view.layer(int(index)), following)
    return h
