"""Our quantiser against MLX's: the same bits for every kind of numbers."""

import mlx.core as mx
import numpy as np
import pytest

from mlxserve.kernels.native import load
from mlxserve.kernels.quantize import quantize

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
                got = quantize(x.astype(dtype), bits, group_size)
                assert all(same_bits(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.full
@pytest.mark.parametrize("bits", [3, 4, 8])
def test_every_bit_of_a_large_matrix(bits, kernel_level):
    w = mx.random.normal((1000, 2048), key=mx.random.key(bits))
    expected = mx.quantize(w, group_size=64, bits=bits)
    assert all(same_bits(a, b) for a, b in zip(quantize(w, bits, 64), expected, strict=True))


def test_strided_and_empty_matrices(kernel_level):
    w = mx.random.normal((64, 96), key=mx.random.key(0)).T
    expected = mx.quantize(mx.contiguous(w), group_size=32, bits=4)
    assert all(same_bits(a, b) for a, b in zip(quantize(w, 4, 32), expected, strict=True))


def test_wrong_arguments_are_refused_by_name():
    native = load().module
    if native is None:
        pytest.skip("only on machines with native kernels")
    w = mx.zeros((2, 64))
    with pytest.raises(ValueError, match="quantize: 7 bits aren't supported"):
        native.quantize(w, 7, 32)
    with pytest.raises(ValueError, match="quantize: groups of 16 aren't supported"):
        native.quantize(w, 4, 16)
    with pytest.raises(ValueError, match="quantize: K=64 isn't a multiple of the group 128"):
        native.quantize(w, 4, 128)
    with pytest.raises(ValueError, match="quantize: w is int32, expected a floating type"):
        native.quantize(w.astype(mx.int32), 4, 32)
    with pytest.raises(ValueError, match=r"quantize: w has shape \[64\], expected 2 dimensions"):
        native.quantize(w[0], 4, 32)
