"""A `models.base.View` without pages or batches: one sequence, explicit masks, float32."""

import mlx.core as mx

from mlxserve.cache.spec import LayerSpec, State


class DenseView:
    """Keeps every key and value it is shown. `advance(n)` announces the next n tokens."""

    def __init__(self, specs: list[LayerSpec]) -> None:
        self._layers = [DenseLayer(self, spec) for spec in specs]
        self.positions = mx.zeros((0,), dtype=mx.int32)
        self.spans: tuple[tuple[int, int], ...] = ()
        self.total = 0

    def advance(self, tokens: int) -> "DenseView":
        self.spans = ((0, tokens),)
        self.positions = mx.arange(self.total, self.total + tokens, dtype=mx.int32)
        self.total += tokens
        return self

    def layer(self, index: int) -> "DenseLayer":
        return self._layers[index]


class DenseLayer:
    def __init__(self, view: DenseView, spec: LayerSpec) -> None:
        self._view = view
        self._spec = spec
        self._keys: list[mx.array] = []
        self._values: list[mx.array] = []
        shapes = spec.shapes if isinstance(spec, State) else ()
        self._states = [mx.zeros((1, *shape)) for shape in shapes]

    def attend(self, q, k, v, *, scale, sinks=None, softcap=None):
        spec, T = self._spec, q.shape[0]
        assert k.shape == (T, spec.heads, spec.dim)
        assert v.shape[:2] == k.shape[:2]
        assert q.shape[2] == spec.dim
        assert q.shape[1] % spec.heads == 0
        self._keys.append(k)
        self._values.append(v)
        keys, values = mx.concatenate(self._keys), mx.concatenate(self._values)
        assert keys.shape[0] == self._view.total
        group = q.shape[1] // spec.heads
        queries = q.astype(mx.float32).transpose(1, 0, 2)
        keys = mx.repeat(keys.astype(mx.float32).transpose(1, 0, 2), group, axis=0)
        values = mx.repeat(values.astype(mx.float32).transpose(1, 0, 2), group, axis=0)
        scores = (queries @ keys.transpose(0, 2, 1)) * scale
        if softcap is not None:
            scores = softcap * mx.tanh(scores / softcap)
        row, column = self._view.positions[:, None], mx.arange(self._view.total)[None]
        visible = column <= row
        if spec.window is not None:
            visible = visible & ((column > row - spec.window) | (column < spec.keep))
        scores = mx.where(visible, scores, -mx.inf)
        top = scores.max(axis=-1, keepdims=True)
        weights = mx.exp(scores - top)
        total = weights.sum(axis=-1, keepdims=True)
        if sinks is not None:
            total = total + mx.exp(sinks.reshape(-1, 1, 1) - top)
        return ((weights / total) @ values).transpose(1, 0, 2).astype(q.dtype)

    def attend_latent(self, q, latent, *, scale):
        keys = latent[:, None]
        return self.attend(q, keys, keys[..., : self._spec.rank], scale=scale)

    def states(self):
        return tuple(self._states)

    def set_states(self, states):
        self._states = list(states)


def run_dense(model, ids, chunks: tuple[int, ...] | None = None) -> mx.array:
    """Logits `[T, V]` of a prompt, whole or cut into chunks of these lengths."""
    view = DenseView(model.layer_specs())
    out, start = [], 0
    for n in chunks or (len(ids),):
        hidden = model(mx.array(ids[start : start + n]), view.advance(n))
        out.append(model.logits(hidden))
        start += n
    assert start == len(ids)
    return mx.concatenate(out)
