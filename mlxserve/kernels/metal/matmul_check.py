"""Whether the matmul of a few rows serves a use, is right on this device, and how fast it is.

Right is also that a row has the same bits whatever else is in the batch.
"""

import time
from collections.abc import Callable

import mlx.core as mx
import numpy as np

from mlxserve.kernels.metal.launch import Runner
from mlxserve.kernels.metal.quantized_matmul import BITS, GROUPS, OUTPUTS, quantized_rows
from mlxserve.kernels.metal.race import race
from mlxserve.kernels.quantized import PackedWeight, quantized_matmul
from mlxserve.kernels.registry import TOLERANCE, check_close
from mlxserve.kernels.uses import MatmulUse
from mlxserve.kernels.verdicts import Timing, Verdict

MIN_GROUPS = 8  # MLX binds smaller arrays in another address space
# Each number that the kernel is compiled for, some between, and more than it takes together.
CHECKED_ROWS = (1, 2, 3, 4, 7, 8, 12, 16, 21)
MAX_CHECKED_OUTPUTS = (
    3 * OUTPUTS
)  # the CPU computes the reference; N isn't part of what is compiled
TIMED_ROWS = (2, 4, 8, 16)
CALLS = 16  # per measurement
COLD_BYTES = 96 << 20  # of different weights, so that no cache holds what is read
BUDGET_S = 0.1  # for measuring both at one number of rows


def unsupported(use: MatmulUse) -> str:
    """Why the kernel can't serve such layers, or ""."""
    if use.mode != "affine":
        return f"weights in {use.mode}, not affine"
    if use.bits not in BITS:
        return f"weights in {use.bits} bits, not 4 or 8"
    if use.group not in GROUPS:
        return f"a group of {use.group} weights is none of {', '.join(map(str, GROUPS))}"
    if use.dtype not in TOLERANCE:
        return f"x in {use.dtype} isn't float16 or bfloat16"
    if use.outputs * use.inputs < MIN_GROUPS * use.group:
        return f"weights of fewer than {MIN_GROUPS} groups"
    return ""


def check(use: MatmulUse, run: Runner) -> float:
    """The largest error in any of several batches, as a share of the row's largest output.

    The reference is computed in float32, and by the CPU. Raises ArithmeticError where the kernel
    differs from it, or from itself in another batch, and whatever `run` raises.
    """
    rng = np.random.default_rng(0)
    outputs = use.outputs
    if outputs > MAX_CHECKED_OUTPUTS:  # and where the last threadgroup ends
        outputs = MAX_CHECKED_OUTPUTS - OUTPUTS + outputs % OUTPUTS
    packed, wide = _weights(use, outputs, rng)
    shape = max(CHECKED_ROWS), use.inputs
    x = mx.array(rng.normal(size=shape).astype(np.float32)).astype(getattr(mx, use.dtype))
    with mx.stream(mx.cpu):
        expected = quantized_matmul(x.astype(mx.float32), wide)
        mx.eval(expected)
    batches = {count: run(quantized_rows(x[:count], packed))[0] for count in CHECKED_ROWS}
    together = batches[len(x)]
    for got in batches.values():
        _check_same(got, together[: len(got)])
    (backwards,) = run(quantized_rows(x[::-1], packed))
    _check_same(backwards[::-1], together)
    return max(
        check_close("matmul", got, row, TOLERANCE[use.dtype])
        for got, row in zip(together, expected, strict=True)
    )


def _weights(
    use: MatmulUse, outputs: int, rng: np.random.Generator
) -> tuple[PackedWeight, PackedWeight]:
    """Random ones, with scales in the use's dtype and, of the same value, in float32."""
    groups = outputs, use.inputs // use.group
    words = rng.integers(0, 1 << 32, (outputs, use.inputs * use.bits // 32), np.uint32)
    scales = rng.uniform(0.5, 1.5, groups) * 2.0 / (1 << use.bits)
    biases = rng.normal(size=groups) - scales * (1 << use.bits) / 2
    sides = [mx.array(side.astype(np.float32)) for side in (scales, biases)]
    scale, bias = (side.astype(getattr(mx, use.dtype)) for side in sides)
    how = use.bits, use.group
    packed = PackedWeight(mx.array(words), scale, bias, *how)
    wide = PackedWeight(mx.array(words), scale.astype(mx.float32), bias.astype(mx.float32), *how)
    return packed, wide


def _check_same(got: mx.array, expected: mx.array) -> None:
    if not bool(mx.array_equal(got, expected)):
        raise ArithmeticError("matmul gives a row other bits in another batch")


def measure(use: MatmulUse, run: Runner) -> list[Timing]:
    """Kernel and reference at each of TIMED_ROWS."""
    dtype = getattr(mx, use.dtype)
    item_bytes = use.outputs * use.inputs * use.bits // 8
    copies = max(1, min(CALLS, COLD_BYTES // item_bytes))
    groups = use.outputs, use.inputs // use.group
    words = use.outputs, use.inputs * use.bits // 32
    weights = [
        PackedWeight(
            mx.full(words, 0x5A5A5A5A, mx.uint32),
            mx.full(groups, 0.01, dtype),
            mx.full(groups, -0.05, dtype),
            use.bits,
            use.group,
        )
        for _ in range(copies)
    ]
    mx.eval([(w.weight, w.scales, w.biases) for w in weights])
    weights = [weights[i % copies] for i in range(CALLS)]
    return [_measure(mx.full((rows, use.inputs), 0.5, dtype), weights, run) for rows in TIMED_ROWS]


def judge(use: MatmulUse, verdict: Verdict) -> tuple[bool, str]:
    """Whether to use a kernel that is right, and why: it must be faster, or be asked for."""
    most = verdict.faster_up_to
    reason = f"faster up to {most} rows" if most else f"slower at {TIMED_ROWS[0]} rows"
    if use.deterministic:
        return True, f"deterministic; {reason}"
    return most > 0, reason


def _measure(x: mx.array, weights: list[PackedWeight], run: Runner) -> Timing:
    mx.eval(x)

    def kernel(packed: PackedWeight) -> mx.array:
        return run(quantized_rows(x, packed))[0]

    def reference(packed: PackedWeight) -> mx.array:
        return quantized_matmul(x, packed)

    seconds = race(
        lambda: _seconds(kernel, weights), lambda: _seconds(reference, weights), BUDGET_S
    )
    return Timing(x.shape[0], 0, *seconds)


def _seconds(multiply: Callable[[PackedWeight], mx.array], weights: list[PackedWeight]) -> float:
    """Of one call among several, each of another weight where memory has room for so many."""
    start = time.perf_counter()
    mx.eval([multiply(packed) for packed in weights])
    return (time.perf_counter() - start) / len(weights)
