"""A kernel and its reference timed in turn, for the checks of kernels."""

import math
import time
from collections.abc import Callable, Sequence

import mlx.core as mx

Measurement = Callable[[], float]
"""Seconds that something took."""


def chain(step: Callable[..., Sequence[mx.array]], first: Sequence[mx.array], calls: int) -> float:
    """Seconds of one call among several, each on what the one before gave, as a model's layers."""
    arrays, start = first, time.perf_counter()
    for _ in range(calls):
        arrays = step(*arrays)
    mx.eval(*arrays)
    return (time.perf_counter() - start) / calls


def race(kernel: Measurement, reference: Measurement, budget_s: float) -> tuple[float, float]:
    """The least seconds of either, of at least one measurement after one that doesn't count."""
    measurements = kernel, reference
    for measure in measurements:
        measure()  # compiles, and touches the memory
    best = [math.inf, math.inf]
    end = time.perf_counter() + budget_s
    while True:
        for i, measure in enumerate(measurements):  # in turn, since a GPU's clock varies
            best[i] = min(best[i], measure())
        if time.perf_counter() > end:
            return best[0], best[1]
