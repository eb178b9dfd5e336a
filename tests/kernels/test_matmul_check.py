"""The check of the Metal matmul finds what it should: with a stand-in that is changed."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from mlxserve.kernels.metal import matmul_check
from mlxserve.kernels.registry import TOLERANCE
from mlxserve.kernels.uses import MatmulUse
from mlxserve.kernels.verdicts import Timing, Verdict
from tests.support.stand_ins.right import compute

USE = MatmulUse(200, 256, 4, 64, "bfloat16")


@pytest.mark.parametrize("use", [
    USE,
    MatmulUse(8, 288, 8, 32, "float16"),
    MatmulUse(1, 1024, 4, 128, "bfloat16", deterministic=True),
], ids=str)  # fmt: skip
def test_what_is_right_passes_within_the_rounding(use):
    assert matmul_check.check(use, compute) <= TOLERANCE[use.dtype] / 2 * 1.01


def edited(number, edit):
    """A launch whose array of that number is edited in NumPy."""

    def run(launch):
        arrays = list(launch.arrays)
        dtype = arrays[number].dtype
        wide = arrays[number].astype(mx.float32) if number != 1 else arrays[number]
        arrays[number] = mx.array(edit(np.array(wide))).astype(dtype)
        return compute(replace(launch, arrays=tuple(arrays)))

    return run


@pytest.mark.parametrize("run", [
    edited(0, lambda x: np.roll(x, 1, axis=1)),
    edited(0, lambda x: np.where(np.arange(256) < 255, x, 0)),
    edited(1, lambda words: np.roll(words, 1, axis=0)),
    edited(1, lambda words: words & 0x7FFFFFFF),
    edited(2, lambda scales: np.roll(scales, 1, axis=1)),
    edited(3, lambda biases: biases * 1.02),
    lambda launch: [out * mx.nan for out in compute(launch)],
], ids=["k", "last k", "outputs", "high codes", "scales", "biases", "nan"])  # fmt: skip
def test_what_is_wrong_is_found(run):
    with pytest.raises(ArithmeticError, match=r"away from its reference|other bits"):
        matmul_check.check(USE, run)


def test_a_wrong_last_output_is_found_however_many_there_are():
    """More than are checked, of which the last threadgroup's share is kept."""
    use = replace(USE, outputs=32 * 50 + 7)

    def run(launch):
        (out,) = compute(launch)
        assert out.shape[1] == 2 * 32 + 7
        out[:, -1] = 0
        return [out]

    with pytest.raises(ArithmeticError, match="away from its reference"):
        matmul_check.check(use, run)


@pytest.mark.parametrize("differs", [
    lambda launch: launch.arrays[0].shape[0] == 1,
    lambda launch: launch.arrays[0].shape[0] > 16,
], ids=["alone", "many"])  # fmt: skip
def test_a_row_with_other_bits_in_another_batch_is_found(differs):
    """One unit in the last place, in one number, which is within the rounding."""

    def run(launch):
        (out,) = compute(launch)
        if differs(launch):
            bits = np.array(out.view(mx.uint16))
            bits[0, 0] ^= 1
            out = mx.array(bits).view(out.dtype)
        return [out]

    with pytest.raises(ArithmeticError, match="other bits in another batch"):
        matmul_check.check(USE, run)


def verdict(*faster):
    """Of 2, 4, 8 and 16 rows."""
    return Verdict("", 1e-3, tuple(
        Timing(rows, 0, 1.0 if won else 3.0, 2.0)
        for rows, won in zip(matmul_check.TIMED_ROWS, faster, strict=True)
    ))  # fmt: skip


@pytest.mark.parametrize(("faster", "rows"), [
    ((True, True, True, True), 16), ((True, True, False, True), 4), ((False, True, True, True), 0),
])  # fmt: skip
def test_it_is_used_up_to_where_it_is_faster(faster, rows):
    found = verdict(*faster)
    used, reason = matmul_check.judge(USE, found)
    assert (used, found.faster_up_to) == (rows > 0, rows)
    assert reason == (f"faster up to {rows} rows" if rows else "slower at 2 rows")
    used, reason = matmul_check.judge(replace(USE, deterministic=True), found)
    assert used
    assert reason.startswith("deterministic; ")
