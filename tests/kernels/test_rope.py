"""Rotary positions against NumPy in float64, at every instruction level."""

import mlx.core as mx
import numpy as np
import pytest

from mlxserve.kernels import rope
from mlxserve.kernels.native import load


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def periods_of(dim, theta=10_000.0):
    return (theta ** (np.arange(0, dim, 2) / dim)).astype(np.float32)


def exact(x, positions, periods, gain=1.0, norm=None, eps=1e-6):
    x = x.astype(np.float64)
    if norm is not None:
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * norm
    angles = positions[:, None, None] / periods.astype(np.float64)
    a, b = np.split(x, 2, axis=-1)
    c, s = np.cos(angles), np.sin(angles)
    return gain * np.concatenate([a * c - b * s, b * c + a * s], axis=-1)


def rotate(q, k, positions, periods, gain=1.0, **norms):
    norms = {name: w if w is None or name == "eps" else mx.array(w) for name, w in norms.items()}
    positions = mx.array(positions.astype(np.int32))
    out = rope.rotate(mx.array(q), mx.array(k), positions, mx.array(periods), gain, **norms)
    return [np.array(x) for x in out]


@pytest.mark.parametrize("dim", [2, 6, 30, 32, 64, 72, 128, 256])
@pytest.mark.parametrize("heads", [(1, 1), (9, 3)])
def test_rotation_equals_float64(dim, heads, kernel_level):
    positions = np.array([0, 1, 2, 63, 3])
    q, k = (numbers(5, h, dim, seed=h) for h in heads)
    periods = periods_of(dim)
    for got, x in zip(rotate(q, k, positions, periods, 1.3), (q, k), strict=True):
        np.testing.assert_allclose(got, exact(x, positions, periods, 1.3), atol=3e-5)


def test_far_positions_are_exact(native_level):
    """To 1e-5 up to position 131072, where a float32 angle is 0.008 radians off."""
    positions = np.array([131_072, 131_071, 99_991, 65_537, 12_345, 1 << 20])
    q, k = numbers(6, 2, 64), numbers(6, 1, 64, seed=1)
    periods = periods_of(64)
    for got, x in zip(rotate(q, k, positions, periods), (q, k), strict=True):
        np.testing.assert_allclose(got, exact(x, positions, periods), atol=3e-6)


def test_every_quarter_of_the_circle(native_level):
    """Angles on both sides of every multiple of 45 degrees, and the unit vectors they give."""
    positions = np.arange(0, 4000)
    periods = np.array([4.0 / np.pi, 1.0, 0.37, 1e6], np.float32)
    x = np.zeros((len(positions), 1, 8), np.float32)
    x[..., :4] = 1
    got, _ = rotate(x, x, positions, periods)
    np.testing.assert_allclose(got, exact(x, positions, periods), atol=3e-7)
    assert np.abs(np.hypot(got[..., :4], got[..., 4:]) - 1).max() < 3e-7


@pytest.mark.parametrize("dim", [6, 64, 128])
def test_heads_are_normed_before_they_turn(dim, kernel_level):
    positions = np.array([0, 5, 9])
    q, k = numbers(3, 4, dim), numbers(3, 2, dim, seed=1)
    q_norm, k_norm = numbers(dim, seed=2), numbers(dim, seed=3)
    periods = periods_of(dim)
    got = rotate(q, k, positions, periods, q_norm=q_norm, k_norm=k_norm, eps=1e-3)
    expected = exact(q, positions, periods, norm=q_norm, eps=1e-3)
    np.testing.assert_allclose(got[0], expected, atol=2e-5)
    expected = exact(k, positions, periods, norm=k_norm, eps=1e-3)
    np.testing.assert_allclose(got[1], expected, atol=2e-5)
    with pytest.raises(ValueError, match="q_norm and k_norm come together"):
        rotate(q, k, positions, periods, q_norm=q_norm, eps=1e-3)


def test_a_token_is_the_same_in_any_batch(kernel_level):
    rng = np.random.default_rng(0)
    positions = rng.integers(0, 5000, 200)
    q, k, norm = numbers(200, 8, 64), numbers(200, 2, 64, seed=1), numbers(64, seed=2)
    periods = periods_of(64)
    batch = rotate(q, k, positions, periods, q_norm=norm, k_norm=norm)
    for t in (0, 1, 77, 199):
        one = slice(t, t + 1)
        alone = rotate(q[one], k[one], positions[one], periods, q_norm=norm, k_norm=norm)
        assert all(np.array_equal(a, b[one]) for a, b in zip(alone, batch, strict=True))


def test_wrong_arguments_are_refused_by_name():
    native = load().module
    if native is None:
        pytest.skip("only on machines with native kernels")
    q, k, periods = mx.zeros((3, 4, 8)), mx.zeros((3, 2, 8)), mx.ones((4,))
    positions = mx.zeros((3,), mx.int32)
    rest = (1.0, None, None, 1e-6)
    with pytest.raises(ValueError, match=r"rope: k is \[2, 2, 8\], expected \[3, 2, 8\]"):
        native.rope(q, k[:2], positions, periods, *rest)
    with pytest.raises(ValueError, match=r"rope: positions is \[2\], expected \[3\]"):
        native.rope(q, k, positions[:2], periods, *rest)
    with pytest.raises(ValueError, match="rope: positions is uint32, expected int32"):
        native.rope(q, k, positions.astype(mx.uint32), periods, *rest)
    with pytest.raises(ValueError, match=r"rope: periods is \[3\], expected \[4\]"):
        native.rope(q, k, positions, periods[:3], *rest)
    with pytest.raises(ValueError, match="rope: D=7 isn't an even number up to 1024"):
        native.rope(q[..., :7], k[..., :7], positions, periods, *rest)
    with pytest.raises(ValueError, match=r"rope: k_norm is \[4\], expected \[8\]"):
        native.rope(q, k, positions, periods, 1.0, None, periods, 1e-6)
