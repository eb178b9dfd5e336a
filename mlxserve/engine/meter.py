"""Where the time of steps goes: for `stats()`, the scheduler's pace, and a trace. No arrays."""

import time

from mlxserve.engine.pace import Pace
from mlxserve.engine.trace import Trace
from mlxserve.histogram import Histogram
from mlxserve.sequence import StepPlan

WAITED_S = 20e-6  # a read that takes less found the step done
STEP_BOUNDS_S = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5, 5.0)
GAP_BOUNDS_S = (1e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.5)


class Meter:
    """Engine thread only. All times are of `time.perf_counter`.

    steps: seconds that each step took; gaps: of these, those in which the device had nothing to do,
    since the step came late. Where a step was over before anyone looked, all the time since it was
    submitted counts: an upper bound.
    """

    def __init__(self, pace: Pace, trace: Trace | None = None) -> None:
        self.steps = Histogram(STEP_BOUNDS_S)
        self.gaps = Histogram(GAP_BOUNDS_S)
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
        self.steps.observe(done_s - began_s)
        self.gaps.observe(start_s - began_s if waited_s > WAITED_S else done_s - began_s)
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
