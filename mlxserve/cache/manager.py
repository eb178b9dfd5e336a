"""Which pages each sequence holds: integers and lists, no arrays.

A sequence's newest tokens lie in its private hot pages, which a step writes. A page whose 64 tokens
are all accepted is sealed: moved to the pool of each layer group, where it never changes. Window
groups let go of sealed pages that no later query can see.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from mlxserve.cache.allocator import PageAllocator
from mlxserve.cache.spec import PAGE_TOKENS, LayerSpec
from mlxserve.errors import InvariantError
from mlxserve.types import Seal, Sequence


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers of one spec; they share page ids."""

    spec: LayerSpec
    layers: tuple[int, ...]


def group_layers(specs: Seq[LayerSpec]) -> list[LayerGroup]:
    """Layers of equal spec together, in the order of their first layer."""
    members: dict[LayerSpec, list[int]] = {}
    for index, spec in enumerate(specs):
        members.setdefault(spec, []).append(index)
    return [LayerGroup(spec, tuple(layers)) for spec, layers in members.items()]


def pages_in_window(window: int | None) -> int | None:
    """The most sealed pages of a sequence that a later query may see; None: there is no bound."""
    return None if window is None else (window + PAGE_TOKENS - 2) // PAGE_TOKENS + 1


class CacheManager:
    """Gives pages to sequences and takes them back. Engine thread only.

    hot_pages: hot page ids, shared by all groups; pool_pages: sealed page ids of each group.
    """

    def __init__(self, groups: Seq[LayerGroup], *, hot_pages: int, pool_pages: Seq[int]) -> None:
        self.groups = list(groups)
        self.hot = PageAllocator(hot_pages)
        self.pools = [PageAllocator(n) for n in pool_pages]

    def reserve(self, seq: Sequence, n: int) -> bool:
        """Make room for n more tokens: all of it, or nothing and False.

        Takes hot pages for the tokens, and a pool page per group for each page they complete, so
        that sealing can't fail later.
        """
        if not seq.tables:
            seq.tables = [[] for _ in self.groups]
            seq.dropped = [0 for _ in self.groups]
        end = seq.computed + n
        hot = -(-end // PAGE_TOKENS) - seq.sealed - len(seq.hot)
        complete = end // PAGE_TOKENS
        needs = [
            complete - gone - len(table)
            for gone, table in zip(seq.dropped, seq.tables, strict=True)
        ]
        if hot > self.hot.free or any(
            need > pool.free for need, pool in zip(needs, self.pools, strict=True)
        ):
            return False
        seq.hot += self.hot.take(max(hot, 0))
        for table, need, pool in zip(seq.tables, needs, self.pools, strict=True):
            table += pool.take(max(need, 0))
        return True

    def has_room(self, tokens: int) -> bool:
        """Whether a new sequence of so many tokens, and one more page, could be held now."""
        pages = tokens // PAGE_TOKENS + 1
        return all(
            pool.free >= min(pages, pages_in_window(group.spec.window) or pages)
            for pool, group in zip(self.pools, self.groups, strict=True)
        )

    def seal(self, seqs: Iterable[Sequence]) -> tuple[Seal, ...]:
        """Seal every complete accepted page; drop what windows have left behind.

        Returns the moves from hot to pool pages, which storage makes before this step's writes.
        """
        moves: list[Seal] = []
        for seq in seqs:
            while (seq.sealed + 1) * PAGE_TOKENS <= seq.accepted:
                source = seq.hot.pop(0)
                pages = tuple(
                    table[seq.sealed - gone]
                    for table, gone in zip(seq.tables, seq.dropped, strict=True)
                )
                moves.append(Seal(source, pages))
                self.hot.give([source])
                seq.sealed += 1
            self._drop_unseen(seq)
        return tuple(moves)

    def _drop_unseen(self, seq: Sequence) -> None:
        """The next query is at `accepted`; from there on only later keys than this are seen."""
        for index, group in enumerate(self.groups):
            if group.spec.window is None:
                continue
            unseen = max(0, seq.accepted - group.spec.window + 1) // PAGE_TOKENS
            n = min(unseen, seq.sealed) - seq.dropped[index] if seq.tables else 0
            if n > 0:
                self.pools[index].give(seq.tables[index][:n])
                del seq.tables[index][:n]
                seq.dropped[index] += n

    def release(self, seq: Sequence) -> None:
        """Take back everything; the sequence starts again from nothing, or is over."""
        self.hot.give(seq.hot)
        for table, pool in zip(seq.tables, self.pools, strict=False):
            pool.give(table)
        seq.hot, seq.tables, seq.dropped = [], [], []
        seq.sealed = seq.computed = 0

    def tokens_at_most(self) -> int:
        """The longest sequence that fits when it is alone."""
        unbounded = [
            pool.pages
            for pool, group in zip(self.pools, self.groups, strict=True)
            if group.spec.window is None
        ]
        return (min(unbounded) + 1) * PAGE_TOKENS - 1 if unbounded else 2**31 - 1

    def check_integrity(self, seqs: Seq[Sequence]) -> None:
        """Raise InvariantError unless every page is free or owned once and every count adds up."""
        self.hot.check([page for seq in seqs for page in seq.hot])
        for index, pool in enumerate(self.pools):
            pool.check([page for seq in seqs if seq.tables for page in seq.tables[index]])
        for seq in seqs:
            name = seq.request.id
            if seq.sealed * PAGE_TOKENS > seq.accepted or seq.accepted > seq.computed:
                raise InvariantError(
                    f"{name}: {seq.sealed} sealed pages, {seq.accepted} accepted tokens, "
                    f"{seq.computed} computed"
                )
            if seq.computed > (seq.sealed + len(seq.hot)) * PAGE_TOKENS:
                raise InvariantError(f"{name}: {seq.computed} tokens computed, too few pages")
            for table, gone in zip(seq.tables, seq.dropped, strict=True):
                if gone + len(table) < seq.sealed:
                    raise InvariantError(f"{name}: a sealed page is missing")
