"""What a model asks of the ops that have Metal kernels, found by tracing a token through it."""

import mlx.core as mx

from mlxserve.cache.spec import LayerSpec
from mlxserve.kernels import attention
from mlxserve.kernels.uses import AttentionUse
from mlxserve.models.base import Model


def attention_uses(model: Model, dtype: mx.Dtype) -> dict[AttentionUse, list[int]]:
    """The layers of each use. dtype: of keys and values.

    So every architecture says what it does, and not what it is declared to do. Nothing is computed,
    and placeholders do for weights.
    """
    view = _Trace(model.layer_specs(), dtype)
    model(mx.zeros(1, mx.int32), view)
    return view.uses


class _Trace:
    """A `View` that takes down what is asked of it."""

    def __init__(self, specs: list[LayerSpec], dtype: mx.Dtype) -> None:
        self.positions = mx.zeros(1, mx.int32)
        self.specs = specs
        self.dtype = dtype
        self.uses: dict[AttentionUse, list[int]] = {}

    def layer(self, index: int) -> "_TracedLayer":
        return _TracedLayer(self, index)


class _TracedLayer:
    def __init__(self, trace: _Trace, index: int) -> None:
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
        window = self.trace.specs[self.index].window
        heads = q.shape[1], k.shape[1], q.shape[2]
        asked = attention.use(*heads, self.trace.dtype, window, softcap, sinks is not None)
        self.trace.uses.setdefault(asked, []).append(self.index)
        return q
