"""Building blocks against torch, at ordinary and at extreme values."""

import mlx.core as mx
import numpy as np
import pytest
import torch

from mlxserve.kernels.gates import GATES, gated
from mlxserve.models.layers import Embedding, Linear, RMSNorm

TORCH = {
    "silu": torch.nn.functional.silu,
    "gelu_pytorch_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
}


@pytest.mark.parametrize("name", GATES)
def test_gates_equal_torch(name):
    x = np.concatenate([np.linspace(-12, 12, 481), [-300.0, 300.0]]).astype(np.float32)
    up = np.linspace(-2, 2, x.size).astype(np.float32)
    expected = (TORCH[name](torch.from_numpy(x)) * torch.from_numpy(up)).numpy()
    got = np.array(gated(mx.array(x)[None], mx.array(up)[None], name))[0]
    np.testing.assert_allclose(got, expected, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("name", GATES)
def test_gates_do_not_overflow_in_float16(name):
    x = mx.array([[-60_000.0, -150.0, 0.0, 150.0, 60_000.0]], dtype=mx.float16)
    got = np.array(gated(x, mx.ones((1, 5), dtype=mx.float16), name))
    assert got[0].tolist() == [0.0, 0.0, 0.0, 150.0, 59_999 // 32 * 32 + 32]


def test_unknown_gate():
    with pytest.raises(ValueError, match="unknown activation relu"):
        gated(mx.zeros((1, 5)), mx.zeros((1, 5)), "relu")


def test_norm_equals_torch():
    x = np.random.default_rng(0).normal(size=(3, 8)).astype(np.float32)
    norm, reference = RMSNorm(8, 0.1), torch.nn.RMSNorm(8, eps=0.1)
    norm.weight = mx.arange(8, dtype=mx.float32)
    reference.weight.data = torch.arange(8.0)
    expected = reference(torch.from_numpy(x)).detach().numpy()
    np.testing.assert_allclose(norm(mx.array(x)), expected, rtol=1e-6, atol=1e-6)


def test_linear_and_tied_embedding():
    linear = Linear(3, 2, bias=True)
    linear.weight, linear.bias = mx.array([[1.0, 2, 3], [4, 5, 6]]), mx.array([0.5, -0.5])
    assert linear(mx.array([[1.0, 0, 1]])).tolist() == [[4.5, 9.5]]
    embedding = Embedding(2, 3)
    embedding.weight = linear.weight
    assert embedding(mx.array([1, 0, 1])).tolist() == [[4, 5, 6], [1, 2, 3], [4, 5, 6]]
    assert embedding.as_linear(mx.array([1.0, 0, 1])).tolist() == [4, 10]
