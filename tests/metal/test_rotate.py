"""The Metal kernel of rotary positions, executed from its source, against NumPy in float64."""

import mlx.core as mx
import numpy as np
import pytest

from mlxserve.kernels.metal.rotate import rotation
from tests.metal.test_add_rms_norm import close, random, wide
from tests.support.metal import emulate, generated_source, mlx_source
from tests.support.metal.clang import has_fused_multiply_add

FULL = pytest.mark.full
EPS = 1e-6
POSITIONS = (0, 1, 77, 4095, 131_071)


def periods(dim, base=10_000.0):
    return mx.array((base ** (np.arange(dim // 2) * 2 / dim)).astype(np.float32))


def exact(x, positions, periods, gain, weight):
    x = wide(x)
    if weight is not None:
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * wide(weight)
    angles = (np.array(positions)[:, None] / wide(periods))[:, None]
    low, high = np.split(x, 2, axis=-1)
    cosine, sine = np.cos(angles), np.sin(angles)
    return gain * np.concatenate([low * cosine - high * sine, high * cosine + low * sine], axis=-1)


def case(q_heads, kv_heads, dim, norms, dtype, positions=POSITIONS, gain=1.0, size=1.0):
    q, k = (
        random(len(positions), heads, dim, dtype=dtype, seed=i, size=size)
        for i, heads in enumerate((q_heads, kv_heads))
    )
    weights = [random(dim, dtype=dtype, seed=i) for i in (2, 3)] if norms else [None, None]
    launch = rotation(
        q, k, mx.array(positions, mx.int32), periods(dim), gain,
        (weights[0], weights[1]) if norms else None, EPS,
    )  # fmt: skip
    right = [
        exact(x, positions, periods(dim), gain, weight)
        for x, weight in zip((q, k), weights, strict=True)
    ]
    return launch, right


def check(q_heads, kv_heads, dim, norms, dtype=mx.float16, *, gain=1.0, **options):
    launch, right = case(q_heads, kv_heads, dim, norms, dtype, gain=gain)
    for got, expected in zip(emulate(launch, **options), right, strict=True):
        close(got, expected, dtype)


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
@pytest.mark.parametrize("heads", [(9, 3), (4, 1)], ids=str)
def test_heads_that_fill_threadgroups_and_those_that_do_not(heads, dtype, norms):
    check(*heads, 64, norms, dtype)


@FULL
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("dim", [16, 20, 40, 80, 96, 112, 128, 192, 256, 512])
def test_head_dims(dim, norms):
    check(2, 1, dim, norms, mode="fast")


def test_gain():
    check(2, 1, 64, True, gain=1.3)
    check(2, 1, 64, False, mx.bfloat16, gain=0.7)


@FULL
@pytest.mark.parametrize("order", ["forward", "reverse", "random"])
def test_whatever_order_threads_run_in(order):
    check(3, 2, 128, True, order=order, seed=3)


@FULL
@pytest.mark.parametrize("freedom", [
    {"flush_to_zero": True}, {"reversed_reductions": True}, {"fused_multiply_add": True},
    {"ulp_noise": 2},
], ids=lambda freedom: next(iter(freedom)))  # fmt: skip
def test_what_a_gpu_may_do_differently(freedom):
    if "fused_multiply_add" in freedom and not has_fused_multiply_add():
        pytest.skip("only on processors with a fused multiply-add")
    check(2, 1, 128, True, mode="fast", **freedom)


def test_angles_are_exact_at_any_position():
    """Ones become cosines and sines: at a million, where a float32 angle is 0.06 radians off."""
    positions = (1_000_003, 999_983, 65_537)
    q = mx.zeros((3, 1, 128), mx.float16)
    q[..., :64] = 1.0
    launch = rotation(q, q, mx.array(positions, mx.int32), periods(128), 1.0, None, EPS)
    turned, _ = emulate(launch)
    expected = exact(q, positions, periods(128), 1.0, None)
    assert np.abs(wide(turned) - expected).max() <= 2.0**-12 + 1e-6


def test_few_tokens_and_many():
    """MLX binds fewer than eight positions in another address space."""
    for positions in ((5,), tuple(range(9))):
        launch, right = case(2, 1, 64, False, mx.float16, positions)
        for got, expected in zip(emulate(launch), right, strict=True):
            close(got, expected, mx.float16)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
@pytest.mark.parametrize("norms", [False, True])
def test_the_source_that_mlx_generates_is_the_one_that_is_emulated(norms, dtype):
    for positions in ((5,), POSITIONS * 2):
        launch, _ = case(2, 1, 64, norms, dtype, positions)
        assert generated_source(launch) == mlx_source(launch)
