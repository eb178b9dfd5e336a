"""Whether decode attention serves a use, is right on this device, and how fast it is.

Both are compared with `kernels.attention.paged_attention`, which has to be the reference here.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from mlxserve.kernels.attention import PagedRows, paged_attention
from mlxserve.kernels.metal.launch import Runner
from mlxserve.kernels.metal.packed_attention import part_pages
from mlxserve.kernels.metal.paged_attention import decode_attention
from mlxserve.kernels.metal.plan import DecodePlan
from mlxserve.kernels.metal.race import race
from mlxserve.kernels.pages import (
    PAGE_TOKENS,
    Pool,
    PoolSides,
    Sides,
    empty_pool,
    pack_keys,
    pack_values,
)
from mlxserve.kernels.registry import TOLERANCE, check_close
from mlxserve.kernels.uses import AttentionUse
from mlxserve.kernels.verdicts import Timing, Verdict

HEAD_DIMS = (64, 72, 80, 96, 112, 128, 192, 256)
# The first token, one page, around a page's end, around the end of a part, and several parts.
POSITIONS = (0, 5, 63, 64, 200, 255, 256, 700, 1100)
CHECKED_WINDOW = 300  # the most: it is no part of what is compiled, and cuts POSITIONS
CONTEXTS = (512, 4096)
ROWS = (1, 8)
CALLS = 32  # per measurement
BUDGET_S = 0.2  # for measuring both at one size


class _Layout(NamedTuple):
    """Rows of one token each over pages; `slots` in the pool and as many hot ones."""

    table: np.ndarray
    pages: np.ndarray
    slots: int


def unsupported(use: AttentionUse) -> str:
    """Why the kernel can't serve such layers, or ""."""
    if use.dim not in HEAD_DIMS:
        return f"head dim {use.dim} is none of {', '.join(map(str, HEAD_DIMS))}"
    if use.dtype not in TOLERANCE:
        return f"a cache in {use.dtype} isn't float16 or bfloat16"
    if use.q_heads % use.kv_heads:
        return f"{use.q_heads} query heads can't share {use.kv_heads} key heads evenly"
    if use.keep:
        return f"the first {use.keep} tokens are kept beside the window"
    if use.value_bits and not use.key_bits:
        return f"keys in 16 bits beside values in {use.value_bits}"
    return ""


def check(use: AttentionUse, run: Runner) -> float:
    """The largest error in any of several ragged rows, as a share of the row's largest output.

    What no query may see is NaN, or large. The reference is computed in float32, and by the CPU.
    Raises ArithmeticError where the kernel differs, and whatever `run` raises.
    """
    rng = np.random.default_rng(0)
    window = None if use.window is None else min(use.window, CHECKED_WINDOW)
    layout = _layout(POSITIONS, window, rng)
    dtype = getattr(mx, use.dtype)
    hot, pool = _contents(use, layout, window, rng, dtype)
    shape = (len(POSITIONS), use.q_heads, use.dim)
    q = mx.array(rng.normal(size=shape).astype(np.float32)).astype(dtype)
    sinks = mx.array(rng.normal(size=use.q_heads).astype(np.float32)) if use.sinks else None
    how: Any = {"scale": use.dim**-0.5, "sinks": sinks, "softcap": use.softcap}
    with mx.stream(mx.cpu):
        rows = PagedRows(layout.table, layout.pages)
        wide_q, wide_hot = q.astype(mx.float32), tuple(x.astype(mx.float32) for x in hot)
        wide_pool = tuple(x.astype(mx.float32) if isinstance(x, mx.array) else x for x in pool)
        expected = paged_attention(wide_q, wide_hot, wide_pool, rows, **how, window=window)
        mx.eval(expected)
    plan = _plan(use, layout, window)
    got = decode_attention(q, hot, pool, plan, **how, run=run)
    return max(  # row by row: the longer a row, the smaller what comes out
        check_close("attention", got_row, row, TOLERANCE[use.dtype])
        for got_row, row in zip(got, expected, strict=True)
    )


def _plan(use: AttentionUse, layout: _Layout, window: int | None) -> DecodePlan:
    packed_pages = part_pages(use.key_bits, use.value_bits)
    return DecodePlan(layout.table, layout.pages, window, packed_pages)


def measure(use: AttentionUse, run: Runner) -> list[Timing]:
    """Kernel and reference at each of CONTEXTS x ROWS, in the cache's dtype."""
    return [_measure(use, run, tokens, rows) for tokens in CONTEXTS for rows in ROWS]


def judge(use: AttentionUse, verdict: Verdict) -> tuple[bool, str]:
    """Whether to use a kernel that is right, and why: it must be faster at most sizes."""
    return verdict.mostly_faster


def _measure(use: AttentionUse, run: Runner, tokens: int, rows: int) -> Timing:
    layout = _layout([tokens - 1] * rows, use.window, np.random.default_rng(0))
    described = PagedRows(layout.table, layout.pages)
    plan = _plan(use, layout, use.window)
    dtype = getattr(mx, use.dtype)
    k, v = (mx.full((layout.slots * PAGE_TOKENS, use.kv_heads, use.dim), 0.5, dtype) for _ in "kv")
    shape = layout.slots, use.kv_heads, PAGE_TOKENS, use.dim
    pool = (
        empty_pool("keys", shape, dtype, use.key_bits),
        empty_pool("values", shape, dtype, use.value_bits),
    )
    q = mx.full((rows, use.q_heads, use.dim), 0.5, dtype)
    sinks = mx.zeros(use.q_heads, dtype) if use.sinks else None
    mx.eval(k, v, pool, q)
    cache = ((k, v), pool)
    how: Any = {"scale": use.dim**-0.5, "sinks": sinks, "softcap": use.softcap}

    def kernel(q: mx.array) -> mx.array:
        return decode_attention(q, *cache, plan, **how, run=run)

    def reference(q: mx.array) -> mx.array:
        return paged_attention(q, *cache, described, **how, window=use.window)

    seconds = race(lambda: _seconds(kernel, q), lambda: _seconds(reference, q), BUDGET_S)
    return Timing(rows, tokens, *seconds)


def _seconds(attend: Callable[[mx.array], mx.array], q: mx.array) -> float:
    """Of one call among several, each on the last one's output, as a model's layers are."""
    start = time.perf_counter()
    for _ in range(CALLS):
        q = attend(q)
    mx.eval(q)
    return (time.perf_counter() - start) / CALLS


def _layout(positions: Sequence[int], window: int | None, rng: np.random.Generator) -> _Layout:
    """Every other row has two hot pages, where it has two; ids are scattered."""
    rows: list[tuple[int, ...]] = []
    counts: list[tuple[int, int]] = []
    for i, position in enumerate(positions):
        base = 0 if window is None else max(0, position - window + 1) // PAGE_TOKENS
        pages = position // PAGE_TOKENS + 1 - base
        hot = min(1 + i % 2, pages)
        at = sum(map(sum, counts))
        rows.append((i, 1, position, base, pages - hot, at, 0))
        counts.append((pages - hot, hot))
    slots = max(map(sum, zip(*counts, strict=True))) + 1
    sealed_ids, hot_ids = (iter(rng.permutation(slots)) for _ in range(2))
    pages = [
        next(ids)
        for sealed, hot in counts
        for ids, count in ((sealed_ids, sealed), (hot_ids, hot))
        for _ in range(count)
    ]
    return _Layout(np.array(rows), np.array(pages), slots)


def _contents(
    use: AttentionUse,
    layout: _Layout,
    window: int | None,
    rng: np.random.Generator,
    dtype: mx.Dtype,
) -> tuple[Sides, PoolSides]:
    """Hot and pool, K and V each: random where a query sees it, NaN elsewhere.

    But a page of packed keys would be NaN as a whole, so what isn't seen there is only large.
    """
    shape = (2, layout.slots, PAGE_TOKENS, use.kv_heads, use.dim)
    hot, pool = (np.full(shape, np.nan, np.float32) for _ in range(2))
    for _, _, position, base, sealed, at, _ in layout.table.tolist():
        low = 0 if window is None else max(0, position - window + 1)
        for page in range(base, position // PAGE_TOKENS + 1):
            target = pool if page - base < sealed else hot
            begin = max(low - page * PAGE_TOKENS, 0)
            end = min(position + 1 - page * PAGE_TOKENS, PAGE_TOKENS)
            numbers = rng.normal(size=(2, end - begin, use.kv_heads, use.dim))
            page_id = layout.pages[at + page - base]
            if use.key_bits and target is pool:
                target[0, page_id] = 4.0
            target[:, page_id, begin:end] = numbers
    hot_k, hot_v = mx.array(hot.reshape(2, -1, *shape[3:])).astype(dtype)
    pool_k, pool_v = mx.array(pool.swapaxes(2, 3)).astype(dtype)
    keys: Pool = pack_keys(pool_k, use.key_bits) if use.key_bits else pool_k
    values: Pool = pack_values(pool_v, use.value_bits) if use.value_bits else pool_v
    return (hot_k, hot_v), (keys, values)
