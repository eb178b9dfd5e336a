"""Building blocks shared by all models. Weights are placeholders until `models.load` fills them."""

import mlx.core as mx
import mlx.nn as nn

from mlxserve.kernels.gates import gated
from mlxserve.kernels.matmul import Weight, matmul, matmuls, rows
from mlxserve.kernels.norm import rms_norm


class Linear(nn.Module):
    """`x @ weight.T + bias`. weight: `[outputs, inputs]`, in any form of `kernels.matmul`."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight: Weight = mx.zeros((outputs, inputs))
        self.bias = mx.zeros((outputs,)) if bias else None

    def __call__(self, x: mx.array, add: mx.array | None = None) -> mx.array:
        """x: `[T, inputs]`; add: `[T, outputs]`. Returns `[T, outputs]` in x's dtype."""
        return matmul(x, self.weight, self.bias, add)


def project(x: mx.array, *layers: Linear) -> list[mx.array]:
    """The same x through several layers. x: `[T, inputs]`. Returns `[T, outputs]` of each."""
    return matmuls(x, [layer.weight for layer in layers], [layer.bias for layer in layers])


class Embedding(nn.Module):
    """A row per token id, times `scale`. weight: `[V, D]`, in any form; packed rows have `dtype`.

    The output head that shares the weight has no scale.
    """

    def __init__(self, vocab_size: int, width: int, *, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale
        self.weight: Weight = mx.zeros((vocab_size, width))
        self.dtype = mx.float32

    def __call__(self, ids: mx.array) -> mx.array:
        """ids: integers `[T]`. Returns `[T, D]`."""
        return rows(self.weight, ids, self.dtype, self.scale)

    def as_linear(self, h: mx.array) -> mx.array:
        """The tied output head. h: `[..., D]`. Returns `[..., V]`."""
        return matmul(h, self.weight)


class RMSNorm(nn.Module):
    """`x / rms(x) * weight` over the last axis (Zhang and Sennrich 2019, arXiv:1910.07467).

    Gemma stores its weights as offsets from 1: its `sanitize` adds the 1, once, at load.
    """

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = mx.ones((width,))
        self.eps = eps

    def __call__(self, x: mx.array, add: mx.array | None = None) -> mx.array:
        """x, add: `[.., D]`. Returns the norm of x, plus add."""
        return rms_norm(x, self.weight, self.eps, add)


class GatedMLP(nn.Module):
    """`down(activation(gate(x)) * up(x))` (Shazeer 2020, arXiv:2002.05202).

    activation: a key of `kernels.gates.GATES`, the name that config files give it.
    """

    def __init__(self, width: int, inner: int, activation: str, *, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = Linear(width, inner, bias=bias)
        self.up_proj = Linear(width, inner, bias=bias)
        self.down_proj = Linear(inner, width, bias=bias)
        self.activation = activation

    def __call__(self, x: mx.array, add: mx.array | None = None) -> mx.array:
        """x, add: `[T, D]`. Returns `[T, D]`."""
        gate, up = project(x, self.gate_proj, self.up_proj)
        return self.down_proj(gated(gate, up, self.activation), add)
