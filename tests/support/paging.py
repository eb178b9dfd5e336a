"""A cache of plain dictionaries that does what a plan says, to check what each query could read.

Every slot holds (request id, position). It knows nothing of how the manager decides: it applies the
moves and writes of a plan, and lists what the tables lead to.
"""

from mlxserve.cache.manager import CacheManager
from mlxserve.cache.spec import PAGE_TOKENS
from mlxserve.types import Chunk, StepPlan

Slot = tuple[str, int]


class PaperCache:
    """Hot and pool pages as dictionaries: page id -> 64 slots."""

    def __init__(self, manager: CacheManager) -> None:
        self.manager = manager
        self.hot: dict[int, list[Slot | None]] = {}
        self.pools: list[dict[int, list[Slot | None]]] = [{} for _ in manager.groups]

    def apply(self, plan: StepPlan) -> None:
        """Make the moves and the writes of a step, then check every query of it."""
        for seal in plan.seals:
            for pool, page in zip(self.pools, seal.pages, strict=True):
                pool[page] = list(self.hot[seal.hot])
        for chunk in plan.chunks:
            self._write(chunk)
        for chunk in plan.chunks:
            for group in range(len(self.pools)):
                self._check(chunk, group)

    def _write(self, chunk: Chunk) -> None:
        for position in range(chunk.start, chunk.start + chunk.n):
            page = chunk.seq.hot[position // PAGE_TOKENS - chunk.seq.sealed]
            slots = self.hot.setdefault(page, [None] * PAGE_TOKENS)
            slots[position % PAGE_TOKENS] = (chunk.seq.request.id, position)

    def _check(self, chunk: Chunk, group: int) -> None:
        """All that the window shows must be there, in order, and belong to this request."""
        seq, window = chunk.seq, self.manager.groups[group].spec.window
        gone = seq.dropped[group]
        sealed = seq.tables[group][: seq.sealed - gone]
        slots = [slot for page in sealed for slot in self.pools[group][page]]
        slots += [slot for page in seq.hot for slot in self.hot.get(page, [None] * PAGE_TOKENS)]
        base = gone * PAGE_TOKENS
        first = 0 if window is None else max(0, chunk.start - window + 1)
        assert base <= first, "a key that the first query may see was dropped"
        for position in range(first, chunk.start + chunk.n):
            assert slots[position - base] == (seq.request.id, position)
