"""The Metal matmul of a few rows over packed weights, executed from its source, against float64."""

import functools

import mlx.core as mx
import numpy as np
import pytest

from mlxserve.kernels.metal import matmul_check
from mlxserve.kernels.metal.quantized_matmul import MAX_ROWS, quantized_rows
from mlxserve.kernels.quantized import PackedWeight
from mlxserve.kernels.uses import MatmulUse
from tests.metal.matmuls import exact, random_case
from tests.support.metal import emulate, generated_source, mlx_source
from tests.support.metal.clang import has_fused_multiply_add

# One rounding of a result, beside what float32 sums lose.
SPACING = {mx.float16: 2.0**-11, mx.bfloat16: 2.0**-8}

run = functools.partial(emulate, mode="fast")


def check(count, outputs, inputs, bits, group, dtype=mx.float16, **options):
    x, packed = random_case(count, outputs, inputs, bits, group, dtype)
    (out,) = emulate(quantized_rows(x, packed), **options)
    expected = exact(x, packed)
    assert out.dtype == dtype
    difference = np.abs(np.array(out.astype(mx.float32)) - expected)
    np.testing.assert_array_less(difference, SPACING[dtype] * np.abs(expected) + 2e-5)


def test_rows_and_outputs_that_fill_nothing():
    check(3, 40, 288, 4, 32)


@pytest.mark.full
@pytest.mark.parametrize("dtype", [
    mx.float16, pytest.param(mx.bfloat16, marks=pytest.mark.slow),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("bits", [4, 8])
def test_every_form_of_weights(bits, group, dtype):
    check(2, 33, 3 * group, bits, group, dtype, mode="fast")


@pytest.mark.full
@pytest.mark.parametrize(("outputs", "inputs"), [
    (8, 32), (1, 256), (31, 64), (64, 256), (65, 512), (3, 2048), (3, 2304), (5, 1056),
])  # fmt: skip
def test_sizes(outputs, inputs):
    """An odd number of groups to an output and an even one, and more than lanes hold at once."""
    check(2, outputs, inputs, 4, 32, mode="fast")


@pytest.mark.full
@pytest.mark.parametrize("count", [16, 35])
def test_many_rows(count):
    check(count, 33, 320, 8, 32, mx.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 4, 8, 12])
def test_every_number_of_rows_that_it_is_compiled_for(count):
    check(count, 33, 320, 8, 32, mx.bfloat16)


@pytest.mark.full
@pytest.mark.parametrize("order", ["reverse", "random"])
def test_whatever_order_threads_run_in(order):
    check(3, 40, 288, 4, 32, order=order, seed=3)


@pytest.mark.full
@pytest.mark.parametrize("freedom", [
    {"flush_to_zero": True}, {"reversed_reductions": True}, {"fused_multiply_add": True},
], ids=lambda freedom: next(iter(freedom)))  # fmt: skip
def test_what_a_gpu_may_do_differently(freedom):
    if "fused_multiply_add" in freedom and not has_fused_multiply_add():
        pytest.skip("only on processors with a fused multiply-add")
    check(3, 40, 288, 4, 32, mode="fast", **freedom)


@pytest.mark.full
def test_a_row_has_the_same_bits_in_every_batch():
    """In each number of rows, in every place, and whatever the others are."""
    x, packed = random_case(MAX_ROWS + 5, 40, 288, 4, 32)
    (together,) = run(quantized_rows(x, packed))
    for count in range(1, MAX_ROWS + 1):
        (got,) = run(quantized_rows(x[:count], packed))
        assert mx.array_equal(got, together[:count]), count
    for shift in range(1, len(x)):
        (got,) = run(quantized_rows(mx.roll(x, shift, axis=0), packed))
        assert mx.array_equal(got, mx.roll(together, shift, axis=0)), shift
    others = mx.full(x.shape, mx.nan, x.dtype)
    others[3] = x[3]
    (got,) = run(quantized_rows(others, packed))
    assert mx.array_equal(got[3], together[3])


@pytest.mark.full
def test_numbers_that_are_not_finite_show():
    x, packed = random_case(3, 40, 288, 4, 32)
    x[1, 287] = mx.inf
    scales = np.array(packed.scales)
    scales[39, 8] = np.nan
    damaged = PackedWeight(packed.weight, mx.array(scales), packed.biases, 4, 32)
    (out,) = run(quantized_rows(x, damaged))
    finite = np.isfinite(np.array(out))
    assert not finite[1].any()
    assert not finite[:, 39].any()
    assert finite[[0, 2], :39].all()


def test_the_source_that_mlx_generates_is_the_one_that_is_emulated():
    for dtype in (mx.float16, mx.bfloat16):
        launch = quantized_rows(*random_case(9, 40, 288, 8, 32, dtype))
        assert generated_source(launch) == mlx_source(launch)


@pytest.mark.parametrize(("use", "reason"), [
    (MatmulUse(4096, 4096, 4, 64, "bfloat16"), ""),
    (MatmulUse(1, 256, 8, 32, "float16", deterministic=True), ""),
    (MatmulUse(64, 64, 4, 32, "float32"), "x in float32"),
    (MatmulUse(64, 64, 6, 32, "float16"), "weights in 6 bits"),
    (MatmulUse(64, 64, 4, 16, "float16"), "a group of 16 weights is none of 32, 64, 128"),
    (MatmulUse(64, 64, 4, 32, "float16", mode="mxfp4"), "weights in mxfp4, not affine"),
    (MatmulUse(3, 64, 4, 32, "float16"), "fewer than 8 groups"),
])  # fmt: skip
def test_layers_that_it_cannot_serve_are_named(use, reason):
    named = matmul_check.unsupported(use)
    assert reason in named if reason else named == ""
