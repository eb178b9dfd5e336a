"""Every mutant of the Metal matmul over packed weights is caught; see test_mutants.py."""

import dataclasses
from functools import cache

import numpy as np
import pytest

from mlxserve.kernels.metal import quantized_matmul
from mlxserve.kernels.metal.launch import source
from tests.metal.matmuls import exact, random_case
from tests.metal.mutation import kernel_mutants
from tests.support.metal import KernelError, cost, emulate
from tests.support.mutants import params

pytestmark = pytest.mark.full

KERNEL = quantized_matmul.KERNEL
WEIGHTS = source("packed_weights.metal")
SWAPPED = [
    ("simd_gid * OUTS + o, n_size - 1", "simd_gid * OUTS + o, n_size - 2"),
    ("first_out + simd_gid * OUTS + o", "first_out + simd_gid * OUTS"),
    ("first_out + simd_gid * OUTS + o", "simd_gid * OUTS + o"),
    ("metal::min(first_out + simd_gid * OUTS + o, n_size - 1)", "first_out + simd_gid * OUTS + o"),
    ("k % (HELD * GROUP) == 0", "k == 0"),
    ("k % (HELD * GROUP) == 0", "true"),
    ("k / (GROUP * PAIR) + lane", "lane"),
    ("k / (GROUP * PAIR) + lane", "k / GROUP + lane"),
    ("long(output[o]) * row_words + held", "held"),
    ("word_of<PAIR>(biases", "word_of<PAIR>(scales"),
    ("k + lane * 8", "k + lane * 4"),
    ("inside ? eight_codes", "true ? eight_codes"),
    ("(long(output[o]) * k_size + at) / 8", "at / 8"),
    ("(long(output[o]) * k_size + at) / 8", "(long(output[o]) * k_size + k) / 8"),
    ("inside && first_row", "first_row"),
    ("long(first_row + r) * k_size", "long(r) * k_size"),
    ("long(first_row + r) * k_size + at", "at"),
    ("r = simd_gid", "r = 0"),
    ("= eight.xy", "= eight.zw"),
    ("(ROWS + r) * 32", "(ROWS + r / 2) * 32"),
    ("at / GROUP % HELD", "at / GROUP"),
    ("at / GROUP % HELD", "k / GROUP % HELD"),
    ("ushort(group / PAIR)", "ushort(lane)"),
    ("group % PAIR == 0 ? scale_pair.x : scale_pair.y", "scale_pair.x"),
    ("group % PAIR == 0 ? bias_pair.x : bias_pair.y", "bias_pair.y"),
    ("half_of == 0 ? codes[o].x : codes[o].y", "codes[o].x"),
    ("half_of * ROWS + r", "r"),
    ("half_of * ROWS + r", "half_of * ROWS"),
    ("unpack<T>(four.y)", "unpack<T>(four.x)"),
    ("weight[o].y, a.y", "weight[o].x, a.y"),
    ("weight[o].w, b.y, sum[o][r]", "weight[o].w, b.y, 0.0f"),
    ("simd_sum(sum[o][r])", "sum[o][r]"),
    ("r * OUTPUTS + simd_gid * OUTS + o]", "r * OUTPUTS + o]"),
    ("i / OUTPUTS", "i / OUTPUTS / 2"),
    ("first_out + i % OUTPUTS", "i % OUTPUTS"),
    ("row < count && ", ""),
    (" && column < n_size", ""),
    ("long(row) * n_size + column", "long(row) * OUTPUTS + column"),
]  # fmt: skip
SWAPPED_WEIGHTS = [
    ("(const device uint2*)words)[i]", "(const device uint2*)words)[0]"),
    ("words[i]", "words[i / 2]"),
    ("word >> 16", "word >> 8"),
    ("(const device ushort*)numbers)[i]", "(const device ushort*)numbers)[i / 2]"),
    ("PAIR == 2", "true"),
]  # fmt: skip

# Mutants that compute the same, and why.
EQUIVALENT = {
    "<= at for (int k = 0; k < k_size; k += STEP) { [17]": "a step in which no lane is inside",
    "+ 1 < at for (int k = 0; k < k_size; k += STEP) { [17]": "K is a multiple of 32",
    "+ 1 < at const bool inside = at < k_size; [24]": "both are multiples of 8",
}


def mutants():
    return [mutant for mutant in every_mutant() if mutant[0] not in EQUIVALENT]


def every_mutant():
    headers = {"weights": (WEIGHTS, SWAPPED_WEIGHTS)}
    return kernel_mutants(KERNEL, SWAPPED, headers)


@cache
def case(index):
    """Inputs and the right result.

    First pairs of scales, more than lanes hold at once, with the last row, output and step not
    full; then an odd number of groups, two blocks of rows, and 8 bits.
    """
    sizes = (3, 40, 2368, 4, 32) if index == 0 else (17, 33, 1056, 8, 32)
    x, packed = random_case(*sizes)
    return x, packed, exact(x, packed)


def works(index, kernel):
    """Whether nothing is wrong with the kernel in this form."""
    x, packed, expected = case(index)
    launch = dataclasses.replace(quantized_matmul.quantized_rows(x, packed), kernel=kernel)
    try:
        (out,) = emulate(launch, timeout_s=20)
    except KernelError:
        return False
    return np.allclose(np.array(out), expected, atol=1e-3 * np.abs(expected).max())


def loaded_bytes(kernel):
    """Of the scales and biases that it loads in the first case."""
    x, packed, _ = case(0)
    launch = dataclasses.replace(quantized_matmul.quantized_rows(x, packed), kernel=kernel)
    return [cost(launch).buffers[name].loads.bytes for name in ("scales", "biases")]


SEEN = [64 * 74 * 2] * 2  # outputs of two threadgroups, and 74 groups of each


def test_the_kernel_as_it_is_works():
    assert all(works(index, KERNEL) for index in range(2))
    assert loaded_bytes(KERNEL) == SEEN


def test_mutants_that_are_left_out_exist():
    assert EQUIVALENT.keys() <= {what for what, _, _ in every_mutant()}


@pytest.mark.parametrize(("what", "text", "header"), params(mutants(), lambda what, *_: what))
def test_a_mutant_is_caught(what, text, header):
    mutant = dataclasses.replace(KERNEL, source=text, header=header)
    if all(works(index, mutant) for index in range(2)):
        assert loaded_bytes(mutant) != SEEN
