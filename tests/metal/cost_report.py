# ruff: noqa: E501  (a table has long lines)
"""The memory traffic of the Metal kernels, as a table: `python -m tests.metal.cost_report --write`.

The table is committed, so that what a change costs shows in its review.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mlxserve.cache.spec import FullKV, KVBits, page_bytes
from mlxserve.kernels.metal import packed_attention, paged_attention
from mlxserve.kernels.metal.launch import Launch
from mlxserve.kernels.metal.paged_attention import Found
from mlxserve.kernels.metal.plan import DecodePlan
from mlxserve.kernels.pages import empty_pool
from tests.metal import chunk_cost, matmul_cost, pack_cost, rows_cost
from tests.support.metal import Cost, cost

TABLE = Path(__file__).with_name("COST.md")
PAGE = 64
HEAD = """\
# What the Metal kernels move

Written by `python -m tests.metal.cost_report --write`; a test compares it with the kernels as they are.

## Decode attention

One batch of rows that see {lengths} tokens, cache and queries in float16, all
launches together. Packed pages have so many bits a number, the hot page at the end of a row has 16.

- *Bytes*: of every access of a simdgroup, what several of its lanes read counted once. The least possible: each key
  and value that a row sees once, with scales and biases where it is packed, q and out once.
- *Transactions*: lines of 128 bytes that those accesses touch, beside as few as would hold the least possible bytes.
- *Coalescing*: the same lines beside those that the same accesses would touch if each lay in a row.
- *Loads of each byte*: how often a key or value is loaded.
- *Operations*: additions, multiplications and functions in floating point, for each of the least bytes.
- *Threadgroup memory*: in bytes of a threadgroup, which may have 32768; and what all threads together load and store there.
- *Barriers* of threadgroups; *simd operations* of simdgroups, their barriers included.

Beyond the least are queries, read for every part, and the parts' results, written and read again: up to 10 % of lines
where eight query heads share a KV head. Every simdgroup reads scale and softcap, up to 1.5 %. The scales of a page's keys
fill no whole lines where heads have 80 numbers, 2 to 3 %; nor does a token's head then, which matters in token-major pages.

| Hq/Hk | D | Hk | complete pages | MB | bytes to the least | transactions to the least | coalescing | loads of each byte | operations | threadgroup memory | MB loaded, stored there | barriers | simd operations |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
"""
LENGTHS = (512, 1000, 8000, 32768)


class Case(NamedTuple):
    """One batch.

    sealed: whether complete pages lie in the pool, head-major, or are hot; bits: of the pool's
    numbers, 0 where they are plain.
    """

    group: int
    dim: int
    kv_heads: int = 1
    sealed: bool = True
    bits: int = 0


CASES = [Case(group, dim) for dim in (64, 128) for group in (1, 3, 8)]
# The two layouts that a page may have.
CASES += [Case(3, dim, 2, sealed) for dim in (64, 80) for sealed in (True, False)]
CASES += [
    Case(group, dim, bits=bits) for bits in (8, 4) for dim in (64, 128) for group in (1, 3, 8)
]
CASES += [Case(3, 80, 2, bits=bits) for bits in (8, 4)]


def launches(case: Case, lengths: Sequence[int]) -> list[Launch]:
    """All launches of a step, the merge last."""
    table: list[tuple[int, ...]] = []
    pages: list[int] = []
    used = [0, 0]  # hot, pool
    for i, length in enumerate(lengths):
        count = -(-length // PAGE)
        sealed = count - 1 if case.sealed else 0
        table.append((i, 1, length - 1, 0, sealed, len(pages), 0))
        pages += range(used[1], used[1] + sealed)
        pages += range(used[0], used[0] + count - sealed)
        used = [used[0] + count - sealed, used[1] + sealed]
    hot = mx.zeros((used[0] * PAGE, case.kv_heads, case.dim), mx.float16)
    shape = max(used[1], 1), case.kv_heads, PAGE, case.dim
    pool = tuple(empty_pool(side, shape, mx.float16, case.bits) for side in ("keys", "values"))
    q = mx.zeros((len(lengths), case.kv_heads * case.group, case.dim), mx.float16)
    part_pages = packed_attention.part_pages(case.bits, case.bits)
    plan = DecodePlan(np.array(table), np.array(pages), None, part_pages)
    first = paged_attention.parts(q, (hot, hot), pool, plan, scale=1.0, softcap=None)
    found = [Found(*map(mx.zeros, launch.shapes), rows) for launch, rows in first]
    merge = paged_attention.merge(found, plan.count, None, mx.float16)
    return [*(launch for launch, _ in first), merge]


class Row(NamedTuple):
    """What all launches cost, beside the least."""

    moved_bytes: int
    least_bytes: int
    transactions: int
    coalescing: float
    operations: int
    threadgroup_bytes: int
    cache_loads: float
    threadgroup_loaded: int
    threadgroup_stored: int
    barriers: int
    simd_operations: int

    @property
    def bytes_ratio(self) -> float:
        return self.moved_bytes / self.least_bytes

    @property
    def transactions_ratio(self) -> float:
        return self.transactions / (self.least_bytes / 128)


def measure(case: Case, lengths: Sequence[int]) -> Row:
    """Count the launches of a case."""
    costs = [cost(launch) for launch in launches(case, lengths)]
    traffic = [side for c in costs for b in c.buffers.values() for side in (b.loads, b.stores)]
    cache_bytes = sum(seen_bytes(case, length) for length in lengths)
    needed = sum(t.transactions_needed for t in traffic)
    return Row(
        moved_bytes=sum(t.moved_bytes for t in traffic),
        least_bytes=cache_bytes + 2 * len(lengths) * case.kv_heads * case.group * case.dim * 2,
        transactions=sum(t.transactions for t in traffic),
        coalescing=sum(t.transactions for t in traffic) / needed,
        operations=sum(c.arithmetic for c in costs),
        threadgroup_bytes=max(c.threadgroup_bytes for c in costs),
        cache_loads=sum(map(_cache_bytes, costs)) / cache_bytes,
        threadgroup_loaded=sum(c.threadgroup_loaded for c in costs),
        threadgroup_stored=sum(c.threadgroup_stored for c in costs),
        barriers=sum(c.barriers for c in costs),
        simd_operations=sum(c.simd_operations for c in costs),
    )


def seen_bytes(case: Case, length: int) -> int:
    """Of the keys and values that a row of so many tokens sees."""
    spec, bits = FullKV(case.kv_heads, case.dim), KVBits(case.bits, case.bits)
    sealed = -(-length // PAGE) - 1
    token_bytes = 2 * case.kv_heads * case.dim * 2
    return sealed * page_bytes(spec, 2, bits) + (length - sealed * PAGE) * token_bytes


def _cache_bytes(counted: Cost) -> int:
    return sum(
        buffer.loads.bytes
        for name, buffer in counted.buffers.items()
        if name.partition("_")[0] in ("hot", "pool", "k", "v") and buffer.space == "device"
    )


def table(rows: dict[Case, Row]) -> str:
    """The section of decode attention."""
    named = ", ".join(map(str, LENGTHS[:-1])) + f" and {LENGTHS[-1]}"
    lines = [HEAD.format(lengths=named)]
    for case, row in rows.items():
        pages = "sealed, head-major" if case.sealed else "hot, token-major"
        pages = f"packed, {case.bits} bits" if case.bits else pages
        lines.append(
            f"| {case.group} | {case.dim} | {case.kv_heads} | {pages} "
            f"| {row.moved_bytes / 1e6:.2f} | {row.bytes_ratio:.3f} "
            f"| {row.transactions_ratio:.3f} | {row.coalescing:.3f} | {row.cache_loads:.3f} "
            f"| {row.operations / row.least_bytes:.2f} | {row.threadgroup_bytes} "
            f"| {row.threadgroup_loaded / 1e6:.1f}, {row.threadgroup_stored / 1e6:.1f} "
            f"| {row.barriers} | {row.simd_operations} |\n"
        )
    return "".join(lines)


if __name__ == "__main__":
    text = table({case: measure(case, LENGTHS) for case in CASES})
    for each in (pack_cost, matmul_cost, rows_cost, chunk_cost):
        text += each.table({case: each.measure(case) for case in each.CASES})
    if "--write" in sys.argv[1:]:
        TABLE.write_text(text, "utf-8")
    print(text)
