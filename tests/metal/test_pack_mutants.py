"""Every mutant of the Metal kernel that packs pages is caught; see test_mutants.py."""

import dataclasses
from functools import cache

import mlx.core as mx
import numpy as np
import pytest

from mlxserve.kernels.metal.launch import source
from mlxserve.kernels.metal.pack_pages import PACK_PAGES, pack_launch
from tests.metal.mutation import kernel_mutants
from tests.metal.test_pack_pages import expected, hot_pages
from tests.support.metal import KernelError, emulate
from tests.support.mutants import params

pytestmark = pytest.mark.full

PLACES = source("places.metal")
SWAPPED = [
    ("ids[page]", "page"),
    ("(KEYS ? 0 : part * ROWS)", "0"),
    ("* heads + head;", "* heads;"),
    ("row * D", "row"),
    ("(KEYS ? part * WIDTH : 0)", "0"),
    ("% (WIDTH / 2)]", "% WIDTH]"),
    ("long(page) * heads", "long(page)"),
    ("* TILES + part", "* TILES"),
    ("metal::min(low, x)", "x"),
    ("metal::max(high, x)", "x"),
    ("finite && (bits", "(bits"),
    ("0x7c00u : 0x7f80u", "0x7f80u : 0x7f80u"),
    ("0x7c00u : 0x7f80u", "0x7c00u : 0x7c00u"),
    ("metal::clamp(low, -LARGEST, LARGEST)", "low"),
    ("metal::min((high - low) / TOP, LARGEST)", "(high - low) / TOP"),
    ("(high - low) / TOP", "high / TOP"),
    ("(1 << BITS) - 1", "(1 << BITS)"),
    ("bias_bits = 0;", ""),
    ("float2(float(scale), float(bias))", "float2((high - low) / TOP, low)"),
    (": float2(0.0f)", ": float2(1.0f)"),
    ("? scale : half(0.0f)", "? scale : scale"),
    (": 0x7e00u", ": 0x7c00u"),
    ("scales[at * GROUPS + g]", "scales[at * GROUPS]"),
    ("biases[at * GROUPS + g]", "biases[g]"),
    ("w / (GROUP / PER_WORD)", "w / GROUP"),
    ("PER_WORD) * PER_WORD + i", "PER_WORD) * PER_WORD"),
    ("w % (GROUP / PER_WORD)", "0"),
    ("by.x > 0.0f", "true"),
    ("metal::rint(", "("),
    ("x - by.y", "x"),
    ("0.0f, TOP)", "0.0f, TOP - 1.0f)"),
    ("<< (i * BITS)", "<< i"),
    ("codes[at * WORDS + w]", "codes[w]"),
]
SWAPPED_PLACES = [
    ("i * WIDTH + g", "g * WIDTH + i"),
    ("g / ACROSS * WIDTH", "g * WIDTH"),
    ("g % ACROSS * 32", "0"),
    ("WIDTH - 1)", "WIDTH - 2)"),
    ("WIDTH - 1)", "WIDTH)"),
]


def every_mutant():
    headers = {"places": (PLACES, SWAPPED_PLACES)}
    return kernel_mutants(PACK_PAGES, SWAPPED, headers)


@cache
def case(dtype, keys, bits):
    """Pages of two heads, in several tiles; some groups aren't finite, or have no width."""
    x = np.array(hot_pages(3, 2, 160 if keys else 144, dtype).astype(mx.float32))
    x[70, 0, 5], x[80, 1, 50], x[100, 0, 20] = np.nan, np.inf, -np.inf
    x[64:128, 0, 30:66] = -0.0
    if dtype == mx.bfloat16:
        x[90, 1, 3], x[91, 1, 3], x[95, 1, 70], x[140, 0, 9] = 2e5, -2e5, 3e37, 3e4
    hot = mx.array(x).astype(dtype)
    launch = pack_launch(hot, mx.array([2, 1], mx.int32), bits, keys=keys)
    return launch, [np.array(want) for want in expected(hot, [2, 1], bits, keys)]


CASES = [
    (mx.bfloat16, True, 4), (mx.float16, False, 8), (mx.bfloat16, False, 8), (mx.float16, True, 8),
]  # fmt: skip


def packs_rightly(kernel):
    """Whether nothing is wrong with the kernel in this form."""
    for each in CASES:
        launch, wanted = case(*each)
        try:
            got = emulate(dataclasses.replace(launch, kernel=kernel), timeout_s=20)
        except KernelError:
            return False
        for a, b in zip(map(np.array, got), wanted, strict=True):
            same = (a == b) | ((a != a) & (b != b))
            if not same.all() or (np.signbit(a) != np.signbit(b))[b == 0].any():
                return False
    return True


def test_the_kernel_itself_passes():
    assert packs_rightly(PACK_PAGES)


@pytest.mark.parametrize(("what", "text", "header"), params(
    list(every_mutant()), lambda what, *_: what,
))  # fmt: skip
def test_a_mutant_is_caught(what, text, header):
    assert not packs_rightly(dataclasses.replace(PACK_PAGES, source=text, header=header))
