"""What a model sees of the cache in one step: positions, and `attend` per layer."""

import mlx.core as mx
import numpy as np

from mlxserve.cache.spec import PAGE_TOKENS
from mlxserve.cache.storage import Storage
from mlxserve.kernels.attention import PagedRows, paged_attention
from mlxserve.types import StepPlan


class BatchView:
    """One step's tokens over the cache. All indices are made once per step, here.

    positions: int32 `[T]`, the rows of the plan end to end.
    """

    def __init__(self, storage: Storage, plan: StepPlan) -> None:
        self._storage = storage
        rows = np.array([(c.n, c.start, c.seq.sealed) for c in plan.chunks], np.int32)
        n, start, sealed = rows.T
        first = np.cumsum(n) - n
        of_token = np.repeat(np.arange(len(n)), n)
        positions = np.arange(len(of_token)) + (start - first)[of_token]
        # Pages of the rows' own hot lists, end to end.
        hot = [page for c in plan.chunks for page in c.seq.hot]
        counts = np.array([len(c.seq.hot) for c in plan.chunks])
        hot_at = np.cumsum(counts) - counts - sealed
        page = np.array(hot, np.int32)[hot_at[of_token] + positions // PAGE_TOKENS]
        self.positions = mx.array(positions.astype(np.int32))
        self._written = mx.array((page * PAGE_TOKENS + positions % PAGE_TOKENS).astype(np.int32))
        self._rows = [_rows(plan, first, group) for group in range(len(storage.groups))]

    @property
    def arrays(self) -> list[mx.array]:
        """All that belongs to this step alone."""
        tables = [array for rows in self._rows for array in rows.arrays]
        return [self.positions, self._written, *tables]

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


def _rows(plan: StepPlan, first: np.ndarray, group: int) -> PagedRows:
    """Each row's sealed pages that this group still has, then its hot ones."""
    table: list[tuple[int, ...]] = []
    pages: list[int] = []
    for at, chunk in zip(first.tolist(), plan.chunks, strict=True):
        seq = chunk.seq
        gone = seq.dropped[group]
        sealed = seq.sealed - gone
        end = -(-(chunk.start + chunk.n) // PAGE_TOKENS)
        table.append((at, chunk.n, chunk.start, gone, sealed, len(pages)))
        pages += seq.tables[group][:sealed]
        pages += seq.hot[: end - seq.sealed]
    # Filled up to a power of two, so that a longer text seldom means another shape of step.
    padded = np.zeros(max(16, 1 << (len(pages) - 1).bit_length()), np.int32)
    padded[: len(pages)] = pages
    return PagedRows(np.array(table, np.int32), padded)
