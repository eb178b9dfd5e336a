"""Every mutant of the Metal kernel of a sum and its norm is caught; see test_mutants.py."""

import dataclasses
from functools import cache

import mlx.core as mx
import numpy as np
import pytest

from mlxserve.kernels.metal.add_rms_norm import KERNEL, sum_and_norm
from mlxserve.kernels.metal.launch import source
from tests.metal.mutation import kernel_mutants
from tests.metal.test_add_rms_norm import EPS, case, exact_norm, wide
from tests.support.metal import KernelError, emulate
from tests.support.mutants import params

pytestmark = pytest.mark.full

SUMS, NUMBERS = source("row_sums.metal"), source("numbers.metal")
SWAPPED = [
    ("simd_gid * 32 + lane", "lane"),
    ("y_shape[1] / 4", "y_shape[1] / 4 - 1"),
    ("threadgroup_position_in_grid.x) * fours", "threadgroup_position_in_grid.x)"),
    ("r * NSG * 32 + thread_id", "thread_id"),
    ("i < fours ? four<T>(y", "true ? four<T>(y"),
    ("if (INNER)", "if (false)"),
    ("float4(0.0f)", "float4(1.0f)"),
    ("total += squares(held[r]);", "total = squares(held[r]);"),
    ("float(4 * fours) + eps", "float(fours) + eps"),
    ("float(4 * fours) + eps", "float(4 * fours)"),
    ("held[r] * scale * four<T>(inner, i)", "held[r] * scale"),
    ("four<T>(inner, i)", "four<T>(weight, i)"),
    ("four<T>(stream, first + i) + held[r]", "four<T>(stream, first + i)"),
    ("four<T>(stream, first + i)", "four<T>(stream, i)"),
    ("held[r] = float4(unpack<T>(pack<T>(sum.xy)), unpack<T>(pack<T>(sum.zw)));", ""),
    ("unpack<T>(pack<T>(sum.zw))", "unpack<T>(pack<T>(sum.xy))"),
    ("partial + NSG", "partial"),
    ("put_four<T>(sums, first + i, sum)", "put_four<T>(sums, i, sum)"),
    ("held[r] * scale * four<T>(weight, i)", "held[r] * scale"),
    ("four<T>(weight, i)", "four<T>(weight, 0)"),
    ("if (i < fours) put_four", "put_four"),
]
SWAPPED_SUMS = [
    ("if (lane == 0) ", ""),
    ("partial[simd_gid]", "partial[0]"),
    ("return simd_sum(lane", "return (lane"),
    ("x.w * x.w", "x.z * x.z"),
    ("numbers)[i];", "numbers)[0];"),
    ("unpack<T>(words.y)", "unpack<T>(words.x)"),
    ("pack<T>(x.zw)", "pack<T>(x.xy)"),
]
SWAPPED_NUMBERS = [
    ("> 0x7f800000u", "> 0xff800000u"),
    ("0x7fc0u", "0x7f80u"),
    ("+ 0x7fffu", "+ 0x8000u"),
    ("+ ((bits >> 16) & 1u)", ""),
    ("<< 16);\n}", "<< 15);\n}"),
]

# Mutants that compute the same, and why.
EQUIVALENT = {
    "<= at UNROLL for (int r = 0; r < ROUNDS; r++) { [24]": "a round with no thread inside",
    "<= at UNROLL for (int r = 0; r < ROUNDS; r++) { [26]": "the same",
    "numbers: > 0x7f800000u -> > 0xff800000u": "NaNs of the emulator end in zeros",
}


def every_mutant():
    headers = {"sums": (SUMS, SWAPPED_SUMS), "numbers": (NUMBERS, SWAPPED_NUMBERS)}
    used = {what for what, _ in SWAPPED_NUMBERS}
    for mutant in kernel_mutants(KERNEL, SWAPPED, headers):
        if not mutant[0].startswith("numbers:") or mutant[0][9:].split(" -> ")[0] in used:
            yield mutant


@cache
def launched(rows, width, inner, dtype, size):
    """Sizes that fill no thread's rounds, and threads of one simdgroup; rows that aren't finite."""
    y, stream, weight, within = case(rows, width, inner, dtype, size)
    # In the middle between two bfloat16, above an even and above an odd one.
    y[0, :2], stream[0, :2] = mx.array([1.0, 1.0078125]), 2.0**-8
    y[1, 2] = mx.nan
    return y, stream, weight, within


CASES = [
    (2, 5004, True, mx.bfloat16, 1.0), (4, 132, False, mx.float16, 1e-3),
    (4, 64, True, mx.float16, 1e-3), (2, 64, False, mx.bfloat16, 1.0),
]  # fmt: skip


def adds_rightly(kernel):
    """Whether nothing is wrong with the kernel in this form."""
    for each in CASES:
        y, stream, weight, within = launched(*each)
        launch = sum_and_norm(y, stream, weight, EPS, within)
        try:
            total, normed = emulate(dataclasses.replace(launch, kernel=kernel), timeout_s=20)
        except KernelError:
            return False
        added = wide(y) if within is None else exact_norm(wide(y), wide(within))
        unit = 2.0**-11 if each[3] == mx.float16 else 2.0**-8
        pairs = (total, wide(stream) + added), (normed, exact_norm(wide(total), wide(weight)))
        for got, right in pairs:
            tolerance = 1.001 * unit * np.abs(right) + 1e-6 * np.nanmax(np.abs(right))
            near = np.abs(wide(got) - right) <= tolerance
            if not (near | (np.isnan(wide(got)) & np.isnan(right))).all():
                return False
        if launch.dtypes[0] == mx.bfloat16 and within is None:
            to_even = wide(total)[0, :2].tolist() == [1.0, 1.015625]
            if not to_even:
                return False
    return True


def test_the_kernel_itself_passes():
    assert adds_rightly(KERNEL)


def test_mutants_that_are_left_out_exist():
    assert EQUIVALENT.keys() <= {what for what, _, _ in every_mutant()}


@pytest.mark.parametrize(("what", "text", "header"), params(
    [mutant for mutant in every_mutant() if mutant[0] not in EQUIVALENT], lambda what, *_: what,
))  # fmt: skip
def test_a_mutant_is_caught(what, text, header):
    assert not adds_rightly(dataclasses.replace(KERNEL, source=text, header=header))
