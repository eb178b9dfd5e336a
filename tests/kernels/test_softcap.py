"""Soft caps against NumPy in float64, at every instruction level."""

import math

import mlx.core as mx
import numpy as np
import pytest

from mlxserve.kernels.softcap import soft_cap


@pytest.mark.parametrize("cap", [0.5, 3.0, 30.0])
@pytest.mark.parametrize("width", [1, 7, 16, 17, 577])
def test_soft_cap_equals_float64(width, cap, kernel_level):
    x = np.random.default_rng(width).normal(size=(3, width), scale=2 * cap).astype(np.float32)
    got = np.array(soft_cap(mx.array(x), cap))
    np.testing.assert_allclose(got, cap * np.tanh(x.astype(np.float64) / cap), rtol=1e-6)


def test_small_values_keep_their_precision(kernel_level):
    x = np.geomspace(1e-20, 1, 1001, dtype=np.float32)
    got = np.array(soft_cap(mx.array(np.concatenate([x, -x])), 30.0))
    expected = 30 * np.tanh(x.astype(np.float64) / 30)
    np.testing.assert_allclose(got, np.concatenate([expected, -expected]), rtol=1e-6)


def test_the_largest_values_reach_the_cap(kernel_level):
    x = mx.array([-math.inf, -1e30, 0.0, 1e30, math.inf])
    assert soft_cap(x, 30.0).tolist() == [-30.0, -30.0, 0.0, 30.0, 30.0]
    assert mx.isnan(soft_cap(mx.array([math.nan]), 30.0)).all()


def test_a_row_is_the_same_in_any_batch(kernel_level):
    x = mx.array(np.random.default_rng(0).normal(size=(300, 577), scale=50).astype(np.float32))
    batch = soft_cap(x, 30.0)
    for row in (0, 1, 150, 299):
        one = slice(row, row + 1)
        assert mx.array_equal(soft_cap(x[one], 30.0), batch[one])


def test_other_dtypes_are_kept():
    x = mx.array([-100.0, 1.0, 100.0], mx.float16)
    got = soft_cap(x, 30.0)
    assert got.dtype == mx.float16
    np.testing.assert_allclose(np.array(got), 30 * np.tanh(np.array(x, np.float64) / 30), rtol=1e-3)


def test_no_cap_leaves_everything_alone():
    x = mx.array([-1e9, 1e9])
    assert soft_cap(x, None) is x


@pytest.mark.parametrize("cap", [0.0, -30.0, math.inf, math.nan])
def test_a_cap_that_makes_no_sense_is_refused(cap):
    with pytest.raises(ValueError, match=rf"soft_cap: cap is {cap}, expected a positive number"):
        soft_cap(mx.zeros((2,)), cap)
