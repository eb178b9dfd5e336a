"""The Metal kernel that packs pages, executed from its source: the reference's bits."""

import mlx.core as mx
import numpy as np
import pytest

from mlxserve.kernels.metal.pack_pages import PACK_PAGES, pack_launch
from mlxserve.kernels.pages import pack_keys, pack_values
from tests.support.metal import emulate, generated_source, mlx_source
from tests.support.metal.clang import has_fused_multiply_add

P = 64
PACK = {True: pack_keys, False: pack_values}
FULL = pytest.mark.full


def hot_pages(n, heads, dim, dtype=mx.float16, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n * P, heads, dim)) * np.exp(rng.normal(size=(heads, dim)))
    return mx.array(x.astype(np.float32)).astype(dtype)


def packed(hot, ids, bits, keys, **options):
    launch = pack_launch(hot, mx.array(ids, mx.int32), bits, keys=keys)
    return emulate(launch, **options)


def expected(hot, ids, bits, keys):
    _, heads, dim = hot.shape
    pages = hot.reshape(-1, P, heads, dim)[mx.array(ids)].swapaxes(1, 2)
    return PACK[keys](pages, bits)


def check(hot, ids, bits, keys, **options):
    """Bit for bit, but for what a NaN may have in it."""
    got, want = packed(hot, ids, bits, keys, **options), expected(hot, ids, bits, keys)
    assert [x.dtype for x in got] == [x.dtype for x in want]
    for a, b in zip(map(np.array, got), map(np.array, want), strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(np.signbit(a[a == 0]), np.signbit(b[b == 0]))


@pytest.mark.parametrize("keys", [True, False])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_several_pages_at_once(keys, bits, dtype):
    check(hot_pages(4, 2, 64, dtype), [3, 0, 2], bits, keys)


@FULL
@pytest.mark.parametrize("keys", [True, False])
@pytest.mark.parametrize("dim", [
    72, 192, 256, *(pytest.param(dim, marks=pytest.mark.slow) for dim in (40, 80, 96, 112, 128)),
])  # fmt: skip
def test_head_dims(keys, dim):
    check(hot_pages(2, 1, dim, mx.bfloat16), [1], 8, keys, mode="fast")
    check(hot_pages(2, 3, dim), [1, 0], 4, keys, mode="fast")


@pytest.mark.parametrize("keys", [True, False])
def test_numbers_that_are_all_alike_or_not_finite_or_too_large(keys):
    x = np.array(hot_pages(1, 1, 64, mx.bfloat16).astype(mx.float32))
    x[:, 0, 0:32] = 0.25  # groups of no width
    x[3, 0, 5] = np.nan
    x[5, 0, 40] = np.inf
    x[7, 0, 41] = -np.inf
    x[9, 0, 50] = 1e30
    x[11, 0, 51] = -1e30
    x[:, 0, 60], x[13, 0, 61] = 0.0, -0.0
    check(mx.array(x).astype(mx.bfloat16), [0], 8, keys)


@FULL
@pytest.mark.parametrize("order", ["forward", "reverse", "random"])
@pytest.mark.parametrize("keys", [True, False])
def test_whatever_order_threads_run_in(order, keys):
    check(hot_pages(2, 2, 80), [1, 0], 4, keys, order=order, seed=3)


@FULL
@pytest.mark.parametrize("keys", [True, False])
@pytest.mark.parametrize("freedom", [
    {"flush_to_zero": True},
    {"fused_multiply_add": True},
    {"ulp_noise": 4},
], ids=lambda freedom: next(iter(freedom)))  # fmt: skip
def test_what_a_gpu_may_do_differently(keys, freedom):
    """Then a code may be the next one where a number lies in the middle between two."""
    if "fused_multiply_add" in freedom and not has_fused_multiply_add():
        pytest.skip("only on processors with a fused multiply-add")
    hot = hot_pages(2, 2, 80)
    got = packed(hot, [1, 0], 8, keys, mode="fast", **freedom)
    want = expected(hot, [1, 0], 8, keys)
    for a, b in zip(got[1:], want[1:], strict=True):
        np.testing.assert_allclose(np.array(a), np.array(b), rtol=2**-10)
    codes, wanted = (np.array(x[0]).view(np.uint8).astype(int) for x in (got, want))
    assert np.abs(codes - wanted).max() <= 1
    assert (codes != wanted).mean() < 0.01


def test_the_signature_is_mlx_s(monkeypatch):
    launch = pack_launch(hot_pages(1, 1, 64), mx.array([0], mx.int32), 8, keys=True)
    assert launch.kernel is PACK_PAGES
    assert generated_source(launch) == mlx_source(launch)
