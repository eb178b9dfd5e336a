"""Packed weights against NumPy's reading of the same bits."""

import mlx.core as mx
import numpy as np
import pytest

from mlxserve.kernels.quantized import PackedWeight, dequantize, quantized_matmul


def pack(n, k, bits, group, seed=0):
    w = mx.array(np.random.default_rng(seed).normal(size=(n, k)).astype(np.float32))
    return PackedWeight(*mx.quantize(w, group_size=group, bits=bits), bits, group)


def unpacked(packed):
    """float64 `[N, K]` from the words themselves, low bits first."""
    n, k = packed.shape
    words = np.array(packed.weight)
    bits = np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little")
    q = bits.reshape(n, k, packed.bits) @ (1 << np.arange(packed.bits))
    scales, biases = (
        np.repeat(np.array(x, np.float64), packed.group_size, axis=-1)
        for x in (packed.scales, packed.biases)
    )
    return q * scales + biases


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("group", [32, 64])
def test_matmul_equals_the_unpacked_product(bits, group):
    packed = pack(24, 192, bits, group)
    assert packed.shape == (24, 192)
    x = np.random.default_rng(1).normal(size=(5, 192)).astype(np.float32)
    expected = x.astype(np.float64) @ unpacked(packed).T
    out = quantized_matmul(mx.array(x), packed)
    np.testing.assert_allclose(np.array(out), expected, rtol=1e-4, atol=1e-4)
    again = mx.array(x) @ dequantize(packed, mx.float32).T
    np.testing.assert_allclose(np.array(again), expected, rtol=1e-4, atol=1e-4)


def test_half_precision_scales_widen_exactly():
    packed = pack(8, 64, 4, 32)
    half = PackedWeight(
        packed.weight, packed.scales.astype(mx.float16), packed.biases.astype(mx.float16), 4, 32
    )
    np.testing.assert_allclose(np.array(dequantize(half, mx.float32)), unpacked(half), rtol=1e-6)


def test_a_wrong_width_is_refused_by_number():
    with pytest.raises(ValueError, match="x has K=100, the weight has K=64"):
        quantized_matmul(mx.zeros((1, 100)), pack(8, 64, 4, 32))
