"""Whether the rotation of queries and keys serves a use, is right on this device, and is fast."""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from mlxserve.kernels.metal.launch import Runner
from mlxserve.kernels.metal.race import chain, race
from mlxserve.kernels.metal.rotate import PAIRS, rotation
from mlxserve.kernels.registry import TOLERANCE, check_close
from mlxserve.kernels.rope import reference
from mlxserve.kernels.uses import RopeUse
from mlxserve.kernels.verdicts import Timing, Verdict

MIN_DIM = 16  # MLX binds arrays of fewer than 8 numbers in another address space
MAX_DIM = 512
BASE = 10_000.0
GAIN, EPS = 1.25, 1e-6
POSITIONS = (0, 1, 63, 4097, 131_071)
TIMED_ROWS = (1, 8, 512)
CALLS = 16  # per measurement, each of what the one before gave
BUDGET_S = 0.1  # for measuring both at one number of rows


def unsupported(use: RopeUse) -> str:
    """Why the kernel can't serve such layers, or ""."""
    if use.dtype not in TOLERANCE:
        return f"activations in {use.dtype} aren't float16 or bfloat16"
    if use.dim % (2 * PAIRS) or not MIN_DIM <= use.dim <= MAX_DIM:
        return f"head dim {use.dim} isn't a multiple of {2 * PAIRS} from {MIN_DIM} to {MAX_DIM}"
    return ""


def check(use: RopeUse, run: Runner) -> float:
    """The largest error at any of POSITIONS, as a share of the largest number of a token's heads.

    Right is float64, by NumPy. Raises ArithmeticError where the kernel differs from it, and
    whatever `run` raises.
    """
    rng = np.random.default_rng(0)
    dtype = getattr(mx, use.dtype)

    def random(*shape: int) -> mx.array:
        return mx.array(rng.normal(size=shape).astype(np.float32)).astype(dtype)

    tokens = len(POSITIONS)
    q, k = random(tokens, use.q_heads, use.dim), random(tokens, use.kv_heads, use.dim)
    norms = (random(use.dim), random(use.dim)) if use.norms else None
    positions = mx.array(POSITIONS, mx.int32)
    turned = run(rotation(q, k, positions, _periods(use), GAIN, norms, EPS))
    return max(
        check_close("rope", row, mx.array(right.astype(np.float32)), TOLERANCE[use.dtype])
        for got, x, weight in zip(turned, (q, k), norms or (None, None), strict=True)
        for row, right in zip(got, _exact(x, weight, use), strict=True)
    )


def _periods(use: RopeUse) -> mx.array:
    return mx.array((BASE ** (np.arange(use.dim // 2) * 2 / use.dim)).astype(np.float32))


def _exact(x: mx.array, weight: mx.array | None, use: RopeUse) -> np.ndarray:
    wide = np.array(x.astype(mx.float32)).astype(np.float64)
    if weight is not None:
        wide = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + EPS)
        wide = wide * np.array(weight.astype(mx.float32))
    periods = np.array(_periods(use)).astype(np.float64)
    angles = (np.array(POSITIONS)[:, None] / periods)[:, None]
    low, high = np.split(wide, 2, axis=-1)
    cosine, sine = np.cos(angles), np.sin(angles)
    return GAIN * np.concatenate([low * cosine - high * sine, high * cosine + low * sine], -1)


def measure(use: RopeUse, run: Runner) -> list[Timing]:
    """Kernel and reference at each of TIMED_ROWS."""
    return [_measure(use, run, rows) for rows in TIMED_ROWS]


def _measure(use: RopeUse, run: Runner, rows: int) -> Timing:
    dtype = getattr(mx, use.dtype)
    heads = use.q_heads, use.kv_heads
    q, k = (mx.full((rows, count, use.dim), 0.5, dtype) for count in heads)
    weight = mx.full((use.dim,), 0.5, dtype)
    norms = (weight, weight) if use.norms else None
    how = mx.arange(rows, dtype=mx.int32), _periods(use), 1.0, norms, EPS
    mx.eval(q, k, weight, *how[:2])

    def kernel(q: mx.array, k: mx.array) -> Sequence[mx.array]:
        return run(rotation(q, k, *how))

    def mlx(q: mx.array, k: mx.array) -> Sequence[mx.array]:
        return reference(q, k, *how)

    seconds = race(
        lambda: chain(kernel, (q, k), CALLS), lambda: chain(mlx, (q, k), CALLS), BUDGET_S
    )
    return Timing(rows, 0, *seconds)


def judge(use: RopeUse, verdict: Verdict) -> tuple[bool, str]:
    """Whether to use a kernel that is right, and why."""
    return verdict.mostly_faster
