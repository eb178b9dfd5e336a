"""Gated activations against NumPy in float64, at every instruction level."""

import mlx.core as mx
import numpy as np
import pytest

from mlxserve.kernels.gates import GATES, gated
from mlxserve.kernels.native import load


def exact(gate, up, kind):
    gate, up = gate.astype(np.float64), up.astype(np.float64)
    slope = gate
    if kind == "gelu_pytorch_tanh":
        slope = 2 * np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
    with np.errstate(over="ignore"):
        return gate / (1 + np.exp(-slope)) * up


@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("width", [1, 7, 16, 17, 576, 640])
def test_gates_equal_float64(kind, width, kernel_level):
    rng = np.random.default_rng(width)
    gate, up = rng.normal(size=(2, 3, width), scale=3).astype(np.float32)
    got = np.array(gated(mx.array(gate), mx.array(up), kind))
    np.testing.assert_allclose(got, exact(gate, up, kind), rtol=1e-6, atol=5e-6)


@pytest.mark.parametrize(("kind", "lowest"), [("silu", -80.0), ("gelu_pytorch_tanh", -2.0)])
def test_one_pass_keeps_relative_precision(kind, lowest, native_level):
    """Also where the activation is tiny; the argument of gelu's exponential grows like x^3, and
    with it the share of a rounding: 5e-6 at -5, where gelu is 2e-7."""
    gate = np.linspace(lowest, 80, 40_001, dtype=np.float32)[None]
    up = np.full_like(gate, 1.5)
    got = np.array(gated(mx.array(gate), mx.array(up), kind))
    np.testing.assert_allclose(got, exact(gate, up, kind), rtol=1e-6)


@pytest.mark.parametrize("kind", GATES)
def test_tails_are_finite(kind, kernel_level):
    gate = mx.array([[-1e30, -1e4, -100.0, 0.0, 100.0, 1e4]])
    got = gated(gate, mx.ones(gate.shape), kind)
    assert got.tolist() == [[0.0, 0.0, 0.0, 0.0, 100.0, 1e4]]


@pytest.mark.parametrize("kind", GATES)
def test_a_row_is_the_same_in_any_batch(kind, kernel_level):
    rng = np.random.default_rng(0)
    gate, up = (mx.array(rng.normal(size=(300, 577)).astype(np.float32)) for _ in range(2))
    batch = gated(gate, up, kind)
    for row in (0, 1, 150, 299):
        one = slice(row, row + 1)
        assert mx.array_equal(gated(gate[one], up[one], kind), batch[one])


def test_wrong_arguments_are_refused_by_name():
    x = mx.zeros((2, 8))
    with pytest.raises(ValueError, match="gated: unknown activation relu"):
        gated(x, x, "relu")
    with pytest.raises(ValueError, match="gated: up is"):
        gated(x, mx.zeros((2, 7)), "silu")
    native = load().module
    if native is None:
        pytest.skip("only on machines with native kernels")
    with pytest.raises(ValueError, match="gated: gate is bfloat16, expected float32"):
        native.gated(x.astype(mx.bfloat16), x, "silu")
