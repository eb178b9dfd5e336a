# ruff: noqa: E501  (a table has long lines)
"""What packing pages moves, for `cost_report`."""

import math
from typing import NamedTuple

import mlx.core as mx

from mlxserve.kernels.metal.pack_pages import pack_launch
from tests.support.metal import cost

PAGE = 64
PAGES = 3
HEAD = """
# Packing full pages

One launch packs the keys, or the values, of all pages that a step seals; here of {pages} pages of two heads in float16.

- *Bytes*, *lines*: of everything that is read and written, to the least possible: each number once, each code, scale and bias once.
- The rest is explained above; operations are for each number.

| side | D | bits | KB | bytes | lines | operations | threadgroup memory | MB loaded, stored there | barriers |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
"""


class Case(NamedTuple):
    """keys: or values; dim: of a head."""

    keys: bool
    dim: int
    bits: int


class Row(NamedTuple):
    """What the launch costs."""

    least_bytes: int
    bytes_ratio: float
    lines_ratio: float
    operations: float
    threadgroup_bytes: int
    threadgroup_loaded: int
    threadgroup_stored: int
    barriers: int


CASES = [
    Case(keys, dim, bits) for keys in (True, False) for dim in (64, 80, 128) for bits in (8, 4)
]


def measure(case: Case) -> Row:
    """Count it, in the emulator."""
    shape = PAGES * PAGE, 2, case.dim
    hot = mx.random.normal(shape, key=mx.random.key(0)).astype(mx.float16)
    launch = pack_launch(hot, mx.arange(PAGES, dtype=mx.int32), case.bits, keys=case.keys)
    written = sum(
        math.prod(shape) * dtype.size
        for shape, dtype in zip(launch.shapes, launch.dtypes, strict=True)
    )
    counted = cost(launch)
    traffic = [t for b in counted.buffers.values() for t in (b.loads, b.stores)]
    least = hot.nbytes + written
    return Row(
        least,
        sum(t.moved_bytes for t in traffic) / least,
        sum(t.transactions for t in traffic) / (least / 128),
        counted.arithmetic / hot.size,
        counted.threadgroup_bytes,
        counted.threadgroup_loaded,
        counted.threadgroup_stored,
        counted.barriers,
    )


def table(rows: dict[Case, Row]) -> str:
    """Its part of the file."""
    lines = [HEAD.format(pages=PAGES)]
    for case, row in rows.items():
        lines.append(
            f"| {'keys' if case.keys else 'values'} | {case.dim} | {case.bits} "
            f"| {row.least_bytes / 1e3:.0f} | {row.bytes_ratio:.3f} | {row.lines_ratio:.3f} "
            f"| {row.operations:.1f} | {row.threadgroup_bytes} "
            f"| {row.threadgroup_loaded / 1e6:.2f}, {row.threadgroup_stored / 1e6:.2f} "
            f"| {row.barriers} |\n"
        )
    return "".join(lines)
