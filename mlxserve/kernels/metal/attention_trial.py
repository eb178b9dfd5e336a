"""What the checks of attention kernels share: rows of made-up contents, errors, times.

Kernels are compared with `kernels.attention.paged_attention`, which has to be the reference here.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from mlxserve.kernels.attention import PagedRows, paged_attention
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
from mlxserve.kernels.verdicts import Timing

CHECKED_WINDOW = 300  # the most: it is no part of what is compiled, and cuts the rows of checks
BUDGET_S = 0.2  # for measuring both at one size

Attend = Callable[..., mx.array]
"""A kernel, called as `paged_attention` is, but without `keep`."""


class Layout(NamedTuple):
    """Rows over pages, as `PagedRows` takes them; `slots` in the pool and as many hot ones."""

    table: np.ndarray
    pages: np.ndarray
    slots: int


def lay_out(
    rows: Sequence[tuple[int, int]], window: int | None, rng: np.random.Generator
) -> Layout:
    """Every other row has two hot pages, where it has two; ids are scattered.

    rows: start and tokens of each.
    """
    table: list[tuple[int, ...]] = []
    counts: list[tuple[int, int]] = []
    first = 0
    for i, (start, n) in enumerate(rows):
        base = _low(start, window) // PAGE_TOKENS
        pages = (start + n - 1) // PAGE_TOKENS + 1 - base
        hot = min(1 + i % 2, pages)
        table.append((first, n, start, base, pages - hot, sum(map(sum, counts)), 0))
        counts.append((pages - hot, hot))
        first += n
    slots = max(map(sum, zip(*counts, strict=True))) + 1
    sealed_ids, hot_ids = (iter(rng.permutation(slots)) for _ in range(2))
    pages = [
        next(ids)
        for sealed, hot in counts
        for ids, count in ((sealed_ids, sealed), (hot_ids, hot))
        for _ in range(count)
    ]
    return Layout(np.array(table), np.array(pages), slots)


def largest_error(use: AttentionUse, rows: Sequence[tuple[int, int]], attend: Attend) -> float:
    """Of any token of ragged rows, as a share of the token's largest output.

    rows: start and tokens of each. What no query may see is NaN, or large. The reference is
    computed in float32, and by the CPU. Raises ArithmeticError where the kernel differs, and
    whatever `attend` raises.
    """
    rng = np.random.default_rng(0)
    window = None if use.window is None else min(use.window, CHECKED_WINDOW)
    layout = lay_out(rows, window, rng)
    hot, pool = _contents(use, layout, window, rng)
    shape = sum(n for _, n in rows), use.q_heads, use.dim
    q = mx.array(rng.normal(size=shape).astype(np.float32)).astype(getattr(mx, use.dtype))
    sinks = mx.array(rng.normal(size=use.q_heads).astype(np.float32)) if use.sinks else None
    described = PagedRows(layout.table, layout.pages)
    how: Any = {"scale": use.dim**-0.5, "window": window, "sinks": sinks, "softcap": use.softcap}
    with mx.stream(mx.cpu):
        wide_q, wide_hot = q.astype(mx.float32), tuple(x.astype(mx.float32) for x in hot)
        wide_pool = tuple(x.astype(mx.float32) if isinstance(x, mx.array) else x for x in pool)
        expected = paged_attention(wide_q, wide_hot, wide_pool, described, **how)
        mx.eval(expected)
    return max(  # token by token: the more it sees, the smaller what comes out
        check_close("attention", got, wanted, TOLERANCE[use.dtype])
        for got, wanted in zip(attend(q, hot, pool, described, **how), expected, strict=True)
    )


def timed(
    use: AttentionUse, layout: Layout, attend: Attend, *, rows: int, context: int, calls: int
) -> Timing:
    """Kernel and reference in turn, in the cache's dtype. rows, context: what is said of the size;
    calls: in one measurement, each on the last one's output, as a model's layers are."""
    described = PagedRows(layout.table, layout.pages)
    dtype = getattr(mx, use.dtype)
    hot = tuple(
        mx.full((layout.slots * PAGE_TOKENS, use.kv_heads, use.dim), 0.5, dtype) for _ in "kv"
    )
    shape = layout.slots, use.kv_heads, PAGE_TOKENS, use.dim
    bits = {"keys": use.key_bits, "values": use.value_bits}
    pool = tuple(empty_pool(side, shape, dtype, side_bits) for side, side_bits in bits.items())
    q = mx.full((int(layout.table[:, 1].sum()), use.q_heads, use.dim), 0.5, dtype)
    sinks = mx.zeros(use.q_heads, dtype) if use.sinks else None
    mx.eval(hot, pool, q)
    how = {"scale": use.dim**-0.5, "window": use.window, "sinks": sinks, "softcap": use.softcap}

    def seconds(function: Attend) -> float:
        out, start = q, time.perf_counter()
        for _ in range(calls):
            out = function(out, hot, pool, described, **how)
        mx.eval(out)
        return (time.perf_counter() - start) / calls

    found = race(lambda: seconds(attend), lambda: seconds(paged_attention), BUDGET_S)
    return Timing(rows, context, *found)


def _contents(
    use: AttentionUse, layout: Layout, window: int | None, rng: np.random.Generator
) -> tuple[Sides, PoolSides]:
    """Hot and pool, K and V each: random where a query sees it, NaN elsewhere.

    But a page of packed keys would be NaN as a whole, so what isn't seen there is only large.
    """
    dtype = getattr(mx, use.dtype)
    shape = (2, layout.slots, PAGE_TOKENS, use.kv_heads, use.dim)
    hot, pool = (np.full(shape, np.nan, np.float32) for _ in range(2))
    for _, n, start, base, sealed, at, _ in layout.table.tolist():
        low, last = _low(start, window), start + n - 1
        for page in range(base, last // PAGE_TOKENS + 1):
            target = pool if page - base < sealed else hot
            begin = max(low - page * PAGE_TOKENS, 0)
            end = min(last + 1 - page * PAGE_TOKENS, PAGE_TOKENS)
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


def _low(start: int, window: int | None) -> int:
    """The first token that the query there sees."""
    return 0 if window is None else max(0, start - window + 1)
