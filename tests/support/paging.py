"""A cache of plain dictionaries that does what a plan says, to check what each query would read.

A slot holds a digest of the salt and of all tokens up to its own: what keys and values depend on.
It knows nothing of how the manager decides: it makes the moves and writes of a plan, reads what the
step's tables lead to, and compares. It also sees to it that nobody writes what isn't theirs.
"""

from collections.abc import Callable, Iterable

from mlxserve.cache.allocator import PageAllocator
from mlxserve.cache.batch import rows_of
from mlxserve.cache.manager import CacheManager
from mlxserve.cache.shared import ZERO_SLOT
from mlxserve.sequence import NO_PAGE, Chunk, Sequence, StepPlan

Draw = Callable[[tuple[int, ...]], int]
Page = list[int | None]  # one digest per token

LOADED = object()  # owner of a hot page that was copied from the pool, and not written since


class PaperCache:
    """Hot and pool pages, and states, as dictionaries of digests.

    draw: the token after these, as the test's model would have it.
    """

    def __init__(self, manager: CacheManager, draw: Draw) -> None:
        self.manager = manager
        self.draw = draw
        self.hot: dict[int, Page] = {}
        self.pools: list[dict[int, Page]] = [{} for _ in manager.groups]
        self.states: dict[int, int] = {}
        self._known: dict[tuple, list[int]] = {}
        # Of pages since they were taken: who writes a hot one, which of a pool aren't sealed yet.
        self._owner: dict[int, object] = {}
        self._unsealed: list[set[int]] = [set() for _ in manager.groups]
        _watch(manager.hot, self._forget_owners)
        for pool, unsealed in zip(manager.pools, self._unsealed, strict=True):
            _watch(pool, unsealed.update)

    def apply(self, plan: StepPlan) -> None:
        """Make the copies and the writes of a step, and check every query of it."""
        for load in plan.loads:
            pages = [pool[page] for pool, page in zip(self.pools, load.pages, strict=True)]
            assert all(page == pages[0] for page in pages), "groups disagree on a page"
            assert load.hot not in self._owner, "a hot page is loaded over its owner's tokens"
            self.hot[load.hot] = list(pages[0])
            self._owner[load.hot] = LOADED
        self.states |= {to: self.states.get(source, 0) for source, to in plan.states}
        digests = [digests_of(chunk, self.draw) for chunk in plan.chunks]
        for chunk, digest in zip(plan.chunks, digests, strict=True):
            self._write(chunk, digest)
        for seal in plan.seals:
            for pool, unsealed, page in zip(self.pools, self._unsealed, seal.pages, strict=True):
                if page != NO_PAGE:
                    assert page in unsealed, f"page {page} is written while it is in use"
                    unsealed.remove(page)
                    pool[page] = list(self.hot[seal.hot])
        for group in range(len(self.pools)):
            self._check_rows(plan, group, digests)
        if self.manager.recurrent:
            for chunk, digest in zip(plan.chunks, digests, strict=True):
                self._recur(chunk, digest)

    def check_tree(self) -> None:
        """Everything that the tree of prefixes offers is what its tokens say. After `apply`."""
        ends = {}
        for node in self.manager.tree.nodes():
            if node.parent is None:
                ends[id(node)] = node.key, 0
                continue
            salt, before = ends[id(node.parent)]
            known = salt, before, node.key
            if known not in self._known:
                self._known[known] = list(_chain(salt, before, node.key))
            digests = self._known[known]
            ends[id(node)] = salt, digests[-1]
            for pool, page in zip(self.pools, node.pages, strict=True):
                if page != NO_PAGE:
                    assert pool[page][: len(digests)] == digests, "a cached page has other tokens"
            if node.snapshot != NO_PAGE:
                assert self.states[node.snapshot] == digests[-1], "a snapshot is of other tokens"

    def _forget_owners(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._owner.pop(page, None)

    def _write(self, chunk: Chunk, digest: list[int]) -> None:
        P = self.manager.page_tokens
        for position in range(chunk.start, chunk.start + chunk.n):
            page = chunk.hot[position // P - chunk.start // P]
            owner = self._owner.get(page)
            if owner is None:  # what it held is of another's tokens
                self.hot[page] = [None] * P
            assert owner in (None, LOADED, chunk.seq), f"hot page {page} is another's"
            self._owner[page] = chunk.seq
            self.hot[page][position % P] = digest[position]

    def _recur(self, chunk: Chunk, digest: list[int]) -> None:
        before = digest[chunk.start - 1] if chunk.start else 0
        assert chunk.seq.slot != ZERO_SLOT
        assert self.states.get(chunk.seq.slot, 0) == before, "a state is of other tokens"
        self.states[chunk.seq.slot] = digest[chunk.start + chunk.n - 1]

    def _check_rows(self, plan: StepPlan, index: int, digests: list[list[int]]) -> None:
        """All that the window shows must be there, in order, and of the same tokens."""
        group, P = self.manager.groups[index], self.manager.page_tokens
        first = [sum(c.n for c in plan.chunks[:i]) for i in range(len(plan.chunks))]
        table, pages = rows_of(plan.chunks, first, index, group)
        pairs = zip(plan.chunks, digests, strict=True)
        owner = [digest for chunk, digest in pairs for _ in range(chunk.n)]
        queries = [p for c in plan.chunks for p in range(c.start, c.start + c.n)]
        rows = [p for at, n, start, *_ in table for p in range(start, start + n)]
        assert rows == queries, "the rows aren't the step's tokens"
        for at, n, start, base, sealed, pages_at, kept in table:
            numbers = [*range(kept), *range(base, -(-(start + n) // P))]
            for query in {start, start + n - 1}:  # those between see no more
                low = 0 if group.window is None else query - group.window + 1
                keep = group.spec.keep
                seen = {p for p in range(query + 1) if p >= low or p < keep}
                for i, number in enumerate(numbers):
                    page = pages[pages_at + i]
                    slots = self.pools[index].get(page) if i < sealed else self.hot.get(page)
                    for position in range(number * P, (number + 1) * P):
                        if position in seen:
                            seen.remove(position)
                            assert slots is not None
                            assert slots[position % P] == owner[at][position]
                    if group.bits and number * P <= query:
                        assert (i < sealed) == (number < query // P), "not visible by position"
                assert not seen, f"positions {sorted(seen)} of {query} can't be read"


def digests_of(chunk: Chunk, draw: Draw) -> list[int]:
    """Of every token of a sequence up to the end of its chunk; one may not be known yet."""
    seq: Sequence = chunk.seq
    ids = list(seq.ids)
    if len(ids) < chunk.start + chunk.n:
        ids.append(draw(tuple(ids)))
    return list(_chain(seq.request.salt, 0, ids[: chunk.start + chunk.n]))


def _chain(salt, digest: int, ids: Iterable[int]) -> Iterable[int]:
    for token in ids:
        digest = hash((salt, digest, token))
        yield digest


def _watch(pages: PageAllocator, told: Callable[[list[int]], object]) -> None:
    """Tell of every page id that is taken."""
    take = pages.take

    def watched(n: int) -> list[int]:
        ids = take(n)
        told(ids)
        return ids

    pages.take = watched
