"""What a model sees of the cache in one step: positions, and `attend` per layer."""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from mlxserve.cache.groups import LayerGroup
from mlxserve.cache.spec import Latent
from mlxserve.cache.storage import Storage
from mlxserve.errors import InvariantError
from mlxserve.kernels.attention import PagedRows, paged_attention
from mlxserve.sequence import Chunk, StepPlan


class BatchView:
    """One step's tokens over the cache. All indices are made once per step, here.

    positions: int32 `[T]`, the rows of the plan end to end; spans: of each row, its first token and
    how many there are.
    """

    def __init__(self, storage: Storage, plan: StepPlan) -> None:
        self._storage = storage
        P = storage.page_tokens
        n, start = np.array([(c.n, c.start) for c in plan.chunks], np.int32).T
        first = np.cumsum(n) - n
        self.spans = tuple(zip(first.tolist(), n.tolist(), strict=True))
        of_token = np.repeat(np.arange(len(n)), n)
        positions = np.arange(len(of_token)) + (start - first)[of_token]
        # The chunks' hot pages, end to end.
        hot = np.array([page for chunk in plan.chunks for page in chunk.hot], np.int32)
        counts = np.array([len(chunk.hot) for chunk in plan.chunks])
        hot_at = np.cumsum(counts) - counts - start // P
        page = hot[hot_at[of_token] + positions // P]
        self.positions = mx.array(positions.astype(np.int32))
        self._written = mx.array((page * P + positions % P).astype(np.int32))
        self._rows = [
            _padded(*rows_of(plan.chunks, first.tolist(), index, group), P)
            for index, group in enumerate(storage.groups)
        ]
        self._slots = mx.array([chunk.seq.slot for chunk in plan.chunks], mx.int32)

    @property
    def arrays(self) -> list[mx.array]:
        """All that belongs to this step alone."""
        tables = [array for rows in self._rows for array in rows.arrays]
        return [self.positions, self._written, *tables]

    def layer(self, index: int) -> "LayerView":
        """The cache of one layer in this step."""
        return LayerView(self, index)

    def _attend(self, layer: int, q: mx.array, k: mx.array, v: mx.array | None, **how) -> mx.array:
        storage = self._storage
        storage.write(layer, self._written, k, v)
        index = storage.group_of[layer]
        group = storage.groups[index]
        hot, pool = storage.hot[layer], storage.pool[layer]
        return paged_attention(
            q, hot, pool, self._rows[index], window=group.window, keep=group.spec.keep, **how
        )


class LayerView:
    """One layer's side of a step; see models.base.LayerView."""

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

    def attend_latent(self, q: mx.array, latent: mx.array, *, scale: float) -> mx.array:
        """The same where keys and values are one vector per token.

        q: `[T, Hq, rank + rope]`, latent: `[T, rank + rope]`. Returns `[T, Hq, rank]`.
        """
        match self._view._storage.specs[self._index]:
            case Latent(rank=rank):
                out = self._view._attend(self._index, q, latent[:, None], None, scale=scale)
                return out[..., :rank]
            case spec:
                raise InvariantError(f"layer {self._index} keeps {spec}, and no latents")

    def states(self) -> tuple[mx.array, ...]:
        """A recurrent layer's states before the step, `[R, ...]` each: one for each span."""
        return self._view._storage.read_states(self._index, self._view._slots)

    def set_states(self, states: Sequence[mx.array]) -> None:
        """And after it."""
        self._view._storage.write_states(self._index, self._view._slots, states)


def rows_of(
    chunks: Sequence[Chunk], first: Sequence[int], index: int, group: LayerGroup
) -> tuple[list[tuple[int, ...]], list[int]]:
    """For each row the sealed pages that the group still has, then the hot ones: see PagedRows.

    first: the chunks' first tokens. Where pages are packed, a query reads those before its own as
    they are sealed, and its own as it was computed, whatever the step: rows end where pages do.
    """
    P = group.page_tokens
    table: list[tuple[int, ...]] = []
    pages: list[int] = []
    for at, chunk in zip(first, chunks, strict=True):
        seq = chunk.seq
        kept, base = group.kept_pages, seq.dropped[index]
        if base <= kept:
            kept = base = 0
        front, sealed = seq.tables[index][:kept], seq.tables[index][base : seq.sealed]
        start, end = chunk.start, chunk.start + chunk.n
        if not group.bits:
            table.append((at, chunk.n, start, base, kept + len(sealed), len(pages), kept))
            pages += front + sealed + seq.hot[: -(-end // P) - seq.sealed]
            continue
        while start < end:
            own = start // P
            n = min(end, (own + 1) * P) - start
            table.append((at, n, start, base, kept + own - base, len(pages), kept))
            pages += [*front, *sealed[: own - base], chunk.hot[own - chunk.start // P]]
            at, start = at + n, start + n
    return table, pages


def _padded(table: list[tuple[int, ...]], pages: list[int], page_tokens: int) -> PagedRows:
    """Filled up to a power of two, so that a longer text seldom means another shape of step."""
    padded = np.zeros(max(16, 1 << (len(pages) - 1).bit_length()), np.int32)
    padded[: len(pages)] = pages
    return PagedRows(np.array(table, np.int32), padded, page_tokens)
