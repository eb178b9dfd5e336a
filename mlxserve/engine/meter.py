"""Where the time of steps goes: for `stats()`, the scheduler's pace, and a trace. No arrays."""

import time

from mlxserve.engine.pace import Pace
from mlxserve.engine.trace import Trace
from mlxserve.sequence import StepPlan

WAITED_S = 20e-6  # a read that takes less found the step done


class Meter:
    """Engine thread only. All times are of `time.perf_counter`.

    busy_s: seconds in which steps were under way; gap_s: of these, those in which the device had
    nothing to do, since the next step came late. Where a step was over before anyone looked, all
    the time since it was submitted counts: an upper bound.
    """

    def __init__(self, pace: Pace, trace: Trace | None = None) -> None:
        self.busy_s = 0.0
        self.gap_s = 0.0
        self._pace = pace
        self._trace = trace
        self._free_s: float | None = None  # since when the device has done all that was read
        self._phase_s = 0.0

    def begin(self) -> None:
        """An iteration of the engine begins."""
        self._phase_s = time.perf_counter()

    def phase(self, name: str) -> float:
        """A phase of it is over. Returns the time."""
        now = time.perf_counter()
        if self._trace is not None:
            self._trace.span(name, self._phase_s, now)
        self._phase_s = now
        return now

    def step(self, plan: StepPlan, submitted_s: float, waited_s: float, done_s: float) -> None:
        """A step was read. submitted_s: when it was given to the device; waited_s: for the read."""
        start_s = submitted_s if self._free_s is None else max(submitted_s, self._free_s)
        began_s = submitted_s if self._free_s is None else self._free_s
        self.busy_s += done_s - began_s
        self.gap_s += start_s - began_s if waited_s > WAITED_S else done_s - began_s
        self._free_s = done_s
        rows = sum(chunk.n == 1 for chunk in plan.chunks)
        self._pace.observe(plan.tokens, rows, done_s - start_s)
        if self._trace is not None:
            sizes = {"tokens": plan.tokens, "rows": len(plan.chunks), "seals": len(plan.seals)}
            self._trace.span("step", start_s, done_s, track="device", **sizes)

    def load(self, running: int, waiting: int, pages: int) -> None:
        """What there was to do, for the trace."""
        if self._trace is not None:
            for name, value in (("running", running), ("waiting", waiting), ("pages", pages)):
                self._trace.counter(name, self._phase_s, value)

    def idle(self) -> None:
        """Nothing is to be done: what comes next isn't late."""
        self._free_s = None

    def close(self) -> None:
        """Complete the trace."""
        if self._trace is not None:
            self._trace.close()
