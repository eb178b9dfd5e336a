"""How often values of each size came: cheap enough for every token and every step."""

from bisect import bisect_left
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Distribution:
    """A histogram as it stood.

    counts: of the values up to each bound and above the one before it, and last of those above all.
    sum: of all values.
    """

    bounds: tuple[float, ...] = ()
    counts: tuple[int, ...] = (0,)
    sum: float = 0.0


class Histogram:
    """Counts of values by size. One thread observes; bounds ascend."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.sum = 0.0
        self._counts = [0] * (len(bounds) + 1)

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def snapshot(self) -> Distribution:
        """As it stands; may be read on any thread."""
        return Distribution(self.bounds, tuple(self._counts), self.sum)
