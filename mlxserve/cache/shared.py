"""What is kept of sealed pages beyond the sequences that made them, and the room that there is.

Page ids of every group, the tree of prefixes over them, and pins, which keep a prefix while there
is room for it. Integers and lists, no arrays.
"""

from collections.abc import Hashable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from math import ceil

from mlxserve.cache.allocator import PageAllocator
from mlxserve.cache.groups import LayerGroup
from mlxserve.cache.prefix import Node, PrefixTree
from mlxserve.errors import CapacityError
from mlxserve.sequence import NO_PAGE

MAX_PINS = 1024
ZERO_SLOT = 0  # of the states: what a sequence begins with


@dataclass(frozen=True, slots=True)
class Restored:
    """Where a saved prefix goes: for each group, ids to write the pages that it needs to.

    NO_PAGE: the tree has it already. slot: the same for the states.
    """

    pages: list[list[int]]
    slot: int


@dataclass(frozen=True, eq=False, slots=True)
class Pin:
    """A prefix that is kept, while there is room for it, until a time on the engine's clock.

    pages: those of each group that are held for it.
    """

    pages: tuple[list[int], ...]
    node: Node
    until_s: float


class SharedPages:
    """Engine thread only. Arguments: see CacheManager.

    groups: the paged ones. recurrent: whether there are layers with states. cuts: whether a prefix
    may end within a page.
    """

    def __init__(self, groups: Seq[LayerGroup], pool_pages: Seq[int], slots: int) -> None:
        self.groups = [group for group in groups if group.paged]
        self.page_tokens = groups[0].page_tokens
        self.recurrent = len(self.groups) < len(groups)
        self.cuts = all(group.cuts for group in groups)
        self.pools = [PageAllocator(n) for n in pool_pages]
        self.states = PageAllocator(slots)
        self.states.take(1)  # ZERO_SLOT
        self.tree = PrefixTree(self.groups, self.pools, self.states)
        self.pins: dict[Hashable, Pin] = {}

    def needed(self, group: int, depth: int, position: int) -> Iterable[int]:
        """Numbers of the pages before `depth` that a query at `position` or later may see."""
        kept, seen = self.groups[group].kept_pages, self.groups[group].first_seen(position)
        return (*range(min(kept, seen, depth)), *range(seen, depth))

    def resumes(self, path: Seq[Node], depth: int) -> bool:
        """Whether every group can go on after `depth` pages, of which `path` are the last ones.

        Those before them are held by whoever asks.
        """
        if self.recurrent and (path[-1].snapshot == NO_PAGE or path[-1].fresh):
            return False
        first = depth - len(path)
        return all(
            path[number - first].pages[group] != NO_PAGE
            for group in range(len(self.groups))
            for number in self.needed(group, depth, depth * self.page_tokens)
            if number >= first
        )

    def make_room(self, group: int, pages: int) -> bool:
        """Take idle pages back until so many are free; pins too, the one that ends first."""
        while pages > self.pools[group].available and self.pins:
            self.unpin(min(self.pins, key=lambda key: self.pins[key].until_s))
        if pages > self.pools[group].available:
            return False
        while self.pools[group].free < pages:
            self.tree.evict_page(group)
        return True

    def give_back(self, share: float) -> int:
        """Forget so large a share of what nobody uses, oldest first. Returns how many pages."""
        forgotten = 0
        for group, pool in enumerate(self.pools):
            for _ in range(ceil(share * len(pool.idle))):
                if pool.idle:  # a page may take others with it
                    self.tree.evict_page(group)
                    forgotten += 1
        for _ in range(ceil(share * len(self.states.idle))):
            self.tree.evict_snapshot()
        return forgotten

    # ---- Prefixes that stay, and such that come from a file.

    def pin(self, key: Hashable, salt: Hashable, ids: Seq[int], until_s: float) -> int:
        """Keep what the tree has of these tokens, in place of an earlier pin under this key.

        It yields before a request would have to be preempted. Returns the tokens kept.
        """
        nodes, tokens = self.prefix(salt, ids)
        if not nodes:
            self.unpin(key)
            return 0
        self.tree.enter(nodes[-1])
        by_group = zip(*(node.pages for node in nodes), strict=True)
        pages = tuple([page for page in held if page != NO_PAGE] for held in by_group)
        for pool, held in zip(self.pools, pages, strict=True):
            for page in held:
                pool.pin(page)
        self.unpin(key)
        self.pins[key] = Pin(pages, nodes[-1], until_s)
        return tokens

    def end_pins(self, now_s: float) -> None:
        """Let go of the pins whose time is over, and of the first to end if there are too many."""
        over = [key for key, pin in self.pins.items() if pin.until_s <= now_s]
        for key in over:
            self.unpin(key)
        while len(self.pins) > MAX_PINS:
            self.unpin(min(self.pins, key=lambda key: self.pins[key].until_s))

    def unpin(self, key: Hashable) -> None:
        """Let go of a pin, if there is one."""
        pin = self.pins.pop(key, None)
        if pin is None:
            return
        for pool, held in zip(self.pools, pin.pages, strict=True):
            pool.unpin(reversed(held))
        self.tree.leave(pin.node)

    def prefix(self, salt: Hashable, ids: Seq[int]) -> tuple[list[Node], int]:
        """The nodes of whole pages and of a tail, and after how many tokens one could resume."""
        root = self.tree.roots.get(salt)
        if root is None:
            return [], 0
        path = self.tree.follow(root, ids, len(ids), self.page_tokens)
        while path and not self.resumes(path, len(path)):
            path.pop()
        at = len(path) * self.page_tokens
        rest = tuple(ids[at : at + self.page_tokens])
        found = self.tree.longest(path[-1] if path else root, rest) if self.cuts else None
        if found is None or NO_PAGE in found[0].pages:
            return path, at
        return [*path, found[0]], at + found[1]

    def needed_pages(self, group: int, tokens: int) -> list[int]:
        """Numbers of the pages that a sequence needs in order to go on after so many tokens.

        That is from the end of the last whole page on: `match` takes a tail only after that.
        """
        border = tokens // self.page_tokens * self.page_tokens
        return list(self.needed(group, -(-tokens // self.page_tokens), border))

    def restore(self, salt: Hashable, ids: Seq[int], *, snapshot: bool) -> Restored:
        """Put a prefix into the tree whose pages the caller writes; see `needed_pages`.

        snapshot: whether there is one of the states at its end. Raises CapacityError if there is no
        room for it.
        """
        P = self.page_tokens
        numbers = [self.needed_pages(group, len(ids)) for group in range(len(self.groups))]
        for group, needed in enumerate(numbers):
            if not self.make_room(group, len(needed)):
                raise CapacityError(
                    f"the cache holds {len(ids)} tokens, and there is memory for "
                    f"{self.pools[group].available * P}; raise the memory limit, or end what runs"
                )
        taken = [pool.take(len(needed)) for pool, needed in zip(self.pools, numbers, strict=True)]
        targets: list[list[int]] = [[] for _ in range(len(self.groups))]
        node = self.tree.root(salt)
        for number in range(-(-len(ids) // P)):
            node = self.tree.insert(node, tuple(ids[number * P : (number + 1) * P]))
            for group in range(len(self.groups)):
                if number in numbers[group]:
                    own = taken[group][len(targets[group])]
                    there = node.pages[group] != NO_PAGE
                    targets[group].append(NO_PAGE if there else own)
                    if not there:
                        self.tree.attach(node, group, own)
        for pool, pages in zip(self.pools, taken, strict=True):
            pool.give(reversed(pages))
        wanted = snapshot and node.snapshot == NO_PAGE
        return Restored(targets, self.take_snapshot(node) if wanted else NO_PAGE)

    def make_slot(self) -> bool:
        """Free a slot, if none is, of the snapshot that has been of no use longest."""
        return bool(self.states.free) or self.tree.evict_snapshot()

    def take_snapshot(self, node: Node) -> int:
        """A slot for a node's snapshot, which the caller writes; NO_PAGE if none can be spared."""
        if not self.make_slot():
            return NO_PAGE
        (slot,) = self.states.take(1)
        self.tree.attach_snapshot(node, slot)
        self.states.give([slot])
        return slot
