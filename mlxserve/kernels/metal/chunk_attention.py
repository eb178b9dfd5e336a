"""Attention of rows of several tokens on Metal, such as a prompt's chunks: one launch for all rows.

A threadgroup takes a block of queries of one row, with all query heads of a KV head, and walks the
pages that they see with matrices of a simdgroup and an online softmax (Dao et al. 2022,
arXiv:2205.14135).

Bytes it has to move: for each block and KV head, each key and value that a query of the block sees
once, packed ones with their scales and biases; the rows' q and out once. A chunk of n tokens has
n * G / `block_rows` blocks, and so its context is read so many times: 64 products for each number
read. Blocks that run at once read the same pages, so the GPU's cache has most of that.
"""

from functools import cache

import mlx.core as mx

from mlxserve.kernels.metal.launch import Kernel, Launch, Runner, source
from mlxserve.kernels.metal.plan import ChunkPlan
from mlxserve.kernels.pages import PackedPages, Pool, PoolSides, Sides, packed_bits

SIMDGROUPS = 8  # of a threadgroup
MAX_CHANNELS = 128  # of which a simdgroup holds eight rows' sums


def block_rows(dim: int) -> int:
    """Rows of queries of a block, each a token of one query head: eight for each simdgroup.

    Two simdgroups share eight where heads have more channels than one holds.
    """
    return 8 * SIMDGROUPS if dim <= MAX_CHANNELS else 4 * SIMDGROUPS


def chunk_attention(
    q: mx.array,
    hot: Sides,
    pool: PoolSides,
    plan: ChunkPlan,
    *,
    scale: float,
    sinks: mx.array | None,
    softcap: float | None,
    run: Runner,
) -> mx.array:
    """`kernels.attention.paged_attention` for the rows of a plan, end to end, in q's dtype.

    q: `[T, Hq, D]`, of which the plan says which tokens; hot, pool: as there, what isn't packed in
    float16 or bfloat16. Layers that `chunk_check.unsupported` has a reason against aren't checked
    for here.
    """
    launch = chunk_launch(q, hot, pool, plan, scale=scale, sinks=sinks, softcap=softcap)
    (out,) = run(launch)
    return out.astype(q.dtype)


def chunk_launch(
    q: mx.array,
    hot: Sides,
    pool: PoolSides,
    plan: ChunkPlan,
    *,
    scale: float,
    sinks: mx.array | None,
    softcap: float | None,
) -> Launch:
    """The launch, whose output is `[tokens of the plan, Hq, D]` in the cache's dtype."""
    (_, q_heads, dim), kv_heads, dtype = q.shape, hot[0].shape[1], hot[0].dtype
    key_bits, value_bits = packed_bits(pool)
    keys, values = (_arrays(side, hot_x) for side, hot_x in zip(pool, hot, strict=True))
    how = _how(scale, softcap or 0.0)
    template = {
        "T": dtype,
        "D": dim,
        "G": q_heads // kv_heads,
        "ROWS": block_rows(dim),
        "NSG": SIMDGROUPS,
        "KB": key_bits or 16,
        "VB": value_bits or 16,
        "SOFTCAP": softcap is not None,
        "SINKS": sinks is not None,
    }
    tables = plan.rows, plan.work, plan.pages
    threads = 32 * SIMDGROUPS
    return Launch(
        kernel=CHUNK,
        arrays=(
            *(q.astype(dtype), *hot, *keys, *values),
            *(*tables, how, how if sinks is None else sinks),
        ),
        template=tuple(template.items()),
        grid=(plan.items * threads, kv_heads, 1),
        threadgroup=(threads, 1, 1),
        shapes=((plan.tokens, q_heads, dim),),
        dtypes=(dtype,),
    )


def _arrays(pool: Pool, hot: mx.array) -> tuple[mx.array, ...]:
    """Codes, scales and biases; plain pages have none: what stands in their place isn't read."""
    return tuple(pool) if isinstance(pool, PackedPages) else (pool, hot, hot)


@cache
def _how(scale: float, softcap: float) -> mx.array:
    return mx.array([scale, softcap], mx.float32)


CHUNK = Kernel(
    "chunk_attention",
    (
        *("q", "hot_k", "hot_v", "k", "k_scales", "k_biases", "v", "v_scales", "v_biases"),
        *("rows", "work", "pages", "how", "sinks"),
    ),
    ("out",),
    source("chunk_attention.metal"),
    "".join(map(source, ("numbers.metal", "codes.metal", "lines.metal", "matrices.metal"))),
)
