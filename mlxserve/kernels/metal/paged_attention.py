"""Decode attention on Metal: one new token per row over its pages, for all rows at once.

A first launch gives each part of at most four plain pages to a threadgroup per KV head; where the
pool is packed, those are the hot pages, and a launch that doesn't wait for it reads the others
(`packed_attention`). The last one merges a row's parts, oldest first (online softmax: Milakov and
Gimelshein 2018, arXiv:1805.02867; split along the context: Dao et al. 2023, "Flash-Decoding").

Bytes it has to move, for a row that sees n plain tokens: n * Hk * D * 2 numbers of the cache once;
per part and query head D + 2 float32 written and read again; the row's q and out.
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import mlx.core as mx

from mlxserve.kernels.metal.launch import Kernel, Launch, Runner, source
from mlxserve.kernels.metal.packed_attention import packed_parts
from mlxserve.kernels.metal.plan import MAX_LANE_NUMBERS, DecodePlan, Parts
from mlxserve.kernels.pages import PoolSides, Sides

SIMDGROUPS = 4  # of a threadgroup


class Found(NamedTuple):
    """What a launch found in its parts, float32: partial `[items, Hq, D]`, tops `[Hq, items, 2]`.

    rows: of the parts.
    """

    partial: mx.array
    tops: mx.array
    rows: mx.array


def decode_attention(
    q: mx.array,
    hot: Sides,
    pool: PoolSides,
    plan: DecodePlan,
    *,
    scale: float,
    sinks: mx.array | None,
    softcap: float | None,
    run: Runner,
) -> mx.array:
    """`kernels.attention.paged_attention` for the rows of a plan, `[R, Hq, D]` in q's dtype.

    q: `[T, Hq, D]`, of which the plan says which tokens; hot, pool: as there, what isn't packed in
    float16 or bfloat16. Layers that `attention_check.unsupported` has a reason against aren't
    checked for here.
    """
    launches = parts(q, hot, pool, plan, scale=scale, softcap=softcap)
    found = []
    for launch, rows in launches:
        partial, tops = run(launch)
        found.append(Found(partial, tops, rows))
    (out,) = run(merge(found, plan.count, sinks, q.dtype))
    return out


def parts(
    q: mx.array,
    hot: Sides,
    pool: PoolSides,
    plan: DecodePlan,
    *,
    scale: float,
    softcap: float | None,
) -> list[tuple[Launch, mx.array]]:
    """The launches that don't wait for others, and the rows of their parts, oldest first."""
    q = q.astype(hot[0].dtype)
    how = _how(scale, softcap or 0.0)
    launches = []
    if plan.packed.items:
        packed = packed_parts(q, pool, plan.packed, how, softcap=softcap is not None)
        launches.append((packed, plan.packed.rows))
    if plan.plain.items:
        # Beside a packed pool no page of a plain one is read.
        plain = tuple(x if isinstance(x, mx.array) else y for x, y in zip(pool, hot, strict=True))
        launch = plain_parts(q, hot, plain, plan.plain, how, softcap=softcap is not None)
        launches.append((launch, plan.plain.rows))
    return launches


def plain_parts(
    q: mx.array,
    hot: Sides,
    pool: Sides,
    parts: Parts,
    how: mx.array,
    *,
    softcap: bool,
) -> Launch:
    """Partial `[items, Hq, D]` and tops `[Hq, items, 2]`, float32, of the parts of plain pages."""
    (_, q_heads, dim), kv_heads = q.shape, hot[0].shape[1]
    group = q_heads // kv_heads
    tile = _tile_tokens(dim)
    heads = _heads_together(group, dim, tile)
    template = {
        "T": hot[0].dtype,
        "D": dim,
        "G": group,
        "H": heads,
        "NSG": SIMDGROUPS,
        "PAGES": parts.pages,
        "TILE": tile,
        "SOFTCAP": softcap,
    }
    threads = 32 * SIMDGROUPS
    return Launch(
        kernel=PARTS,
        arrays=(q, *hot, *pool, parts.work, how),
        template=tuple(template.items()),
        grid=(parts.items * threads, kv_heads * (group // heads), 1),
        threadgroup=(threads, 1, 1),
        shapes=((parts.items, q_heads, dim), (q_heads, parts.items, 2)),
        dtypes=(mx.float32, mx.float32),
    )


def merge(found: Sequence[Found], rows: int, sinks: mx.array | None, dtype: mx.Dtype) -> Launch:
    """The last launch: `[rows, Hq, D]` in `dtype`. found: of one launch or two, oldest first."""
    first, last = found[0], found[-1]
    _, q_heads, dim = first.partial.shape
    newer = len(found) > 1
    return Launch(
        kernel=MERGE,
        arrays=(*first, *last, first.tops if sinks is None else sinks),
        template=(("T", dtype), ("D", dim), ("NEWER", newer), ("SINKS", sinks is not None)),
        grid=(32 * rows, q_heads, 1),
        threadgroup=(32, 1, 1),
        shapes=((rows, q_heads, dim),),
        dtypes=(dtype,),
    )


def _tile_tokens(dim: int) -> int:
    """Tokens of a tile: about 4 KB, so that a GPU core holds a dozen simdgroups and their tiles."""
    return 32 if dim <= 80 else 16 if dim <= 128 else 8


def _heads_together(group: int, dim: int, tile: int) -> int:
    """Query heads of a threadgroup: as many as registers hold, in equal shares.

    Each takes `dim / 32` numbers of a lane, its largest score, sum and score. In the end a tile's
    memory holds `dim` float32 of each head, where it held `tile * dim` numbers of 16 bits.
    """
    most = min(MAX_LANE_NUMBERS * 32 // (dim + 96), tile // 2)
    return max(n for n in range(1, group + 1) if group % n == 0 and (n == 1 or n <= most))


@cache
def _how(scale: float, softcap: float) -> mx.array:
    return mx.array([scale, softcap], mx.float32)


PARTS = Kernel(
    "paged_attention",
    ("q", "hot_k", "hot_v", "pool_k", "pool_v", "work", "how"),
    ("partial", "tops"),
    source("paged_attention.metal"),
    source("numbers.metal"),
)
MERGE = Kernel(
    "paged_attention_merge",
    ("partial", "tops", "rows", "newer_partial", "newer_tops", "newer_rows", "sinks"),
    ("out",),
    source("paged_attention_merge.metal"),
    source("numbers.metal"),
)
