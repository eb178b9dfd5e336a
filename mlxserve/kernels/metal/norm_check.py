"""Whether a sum and its norm in one launch serve a use, are right on this device, and are fast."""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from mlxserve.kernels.metal.add_rms_norm import FOUR, MAX_WIDTH, sum_and_norm
from mlxserve.kernels.metal.launch import Runner
from mlxserve.kernels.metal.race import chain, race
from mlxserve.kernels.norm import reference
from mlxserve.kernels.registry import TOLERANCE, check_close
from mlxserve.kernels.uses import NormUse
from mlxserve.kernels.verdicts import Timing, Verdict

MIN_WIDTH = 8  # MLX binds smaller arrays in another address space
EPS = 1e-5
CHECKED_ROWS = 3
TIMED_ROWS = (1, 8, 512)
CALLS = 16  # per measurement, each of what the one before gave
BUDGET_S = 0.1  # for measuring both at one number of rows


def unsupported(use: NormUse) -> str:
    """Why the kernel can't serve such layers, or ""."""
    if use.dtype not in TOLERANCE:
        return f"activations in {use.dtype} aren't float16 or bfloat16"
    if use.width % FOUR or not MIN_WIDTH <= use.width <= MAX_WIDTH:
        return f"a width of {use.width} isn't a multiple of {FOUR} from {MIN_WIDTH} to {MAX_WIDTH}"
    return ""


def check(use: NormUse, run: Runner) -> float:
    """The largest error of sum and norm, as a share of the row's largest number.

    Right is float64, by NumPy. Raises ArithmeticError where the kernel differs from it, and
    whatever `run` raises.
    """
    rng = np.random.default_rng(0)
    dtype = getattr(mx, use.dtype)
    sizes = np.array([1e-3, 1.0, 100.0])[:, None]  # of the rows' numbers
    y, stream = (
        mx.array((rng.normal(size=(CHECKED_ROWS, use.width)) * sizes).astype(np.float32))
        for _ in range(2)
    )
    weights = mx.array(rng.uniform(0.5, 1.5, (2, use.width)).astype(np.float32)).astype(dtype)
    y, stream, inner = y.astype(dtype), stream.astype(dtype), weights[1] if use.inner else None
    total, normed = run(sum_and_norm(y, stream, weights[0], EPS, inner))
    added = _wide(y) if inner is None else _norm(_wide(y), _wide(inner))
    # The norm is that of the rounded sum.
    expected = _wide(stream) + added, _norm(_wide(total), _wide(weights[0]))
    return max(
        check_close("norm", row, mx.array(right.astype(np.float32)), TOLERANCE[use.dtype])
        for got, rights in zip((total, normed), expected, strict=True)
        for row, right in zip(got, rights, strict=True)
    )


def _wide(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32)).astype(np.float64)


def _norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * weight


def measure(use: NormUse, run: Runner) -> list[Timing]:
    """Kernel and reference at each of TIMED_ROWS."""
    return [_measure(use, run, rows) for rows in TIMED_ROWS]


def _measure(use: NormUse, run: Runner, rows: int) -> Timing:
    dtype = getattr(mx, use.dtype)
    weight, x = mx.full((use.width,), 0.5, dtype), mx.full((rows, use.width), 0.5, dtype)
    inner = weight if use.inner else None
    mx.eval(weight, x)

    def kernel(stream: mx.array, y: mx.array) -> Sequence[mx.array]:
        return run(sum_and_norm(y, stream, weight, EPS, inner))

    def mlx(stream: mx.array, y: mx.array) -> Sequence[mx.array]:
        return reference(y, stream, weight, EPS, inner)

    seconds = race(
        lambda: chain(kernel, (x, x), CALLS), lambda: chain(mlx, (x, x), CALLS), BUDGET_S
    )
    return Timing(rows, 0, *seconds)


def judge(use: NormUse, verdict: Verdict) -> tuple[bool, str]:
    """Whether to use a kernel that is right, and why."""
    return verdict.mostly_faster
