"""Every mutant of the Metal kernel of rotary positions is caught; see test_mutants.py."""

import dataclasses
from functools import cache

import mlx.core as mx
import numpy as np
import pytest

from mlxserve.kernels.metal.launch import source
from mlxserve.kernels.metal.rotate import KERNEL
from tests.metal.mutation import kernel_mutants
from tests.metal.test_rotate import case, wide
from tests.support.metal import KernelError, emulate
from tests.support.mutants import params

pytestmark = pytest.mark.full

ANGLES = source("angles.metal")
SWAPPED = [
    ("thread_position_in_grid.x) / 32", "thread_position_in_grid.x) / 64"),
    ("int(thread_position_in_grid.y)", "0"),
    ("index - Q_HEADS;", "index;"),
    ("is_query ? Q_HEADS : K_HEADS)) {", "is_query ? Q_HEADS : Q_HEADS)) {"),
    ("long(token) * Q_HEADS + head) * DIM : k", "long(token) * Q_HEADS) * DIM : k"),
    ("k + (long(token) * K_HEADS + head)", "k + (long(token) * K_HEADS)"),
    ("long(token) * K_HEADS + head) * DIM;\n  device", "head) * DIM;\n  device"),
    ("q_out + (long(token) * Q_HEADS + head)", "q_out + (long(token) * Q_HEADS)"),
    ("k_out + (long(token) * K_HEADS + head)", "k_out + (long(token) * K_HEADS)"),
    ("(r * 32 + lane) * 2;\n    const bool", "lane * 2;\n    const bool"),
    ("inside ? unpack<T>(((const", "true ? unpack<T>(((const"),
    ("((const device uint*)from)[(HALF + i) / 2]) :", "((const device uint*)from)[i / 2]) :"),
    ("squares += low[r].x * low[r].x", "squares = low[r].x * low[r].x"),
    ("low[r].y * low[r].y", "low[r].x * low[r].x"),
    ("squares += high[r].x", "squares = high[r].x"),
    ("high[r].y * high[r].y", "high[r].x * high[r].x"),
    ("scale = numbers[0]", "scale = 1.0f"),
    ("if (NORMS) scale", "if (false) scale"),
    ("if (NORMS) scale", "scale"),
    ("simd_sum(squares)", "squares"),
    ("/ float(DIM)", "/ float(HALF)"),
    ("+ numbers[1]", ""),
    ("low[r] * scale", "low[r]"),
    ("high[r] * scale", "high[r]"),
    ("is_query ? q_norm : k_norm", "is_query ? k_norm : q_norm"),
    ("weight[i / 2]", "weight[0]"),
    ("weight[(HALF + i) / 2]", "weight[i / 2]"),
    ("positions[token], periods[i])", "positions[token], periods[i + 1])"),
    ("periods[i + 1]", "periods[i]"),
    ("positions[token], periods[i])", "positions[0], periods[i])"),
    ("float2(first.x, second.x)", "float2(first.x, first.x)"),
    ("float2(first.y, second.y)", "float2(second.y, second.y)"),
    ("a * cosine - b * sine", "a * cosine + b * sine"),
    ("b * cosine + a * sine", "b * cosine"),
    ("((device uint*)to)[i / 2]", "((device uint*)to)[0]"),
    ("((device uint*)to)[(HALF + i) / 2]", "((device uint*)to)[i / 2]"),
]  # fmt: skip
SWAPPED_ANGLES = [
    ("* inverse;\n  const float angle =", "* 0.0f;\n  const float angle ="),
    ("metal::fma(at, rest, ", "("),
    ("metal::fma(at, inverse, -angle)", "0.0f"),
    ("metal::rint(", "("),
    ("0.15915494f", "0.1f"),
    ("metal::fma(turns, 1.7484555e-7f, metal::fma(turns, -6.2831855f, angle))",
     "metal::fma(turns, -6.2831855f, angle)"),
    ("metal::precise::cos(reduced + angle_rest)", "metal::precise::cos(reduced)"),
    ("metal::precise::sin(reduced + angle_rest)", "metal::precise::sin(reduced)"),
    ("metal::precise::sin", "metal::precise::cos"),
]  # fmt: skip

# Mutants that compute the same, and why.
EQUIVALENT = {
    "+ 1 < at if (i < HALF) { [9]": "both are even",
    "+ 1 < at const bool inside = i < HALF; [25]": "both are even",
    "<= at UNROLL for (int r = 0; r < ROUNDS; r++) { [26]": "a round with no lane inside",
}


def every_mutant():
    return kernel_mutants(KERNEL, SWAPPED, {"angles": (ANGLES, SWAPPED_ANGLES)})


POSITIONS = (1_000_003, 0, 999_999)
CASES = [
    (3, 2, 144, True, mx.float16, POSITIONS, 1.5), (3, 2, 64, False, mx.bfloat16, POSITIONS, 1.0),
    (1, 1, 20, True, mx.float16, (3,), 1.0, 1e-3),
]  # fmt: skip


@cache
def launched(index):
    return case(*CASES[index])


def turns_rightly(kernel):
    """Whether nothing is wrong with the kernel in this form."""
    for index, each in enumerate(CASES):
        launch, right = launched(index)
        try:
            turned = emulate(dataclasses.replace(launch, kernel=kernel), timeout_s=20)
        except KernelError:
            return False
        unit = 2.0**-11 if each[4] == mx.float16 else 2.0**-8
        for got, expected in zip(turned, right, strict=True):
            tolerance = 1.001 * unit * np.abs(expected) + 1e-6 * np.abs(expected).max()
            if not (np.abs(wide(got) - expected) <= tolerance).all():
                return False
    return True


def test_the_kernel_itself_passes():
    assert turns_rightly(KERNEL)


def test_mutants_that_are_left_out_exist():
    assert EQUIVALENT.keys() <= {what for what, _, _ in every_mutant()}


@pytest.mark.parametrize(("what", "text", "header"), params(
    [mutant for mutant in every_mutant() if mutant[0] not in EQUIVALENT], lambda what, *_: what,
))  # fmt: skip
def test_a_mutant_is_caught(what, text, header):
    assert not turns_rightly(dataclasses.replace(KERNEL, source=text, header=header))
