"""Page ids of one pool: handed out lowest first, so that storage can grow as ids are needed."""

import heapq

from mlxserve.errors import InvariantError


class PageAllocator:
    """Free and used page ids. Engine thread only."""

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self._free = list(range(pages))
        self._used: set[int] = set()

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return len(self._used)

    def take(self, n: int) -> list[int]:
        """The n lowest free ids. The caller has checked `free`; raises InvariantError otherwise."""
        if n > self.free:
            raise InvariantError(f"{n} pages asked for, {self.free} of {self.pages} are free")
        ids = [heapq.heappop(self._free) for _ in range(n)]
        self._used.update(ids)
        return ids

    def give(self, ids: list[int]) -> None:
        """Take ids back. Raises InvariantError for an id that is not in use (a double free)."""
        for page in ids:
            if page not in self._used:
                raise InvariantError(f"page {page} was freed twice")
            self._used.remove(page)
            heapq.heappush(self._free, page)

    def check(self, owned: list[int]) -> None:
        """Raise InvariantError unless `owned` are exactly the used ids, each once."""
        if len(set(owned)) != len(owned):
            raise InvariantError("a page has two owners")
        if set(owned) != self._used or self.free + self.used != self.pages:
            raise InvariantError(
                f"{self.used} pages in use, {self.free} free, {len(owned)} owned, of {self.pages}"
            )
