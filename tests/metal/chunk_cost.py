# ruff: noqa: E501  (a table has long lines)
"""What attention of a prompt's chunks moves, for `cost_report`."""

from functools import cache
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mlxserve.cache.spec import FullKV, KVBits, page_bytes
from mlxserve.kernels.metal.chunk_attention import block_rows, chunk_launch
from mlxserve.kernels.metal.launch import Launch
from mlxserve.kernels.metal.plan import ChunkPlan
from mlxserve.kernels.pages import empty_pool
from tests.support.metal import Cost, cost

PAGE = 64
MLX_QUERIES = 32  # of a block of MLX's attention, which takes one query head
# What MLX's operations move of a number of the cache before they attend, in bytes: a gather and a
# copy into the order of heads, each of which reads and writes 16 bits; of packed ones float32 that
# is shifted out of its word, masked, converted, scaled, shifted by the bias, put in order and joined
# to the hot page's.
MLX_COPIES = {0: 2 * 4, 8: 2 + 5 + 6 * 8, 4: 1 + 4.5 + 6 * 8}
HEAD = """
## Attention of a prompt's chunks

One chunk of so many tokens after so many others, one KV head, in float16. Packed pages have so many bits a number, a query's
own page has 16. Counted for a page of queries, and added up: the others do the same with more pages before them.

- *Bytes*, *lines*: of everything, to the least possible of such blocks: for each block of 64 rows of queries (tokens times query
  heads of the KV head), each key and value that one of them sees once, packed keys in whole pages, with scales and biases; q and
  out once.
- *Reads of a key*: how many blocks read a key or value, on average. All but the first reading the GPU's cache mostly has: blocks
  that run at once read the same pages. Whatever they read gives 64 products a number.
- *MLX's path*: gathers of pages, copies in the order of heads, of packed pages all operations that unpack them, and attention that
  reads keys and values for {queries} queries of each query head; in bytes to the least of ours. And its own reads of a key.
- The rest is explained above; operations are for each number read, 128 of them the products and sums of matrices.

Lines beyond the bytes: each of 8 simdgroups reads the ids of pages, and 32 scales of 16 bits fill half a line.

| tokens | after | Hq/Hk | D | pages | MB | bytes | lines | reads of a key | MLX's path | its reads | threadgroup memory | operations | barriers |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
"""


class Case(NamedTuple):
    """tokens, after: of the chunk and before it, whole pages; bits: of the pool, 0 where plain."""

    tokens: int
    after: int
    group: int
    dim: int
    bits: int = 0


CASES = [
    Case(tokens, after, group, dim)
    for dim in (64, 128)
    for group in (1, 3, 8)
    for tokens in (128, 512)
    for after in (0, 2048, 8192)
]
CASES += [
    Case(512, after, group, dim, bits)
    for bits in (8, 4)
    for dim in (64, 128)
    for group in (1, 3, 8)
    for after in (2048, 8192)
]


class Row(NamedTuple):
    """What the launch costs. least_bytes: that its blocks need; cache_bytes: read of the cache."""

    moved_bytes: int
    least_bytes: int
    lines: int
    cache_bytes: int
    operations: int
    threadgroup_bytes: int
    barriers: int


def launch_of(case: Case) -> Launch:
    """A chunk as one row: where pages are packed, that is a page of queries at most."""
    pages = (case.after + case.tokens) // PAGE
    shape = pages, 1, PAGE, case.dim
    pool = tuple(empty_pool(side, shape, mx.float16, case.bits) for side in ("keys", "values"))
    hot = mx.zeros((PAGE, 1, case.dim), mx.float16)
    q = mx.zeros((case.tokens, case.group, case.dim), mx.float16)
    table = np.array([(0, case.tokens, case.after, 0, pages - bool(case.bits), 0, 0)])
    ids = np.arange(pages)
    ids[-1] *= not case.bits
    plan = ChunkPlan(table, ids, None, case.group, block_rows(case.dim))
    return chunk_launch(q, (hot, hot), pool, plan, scale=1.0, sinks=None, softcap=None)


def measure(case: Case) -> Row:
    """Count a page of queries with nothing and with a page before them, and add up all others."""
    own, more = (_page_of_queries(case.group, case.dim, case.bits, after) for after in (0, PAGE))
    pages = case.tokens // PAGE
    before = sum(case.after // PAGE + page for page in range(pages))
    return Row(
        *(pages * x + before * (y - x) for x, y in zip(own[:5], more[:5], strict=True)),
        own.threadgroup_bytes,
        pages * own.barriers + before * (more.barriers - own.barriers),
    )


@cache
def _page_of_queries(group: int, dim: int, bits: int, after: int) -> Row:
    case = Case(PAGE, after, group, dim, bits)
    return row_of(case, cost(launch_of(case)))


def row_of(case: Case, counted: Cost) -> Row:
    """What was counted of a launch, beside the least."""
    traffic = [t for b in counted.buffers.values() for t in (b.loads, b.stores)]
    cache = sum(
        buffer.loads.moved_bytes
        for name, buffer in counted.buffers.items()
        if name.partition("_")[0] in ("hot", "k", "v")
    )
    return Row(
        sum(t.moved_bytes for t in traffic),
        least_bytes(case),
        sum(t.transactions for t in traffic),
        cache,
        counted.arithmetic,
        counted.threadgroup_bytes,
        counted.barriers,
    )


def least_bytes(case: Case) -> int:
    """That the blocks of a chunk need, whose own tokens are plain."""
    rows = case.tokens * case.group
    least = 2 * rows * case.dim * 2  # q and out
    for first in range(0, rows, block_rows(case.dim)):
        last = min(first + block_rows(case.dim), rows) - 1
        own = (last // case.group + 1) * 2 * case.dim * 2
        least += pages_bytes(case, case.after) + own
    return least


def pages_bytes(case: Case, tokens: int) -> int:
    """Of keys and values in whole pages."""
    spec, bits = FullKV(1, case.dim), KVBits(case.bits, case.bits)
    return tokens // PAGE * page_bytes(spec, 2, bits)


def seen_bytes(case: Case) -> int:
    """Of the keys and values that the chunk sees, once."""
    return pages_bytes(case, case.after) + case.tokens * 2 * case.dim * 2


def mlx_path(case: Case) -> tuple[float, float]:
    """Bytes that it moves, and how often its attention reads a key."""
    numbers = (case.after + case.tokens) * 2 * case.dim
    width = 4 if case.bits else 2
    blocks = [case.after + end for end in range(MLX_QUERIES, case.tokens + 1, MLX_QUERIES)]
    reads = case.group * sum(blocks) / (case.after + case.tokens)
    rows = 2 * case.tokens * case.group * case.dim * 2
    return numbers * (MLX_COPIES[case.bits] + reads * width) + rows, reads


def table(rows: dict[Case, Row]) -> str:
    """Its part of the file."""
    lines = [HEAD.format(queries=MLX_QUERIES)]
    for case, row in rows.items():
        mlx_bytes, mlx_reads = mlx_path(case)
        numbers = row.cache_bytes / (seen_bytes(case) / (2 * (case.after + case.tokens) * case.dim))
        lines.append(
            f"| {case.tokens} | {case.after} | {case.group} | {case.dim} | {case.bits or 16} bits "
            f"| {row.moved_bytes / 1e6:.2f} | {row.moved_bytes / row.least_bytes:.3f} "
            f"| {row.lines / (row.least_bytes / 128):.3f} "
            f"| {row.cache_bytes / seen_bytes(case):.1f} | {mlx_bytes / row.least_bytes:.2f} "
            f"| {mlx_reads:.1f} | {row.threadgroup_bytes} | {row.operations / numbers:.1f} "
            f"| {row.barriers} |\n"
        )
    return "".join(lines)
