"""What a model sees of the cache in one step: positions, and `attend` per layer."""

import mlx.core as mx

from mlxserve.cache.spec import PAGE_TOKENS
from mlxserve.cache.storage import Storage
from mlxserve.kernels.attention import RowPages, paged_attention
from mlxserve.types import Chunk, StepPlan


class BatchView:
    """One step's tokens over the cache. All indices are made once per step, here.

    positions: int32 `[T]`, the rows of the plan end to end.
    """

    def __init__(self, storage: Storage, plan: StepPlan) -> None:
        self._storage = storage
        positions: list[int] = []
        written: list[int] = []
        for chunk in plan.chunks:
            seq = chunk.seq
            for position in range(chunk.start, chunk.start + chunk.n):
                page = seq.hot[position // PAGE_TOKENS - seq.sealed]
                positions.append(position)
                written.append(page * PAGE_TOKENS + position % PAGE_TOKENS)
        self.positions = mx.array(positions, mx.int32)
        self._written = mx.array(written, mx.int32)
        hot = [mx.array(_hot_pages(chunk), mx.int32) for chunk in plan.chunks]
        self._rows = [_rows(plan, hot, group) for group in range(len(storage.groups))]

    def layer(self, index: int) -> "LayerView":
        """The cache of one layer in this step."""
        return LayerView(self, index)

    def _attend(self, layer: int, q: mx.array, k: mx.array, v: mx.array, **how) -> mx.array:
        storage = self._storage
        storage.write(layer, self._written, k, v)
        group = storage.group_of[layer]
        window = storage.groups[group].spec.window
        hot, pool = storage.hot[layer], storage.pool[layer]
        return paged_attention(q, hot, pool, self._rows[group], window=window, **how)


class LayerView:
    """One layer's side of a step."""

    def __init__(self, view: BatchView, index: int) -> None:
        self._view = view
        self._index = index

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
        """Append k, v of the new tokens and attend to all that each query may see.

        q: `[T, Hq, D]`, k, v: `[T, Hk, D]`. Returns `[T, Hq, D]`.
        """
        return self._view._attend(self._index, q, k, v, scale=scale, sinks=sinks, softcap=softcap)


def _hot_pages(chunk: Chunk) -> list[int]:
    end = -(-(chunk.start + chunk.n) // PAGE_TOKENS)
    return chunk.seq.hot[: end - chunk.seq.sealed]


def _rows(plan: StepPlan, hot: list[mx.array], group: int) -> list[RowPages]:
    rows, first = [], 0
    for chunk, pages in zip(plan.chunks, hot, strict=True):
        seq = chunk.seq
        gone = seq.dropped[group]
        sealed = seq.tables[group][: seq.sealed - gone]
        table = mx.array(sealed, mx.int32) if sealed else None
        rows.append(RowPages(first, chunk.n, chunk.start, gone * PAGE_TOKENS, table, pages))
        first += chunk.n
    return rows
