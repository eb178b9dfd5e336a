"""Attention of a step's new tokens over hot and sealed pages."""

from collections.abc import Callable
from dataclasses import astuple, dataclass
from functools import cache, cached_property, partial
from types import ModuleType
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from mlxserve import device
from mlxserve.kernels.metal.chunk_attention import block_rows, chunk_attention
from mlxserve.kernels.metal.launch import Runner
from mlxserve.kernels.metal.packed_attention import part_pages
from mlxserve.kernels.metal.paged_attention import decode_attention
from mlxserve.kernels.metal.plan import ChunkPlan, DecodePlan
from mlxserve.kernels.pages import (
    PAGE_TOKENS,
    PackedPages,
    Pool,
    PoolSides,
    Sides,
    arrays_of,
    dtype_name,
    pack_keys,
    pack_values,
    packed_bits,
    page_tokens,
    unpack_keys,
    unpack_values,
)
from mlxserve.kernels.registry import check_close, metal, native
from mlxserve.kernels.uses import AttentionUse, ChunkUse

FUSED_DIMS = (64, 80, 128)  # head dims of which MLX's GPU attention holds no scores of a prompt


class PagedRows:
    """Where the rows of a step find their keys and values; one for all layers that share page ids.

    table: int32 `[R, 7]`, per row
        first, n, start: its queries are tokens first .. first + n of the step, rows end to end, at
            positions start .. start + n of its sequence;
        base_page: it still has positions from base_page * P on;
        sealed: how many of its pages, the oldest, lie in the pool; the others are hot;
        pages_at: where in `pages` its ids begin, in ascending order of pages up to that of its last
            query;
        kept: how many of them come before base_page: pages 0 .. kept of the sequence. At most
            base_page, and 0 where none is missing in between.
    pages: int32, page ids of all rows. page_tokens: P, tokens of a page, see `pages`.
    """

    def __init__(
        self, table: np.ndarray, pages: np.ndarray, page_tokens: int = PAGE_TOKENS
    ) -> None:
        self.table = np.ascontiguousarray(table, np.int32)
        self.pages = np.ascontiguousarray(pages, np.int32)
        self.page_tokens = page_tokens
        self._handle: Any = None
        self._plans: dict[tuple[int | None, int], DecodePlan] = {}
        self._chunk_plans: dict[tuple[int | None, int, int], ChunkPlan] = {}

    @cached_property
    def arrays(self) -> tuple[mx.array, mx.array]:
        """Table and pages for the device."""
        return mx.array(self.table), mx.array(self.pages)

    def handle(self, kernels: ModuleType) -> Any:
        """The native kernel's form. Raises ValueError where rows and pages don't fit together."""
        if self._handle is None:
            self._handle = kernels.PagedRows(self.table, self.pages, self.page_tokens)
        return self._handle

    def decode_plan(self, window: int | None, packed_pages: int = 0) -> DecodePlan:
        """The Metal kernels' form of the rows of one token. packed_pages: see `DecodePlan`."""
        key = window, packed_pages
        if key not in self._plans:
            single = self.table[self.table[:, 1] == 1]
            self._plans[key] = DecodePlan(single, self.pages, window, packed_pages)
        return self._plans[key]

    def chunk_plan(self, window: int | None, group: int, dim: int) -> ChunkPlan:
        """The same of the rows of several tokens. group: query heads of a KV head; dim: of them."""
        key = window, group, block_rows(dim)
        if key not in self._chunk_plans:
            longer = self.table[self.table[:, 1] > 1]
            self._chunk_plans[key] = ChunkPlan(longer, self.pages, *key)
        return self._chunk_plans[key]

    @cached_property
    def rows(self) -> list["RowPages"]:
        """The reference's form."""
        made, tokens = [], self.page_tokens
        for first, n, start, base, sealed, at, kept in self.table.tolist():
            end = at + kept + -(-(start + n) // tokens) - base
            pool, hot = self.pages[at : at + sealed], self.pages[at + sealed : end]
            table = mx.array(pool) if sealed else None
            row = RowPages(first, n, start, kept * tokens, base * tokens, table, mx.array(hot))
            made.append(row)
        return made


class Options(NamedTuple):
    """How a layer attends; see `paged_attention`."""

    scale: float
    window: int | None = None
    keep: int = 0
    sinks: mx.array | None = None
    softcap: float | None = None


@dataclass(frozen=True, eq=False, slots=True)
class RowPages:
    """One row for the reference.

    kept, base: the gathered keys are at positions 0 .. kept, and from base on. sealed: page ids in
    the pool, oldest first, or None; hot: ids of the hot pages after them.
    """

    first: int
    n: int
    start: int
    kept: int
    base: int
    sealed: mx.array | None
    hot: mx.array

    @property
    def end(self) -> int:
        """The position after its last query's."""
        return self.start + self.n


def paged_attention(
    q: mx.array,
    hot: Sides,
    pool: PoolSides,
    rows: PagedRows,
    *,
    scale: float,
    window: int | None = None,
    keep: int = 0,
    sinks: mx.array | None = None,
    softcap: float | None = None,
) -> mx.array:
    """Softmax attention (Vaswani et al. 2017) of ragged rows over paged keys and values.

    q: `[T, Hq, D]`, rows end to end. hot: K and V, `[n_hot * P, Hk, D]` each, token-major; the new
    tokens are already in them. pool: K and V, `[pages, Hk, P, D]` each, head-major. All four in
    float32, float16 or bfloat16; but K, V or both of the pool may be packed instead (see `pages`),
    and are then read as float32. Where the values are the keys, hot and pool have one side, which
    isn't packed. Returns `[T, Hq, D]` in q's dtype.

    The query at position p sees keys up to p; with `window` only those after p - window and, with
    `keep`, the first so many of its sequence (Xiao et al. 2023, arXiv:2309.17453).
    sinks: `[Hq]`, a logit per head that takes part in the softmax and has no value (in the same
    paper). softcap: c replaces a score s by c * tanh(s / c) (Gemma 2, arXiv:2408.00118). Raises
    ValueError if the rows don't cover q or have pages of another size, Hq isn't a multiple of Hk,
    `keep` is negative or has no window beside it, or (native) any shape, dtype or page id doesn't
    fit or a query sees keys of pages that its row doesn't have.

    The Metal kernels, one for rows of one token and one for longer rows, serve pages of 64 that
    have two sides, without `keep` and without packed values beside plain keys. No kernel holds a
    matrix of scores (online softmax, Milakov and Gimelshein 2018, arXiv:1805.02867). The native one
    gives a query the same bits alone, in a batch and in any chunk; those for Metal in any batch,
    and in any chunk of several tokens.
    """
    how = Options(scale, window, keep, sinks, softcap)
    if (kernels := native("attention")) is not None:
        return _native(kernels, q, hot, pool, rows, how)
    if len(hot) == len(pool) == 2 and rows.page_tokens == PAGE_TOKENS:
        sizes = q.shape[1], hot[0].shape[1], q.shape[2], hot[0].dtype
        asked = use(*sizes, window, softcap, sinks is not None, keep, *packed_bits(pool))
        decode, chunk = metal(asked), metal(chunk_use(asked))
        if decode is not None or chunk is not None:
            return _metal(decode, q, hot, pool, rows, how, chunk)
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
    keep: int,
    key_bits: int,
    value_bits: int,
) -> AttentionUse:
    """What a layer of such sizes asks of the op; dtype: of its cache, where that isn't packed."""
    name, bits = dtype_name(dtype), (key_bits, value_bits)
    return AttentionUse(q_heads, kv_heads, dim, name, window, softcap, sinks, keep, *bits)


@cache
def chunk_use(asked: AttentionUse) -> ChunkUse:
    """What the same layer asks of the op for rows of several tokens."""
    return ChunkUse(*astuple(asked))


def _native(
    kernels: ModuleType,
    q: mx.array,
    hot: Sides,
    pool: PoolSides,
    rows: PagedRows,
    how: Options,
) -> mx.array:
    if how.sinks is not None and how.sinks.dtype != mx.float32:
        how = how._replace(sinks=how.sinks.astype(mx.float32))
    wide = q if q.dtype == mx.float32 else q.astype(mx.float32)
    handle = rows.handle(kernels)
    pools = [arrays_of(side) for side in pool]
    out = kernels.paged_attention(wide, hot, pools, handle, *rows.arrays, *how)
    return out if wide is q else out.astype(q.dtype)


def _metal(
    decode: Runner | None,
    q: mx.array,
    hot: Sides,
    pool: PoolSides,
    rows: PagedRows,
    how: Options,
    chunk: Runner | None = None,
) -> mx.array:
    """Rows of one token by the kernels that `decode` runs, longer ones by that of `chunk`.

    Those without a kernel have the reference.
    """
    single = rows.table[:, 1] == 1
    options = {"scale": how.scale, "sinks": how.sinks, "softcap": how.softcap}
    unserved = np.where(single, decode is None, chunk is None)
    outs, taken = [], []  # results, and the rows that they are of
    if decode is not None and single.any():
        plan = rows.decode_plan(how.window, part_pages(*packed_bits(pool)))
        outs.append(decode_attention(q, hot, pool, plan, run=decode, **options))
        taken += np.flatnonzero(single).tolist()
    if chunk is not None and not single.all():
        chunks = rows.chunk_plan(how.window, q.shape[1] // hot[0].shape[1], q.shape[2])
        outs.append(chunk_attention(q, hot, pool, chunks, run=chunk, **options))
        taken += np.flatnonzero(~single).tolist()
    for i in np.flatnonzero(unserved).tolist():
        outs.append(_row(q, hot, pool, rows.rows[i], how))
        taken.append(i)
    out = outs[0] if len(outs) == 1 else mx.concatenate(outs)
    if taken == sorted(taken):
        return out
    first, n = rows.table[taken, :2].T
    tokens = np.concatenate([np.arange(at, at + count) for at, count in zip(first, n, strict=True)])
    return out[mx.array(np.argsort(tokens))]


def _reference(
    q: mx.array,
    hot: Sides,
    pool: PoolSides,
    rows: PagedRows,
    how: Options,
) -> mx.array:
    if len(hot) != len(pool):
        raise ValueError(f"hot has {len(hot)} sides and pool has {len(pool)}")
    if (tokens := page_tokens(pool)) != rows.page_tokens:
        raise ValueError(
            f"rows are of pages of {rows.page_tokens} tokens, the cache has pages of {tokens}"
        )
    if how.keep < 0 or (how.keep and how.window is None):
        raise ValueError(f"keep is {how.keep}, expected 0 or more, and 0 where there is no window")
    heads = hot[0].shape[1]
    if q.shape[1] % heads:
        raise ValueError(f"{q.shape[1]} query heads can't share {heads} key heads evenly")
    covered = int(rows.table[:, 1].sum())
    if covered != q.shape[0]:
        raise ValueError(f"rows cover {covered} tokens, q has {q.shape[0]}")
    outs = [_row(q, hot, pool, row, how) for row in rows.rows]
    return outs[0] if len(outs) == 1 else mx.concatenate(outs)


def _row(q: mx.array, hot: Sides, pool: PoolSides, row: RowPages, how: Options) -> mx.array:
    """One row: gathered, then MLX's own attention. Returns `[n, Hq, D]` in q's dtype."""
    low = 0 if how.window is None else max(0, row.start - how.window + 1)
    front = min(how.keep, low)  # how many tokens before `low` are seen
    if row.kept < row.base and (how.keep > row.kept or low < row.base):
        raise ValueError(f"the row of token {row.first} sees keys of pages that it doesn't have")
    tokens = page_tokens(pool)
    unpack = (partial(unpack_keys, tokens=tokens), partial(unpack_values, dim=hot[0].shape[2]))
    sides = [
        _seen(_gather(hot_x, pool_x, unpack_x, row, tokens), row, front, low)
        for hot_x, pool_x, unpack_x in zip(hot, pool, unpack, strict=False)
    ]
    k, v = sides[0], sides[-1]
    rows_q = q[row.first : row.first + row.n].swapaxes(0, 1)
    mask = _mask(row, front, low, how)
    if how.softcap is None:
        out = mx.fast.scaled_dot_product_attention(
            rows_q[None], k[None], v[None], scale=how.scale, mask=mask, sinks=how.sinks
        )[0]
    else:
        out = _softcapped(rows_q, k, v, how, how.softcap, mask)
    return out.swapaxes(0, 1).astype(q.dtype)


def _gather(
    hot: mx.array,
    pool: Pool,
    unpack: Callable[[PackedPages], mx.array],
    row: RowPages,
    tokens: int,
) -> mx.array:
    """All of one row's keys (or values) in order of position, `[Hk, tokens, D]`."""
    _, heads, dim = hot.shape
    tail = hot.reshape(-1, tokens, heads, dim)[row.hot]
    tail = tail.reshape(-1, heads, dim).swapaxes(0, 1)
    if row.sealed is None:
        return tail
    if isinstance(pool, PackedPages):
        sealed = unpack(PackedPages(*(x[row.sealed] for x in pool)))
    else:
        sealed = pool[row.sealed]
    sealed = sealed.swapaxes(0, 1).reshape(heads, -1, dim)
    return mx.concatenate([sealed, tail.astype(sealed.dtype)], axis=1)


def _seen(x: mx.array, row: RowPages, front: int, low: int) -> mx.array:
    """Of what was gathered the first `front` tokens, and those from position `low` on."""
    missing = row.base - row.kept
    rest = x[:, low - missing : row.end - missing]
    return mx.concatenate([x[:, :front], rest], axis=1) if front else rest


def _mask(row: RowPages, front: int, low: int, how: Options) -> mx.array | str | None:
    """None where every query sees every key, "causal" where only the future is hidden."""
    if row.n == 1:
        return None
    if how.window is None or row.end <= low + how.window:
        return "causal"
    queries = mx.arange(row.start, row.end)[:, None]
    keys = mx.concatenate([mx.arange(front), mx.arange(low, row.end)])[None]
    return (keys <= queries) & ((keys > queries - how.window) | (keys < how.keep))


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


def scratch_bytes(page_bytes: int, page_tokens: int, dim: int, queries: int) -> int:
    """What one layer's attention holds for a while, per page that it reads.

    page_bytes: keys and values of an unpacked page. dim: of a head. queries: tokens times heads
    that attend at once. The native kernel reads pages where they lie. The reference gathers them,
    puts them in order and joins hot ones to them; where MLX has no fused attention of prompts, it
    holds float32 scores too.
    """
    if native("attention") is not None:
        return 0
    fused = device.has_metal() and dim in FUSED_DIMS
    return 3 * page_bytes + (0 if fused else 4 * page_tokens * queries)


def check(kernels: ModuleType) -> None:
    """Kernel against reference, every option, two shapes of head. Raises ArithmeticError."""
    key = iter(mx.random.split(mx.random.key(0), 10))
    # A decode row of four pages, one of its first token, a chunk across a border, and a row that
    # has its first page and its last two.
    rows = [[0, 1, 200, 0, 3, 0, 0], [1, 1, 0, 0, 0, 4, 0], [2, 9, 60, 0, 0, 5, 0]]
    kept = [11, 2, 500, 6, 2, 7, 1]
    pages = np.array([2, 0, 1, 3, 1, 0, 2, 1, 2, 3])
    for dim, dtype, window, softcap in ((20, mx.float16, 70, None), (64, mx.float32, None, 3.0)):
        hot_k, hot_v = (mx.random.normal((256, 2, dim), key=next(key)) for _ in "kv")
        pool_k, pool_v = (mx.random.normal((3, 2, 64, dim), key=next(key)) for _ in "kv")
        hot = (hot_k.astype(dtype), hot_v.astype(dtype))
        pool = (pool_k.astype(dtype), pool_v.astype(dtype))
        q = mx.random.normal((13, 6, dim), key=next(key))
        sinks = None if softcap else q[0, :, 0]
        packed = (pack_keys(pool_k, 4 if softcap else 8), pack_values(pool_v, 8 if softcap else 4))
        described = PagedRows(np.array([*rows, kept] if window else rows), pages)
        q = q if window else q[:11]
        how = Options(dim**-0.5, window, 10 if window else 0, sinks, softcap)
        for sides, kind in ((hot, pool), (hot, packed), (hot[:1], pool[:1])):
            given = (q, sides, kind, described, how)
            check_close("attention", _native(kernels, *given), _reference(*given), 1e-5)
