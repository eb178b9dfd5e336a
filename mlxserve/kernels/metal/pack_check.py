"""Whether packing full pages serves a use, is right on this device, and how fast it is.

Right is what `kernels.pages` describes, in float32 on the CPU. Where a number lies in the middle
between two codes, arithmetic that is a little off may take the other one.
"""

import time
from collections.abc import Callable

import mlx.core as mx
import numpy as np

from mlxserve.kernels.metal.launch import Runner
from mlxserve.kernels.metal.pack_pages import pack_launch
from mlxserve.kernels.metal.race import race
from mlxserve.kernels.pages import (
    PAGE_TOKENS,
    PackedPages,
    pack_keys,
    pack_values,
    unpack_keys,
    unpack_values,
)
from mlxserve.kernels.uses import SealUse
from mlxserve.kernels.verdicts import Timing, Verdict

DTYPES = ("float16", "bfloat16")
CHECKED_PAGES = (2, 0, 3)
TIMED_PAGES = (1, 4, 16)
MAX_STEPS = 1.02  # between two codes that stand for one number
MAX_SHARE = 0.01  # of numbers whose codes differ
CALLS = 8  # per measurement
BUDGET_S = 0.1  # for measuring both at one number of pages


def unsupported(use: SealUse) -> str:
    """Why the kernel can't serve such layers, or ""."""
    if use.dtype not in DTYPES:
        return f"a cache in {use.dtype} isn't float16 or bfloat16"
    if use.dim % 2:
        return f"head dim {use.dim} is odd"
    return ""


def check(use: SealUse, run: Runner) -> float:
    """The largest error of any number that was packed, as a share of the largest number.

    Raises ArithmeticError where the kernel differs, and whatever `run` raises.
    """
    hot = _contents(use, max(CHECKED_PAGES) + 1)
    ids = mx.array(CHECKED_PAGES, mx.int32)
    got = PackedPages(*run(pack_launch(hot, ids, use.bits, keys=use.side == "keys")))
    mx.eval(got)
    with mx.stream(mx.cpu):
        expected = _pack(use, hot, CHECKED_PAGES)
        ones = mx.full(got.codes.shape, sum(1 << i for i in range(0, 32, use.bits)), mx.uint32)
        step = _unpack(use, PackedPages(ones, expected.scales, mx.zeros_like(expected.biases)))
        found, wanted, steps = (
            np.array(x) for x in (_unpack(use, got), _unpack(use, expected), step)
        )
    if not np.array_equal(np.isnan(found), np.isnan(wanted)):
        raise ArithmeticError("packed pages don't show which numbers aren't finite")
    off = np.nan_to_num(np.abs(found - wanted))
    largest = float(np.nanmax(np.abs(wanted)))
    most = MAX_STEPS * np.nan_to_num(steps) + 2**-10 * np.nan_to_num(np.abs(wanted))
    if (off > most).any() or (off > 0).mean() > MAX_SHARE:
        raise ArithmeticError(
            f"packed pages are {off.max() / largest:.1e} away from the reference, and "
            f"{(off > 0).mean():.1%} of their numbers differ"
        )
    return float(off.max()) / largest


def measure(use: SealUse, run: Runner) -> list[Timing]:
    """Kernel and reference at each of TIMED_PAGES."""
    return [_measure(use, run, pages) for pages in TIMED_PAGES]


def judge(use: SealUse, verdict: Verdict) -> tuple[bool, str]:
    """Whether to use a kernel that is right, and why: it must be faster at most sizes."""
    return verdict.mostly_faster


def _contents(use: SealUse, pages: int) -> mx.array:
    """Random, but for a channel that is constant, and a number that isn't finite."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(pages * PAGE_TOKENS, use.heads, use.dim)).astype(np.float32)
    x[:, 0, 1] = 0.25
    x[CHECKED_PAGES[1] * PAGE_TOKENS + 7, -1, -1] = np.nan
    x[CHECKED_PAGES[0] * PAGE_TOKENS + 9, 0, 0] = np.inf
    return mx.array(x).astype(getattr(mx, use.dtype))


def _pack(use: SealUse, hot: mx.array, ids: tuple[int, ...]) -> PackedPages:
    pages = hot.reshape(-1, PAGE_TOKENS, use.heads, use.dim)[mx.array(ids)].swapaxes(1, 2)
    return (pack_keys if use.side == "keys" else pack_values)(pages, use.bits)


def _unpack(use: SealUse, packed: PackedPages) -> mx.array:
    return unpack_keys(packed) if use.side == "keys" else unpack_values(packed, use.dim)


def _measure(use: SealUse, run: Runner, pages: int) -> Timing:
    hot, ids = _contents(use, pages + max(CHECKED_PAGES)), mx.arange(pages, dtype=mx.int32)
    mx.eval(hot, ids)

    def kernel() -> object:
        return run(pack_launch(hot, ids, use.bits, keys=use.side == "keys"))

    def reference() -> object:
        return [_pack(use, hot, (page,)) for page in range(pages)]

    return Timing(pages, 0, *race(lambda: _seconds(kernel), lambda: _seconds(reference), BUDGET_S))


def _seconds(pack: Callable[[], object]) -> float:
    start = time.perf_counter()
    mx.eval([pack() for _ in range(CALLS)])
    return (time.perf_counter() - start) / CALLS
