"""Memory that is given back when the whole system runs short of it.

macOS then compresses and swaps what is least used, and a model whose weights or pages were swapped
out answers in minutes. Prefixes that nobody uses cost only their computation, so they go first.
"""

import logging
import time
from collections.abc import Callable

from mlxserve.device import Pressure
from mlxserve.engine.core import Core

logger = logging.getLogger(__name__)

CHECK_S = 1.0

SHARES = {Pressure.WARNING: 0.5, Pressure.CRITICAL: 1.0}
"""Of the prefixes that nobody uses: what is forgotten each time, as long as the system is short."""


class Relief:
    """Asks the system, and has the core give memory back. Engine thread only.

    signal: of `device.pressure_signal`.
    """

    def __init__(self, core: Core, signal: Callable[[], Pressure] | None) -> None:
        self.core = core
        self.every_s = None if signal is None else CHECK_S
        self._signal = signal
        self._next_s = 0.0
        self._last = Pressure.NORMAL

    def give(self) -> None:
        """Look whether it is time to ask, and then at what the system says."""
        if self._signal is None or time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + CHECK_S
        last, self._last = self._last, self._signal()
        if self._last == Pressure.NORMAL:
            return
        worse = self._last > last  # the arrays may have room that nobody needs any more
        if worse or any(pool.idle for pool in self.core.manager.pools):
            pages, freed = self.core.give_back(SHARES[self._last])
            logger.warning(
                "the system is short of memory (%s): %d pages of prefixes that nobody uses are "
                "forgotten, %.1f MB are given back",
                self._last.name.lower(), pages, freed / 1e6,
            )  # fmt: skip
