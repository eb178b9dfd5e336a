"""Sealed pages as a tree of their tokens, so that equal prefixes are computed once. No arrays.

A node is one page of tokens; its path from the root is a prefix. The root is chosen by a salt, and
nothing is ever found under another's. A node holds a page of each group while it lasts: a window's
pages may be taken back from anywhere, others from the leaves only. A node may also hold a snapshot
of the recurrent states at its end. A leaf may have fewer tokens than a page: somebody's tail.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Hashable, Iterator
from collections.abc import Sequence as Seq
from typing import Any

from mlxserve.cache.allocator import PageAllocator
from mlxserve.cache.groups import LayerGroup
from mlxserve.errors import InvariantError
from mlxserve.sequence import NO_PAGE

Key = tuple[int, ...]


class Node:
    """A page of tokens after those of its parent.

    depth: pages from the root to here; users: sequences whose sealed pages end here; pages: its
    page of each group, or NO_PAGE; fresh: what it holds isn't written before the next step.
    """

    def __init__(self, parent: "Node | None", key: Any, groups: int) -> None:
        self.parent = parent
        self.key = key  # of the root: the salt
        self.depth = 0 if parent is None else parent.depth + 1
        self.children: dict[Key, Node] = {}
        self.order: list[Key] = []  # of the children's keys, to find the one with most in common
        self.pages = [NO_PAGE] * groups
        self.snapshot = NO_PAGE
        self.users = 0
        self.fresh = False

    @property
    def bare(self) -> bool:
        """Whether nothing would be lost with it."""
        return not self.children and not self.users and not self.holds

    @property
    def holds(self) -> bool:
        return self.snapshot != NO_PAGE or any(page != NO_PAGE for page in self.pages)


class PrefixTree:
    """The tree. Engine thread only.

    groups: the paged layer groups; pools: their page ids; states: slots of recurrent states.
    """

    def __init__(
        self, groups: Seq[LayerGroup], pools: Seq[PageAllocator], states: PageAllocator
    ) -> None:
        self._groups = groups
        self._pools = pools
        self._states = states
        self.roots: dict[Hashable, Node] = {}
        self._node_of: list[dict[int, Node]] = [{} for _ in pools]
        self._snapshot_of: dict[int, Node] = {}
        self._fresh: list[Node] = []  # to be written by the next plan,
        self._planned: list[Node] = []  # and by the last one

    def begin_plan(self) -> None:
        """What the last plan writes may be copied by the next."""
        for node in self._planned:
            node.fresh = False
        self._planned = []

    def end_plan(self) -> None:
        """All that was attached is written by this plan."""
        self._planned += self._fresh
        self._fresh = []

    def root(self, salt: Hashable) -> Node:
        """The empty prefix under a salt."""
        if salt not in self.roots:
            self.roots[salt] = Node(None, salt, len(self._pools))
        return self.roots[salt]

    def follow(self, node: Node, ids: Seq[int], limit: int, page_tokens: int) -> list[Node]:
        """The whole pages after `node` that agree with ids, as far as `limit` tokens."""
        path = []
        at = node.depth * page_tokens
        while at + page_tokens <= limit:
            child = node.children.get(tuple(ids[at : at + page_tokens]))
            if child is None:
                break
            path.append(child)
            node, at = child, at + page_tokens
        return path

    def longest(self, node: Node, ids: Key) -> tuple[Node, int] | None:
        """The child whose tokens agree longest with ids, and how many of them do."""
        # In sorted order, it is next to where ids would stand.
        place = bisect_left(node.order, ids)
        best: tuple[Node, int] | None = None
        for key in node.order[max(0, place - 1) : place + 1]:
            n = _agreeing(key, ids)
            if n and (best is None or n > best[1]):
                best = node.children[key], n
        return best

    def insert(self, parent: Node, key: Key) -> Node:
        """The child with these tokens; a new one holds nothing yet."""
        child = parent.children.get(key)
        if child is None:
            child = parent.children[key] = Node(parent, key, len(self._pools))
            insort(parent.order, key)
        return child

    def attach(self, node: Node, group: int, page: int) -> None:
        """A node gets a group's page, which somebody holds."""
        self._pools[group].cache(page)
        self._node_of[group][page] = node
        node.pages[group] = page
        self._freshen(node)

    def attach_snapshot(self, node: Node, slot: int) -> None:
        """A node gets a snapshot of the states, in a slot that somebody holds."""
        self._states.cache(slot)
        self._snapshot_of[slot] = node
        node.snapshot = slot
        self._freshen(node)

    def drop_tails(self, node: Node, key: Key) -> None:
        """Children of `node` that are only the beginning of `key` are of no more use.

        But for those that are pinned: their pages are held anyway.
        """
        place = bisect_left(node.order, key)
        while place and key[: len(node.order[place - 1])] == node.order[place - 1]:
            place -= 1
            tail = node.children[node.order[place]]
            if not tail.users:
                self._remove(tail)

    def enter(self, node: Node) -> Node:
        """One user more."""
        node.users += 1
        return node

    def leave(self, node: Node) -> None:
        """One user less."""
        node.users -= 1
        self._prune(node)

    def evict_page(self, group: int) -> None:
        """Take back the group's page that has been idle longest. There must be one."""
        node = self._node_of[group][next(iter(self._pools[group].idle))]
        if self._groups[group].window is not None:
            self._detach(node, group)
            self._prune(node)
        elif node.children:
            raise InvariantError("the oldest idle page has pages after it")
        else:
            self._remove(node)

    def evict_snapshot(self) -> bool:
        """Take back the slot of the snapshot that has been of no use longest."""
        idle = self._states.idle
        if not idle:
            return False
        node = self._snapshot_of[next(iter(idle))]
        self._detach_snapshot(node)
        self._prune(node)
        return True

    def nodes(self) -> Iterator[Node]:
        """All of them, parents first."""
        waiting = list(self.roots.values())
        while waiting:
            node = waiting.pop()
            yield node
            waiting += node.children.values()

    def check(self, page_tokens: int) -> tuple[list[Counter[int]], Counter[int]]:
        """Pages of each group and snapshots in the tree. Raises InvariantError if it is broken."""
        pages = [Counter[int]() for _ in self._pools]
        snapshots = Counter[int]()
        for node in self.nodes():
            if node.order != sorted(node.children):
                raise InvariantError("a node's children are out of order")
            if node.parent is not None and node.bare:
                raise InvariantError("a node that holds nothing was kept")
            if node.children and node.parent is not None and len(node.key) != page_tokens:
                raise InvariantError("a tail has pages after it")
            for group, page in enumerate(node.pages):
                if page != NO_PAGE:
                    pages[group][page] += 1
            if node.snapshot != NO_PAGE:
                snapshots[node.snapshot] += 1
        return pages, snapshots

    def _freshen(self, node: Node) -> None:
        node.fresh = True
        self._fresh.append(node)

    def _remove(self, node: Node) -> None:
        """A leaf goes, with all that it holds, and so does what was kept for its sake."""
        for group in range(len(self._pools)):
            self._detach(node, group)
        self._detach_snapshot(node)
        self._prune(node)

    def _prune(self, node: Node) -> None:
        while node.parent is not None and node.bare:
            parent = node.parent
            del parent.children[node.key]
            del parent.order[bisect_left(parent.order, node.key)]
            node = parent
        if node.parent is None and node.bare:
            del self.roots[node.key]

    def _detach(self, node: Node, group: int) -> None:
        page = node.pages[group]
        if page != NO_PAGE:
            node.pages[group] = NO_PAGE
            del self._node_of[group][page]
            self._pools[group].uncache(page)

    def _detach_snapshot(self, node: Node) -> None:
        if node.snapshot != NO_PAGE:
            slot, node.snapshot = node.snapshot, NO_PAGE
            del self._snapshot_of[slot]
            self._states.uncache(slot)


def _agreeing(a: Key, b: Key) -> int:
    """How many tokens at the beginning are equal."""
    n = min(len(a), len(b))
    return next((i for i in range(n) if a[i] != b[i]), n)
