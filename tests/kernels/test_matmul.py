"""The native matmul against NumPy in float64, and against itself: order, batches, levels."""

import mlx.core as mx
import numpy as np
import pytest

from mlxserve.config import CPU_LEVELS
from mlxserve.kernels import matmul as op
from mlxserve.kernels import registry
from mlxserve.kernels.matmul import PanelWeight, matmul, matmuls, rows
from mlxserve.kernels.quantized import PackedWeight, dequantize

native = registry.native("matmul")
pytestmark = pytest.mark.skipif(native is None, reason="only on machines with native kernels")

AFFINE = [("affine", bits, group) for bits in (2, 3, 4, 5, 6, 8) for group in (32, 64, 128)]
FORMATS = [*AFFINE, ("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)]
DTYPES = [mx.float32, mx.float16, mx.bfloat16]


def numbers(*shape, seed=0, scale=1.0):
    return mx.array(np.random.default_rng(seed).normal(size=shape).astype(np.float32) * scale)


def quantised(n, k, mode, bits, group, dtype=mx.float16, seed=0):
    w = numbers(n, k, seed=seed).astype(dtype)
    words, scales, *biases = mx.quantize(w, group, bits, mode=mode)
    return PackedWeight(words, scales, biases[0] if biases else None, bits, group, mode)


def panels(weight) -> PanelWeight:
    found = op.to_panels(native, weight)
    assert found is not None
    return found


def exact(x, weight):
    dense = dequantize(weight, mx.float32) if isinstance(weight, PackedWeight) else weight
    return np.array(x, np.float64) @ np.array(dense.astype(mx.float32), np.float64).T


def rounding(x, weight):
    """What 16 bits for x may move a result: half a step of each, all in one direction."""
    dense = np.abs(np.array(dequantize(weight, mx.float32)))
    group = weight.group_size
    steps = np.abs(np.array(x)).reshape(len(x), -1, group).max(-1) / 32767 / 2
    return np.repeat(steps, group, -1) @ dense.T + 1e-5 * np.abs(exact(x, weight)).max()


@pytest.mark.parametrize(("mode", "bits", "group"), FORMATS)
@pytest.mark.parametrize("rows_of_x", [1, 2, 5, 16, 131])
def test_every_format(mode, bits, group, rows_of_x):
    for n, k in ((1, 128), (17, 256), (48, 640)):
        weight = quantised(n, k, mode, bits, group, seed=n)
        x = numbers(rows_of_x, k, seed=rows_of_x)
        got = np.array(matmul(x, panels(weight)))
        assert got.shape == (rows_of_x, n)
        assert (np.abs(got - exact(x, weight)) <= rounding(x, weight)).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), [(1, 1), (16, 7), (33, 100), (7, 513)])
@pytest.mark.parametrize("rows_of_x", [1, 2, 3, 7, 19, 130])
def test_dense_weights_of_any_shape(dtype, n, k, rows_of_x):
    weight, x = numbers(n, k).astype(dtype), numbers(rows_of_x, k, seed=1)
    np.testing.assert_allclose(np.array(matmul(x, panels(weight))), exact(x, weight), atol=2e-4)


@pytest.mark.parametrize("weight", [
    *(quantised(50, 384, *f) for f in FORMATS), *(numbers(50, 384).astype(d) for d in DTYPES),
])  # fmt: skip
def test_a_row_gives_the_same_bits_alone_and_in_any_batch(weight):
    ready, x = panels(weight), numbers(140, 384, seed=3)
    together = np.array(matmul(x, ready))
    for first, last in ((0, 1), (7, 8), (3, 5), (10, 17), (0, 129), (139, 140)):
        part = np.array(matmul(x[first:last], ready))
        np.testing.assert_array_equal(part, together[first:last])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [3, 4, 8])
def test_scales_of_each_type(dtype, bits):
    weight, x = quantised(20, 128, "affine", bits, 32, dtype), numbers(3, 128)
    got = np.array(matmul(x, panels(weight)))
    if dtype == mx.float32:  # kept in 16 bits
        halves = (a.astype(mx.float16) for a in (weight.scales, weight.biases))
        weight = PackedWeight(weight.weight, *halves, bits, 32)
    assert (np.abs(got - exact(x, weight)) <= rounding(x, weight)).all()


@pytest.mark.parametrize("bits", [4, 5, 8])
def test_symmetric_weights_take_no_memory_for_biases(bits):
    words = mx.array(np.random.default_rng(0).integers(0, 2**32, (32, 128 * bits // 32)), mx.uint32)
    scales = numbers(32, 4).astype(mx.float16)
    biases = scales * -(2.0 ** (bits - 1))
    weight = PackedWeight(words, scales, biases.astype(mx.float16), bits, 32)
    ready, x = panels(weight), numbers(9, 128, seed=1)
    assert ready.data.nbytes == words.nbytes + scales.nbytes
    assert (np.abs(np.array(matmul(x, ready)) - exact(x, weight)) <= rounding(x, weight)).all()


def test_float32_scales_are_halved_only_where_that_is_harmless():
    weight, x = quantised(32, 128, "affine", 4, 32, mx.float32), numbers(4, 128)
    small = panels(weight)
    assert small.data.nbytes == weight.weight.nbytes + weight.scales.nbytes  # 2 x 16 bits
    huge = PackedWeight(weight.weight, weight.scales * 1e6, weight.biases * 1e6, 4, 32)
    wide = panels(huge)
    assert wide.data.nbytes == small.data.nbytes + weight.scales.nbytes
    assert (np.abs(np.array(matmul(x, wide)) - exact(x, huge)) <= rounding(x, huge)).all()


def test_rows_are_those_of_the_weight():
    ids = mx.array([0, 3, 3, 49, 16, 15])
    for form in FORMATS:
        weight = quantised(50, 256, *form)
        got = rows(panels(weight), ids, mx.float32)
        np.testing.assert_array_equal(np.array(got), np.array(dequantize(weight, mx.float32)[ids]))
    for dtype in DTYPES:
        dense = numbers(50, 33).astype(dtype)
        got = rows(panels(dense), ids, mx.float32)
        np.testing.assert_array_equal(np.array(got), np.array(dense[ids].astype(mx.float32)))


def test_a_row_that_does_not_exist_is_not_a_number():
    got = np.array(rows(panels(numbers(20, 32)), mx.array([-1, 20, 5, 1 << 30]), mx.float32))
    assert np.isnan(got[[0, 1, 3]]).all()
    assert np.isfinite(got[2]).all()


def test_several_weights_with_biases_and_a_sum():
    x = numbers(5, 128)
    weights = [
        quantised(30, 128, "affine", 4, 32),
        numbers(7, 128),
        quantised(16, 128, "affine", 8, 64),
    ]
    biases = [numbers(30), None, numbers(16)]
    outs = matmuls(x, [panels(w) for w in weights], biases)
    for out, weight, bias in zip(outs, weights, biases, strict=True):
        alone = matmul(x, panels(weight), bias)
        np.testing.assert_array_equal(np.array(out), np.array(alone))
        plain = np.array(matmul(x, panels(weight)))
        np.testing.assert_array_equal(
            np.array(out), plain if bias is None else plain + np.array(bias)
        )


def test_inputs_that_are_views():
    weight, x = panels(quantised(32, 128, "affine", 4, 32)), numbers(128, 6)
    want = np.array(matmul(mx.array(np.ascontiguousarray(np.array(x).T)), weight))
    np.testing.assert_array_equal(np.array(matmul(x.T, weight)), want)
    wide = mx.broadcast_to(x.T[:1], (4, 128))
    np.testing.assert_array_equal(np.array(matmul(wide, weight)), np.repeat(want[:1], 4, 0))


def test_other_types_and_more_dimensions():
    weight, x = panels(quantised(32, 128, "affine", 4, 32)), numbers(2, 3, 128)
    out = matmul(x, weight)
    assert out.shape == (2, 3, 32)
    half = matmul(x.astype(mx.float16), weight)
    assert half.dtype == mx.float16
    np.testing.assert_allclose(np.array(half), np.array(out), rtol=2e-3, atol=2e-2)
    bias = numbers(32).astype(mx.bfloat16)
    np.testing.assert_array_equal(
        np.array(matmul(x, weight, bias) - bias), np.array(out + bias - bias)
    )


def test_nothing_in_nothing_out():
    weight = panels(quantised(32, 128, "affine", 4, 32))
    assert matmul(mx.zeros((0, 128)), weight).shape == (0, 32)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_not_hidden(bad):
    x = np.array(numbers(3, 128))
    x[1, 70] = bad
    for weight in (quantised(32, 128, "affine", 4, 32), numbers(32, 128)):
        out = np.array(matmul(mx.array(x), panels(weight)))
        assert not np.isfinite(out[1]).any()
        assert np.isfinite(out[[0, 2]]).all()


def test_tiny_and_huge_inputs():
    weight = quantised(32, 128, "affine", 4, 32)
    for scale in (0.0, 1e-38, 1e-30, 1e30):
        x = numbers(2, 128, scale=scale)
        out = np.array(matmul(x, panels(weight)), np.float64)
        np.testing.assert_allclose(out, exact(x, weight), atol=max(scale, 1e-33) * 0.1)


@pytest.mark.parametrize("level", CPU_LEVELS)
def test_instruction_levels_agree(level):
    usual = native.level()
    if not native.set_level(level):
        pytest.skip(f"only on processors with {level}")
    # Bit for bit, but that portable code rounds a multiply-add twice.
    tolerance = 1e-4 if "portable" in (level, usual) else 0
    try:
        for form in [*FORMATS, *DTYPES]:
            weight = numbers(40, 256).astype(form) if form in DTYPES else quantised(40, 256, *form)
            x, ready = numbers(9, 256), panels(weight)
            here = np.array(matmul(x, ready))
            alone = np.array(matmul(x[4:5], ready))
            np.testing.assert_array_equal(alone, here[4:5])
            native.set_level(usual)
            there = np.array(matmul(x, ready))
            np.testing.assert_allclose(here, there, rtol=tolerance, atol=tolerance)
            native.set_level(level)
    finally:
        native.set_level(usual)


def test_what_does_not_fit_is_refused():
    weight = panels(quantised(32, 128, "affine", 4, 32))
    raw, x = quantised(32, 128, "affine", 4, 32), mx.zeros((2, 128))
    with pytest.raises(ValueError, match="x has K=64, the weight has K=128"):
        matmul(mx.zeros((2, 64)), weight)
    with pytest.raises(ValueError, match=r"bias is \[31\], expected \[32\]"):
        matmul(x, weight, mx.zeros((31,)))
    with pytest.raises(ValueError, match="unknown format q7"):
        native.pack(raw.weight, raw.scales, raw.biases, "q7", 32)
    with pytest.raises(ValueError, match="groups of 48 aren't supported"):
        native.pack(raw.weight, raw.scales, raw.biases, "q4", 48)
    with pytest.raises(ValueError, match=r"scales is .*, expected"):
        native.pack(raw.weight, raw.scales, raw.biases, "q4", 64)
    with pytest.raises(ValueError, match="scales are int32, expected a floating type"):
        native.pack(raw.weight, raw.scales.astype(mx.int32), None, "q4", 32)
    with pytest.raises(ValueError, match="biases is float32, expected float16"):
        native.pack(raw.weight, raw.scales, raw.biases.astype(mx.float32), "q4", 32)
    with pytest.raises(ValueError, match="weight is float32, expected uint32"):
        native.pack(mx.zeros((32, 16)), raw.scales, raw.biases, "q4", 32)
    with pytest.raises(ValueError, match=r"weight has shape .*, expected 2 or 3 dimensions"):
        native.pack(raw.weight[0], raw.scales, raw.biases, "q4", 32)
    with pytest.raises(ValueError, match="a weight is None"):
        native.matmul(x, [None], [None])
    with pytest.raises(ValueError, match="K=67108865 is too large"):  # a panel of 4 GiB and more
        native.pack(mx.zeros((1, 2**26 + 1)), None, None, "f32", 0)
    with pytest.raises(ValueError, match="weight is empty"):
        native.pack(raw.weight[:0], raw.scales[:0], None, "q4", 32)


def test_groups_that_the_kernels_do_not_have_stay_with_mlx():
    w = numbers(8, 48)
    words = PackedWeight(mx.zeros((8, 6), mx.uint32), mx.ones((8, 3)), mx.zeros((8, 3)), 4, 16)
    assert op.to_panels(native, words) is None
    assert op.to_panels(native, w) is not None
