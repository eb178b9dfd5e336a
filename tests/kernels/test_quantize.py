"""Our quantiser against MLX's: the same bits for every kind of numbers."""

import mlx.core as mx
import numpy as np
import pytest

from mlxserve.kernels.native import load
from mlxserve.kernels.quantize import quantize
from mlxserve.kernels.registry import native

FLOATS = {"mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}  # bits, group size
KINDS = {
    "random": lambda rng, x: x,
    "constant": lambda rng, x: np.broadcast_to(x[:, :1], x.shape),
    "zero": lambda rng, x: x * 0,
    "minus zero": lambda rng, x: x * 0 * np.sign(x),
    "huge": lambda rng, x: x * 1e4,
    "tiny": lambda rng, x: x * 1e-9,
    "at the smallest step": lambda rng, x: x * 3e-7,
    "subnormal": lambda rng, x: x * 1e-40,
    "outliers": lambda rng, x: np.where(rng.random(x.shape) < 0.01, x * 1000, x),
    "positive": lambda rng, x: np.abs(x),
    "negative": lambda rng, x: -np.abs(x),
    "on a grid": lambda rng, x: np.round(x * 4) / 4,
    "symmetric": lambda rng, x: np.where(rng.random(x.shape) < 0.5, 1.0, -1.0),
}


def same_bits(a, b):
    width = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32}[a.itemsize]
    return a.dtype == b.dtype and mx.array_equal(a.view(width), b.view(width))


@pytest.mark.parametrize("kind", KINDS)
def test_every_bit_is_mlx_s(kind, kernel_level):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 384)).astype(np.float32)
    x = mx.array(KINDS[kind](rng, x).astype(np.float32))
    for dtype in (mx.float32, mx.float16, mx.bfloat16):
        for group_size in (32, 64, 128):
            for bits in (2, 3, 4, 5, 6, 8):
                expected = mx.quantize(x.astype(dtype), group_size=group_size, bits=bits)
                *got, _ = quantize(x.astype(dtype), bits, group_size)
                assert all(same_bits(a, b) for a, b in zip(got, expected, strict=True))
        for mode, (bits, group_size) in FLOATS.items():
            if kind == "subnormal":  # MLX's CPU operations give these a factor of up to 2^123
                continue
            expected = mx.quantize(x.astype(dtype), group_size=group_size, bits=bits, mode=mode)
            *got, biases, _ = quantize(x.astype(dtype), bits, group_size, mode)
            assert biases is None
            assert all(same_bits(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("mode", FLOATS)
def test_numbers_below_every_scale_become_nothing(mode, kernel_level):
    if native("quantize") is None:
        pytest.skip("only on native kernels")
    bits, group_size = FLOATS[mode]
    w = mx.full((4, 64), 1e-42)
    weight, scales, *_ = quantize(w, bits, group_size, mode)
    back = mx.dequantize(weight, scales, None, group_size, bits, mode=mode, dtype=mx.float32)
    assert float(mx.abs(back).max()) < 1e-37


@pytest.mark.parametrize("mode", FLOATS)
def test_every_float_is_rounded_to_the_nearest(mode, kernel_level):
    """Codes by brute force over all that there are, in float64."""
    bits, group_size = FLOATS[mode]
    codes = np.arange(1 << bits, dtype=np.uint32)
    grid = _values(codes, bits)
    rng = np.random.default_rng(1)
    x = rng.normal(size=(16, 96)).astype(np.float32)
    weight, scales, *_ = quantize(mx.array(x), bits, group_size, mode)
    per_word = 32 // bits
    shifts = np.arange(per_word, dtype=np.uint32) * bits
    found = (np.array(weight)[..., None] >> shifts & (1 << bits) - 1).reshape(x.shape)
    step = np.repeat(_scales(np.array(scales), mode), group_size, axis=1)
    off = np.abs(_values(found, bits) * step - x)
    best = np.nanmin(np.abs(grid * step[..., None] - x[..., None]), axis=-1)
    np.testing.assert_allclose(off, best, rtol=1e-6, atol=1e-7)
    # And a scale is as fine as it can be with the largest weight in reach (nvfp4 rounds its own).
    largest = np.abs(x.reshape(16, -1, group_size)).max(-1) / np.nanmax(grid)
    ratio = _scales(np.array(scales), mode) / largest
    assert (ratio >= (1 - 2**-4 if mode == "nvfp4" else 1)).all()
    assert (ratio < (1 + 2**-4 if mode == "nvfp4" else 2)).all()


def _values(codes, bits):
    """What codes of E2M1 or E4M3 stand for (OCP Microscaling Formats, version 1.0)."""
    mantissa_bits, bias = (1, 1) if bits == 4 else (3, 7)
    sign = np.where(codes >> (bits - 1), -1.0, 1.0)
    rest = codes & ((1 << (bits - 1)) - 1)
    exponent, mantissa = rest >> mantissa_bits, rest & ((1 << mantissa_bits) - 1)
    fraction = mantissa / (1 << mantissa_bits)
    normal = np.exp2(exponent.astype(np.float64) - bias) * (1 + fraction)
    values = sign * np.where(exponent == 0, np.exp2(1.0 - bias) * fraction, normal)
    return np.where(rest == 0x7F, np.nan, values) if bits == 8 else values


def _scales(codes, mode):
    if mode == "nvfp4":
        return _values(codes.astype(np.uint32), 8)
    return np.exp2(codes.astype(np.float64) - 127)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["random", "outliers", "zero"])
def test_errors_are_those_of_what_is_stored(kind, dtype, kernel_level):
    """In float64, over several parts of which the last isn't whole."""
    rng = np.random.default_rng(2)
    x = KINDS[kind](rng, rng.normal(size=(700, 384)))
    w = mx.array(x.astype(np.float32)).astype(dtype)
    schemes = [("affine", bits, 64) for bits in (2, 3, 4, 5, 6, 8)]
    schemes += [(mode, *how) for mode, how in FLOATS.items()]
    exact = np.array(w.astype(mx.float32), np.float64)
    for mode, bits, group_size in schemes:
        words, scales, biases, errors = quantize(w, bits, group_size, mode)
        if biases is not None:
            scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
        back = mx.dequantize(words, scales, biases, group_size, bits, mode=mode, dtype=mx.float32)
        error, whole = np.array(errors).sum(axis=0, dtype=np.float64)
        assert whole == pytest.approx((exact**2).sum(), rel=1e-4)
        want = ((np.array(back, np.float64) - exact) ** 2).sum()
        assert error == pytest.approx(want, rel=1e-3), (mode, bits)


@pytest.mark.full
@pytest.mark.parametrize("bits", [3, 4, 8])
def test_every_bit_of_a_large_matrix(bits, kernel_level):
    w = mx.random.normal((1000, 2048), key=mx.random.key(bits))
    expected = mx.quantize(w, group_size=64, bits=bits)
    assert all(same_bits(a, b) for a, b in zip(quantize(w, bits, 64)[:3], expected, strict=True))


def test_strided_and_empty_matrices(kernel_level):
    w = mx.random.normal((64, 96), key=mx.random.key(0)).T
    expected = mx.quantize(mx.contiguous(w), group_size=32, bits=4)
    assert all(same_bits(a, b) for a, b in zip(quantize(w, 4, 32)[:3], expected, strict=True))


def test_wrong_arguments_are_refused_by_name():
    kernels = load().module
    if kernels is None:
        pytest.skip("only on machines with native kernels")
    w = mx.zeros((2, 64))
    with pytest.raises(ValueError, match="quantize: 7 bits aren't supported"):
        kernels.quantize(w, 7, 32)
    with pytest.raises(ValueError, match="quantize: groups of 16 aren't supported"):
        kernels.quantize(w, 4, 16)
    with pytest.raises(ValueError, match="quantize: K=64 isn't a multiple of the group 128"):
        kernels.quantize(w, 4, 128)
    with pytest.raises(ValueError, match="quantize: w is int32, expected a floating type"):
        kernels.quantize(w.astype(mx.int32), 4, 32)
    with pytest.raises(
        ValueError, match="quantize_floats: 6 bits in groups of 32 aren't supported"
    ):
        kernels.quantize_floats(w, 6, 32)
    with pytest.raises(ValueError, match="quantize_floats: K=40 isn't a multiple of the group 16"):
        kernels.quantize_floats(mx.zeros((2, 40)), 4, 16)
    with pytest.raises(ValueError, match=r"quantize: w has shape \[64\], expected 2 dimensions"):
        kernels.quantize(w[0], 4, 32)
