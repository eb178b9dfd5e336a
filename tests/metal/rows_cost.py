# ruff: noqa: E501  (a table has long lines)
"""What the kernels that work on rows move, sums with their norms and rotations, for `cost_report`."""

import math
from typing import NamedTuple

import mlx.core as mx

from mlxserve.kernels.metal.add_rms_norm import sum_and_norm
from mlxserve.kernels.metal.launch import Launch
from mlxserve.kernels.metal.rotate import rotation
from tests.support.metal import cost

ROWS = 16
HEAD = """
## Sums with their norms, and rotations

{rows} rows in float16. The least possible: of each row everything in and out once, weights and periods once.

- *Bytes*, *lines*: of activations to their least. *Weights again*: what is read of weights and periods beyond the first
  time, for each byte of activations; the GPU's cache has them.
- Of a head of 64 numbers the halves are read one by one, each half a line.
- The rest is explained above; operations are for each number that comes out.

| kernel | sizes | KB | bytes | lines | weights again | operations | threadgroup memory | barriers | simd operations |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
"""


class Case(NamedTuple):
    """sizes: of a norm its width, of a rotation heads of queries, of keys, and their dim.

    normed: whether there is a norm before the sum, or one of each head.
    """

    sizes: tuple[int, ...]
    normed: bool

    @property
    def name(self) -> str:
        if len(self.sizes) == 1:
            return "add_rms_norm, one before" if self.normed else "add_rms_norm"
        return "rotate, norms" if self.normed else "rotate"


class Row(NamedTuple):
    """What the launch costs."""

    least_bytes: int
    bytes_ratio: float
    lines_ratio: float
    again: float
    operations: float
    threadgroup_bytes: int
    barriers: int
    simd_operations: int


CASES = [
    Case((576,), False), Case((4096,), False), Case((1152,), True), Case((9, 3, 64), False),
    Case((32, 8, 128), False), Case((32, 4, 128), True), Case((4, 1, 256), True),
]  # fmt: skip
ACTIVATIONS = {"y", "stream", "sums", "normed", "q", "k", "q_out", "k_out"}


def _launch(case: Case) -> Launch:
    weight = mx.ones((case.sizes[-1],), mx.float16)
    if len(case.sizes) == 1:
        x = mx.ones((ROWS, *case.sizes), mx.float16)
        return sum_and_norm(x, x * 2, weight, 1e-5, weight * 2 if case.normed else None)
    q_heads, kv_heads, dim = case.sizes
    q, k = (mx.ones((ROWS, heads, dim), mx.float16) for heads in (q_heads, kv_heads))
    norms = (weight, weight * 2) if case.normed else None
    positions, periods = mx.arange(ROWS, dtype=mx.int32), mx.ones((dim // 2,))
    return rotation(q, k, positions, periods, 1.0, norms, 1e-6)


def measure(case: Case) -> Row:
    """Count it, in the emulator."""
    launch = _launch(case)
    counted = cost(launch)
    given = dict(zip(launch.kernel.inputs, launch.arrays, strict=True))
    results = math.prod(launch.shapes[0]) + math.prod(launch.shapes[1])
    least = 2 * results + sum(given[name].nbytes for name in ACTIVATIONS & given.keys())
    traffic = {name: (b.loads, b.stores) for name, b in counted.buffers.items()}
    moved = [t for name in ACTIVATIONS & traffic.keys() for t in traffic[name]]
    others = {name: loads.moved_bytes for name, (loads, _) in traffic.items() if name in given}
    again = sum(
        max(n - given[name].nbytes, 0) for name, n in others.items() if name not in ACTIVATIONS
    )
    return Row(
        least,
        sum(t.moved_bytes for t in moved) / least,
        sum(t.transactions for t in moved) / (least / 128),
        again / least,
        counted.arithmetic / results,
        counted.threadgroup_bytes,
        counted.barriers,
        counted.simd_operations,
    )


def table(rows: dict[Case, Row]) -> str:
    """Its part of the file."""
    lines = [HEAD.format(rows=ROWS)]
    for case, row in rows.items():
        sizes = "/".join(map(str, case.sizes))
        lines.append(
            f"| {case.name} | {sizes} | {row.least_bytes / 1e3:.0f} | {row.bytes_ratio:.3f} "
            f"| {row.lines_ratio:.3f} | {row.again:.2f} | {row.operations:.1f} "
            f"| {row.threadgroup_bytes} | {row.barriers} | {row.simd_operations} |\n"
        )
    return "".join(lines)
