"""Building blocks shared by all models. Weights are placeholders until `models.load` fills them."""

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn

from mlxserve.errors import ModelError
from mlxserve.kernels.quantized import PackedWeight, dequantize, quantized_matmul

Gate = Callable[[mx.array, mx.array], mx.array]


def _project(x: mx.array, weight: mx.array | PackedWeight) -> mx.array:
    """`x @ weight.T` for either kind of weight. x: `[..., K]`, weight: `[N, K]`."""
    if isinstance(weight, PackedWeight):
        return quantized_matmul(x, weight)
    return x @ weight.T


class Linear(nn.Module):
    """`x @ weight.T + bias`. weight: `[outputs, inputs]`, an array or a PackedWeight."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight: mx.array | PackedWeight = mx.zeros((outputs, inputs))
        self.bias = mx.zeros((outputs,)) if bias else None

    def __call__(self, x: mx.array) -> mx.array:
        """x: `[T, inputs]`. Returns `[T, outputs]` in x's dtype."""
        y = _project(x, self.weight)
        return y if self.bias is None else y + self.bias


class Embedding(nn.Module):
    """A row per token id. weight: `[V, D]`, an array or packed; packed rows come out in `dtype`."""

    def __init__(self, vocab_size: int, width: int) -> None:
        super().__init__()
        self.weight: mx.array | PackedWeight = mx.zeros((vocab_size, width))
        self.dtype = mx.float32

    def __call__(self, ids: mx.array) -> mx.array:
        """ids: integers `[T]`. Returns `[T, D]`."""
        w = self.weight
        if not isinstance(w, PackedWeight):
            return w[ids]
        biases = None if w.biases is None else w.biases[ids]
        rows = PackedWeight(w.weight[ids], w.scales[ids], biases, w.bits, w.group_size, w.mode)
        return dequantize(rows, self.dtype)

    def as_linear(self, h: mx.array) -> mx.array:
        """The tied output head. h: `[..., D]`. Returns `[..., V]`."""
        return _project(h, self.weight)


class RMSNorm(nn.Module):
    """`x / rms(x) * weight` over the last axis (Zhang and Sennrich 2019, arXiv:1910.07467).

    Gemma stores its weights as offsets from 1: its `sanitize` adds the 1, once, at load.
    """

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = mx.ones((width,))
        self.eps = eps

    def __call__(self, x: mx.array) -> mx.array:
        return mx.fast.rms_norm(x, self.weight, self.eps)


class GatedMLP(nn.Module):
    """`down(gate(x) through the activation, times up(x))` (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, width: int, inner: int, gate: Gate, *, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = Linear(width, inner, bias=bias)
        self.up_proj = Linear(width, inner, bias=bias)
        self.down_proj = Linear(inner, width, bias=bias)
        self.gate = gate

    def __call__(self, x: mx.array) -> mx.array:
        """x: `[T, D]`. Returns `[T, D]`."""
        return self.down_proj(self.gate(self.gate_proj(x), self.up_proj(x)))


def _swiglu(gate: mx.array, up: mx.array) -> mx.array:
    return gate * mx.sigmoid(gate) * up


def _geglu_tanh(gate: mx.array, up: mx.array) -> mx.array:
    inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)  # sqrt(2 / pi)
    return 0.5 * gate * (1 + mx.tanh(inner)) * up


GATES: dict[str, Gate] = {"silu": _swiglu, "gelu_pytorch_tanh": _geglu_tanh}


def make_gate(name: str) -> Gate:
    """`(gate, up) -> activation(gate) * up`, under the name that config files give the activation.

    Fused into one kernel on Metal. On CPU mx.compile would run g++ at the first call (1.4 s) and
    gain 0.03 ms per layer and token, so there it stays plain. Raises ModelError for another name.
    """
    if name not in GATES:
        raise ModelError(f"activation {name!r} isn't supported; supported: {', '.join(GATES)}")
    gate = GATES[name]
    return mx.compile(gate, shapeless=True) if mx.metal.is_available() else gate


def soft_cap(x: mx.array, cap: float | None) -> mx.array:
    """`cap * tanh(x / cap)`, which keeps values within +-cap; None leaves them alone."""
    return x if cap is None else mx.tanh(x / cap) * cap
