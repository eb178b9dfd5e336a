"""The memory traffic of the Metal matmul over packed weights: a part of `cost_report`."""

from typing import NamedTuple

import mlx.core as mx

from mlxserve.kernels.metal.quantized_matmul import quantized_rows
from mlxserve.kernels.quantized import PackedWeight
from tests.support.metal import cost

MEASURED_OUTPUTS = 64
HEAD = f"""
## Matmul of a few rows over packed weights

x in bfloat16. Counted for {MEASURED_OUTPUTS} outputs and multiplied: 32 outputs are one threadgroup, and all do the same. Shapes are
those of Llama 3 8B, and last of SmolLM2 135M.

- *Weights*: their bytes, and lines of 128 bytes, to the least possible: each code, scale and bias once, for all rows.
- *All*: the same of weights, x and the result together, where x is read from memory once.
- *x again*: every threadgroup reads all of x. This is what it reads beyond the first time, which the GPU's cache has,
  for each byte of the weights.
- The rest is explained above; operations are for each byte of the weights.

An output of 576 inputs in 4 bits fills 2.25 lines, which a simdgroup reads in three steps: each touches two lines.

| rows | outputs x inputs | bits | group | MB of weights | weights: bytes | lines | all: bytes | lines | x again | operations | threadgroup memory | MB loaded, stored there | barriers | simd operations |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
"""  # noqa: E501


class Case(NamedTuple):
    """Rows of x against one weight."""

    rows: int
    outputs: int = 14336
    inputs: int = 4096
    bits: int = 4
    group: int = 64


CASES = [Case(rows) for rows in (1, 2, 4, 8, 16)]
CASES += [Case(8, group=32), Case(8, group=128), Case(8, bits=8), Case(8, 4096, 14336)]
CASES += [Case(8, 576, 576)]


class Row(NamedTuple):
    """What a case costs, beside the least."""

    weight_bytes: int
    weight_bytes_ratio: float
    weight_lines_ratio: float
    bytes_ratio: float
    lines_ratio: float
    x_again: float
    operations: float
    threadgroup_bytes: int
    threadgroup_loaded: int
    threadgroup_stored: int
    barriers: int
    simd_operations: int


def measure(case: Case) -> Row:
    """Count what a case moves. Its outputs are a multiple of those that are measured."""
    times, rest = divmod(case.outputs, MEASURED_OUTPUTS)
    if rest:
        raise ValueError(f"{case.outputs} outputs aren't a multiple of {MEASURED_OUTPUTS}")
    groups = MEASURED_OUTPUTS, case.inputs // case.group
    words = mx.zeros((MEASURED_OUTPUTS, case.inputs * case.bits // 32), mx.uint32)
    sides = mx.zeros(groups, mx.bfloat16), mx.zeros(groups, mx.bfloat16)
    packed = PackedWeight(words, *sides, case.bits, case.group)
    counted = cost(quantized_rows(mx.zeros((case.rows, case.inputs), mx.bfloat16), packed))
    weights = [counted.buffers[name].loads for name in ("words", "scales", "biases")]
    x, out = counted.buffers["x"].loads, counted.buffers["out"].stores
    weight_least = times * (words.nbytes + sum(side.nbytes for side in sides))
    weight_bytes = times * sum(side.moved_bytes for side in weights)
    weight_lines = times * sum(side.transactions for side in weights)
    x_least, out_least = case.rows * case.inputs * 2, case.rows * case.outputs * 2
    least = weight_least + x_least + out_least
    return Row(
        weight_bytes=weight_least,
        weight_bytes_ratio=weight_bytes / weight_least,
        weight_lines_ratio=weight_lines / (weight_least / 128),
        bytes_ratio=(weight_bytes + x.distinct_bytes + times * out.moved_bytes) / least,
        lines_ratio=(weight_lines + x_least / 128 + times * out.transactions) / (least / 128),
        x_again=(times * x.moved_bytes - x_least) / weight_least,
        operations=times * counted.arithmetic / weight_least,
        threadgroup_bytes=counted.threadgroup_bytes,
        threadgroup_loaded=times * counted.threadgroup_loaded,
        threadgroup_stored=times * counted.threadgroup_stored,
        barriers=times * counted.barriers,
        simd_operations=times * counted.simd_operations,
    )


def table(rows: dict[Case, Row]) -> str:
    """The section of the file."""
    lines = [HEAD]
    for case, row in rows.items():
        lines.append(
            f"| {case.rows} | {case.outputs} x {case.inputs} | {case.bits} | {case.group} "
            f"| {row.weight_bytes / 1e6:.2f} "
            f"| {row.weight_bytes_ratio:.3f} | {row.weight_lines_ratio:.3f} "
            f"| {row.bytes_ratio:.3f} | {row.lines_ratio:.3f} | {row.x_again:.2f} "
            f"| {row.operations:.1f} | {row.threadgroup_bytes} "
            f"| {row.threadgroup_loaded / 1e6:.0f}, {row.threadgroup_stored / 1e6:.0f} "
            f"| {row.barriers} | {row.simd_operations} |\n"
        )
    return "".join(lines)
