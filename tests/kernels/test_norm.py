"""Norms against NumPy in float64, at every instruction level, and one row like another."""

import mlx.core as mx
import numpy as np
import pytest

from mlxserve.kernels import norm
from mlxserve.kernels.native import load

WIDTHS = [1, 7, 16, 17, 64, 576, 640, 2049]


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape, loc=0.3).astype(np.float32)


def exact_rms_norm(x, weight, eps):
    x = x.astype(np.float64)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def exact_layer_norm(x, weight, bias, eps):
    x = x.astype(np.float64)
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight + bias


def close(got, expected, tolerance=2e-6):
    scale = max(1.0, np.abs(expected).max())
    np.testing.assert_allclose(np.array(got), expected, rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", [(1,), (5,), (3, 4)])
def test_norms_equal_float64(width, rows, kernel_level):
    x, residual = numbers(*rows, width), numbers(*rows, width, seed=1)
    weight, bias = numbers(width, seed=2), numbers(width, seed=3)
    x_, residual_, weight_, bias_ = map(mx.array, (x, residual, weight, bias))
    close(norm.rms_norm(x_, weight_, 1e-5), exact_rms_norm(x, weight, 1e-5))
    for inner, added in ((None, x), (bias, exact_rms_norm(x, bias, 1e-5))):
        inner_ = None if inner is None else bias_
        total, normed = norm.add_rms_norm(x_, residual_, weight_, 1e-5, inner_)
        close(total, residual + added)
        close(normed, exact_rms_norm(residual + added, weight, 1e-5))
    if width > 1:  # the variance of one number is 0: nothing but rounding is left
        expected = exact_layer_norm(x, weight, bias, 1e-5)
        close(norm.layer_norm(x_, weight_, bias_, 1e-5), expected, 1e-5)
        expected = exact_layer_norm(x, weight, np.zeros(width), 1e-5)
        close(norm.layer_norm(x_, weight_, None, 1e-5), expected, 1e-5)


@pytest.mark.parametrize("width", [7, 576, 2049])
def test_a_row_is_the_same_in_any_batch(width, kernel_level):
    # Enough rows that several threads share them.
    x, residual = mx.array(numbers(300, width)), mx.array(numbers(300, width, seed=1))
    weight = mx.array(numbers(width, seed=2))
    normed = norm.rms_norm(x, weight, 1e-6)
    sums = [norm.add_rms_norm(x, residual, weight, 1e-6, inner) for inner in (None, weight)]
    layer = norm.layer_norm(x, weight, weight, 1e-6)
    for row in (0, 1, 150, 299):
        one = slice(row, row + 1)
        assert mx.array_equal(norm.rms_norm(x[one], weight, 1e-6), normed[one])
        for inner, (total, after) in zip((None, weight), sums, strict=True):
            alone = norm.add_rms_norm(x[one], residual[one], weight, 1e-6, inner)
            assert mx.array_equal(alone[0], total[one])
            assert mx.array_equal(alone[1], after[one])
        assert mx.array_equal(norm.layer_norm(x[one], weight, weight, 1e-6), layer[one])


def test_a_sum_and_its_norm_are_those_of_one_after_the_other(kernel_level):
    x, residual = (mx.array(numbers(3, 100, seed=i)) for i in range(2))
    weight, inner = (mx.array(numbers(100, seed=i)) for i in (2, 3))
    for within, added in ((None, x), (inner, norm.rms_norm(x, inner, 1e-6))):
        total, normed = norm.add_rms_norm(x, residual, weight, 1e-6, within)
        assert mx.array_equal(total, residual + added)
        assert mx.array_equal(normed, norm.rms_norm(total, weight, 1e-6))


def test_large_numbers_and_a_large_mean(kernel_level):
    x = numbers(2, 1152) * 1e5
    weight = np.ones(1152, np.float32)
    close(norm.rms_norm(mx.array(x), mx.array(weight), 1e-6), exact_rms_norm(x, weight, 1e-6))
    x = numbers(2, 1152) + 1000
    expected = exact_layer_norm(x, weight, 0, 1e-6)
    # The mean is known to 6e-5 of a spread of 1.
    close(norm.layer_norm(mx.array(x), mx.array(weight), None, 1e-6), expected, 1e-4)


def test_strided_and_empty_inputs(kernel_level):
    x, weight = numbers(6, 2, 40), numbers(40, seed=1)
    turned = mx.array(x).swapaxes(0, 1)
    close(
        norm.rms_norm(turned, mx.array(weight), 1e-5),
        exact_rms_norm(x.swapaxes(0, 1), weight, 1e-5),
    )
    assert norm.rms_norm(mx.zeros((0, 40)), mx.array(weight), 1e-5).shape == (0, 40)


def test_wrong_arguments_are_refused_by_name():
    native = load().module
    if native is None:
        pytest.skip("only on machines with native kernels")
    x, weight = mx.zeros((2, 8)), mx.ones((8,))
    with pytest.raises(ValueError, match=r"rms_norm: weight is \[7\], expected \[8\]"):
        native.rms_norm(x, mx.ones((7,)), 1e-5)
    with pytest.raises(ValueError, match="rms_norm: x is float16, expected float32"):
        native.rms_norm(x.astype(mx.float16), weight, 1e-5)
    with pytest.raises(ValueError, match=r"rms_norm: x has shape \[\]"):
        native.rms_norm(mx.array(1.0), weight, 1e-5)
    with pytest.raises(ValueError, match=r"add_rms_norm: stream is \[2, 9\], expected \[2, 8\]"):
        native.add_rms_norm(x, mx.zeros((2, 9)), weight, 1e-5, None)
    with pytest.raises(ValueError, match=r"add_rms_norm: inner is \[7\], expected \[8\]"):
        native.add_rms_norm(x, x, weight, 1e-5, mx.ones((7,)))
    with pytest.raises(ValueError, match=r"layer_norm: bias is \[1\], expected \[8\]"):
        native.layer_norm(x, weight, mx.ones((1,)), 1e-5)
