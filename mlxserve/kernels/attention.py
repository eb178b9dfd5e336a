"""Attention of a step's new tokens over hot and sealed pages."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property, partial
from types import ModuleType
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from mlxserve.kernels.metal.launch import Runner
from mlxserve.kernels.metal.paged_attention import DecodePlan, decode_attention
from mlxserve.kernels.pages import (
    PAGE_TOKENS,
    PackedPages,
    Pair,
    Pool,
    PoolPair,
    arrays_of,
    pack_keys,
    pack_values,
    unpack_keys,
    unpack_values,
)
from mlxserve.kernels.registry import check_close, metal, native
from mlxserve.kernels.uses import AttentionUse


class PagedRows:
    """Where the rows of a step find their keys and values; one for all layers that share page ids.

    table: int32 `[R, 6]`, per row
        first, n, start: its queries are tokens first .. first + n of the step, rows end to end, at
            positions start .. start + n of its sequence;
        base_page: the oldest page that it still has: positions from base_page * 64 on;
        sealed: how many of its pages, from there on, lie in the pool; the others are hot;
        pages_at: where in `pages` its ids begin, one for each page up to that of its last query.
    pages: int32, page ids of all rows.
    """

    def __init__(self, table: np.ndarray, pages: np.ndarray) -> None:
        self.table = np.ascontiguousarray(table, np.int32)
        self.pages = np.ascontiguousarray(pages, np.int32)
        self._handle: Any = None
        self._plans: dict[int | None, DecodePlan] = {}

    @cached_property
    def arrays(self) -> tuple[mx.array, mx.array]:
        """Table and pages for the device."""
        return mx.array(self.table), mx.array(self.pages)

    def handle(self, kernels: ModuleType) -> Any:
        """The native kernel's form. Raises ValueError where rows and pages don't fit together."""
        if self._handle is None:
            self._handle = kernels.PagedRows(self.table, self.pages)
        return self._handle

    def decode_plan(self, window: int | None) -> DecodePlan:
        """The Metal kernel's form of the rows of one token."""
        if window not in self._plans:
            single = self.table[self.table[:, 1] == 1]
            self._plans[window] = DecodePlan(single, self.pages, window)
        return self._plans[window]

    @cached_property
    def rows(self) -> list["RowPages"]:
        """The reference's form."""
        made = []
        for first, n, start, base, sealed, at in self.table.tolist():
            end = at + -(-(start + n) // PAGE_TOKENS) - base
            pool, hot = self.pages[at : at + sealed], self.pages[at + sealed : end]
            table = mx.array(pool) if sealed else None
            made.append(RowPages(first, n, start, base * PAGE_TOKENS, table, mx.array(hot)))
        return made


class Options(NamedTuple):
    """How a layer attends; see `paged_attention`."""

    scale: float
    window: int | None = None
    sinks: mx.array | None = None
    softcap: float | None = None


@dataclass(frozen=True, eq=False, slots=True)
class RowPages:
    """One row for the reference.

    base: position of the first gathered key. sealed: page ids in the pool, oldest first, or None;
    hot: ids of the hot pages after them.
    """

    first: int
    n: int
    start: int
    base: int
    sealed: mx.array | None
    hot: mx.array


def paged_attention(
    q: mx.array,
    hot: Pair,
    pool: PoolPair,
    rows: PagedRows,
    *,
    scale: float,
    window: int | None = None,
    sinks: mx.array | None = None,
    softcap: float | None = None,
) -> mx.array:
    """Softmax attention (Vaswani et al. 2017) of ragged rows over paged keys and values.

    q: `[T, Hq, D]`, rows end to end. hot: K and V, `[n_hot * 64, Hk, D]` each, token-major; the new
    tokens are already in them. pool: K and V, `[pages, Hk, 64, D]` each, head-major. All four in
    float32, float16 or bfloat16; but K, V or both of the pool may be packed instead (see `pages`),
    and are then read as float32. Returns `[T, Hq, D]` in q's dtype.

    The query at position p sees keys up to p, and with `window` only those after p - window.
    sinks: `[Hq]`, a logit per head that takes part in the softmax and has no value (Xiao et al.
    2023, arXiv:2309.17453). softcap: c replaces a score s by c * tanh(s / c) (Gemma 2,
    arXiv:2408.00118). Raises ValueError if the rows don't cover q, Hq isn't a multiple of Hk, or
    (native) any shape, dtype or page id doesn't fit.

    The Metal kernel serves rows of one token over pages that aren't packed. Neither kernel holds a
    matrix of scores (online softmax, Milakov and Gimelshein 2018, arXiv:1805.02867); the native one
    gives a query the same bits alone, in a batch and in any chunk.
    """
    how = Options(scale, window, sinks, softcap)
    if (kernels := native("attention")) is not None:
        return _native(kernels, q, hot, pool, rows, how)
    pool_k, pool_v = pool
    if isinstance(pool_k, mx.array) and isinstance(pool_v, mx.array):
        sizes = q.shape[1], hot[0].shape[1], q.shape[2], hot[0].dtype
        if (run := metal(use(*sizes, window, softcap, sinks is not None))) is not None:
            return _metal(run, q, hot, (pool_k, pool_v), rows, how)
    return _reference(q, hot, pool, rows, how)


@cache
def use(
    q_heads: int,
    kv_heads: int,
    dim: int,
    dtype: mx.Dtype,
    window: int | None,
    softcap: float | None,
    sinks: bool,
) -> AttentionUse:
    """What a layer of such sizes asks of the op; dtype: of its cache."""
    name = str(dtype).removeprefix("mlx.core.")
    return AttentionUse(q_heads, kv_heads, dim, name, window, softcap, sinks)


def _native(
    kernels: ModuleType,
    q: mx.array,
    hot: Pair,
    pool: PoolPair,
    rows: PagedRows,
    how: Options,
) -> mx.array:
    if how.sinks is not None and how.sinks.dtype != mx.float32:
        how = how._replace(sinks=how.sinks.astype(mx.float32))
    wide = q if q.dtype == mx.float32 else q.astype(mx.float32)
    handle = rows.handle(kernels)
    pools = (arrays_of(side) for side in pool)
    out = kernels.paged_attention(wide, *hot, *pools, handle, *rows.arrays, *how)
    return out if wide is q else out.astype(q.dtype)


def _metal(
    run: Runner,
    q: mx.array,
    hot: Pair,
    pool: Pair,
    rows: PagedRows,
    how: Options,
) -> mx.array:
    """Rows of one token by the kernel, longer ones by the reference."""
    single = rows.table[:, 1] == 1
    outs, tokens = [], []
    if single.any():
        plan = rows.decode_plan(how.window)
        options = {"scale": how.scale, "sinks": how.sinks, "softcap": how.softcap}
        outs.append(decode_attention(q, hot, pool, plan, run=run, **options))
        tokens.append(rows.table[single, 0])
    for row in (row for row in rows.rows if row.n > 1):
        outs.append(_row(q, hot, pool, row, how))
        tokens.append(np.arange(row.first, row.first + row.n))
    order = np.argsort(np.concatenate(tokens), kind="stable")
    out = outs[0] if len(outs) == 1 else mx.concatenate(outs)
    return out if (np.diff(order) == 1).all() else out[mx.array(order)]


def _reference(
    q: mx.array,
    hot: Pair,
    pool: PoolPair,
    rows: PagedRows,
    how: Options,
) -> mx.array:
    heads = hot[0].shape[1]
    if q.shape[1] % heads:
        raise ValueError(f"{q.shape[1]} query heads can't share {heads} key heads evenly")
    covered = int(rows.table[:, 1].sum())
    if covered != q.shape[0]:
        raise ValueError(f"rows cover {covered} tokens, q has {q.shape[0]}")
    outs = [_row(q, hot, pool, row, how) for row in rows.rows]
    return outs[0] if len(outs) == 1 else mx.concatenate(outs)


def _row(q: mx.array, hot: Pair, pool: PoolPair, row: RowPages, how: Options) -> mx.array:
    """One row: gathered, then MLX's own attention. Returns `[n, Hq, D]` in q's dtype."""
    low = row.base if how.window is None else max(row.base, row.start - how.window + 1)
    unpack = (unpack_keys, partial(unpack_values, dim=hot[0].shape[2]))
    k, v = (
        _gather(*sides, row)[:, low - row.base : row.start + row.n - row.base]
        for sides in zip(hot, pool, unpack, strict=True)
    )
    rows_q = q[row.first : row.first + row.n].swapaxes(0, 1)
    mask = _mask(row, low, how.window)
    if how.softcap is None:
        out = mx.fast.scaled_dot_product_attention(
            rows_q[None], k[None], v[None], scale=how.scale, mask=mask, sinks=how.sinks
        )[0]
    else:
        out = _softcapped(rows_q, k, v, how, how.softcap, mask)
    return out.swapaxes(0, 1).astype(q.dtype)


def _gather(
    hot: mx.array, pool: Pool, unpack: Callable[[PackedPages], mx.array], row: RowPages
) -> mx.array:
    """One row's keys (or values) in order of position, `[Hk, tokens, D]`."""
    _, heads, dim = hot.shape
    tail = hot.reshape(-1, PAGE_TOKENS, heads, dim)[row.hot]
    tail = tail.reshape(-1, heads, dim).swapaxes(0, 1)
    if row.sealed is None:
        return tail
    if isinstance(pool, PackedPages):
        sealed = unpack(PackedPages(*(x[row.sealed] for x in pool)))
    else:
        sealed = pool[row.sealed]
    sealed = sealed.swapaxes(0, 1).reshape(heads, -1, dim)
    return mx.concatenate([sealed, tail.astype(sealed.dtype)], axis=1)


def _mask(row: RowPages, low: int, window: int | None) -> mx.array | str | None:
    """None where every query sees every key, "causal" where only the future is hidden."""
    if row.n == 1:
        return None
    if window is None or row.start + row.n <= low + window:
        return "causal"
    queries = mx.arange(row.start, row.start + row.n)[:, None]
    keys = mx.arange(low, row.start + row.n)[None]
    return (keys <= queries) & (keys > queries - window)


def _softcapped(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    how: Options,
    softcap: float,
    mask: mx.array | str | None,
) -> mx.array:
    """The same with capped scores, for which MLX has no fused op.

    q: `[Hq, n, D]`; k, v: `[Hk, L, D]`. Returns `[Hq, n, D]`.
    """
    (hq, n, dim), (hk, length, _) = q.shape, k.shape
    grouped = q.reshape(hk, hq // hk, n, dim).astype(mx.float32) * how.scale
    scores = grouped @ k[:, None].astype(mx.float32).swapaxes(-1, -2)
    scores = softcap * mx.tanh(scores / softcap)
    if mask is not None:
        seen = mx.tri(n, length, length - n, dtype=mx.bool_) if isinstance(mask, str) else mask
        scores = mx.where(seen, scores, -mx.inf)
    if how.sinks is not None:
        sink = mx.broadcast_to(how.sinks.reshape(hk, -1, 1, 1), (*scores.shape[:-1], 1))
        weights = mx.softmax(mx.concatenate([scores, sink.astype(mx.float32)], -1), -1)[..., :-1]
    else:
        weights = mx.softmax(scores, -1)
    return (weights @ v[:, None].astype(mx.float32)).reshape(hq, n, dim).astype(q.dtype)


def check(kernels: ModuleType) -> None:
    """Kernel against reference, every option, two shapes of head. Raises ArithmeticError."""
    key = iter(mx.random.split(mx.random.key(0), 10))
    # A decode row of four pages, one of its first token, a chunk across a border.
    table = np.array([[0, 1, 200, 0, 3, 0], [1, 1, 0, 0, 0, 4], [2, 9, 60, 0, 0, 5]])
    rows = PagedRows(table, np.array([2, 0, 1, 3, 1, 0, 2]))
    for dim, dtype, window, softcap in ((20, mx.float16, 70, None), (64, mx.float32, None, 3.0)):
        hot_k, hot_v = (mx.random.normal((256, 2, dim), key=next(key)) for _ in "kv")
        pool_k, pool_v = (mx.random.normal((3, 2, 64, dim), key=next(key)) for _ in "kv")
        hot = (hot_k.astype(dtype), hot_v.astype(dtype))
        pool = (pool_k.astype(dtype), pool_v.astype(dtype))
        q = mx.random.normal((11, 6, dim), key=next(key))
        sinks = None if softcap else q[0, :, 0]
        packed = (pack_keys(pool_k, 4 if softcap else 8), pack_values(pool_v, 8 if softcap else 4))
        for kind in (pool, packed):
            given = (q, hot, kind, rows, Options(dim**-0.5, window, sinks, softcap))
            check_close("attention", _native(kernels, *given), _reference(*given), 1e-5)
