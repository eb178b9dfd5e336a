"""The Metal kernel of a sum and its norm, executed from its source, against NumPy in float64."""

import mlx.core as mx
import numpy as np
import pytest

from mlxserve.kernels.metal.add_rms_norm import sum_and_norm
from tests.support.metal import emulate, generated_source, mlx_source
from tests.support.metal.clang import has_fused_multiply_add

FULL = pytest.mark.full
EPS = 1e-5
# Half a unit in the last place, relative to the number itself, and a little of float32.
HALF_UNIT = {mx.float16: 2.0**-11, mx.bfloat16: 2.0**-8}


def wide(x):
    return np.array(x.astype(mx.float32)).astype(np.float64)


def exact_norm(x, weight):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * weight


def random(*shape, dtype, seed, size=1.0):
    x = np.random.default_rng(seed).normal(size=shape) * size
    return mx.array(x.astype(np.float32)).astype(dtype)


def case(rows, width, inner, dtype, size=1.0):
    y, stream = (random(rows, width, dtype=dtype, seed=i, size=size) for i in range(2))
    weight, within = (random(width, dtype=dtype, seed=i) for i in (2, 3))
    return y, stream, weight, within if inner else None


def close(got, expected, dtype):
    assert got.dtype == dtype
    # Each number to half a unit of itself; where terms cancel, float32 shows.
    tolerance = 1.001 * HALF_UNIT[dtype] * np.abs(expected) + 2e-6 * np.abs(expected).max()
    assert (np.abs(wide(got) - expected) <= tolerance).all()


def check(rows, width, inner, dtype, *, size=1.0, **options):
    y, stream, weight, within = case(rows, width, inner, dtype, size)
    launch = sum_and_norm(y, stream, weight, EPS, within)
    total, normed = emulate(launch, **options)
    added = wide(y) if within is None else exact_norm(wide(y), wide(within))
    close(total, wide(stream) + added, dtype)
    close(normed, exact_norm(wide(total), wide(weight)), dtype)


@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
@pytest.mark.parametrize("width", [576, 4096])
def test_widths_of_models(width, inner, dtype):
    check(3, width, inner, dtype)


@FULL
@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("width", [8, 12, 100, 128, 132, 640, 2044, 4100, 8192, 12_292, 32_768])
def test_widths_that_fill_threads_and_those_that_do_not(width, inner):
    check(2, width, inner, mx.bfloat16, mode="fast")


@FULL
@pytest.mark.parametrize("size", [1e-4, 300.0])
def test_small_numbers_and_large_ones(size):
    """eps counts beside the first; squares of the others are beyond float16."""
    check(2, 640, False, mx.float16, size=size)
    check(2, 640, True, mx.float16, size=size)


@FULL
@pytest.mark.parametrize("order", ["forward", "reverse", "random"])
def test_whatever_order_threads_run_in(order):
    check(2, 5120, True, mx.float16, order=order, seed=3)


@FULL
@pytest.mark.parametrize("freedom", [
    {"flush_to_zero": True}, {"reversed_reductions": True}, {"fused_multiply_add": True},
    {"ulp_noise": 2},
], ids=lambda freedom: next(iter(freedom)))  # fmt: skip
def test_what_a_gpu_may_do_differently(freedom):
    if "fused_multiply_add" in freedom and not has_fused_multiply_add():
        pytest.skip("only on processors with a fused multiply-add")
    check(2, 1152, True, mx.float16, mode="fast", **freedom)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_a_row_that_is_not_finite_stays_alone(dtype):
    y, stream, weight, _ = case(3, 64, False, dtype)
    y[1, 5], stream[1, 60] = mx.inf, mx.nan
    total, normed = emulate(sum_and_norm(y, stream, weight, EPS, None))
    assert np.isinf(wide(total)[1, 5])
    assert np.isnan(wide(total)[1, 60])
    assert np.isnan(wide(normed)[1]).all()
    assert np.isfinite(wide(normed)[[0, 2]]).all()


def test_bfloat16_rounds_halves_to_even():
    """0x3f80 + half a unit: down to 0x3f80; 0x3f81 + half: up to 0x3f82."""
    y = mx.array([[1.0, 1.0078125, -1.0, -1.0078125] * 2], mx.bfloat16)
    stream = mx.array([[2.0**-8, 2.0**-8, -(2.0**-8), -(2.0**-8)] * 2], mx.bfloat16)
    total, _ = emulate(sum_and_norm(y, stream, mx.ones(8, mx.bfloat16), EPS, None))
    assert wide(total)[0, :4].tolist() == [1.0, 1.015625, -1.0, -1.015625]


def test_the_source_that_mlx_generates_is_the_one_that_is_emulated():
    for dtype in (mx.float16, mx.bfloat16):
        for inner in (False, True):
            made = case(2, 576, inner, dtype)
            launch = sum_and_norm(*made[:3], EPS, made[3])
            assert generated_source(launch) == mlx_source(launch)
