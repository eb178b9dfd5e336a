"""What a model asks of the ops that have Metal kernels."""

from collections.abc import Sequence
from typing import cast

import mlx.core as mx
import mlx.nn as nn

from mlxserve.cache.spec import UNPACKED, KVBits, Latent, LayerSpec, State
from mlxserve.errors import ModelError
from mlxserve.kernels import attention, matmul, registry
from mlxserve.kernels.quantized import PackedWeight
from mlxserve.kernels.uses import AttentionUse, MatmulUse, Use
from mlxserve.models import tensors
from mlxserve.models.base import Model, Weights
from mlxserve.models.layers import Embedding


def attention_uses(
    model: Model,
    dtype: mx.Dtype,
    specs: Sequence[LayerSpec] | None = None,
    bits: KVBits = UNPACKED,
) -> dict[AttentionUse, list[int]]:
    """The layers of each use of attention over keys and values, by tracing a token through it.

    dtype: theirs, where they aren't packed; specs: what the cache keeps, None for the model's own;
    bits: of sealed pages. So every architecture says what it does, and not what it is declared to
    do. Nothing is computed, and placeholders do for weights.
    """
    view = Trace(model.layer_specs() if specs is None else specs, dtype, bits)
    trace(model, view)
    return view.uses


def other_uses(model: Model, dtype: mx.Dtype) -> list[Use]:
    """The uses of ops between those, such as norms, by tracing a token in the same way.

    dtype: of activations; the model's placeholders for weights get it.
    """
    cast(nn.Module, model).set_dtype(dtype)
    for part in model.named_modules():
        if isinstance(part[1], Embedding):
            part[1].dtype = dtype
    with registry.noting() as noted:
        trace(model, Trace(model.layer_specs(), dtype))
    return list(noted)


def matmul_uses(
    model: Model, weights: Weights, dtype: mx.Dtype, *, deterministic: bool = False
) -> dict[MatmulUse, list[str]]:
    """The matrices of each use of matmul, by name, among those that are packed.

    weights: under the model's names; dtype: of activations; deterministic: see `MatmulUse`.
    """
    uses: dict[MatmulUse, list[str]] = {}
    for name in tensors.multiplied(model):
        weight = weights[f"{name}.weight"]
        if isinstance(weight, PackedWeight):
            asked = matmul.use(weight, dtype, deterministic=deterministic)
            uses.setdefault(asked, []).append(name)
    return uses


def trace(model: Model, view: "Trace") -> None:
    """Show a token to a model, or to a part of it. Nothing is computed."""
    first = model.own_layers.start == 0
    model(mx.zeros(1, mx.int32) if first else mx.zeros((1, model.config.width), view.dtype), view)


class Trace:
    """A `View` of one token that takes down what is asked of it.

    uses: of attention over keys and values, with their layers. By layer, heads and dims: of its
    queries; made: numbers in the queries and keys that it attends with, and in what it gets back.
    """

    def __init__(
        self, specs: Sequence[LayerSpec], dtype: mx.Dtype, bits: KVBits = UNPACKED
    ) -> None:
        self.positions = mx.zeros(1, mx.int32)
        self.spans = ((0, 1),)
        self.specs = specs
        self.dtype = dtype
        self.bits = bits
        self.uses: dict[AttentionUse, list[int]] = {}
        self.heads: dict[int, int] = {}
        self.dims: dict[int, int] = {}
        self.made: dict[int, int] = {}

    def layer(self, index: int) -> "TracedLayer":
        return TracedLayer(self, index)


class TracedLayer:
    """One layer's side of it."""

    def __init__(self, trace: Trace, index: int) -> None:
        self.trace = trace
        self.index = index

    def attend(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        *,
        scale: float,
        sinks: mx.array | None = None,
        softcap: float | None = None,
    ) -> mx.array:
        spec, bits = self.trace.specs[self.index], self.trace.bits
        if isinstance(spec, State):
            raise ModelError(f"layer {self.index} attends, and keeps states only")
        sizes = q.shape[1], k.shape[1], q.shape[2], self.trace.dtype
        how = spec.window, softcap, sinks is not None, spec.keep
        asked = attention.use(*sizes, *how, bits.keys, bits.values)
        self.trace.uses.setdefault(asked, []).append(self.index)
        self._take_down(q, k)
        return q

    def attend_latent(self, q: mx.array, latent: mx.array, *, scale: float) -> mx.array:
        spec = self.trace.specs[self.index]
        if not isinstance(spec, Latent):
            raise ModelError(f"layer {self.index} attends to latents, and keeps {spec}")
        self._take_down(q, latent)
        return q[..., : spec.rank]

    def _take_down(self, q: mx.array, keys: mx.array) -> None:
        _, self.trace.heads[self.index], self.trace.dims[self.index] = q.shape
        self.trace.made[self.index] = 2 * q.size + keys.size

    def states(self) -> tuple[mx.array, ...]:
        spec = self.trace.specs[self.index]
        if not isinstance(spec, State):
            raise ModelError(f"layer {self.index} asks for states, and keeps {spec}")
        return tuple(mx.zeros((1, *shape)) for shape in spec.shapes)

    def set_states(self, states: Sequence[mx.array]) -> None:
        pass  # they aren't attention's
