"""Cases of the Metal matmul over packed weights, and their results in float64."""

import mlx.core as mx
import numpy as np

from mlxserve.kernels.quantized import PackedWeight


def random_case(count, outputs, inputs, bits, group, dtype=mx.float16, seed=0):
    """x `[count, inputs]` and a weight `[outputs, inputs]`."""
    rng = np.random.default_rng(seed)
    numbers = (rng.normal(size=(n, inputs)) for n in (count, outputs))
    x, w = (mx.array(n.astype(np.float32)).astype(dtype) for n in numbers)
    return x, PackedWeight(*mx.quantize(w, group, bits), bits, group)


def exact(x, packed):
    """float64 `[count, outputs]`."""
    words = np.array(packed.weight)[..., None]
    codes = words >> np.arange(0, 32, packed.bits, dtype=np.uint32) & (1 << packed.bits) - 1
    scales, biases = (
        wide(side).repeat(packed.group_size, 1) for side in (packed.scales, packed.biases)
    )
    weight = codes.reshape(len(words), -1) * scales + biases
    return wide(x) @ weight.T


def wide(x):
    return np.array(x.astype(mx.float32), np.float64)
