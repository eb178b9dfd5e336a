"""Decode attention on Metal: one new token per row over its pages, in two launches for all rows.

The first launch gives each part of at most four pages to a threadgroup per KV head; the second
merges a row's parts, oldest first. Parts begin at fixed positions, so what a row gets doesn't
depend on its batch mates (online softmax: Milakov and Gimelshein 2018, arXiv:1805.02867; split
along the context: Dao et al. 2023, "Flash-Decoding").

Bytes it has to move, for a row that sees n tokens: n * Hk * D * 2 numbers of the cache once; per
part and query head D + 2 float32 written and read again; the row's q and out.
"""

from functools import cache
from importlib import resources

import mlx.core as mx
import numpy as np

from mlxserve.kernels.metal.launch import Kernel, Launch, Runner
from mlxserve.kernels.pages import PAGE_TOKENS, Sides

PART_PAGES = 4
SIMDGROUPS = 4  # of a threadgroup
HEAD_DIMS = (64, 72, 80, 96, 112, 128, 192, 256)
DTYPES = (mx.float16, mx.bfloat16)
# Numbers of all heads that a lane keeps in registers. MLX measured that 88 spill (its pull request
# 4077), in a kernel that is like ours in this respect.
MAX_LANE_NUMBERS = 56


def unsupported(q_heads: int, kv_heads: int, dim: int, dtype: mx.Dtype, keep: int = 0) -> str:
    """Why the kernel can't serve such layers, or ""."""
    if dim not in HEAD_DIMS:
        return f"head dim {dim} is none of {', '.join(map(str, HEAD_DIMS))}"
    if dtype not in DTYPES:
        return f"a cache in {str(dtype).removeprefix('mlx.core.')} isn't float16 or bfloat16"
    if q_heads % kv_heads:
        return f"{q_heads} query heads can't share {kv_heads} key heads evenly"
    if keep:
        return f"the first {keep} tokens are kept beside the window"
    return ""


class DecodePlan:
    """Which parts of which rows there are; one for all layers that share page ids and a window.

    table, pages: of `PagedRows`, rows of one token each. rows: int32 `[R, 8]`, work: int32
    `[items, 4]`, as paged_attention.metal reads them.
    """

    def __init__(self, table: np.ndarray, pages: np.ndarray, window: int | None) -> None:
        first, n, position, base, sealed, at, kept = table.astype(np.int64).T
        if (n != 1).any():
            raise ValueError(f"decode attention takes rows of one token, got {n.max()}")
        if kept.any():
            raise ValueError(f"decode attention takes no kept pages, got {kept.max()}")
        oldest = base * PAGE_TOKENS
        low = oldest if window is None else np.maximum(oldest, position - window + 1)
        begin, end = low // PAGE_TOKENS, position // PAGE_TOKENS + 1
        first_part = begin // PART_PAGES
        items = -(-end // PART_PAGES) - first_part
        first_item = np.cumsum(items) - items
        row = np.repeat(np.arange(len(items)), items)
        part = first_part[row] + np.arange(len(row)) - first_item[row]
        work = np.zeros((max(2, len(row)), 4), np.int32)  # below 8 numbers MLX changes their type
        work[: len(row), 0] = row
        work[: len(row), 1] = np.maximum(part * PART_PAGES, begin[row])
        work[: len(row), 2] = np.minimum(part * PART_PAGES + PART_PAGES, end[row])
        rows = np.stack([first, position, low, base, sealed, at, first_item, items], axis=1)
        self.items = len(row)
        self.count = len(items)
        self.rows = mx.array(rows.astype(np.int32))
        self.work = mx.array(work)
        self.pages = mx.array(np.resize(pages, max(8, len(pages))).astype(np.int32))


def decode_attention(
    q: mx.array,
    hot: Sides,
    pool: Sides,
    plan: DecodePlan,
    *,
    scale: float,
    sinks: mx.array | None,
    softcap: float | None,
    run: Runner,
) -> mx.array:
    """`kernels.attention.paged_attention` for the rows of a plan, `[R, Hq, D]` in q's dtype.

    q: `[T, Hq, D]`, of which the plan says which tokens; hot, pool: as there, in float16 or
    bfloat16. Layers for which `unsupported` gives a reason aren't checked for here.
    """
    first = parts(q, hot, pool, plan, scale=scale, softcap=softcap)
    partial, tops = run(first)
    (out,) = run(merge(partial, tops, plan, sinks, q.dtype))
    return out


def parts(
    q: mx.array,
    hot: Sides,
    pool: Sides,
    plan: DecodePlan,
    *,
    scale: float,
    softcap: float | None,
) -> Launch:
    """The first launch: partial `[items, Hq, D]` and tops `[Hq, items, 2]`, float32."""
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
        "TILE": tile,
        "SOFTCAP": softcap is not None,
    }
    threads = 32 * SIMDGROUPS
    return Launch(
        kernel=PARTS,
        arrays=(
            q.astype(hot[0].dtype),
            *hot,
            *pool,
            plan.rows,
            plan.work,
            plan.pages,
            _how(scale, softcap or 0.0),
        ),
        template=tuple(template.items()),
        grid=(plan.items * threads, kv_heads * (group // heads), 1),
        threadgroup=(threads, 1, 1),
        shapes=((plan.items, q_heads, dim), (q_heads, plan.items, 2)),
        dtypes=(mx.float32, mx.float32),
    )


def merge(
    partial: mx.array, tops: mx.array, plan: DecodePlan, sinks: mx.array | None, dtype: mx.Dtype
) -> Launch:
    """The second launch: `[R, Hq, D]` in `dtype`."""
    _, q_heads, dim = partial.shape
    return Launch(
        kernel=MERGE,
        arrays=(partial, tops, plan.rows, tops if sinks is None else sinks),
        template=(("T", dtype), ("D", dim), ("SINKS", sinks is not None)),
        grid=(32 * plan.count, q_heads, 1),
        threadgroup=(32, 1, 1),
        shapes=((plan.count, q_heads, dim),),
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


def _source(name: str) -> str:
    return resources.files("mlxserve.kernels.metal").joinpath(name).read_text("utf-8")


PARTS = Kernel(
    "paged_attention",
    ("q", "hot_k", "hot_v", "pool_k", "pool_v", "rows", "work", "pages", "how"),
    ("partial", "tops"),
    _source("paged_attention.metal"),
    _source("numbers.metal"),
)
MERGE = Kernel(
    "paged_attention_merge",
    ("partial", "tops", "rows", "sinks"),
    ("out",),
    _source("paged_attention_merge.metal"),
    _source("numbers.metal"),
)
