"""Page ids of one pool, with counts of who holds them. No arrays.

Ids are handed out lowest first, so that storage need reach only as far as pages are in use. A page
that the tree of prefixes holds and nobody else is idle: it may be taken back, oldest first.
"""

import heapq
from collections import Counter, OrderedDict
from collections.abc import Iterable

from mlxserve.errors import InvariantError


class PageAllocator:
    """Free, held and cached page ids. Engine thread only.

    idle: cached pages that nobody holds, the one that was given back first at the front. pinned:
    how many are held by pins alone.
    """

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self.idle: OrderedDict[int, None] = OrderedDict()
        self._free = list(range(pages))
        self.pinned = 0
        self._holders: dict[int, int] = {}
        self._pins: dict[int, int] = {}  # of the holders, those that are pins
        self._cached: set[int] = set()

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return self.pages - len(self._free)

    @property
    def available(self) -> int:
        """Pages that are free or may be taken back."""
        return len(self._free) + len(self.idle)

    @property
    def reach(self) -> int:
        """How many pages there must be for those that somebody has."""
        return 1 + max((*self._holders, *self._cached), default=-1)

    def take(self, n: int) -> list[int]:
        """The n lowest free ids, held once. Raises InvariantError unless so many are `free`."""
        if n > self.free:
            raise InvariantError(f"{n} pages asked for, {self.free} of {self.pages} are free")
        ids = [heapq.heappop(self._free) for _ in range(n)]
        self._holders.update(dict.fromkeys(ids, 1))
        return ids

    def share(self, page: int) -> None:
        """One holder more, of a page that is held or cached."""
        if page not in self._holders and page not in self._cached:
            raise InvariantError(f"page {page} is shared, and nobody has it")
        self.pinned -= self._only_pinned(page)
        self._holders[page] = self._holders.get(page, 0) + 1
        self.idle.pop(page, None)

    def give(self, ids: Iterable[int]) -> None:
        """One holder less of each. Raises InvariantError for a page that nobody holds."""
        for page in ids:
            if page not in self._holders:
                raise InvariantError(f"page {page} was freed twice")
            self._holders[page] -= 1
            if not self._holders[page]:
                del self._holders[page]
                if page in self._cached:
                    self.idle[page] = None
                else:
                    heapq.heappush(self._free, page)
            self.pinned += self._only_pinned(page)

    def pin(self, page: int) -> None:
        """One holder more of a page, which is a pin."""
        self.share(page)
        self._pins[page] = self._pins.get(page, 0) + 1
        self.pinned += self._only_pinned(page)

    def unpin(self, ids: Iterable[int]) -> None:
        """One pin less of each."""
        for page in ids:
            self.pinned -= self._only_pinned(page)
            self._pins[page] -= 1
            if not self._pins[page]:
                del self._pins[page]
            self.give([page])

    def _only_pinned(self, page: int) -> bool:
        return page in self._pins and self._pins[page] == self._holders[page]

    def cache(self, page: int) -> None:
        """The tree keeps a page that is held."""
        if page not in self._holders or page in self._cached:
            raise InvariantError(f"page {page} can't be cached: it isn't held, or is already")
        self._cached.add(page)

    def uncache(self, page: int) -> None:
        """The tree lets go of a page; it is free unless somebody holds it."""
        if page not in self._cached:
            raise InvariantError(f"page {page} isn't cached")
        self._cached.remove(page)
        if page in self.idle:
            del self.idle[page]
            heapq.heappush(self._free, page)

    def touch(self, page: int) -> None:
        """An idle page was of use: it is taken back later than the others."""
        if page in self.idle:
            self.idle.move_to_end(page)

    def check(
        self, held: Counter[int], cached: Counter[int], pins: Counter[int] | None = None
    ) -> None:
        """Raise InvariantError unless pages are held and cached exactly as counted here.

        pins: of the holders, those that are pins.
        """
        if any(n != 1 for n in cached.values()) or set(cached) != self._cached:
            raise InvariantError(f"the tree has {len(cached)} pages, not {len(self._cached)}")
        if dict(held) != self._holders:
            wrong = {p for p in {*held, *self._holders} if held[p] != self._holders.get(p, 0)}
            raise InvariantError(f"the holders of pages {sorted(wrong)} don't add up")
        only = sum(self._only_pinned(page) for page in self._pins)
        if self._pins != (pins or {}) or self.pinned != only:
            raise InvariantError(
                f"{self.pinned} pages are said to be held by pins alone, not {only}"
            )
        if set(self.idle) != self._cached - set(self._holders):
            raise InvariantError("idle pages are not those that only the tree has")
        if set(self._free) != set(range(self.pages)) - set(self._holders) - self._cached:
            raise InvariantError("free pages are not those that nobody has")
