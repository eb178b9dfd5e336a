"""Packed pages: the format against NumPy, and attention over them, at every instruction level."""

import mlx.core as mx
import numpy as np
import pytest

from mlxserve.kernels import registry
from mlxserve.kernels.append import append
from mlxserve.kernels.attention import PagedRows, paged_attention
from mlxserve.kernels.pages import (
    PackedPages,
    pack_keys,
    pack_values,
    unpack_keys,
    unpack_values,
)
from tests.kernels import paged as oracle
from tests.kernels.paged import P, Paged, check_recorded, same_bits
from tests.kernels.test_attention_native import options, run

ROWS = [(63, 1), (64, 1), (200, 1), (60, 10), (128, 3), (5, 70)]
HEADS = [(4, 4, 16), (9, 3, 64), (3, 1, 20), (8, 1, 72), (5, 5, 1)]


def pages(n, heads, dim, seed=0):
    """Channels of all sizes, and heads whose numbers are odd in some way."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, heads, P, dim)) * 10 ** rng.uniform(-2, 2, size=dim)
    x[0] += 100
    x[0, 0] = 3.7  # nothing to tell apart
    x[1, 0] = rng.normal(size=(P, dim)) * 1e-8  # below float16's smallest step
    x[2, 0] = rng.normal(size=(P, dim)) * 1e6  # beyond its largest number
    x[3, 0] = 3e38 * np.sign(x[3, 0])
    x[4, 0] = np.copysign(0, x[4, 0])
    x[5, 0, 40, dim // 2], x[6, 0, 50, dim // 2], x[7, 0, 3, 0] = np.nan, np.inf, -np.inf
    return x.astype(np.float32)


@pytest.mark.full
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("bits", [(8, 4), (4, 8)])
@pytest.mark.parametrize(("heads", "dim"), [(2, 1), (1, 7), (3, 20), (2, 64), (1, 112)])
def test_pages_are_packed_as_defined(kernel_level, dtype, bits, heads, dim):
    given = [mx.array(pages(8, heads, dim, seed)).astype(dtype) for seed in (1, 2)]
    pool = (pack_keys(mx.zeros((9, heads, P, dim)), bits[0]),
            pack_values(mx.zeros((9, heads, P, dim)), bits[1]))  # fmt: skip
    hot = tuple(x.swapaxes(1, 2).reshape(-1, heads, dim) for x in given)
    moves = mx.array([[i, 8 - i] for i in range(8)], mx.int32)
    none = mx.zeros((0, heads, dim), dtype)
    _, pool = append(hot, pool, mx.zeros((0,), mx.int32), none, none, moves)
    for x, n, got, pack in zip(given, bits, pool, oracle.PACK, strict=True):
        expected, _ = pack(np.array(x.astype(mx.float32)), n)
        same_bits([a[8:0:-1] for a in got], expected)
        assert all(not np.array(a[0]).any() for a in got)  # the page that nobody sealed


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dim", [1, 20, 64, 80])
def test_a_number_comes_back_to_half_a_step(bits, dim):
    x = pages(8, 2, dim)[:3, 1:].astype(np.float64)
    top = 2**bits - 1
    for keys, packed in ((True, pack_keys), (False, pack_values)):
        made = packed(mx.array(x.astype(np.float32)), bits)
        back = np.array(unpack_keys(made) if keys else unpack_values(made, dim), np.float64)
        groups = [x] if keys else np.split(x, range(32, dim, 32), axis=3)
        for group, got in zip(
            groups, [back] if keys else np.split(back, range(32, dim, 32), axis=3), strict=True
        ):
            axis = 2 if keys else 3
            low, high = group.min(axis, keepdims=True), group.max(axis, keepdims=True)
            step = (high - low) / top
            # float16 is off by 2^-11 of a number, and not at all by less than 2^-25.
            rounding = np.maximum(np.abs(low), 2**-14) * 2**-11
            rounding = rounding + top * np.maximum(step, 2**-14) * 2**-11
            assert (np.abs(got - group) <= 0.5001 * step + 1.001 * rounding).all()


@pytest.mark.full
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("bits", [(8, 8), (4, 4), (8, None), (None, 4)])
def test_attention_reads_packed_pages(kernel_level, heads, bits):
    hq, hk, dim = heads
    for window, name, dtype in (
        (None, "plain", mx.float32),
        (100, "both", mx.float16),
        (33, "softcap", mx.bfloat16),
        (64, "sinks", mx.float32),
    ):
        paged = Paged(ROWS, hk, dim, window=window, dtype=dtype, bits=bits, filler=1e3)
        q = np.random.default_rng(dim).normal(size=(paged.total, hq, dim)).astype(np.float32)
        how = {"scale": dim**-0.5, **options(name, hq)}
        expected = paged.expected(q.astype(np.float64), **how)
        np.testing.assert_allclose(run(paged, q, **how), expected, atol=2e-5)


def unpacked(paged, dim):
    """The same pages, plain."""
    keys, values = paged.pool
    return unpack_keys(keys), unpack_values(values, dim)


@pytest.mark.full
@pytest.mark.parametrize("bits", [(8, 4), (4, 8)])
@pytest.mark.parametrize("name", ["plain", "both"])
@pytest.mark.parametrize("window", [None, 90])
def test_packed_pages_give_the_bits_of_their_numbers(native_level, bits, name, window):
    """And so does a row alone, in a batch and in chunks, as with plain pages."""
    rows = [(2000, 1), (700, 5), (0, 1), (300, 70), *[(100 + i, 1) for i in range(12)]]
    paged = Paged(rows, 3, 40, window=window, bits=bits)
    q = np.random.default_rng(2).normal(size=(paged.total, 9, 40)).astype(np.float32)
    how = {"scale": 0.2, **options(name, 9)}
    together, table, packed = run(paged, q, **how), paged.described.table, paged.pool
    paged.pool = unpacked(paged, 40)
    np.testing.assert_array_equal(run(paged, q, **how), together)
    paged.pool = packed
    for first, n, start, *rest in table:
        for step in (1, 3, 33):
            for low in range(0, n, step):
                now = min(step, n - low)
                row = [0, now, start + low, *rest]
                paged.described = PagedRows(np.array([row]), paged.described.pages)
                part = slice(first + low, first + low + now)
                np.testing.assert_array_equal(run(paged, q[part], **how), together[part])


def test_queries_and_hot_pages_of_16_bits(kernel_level):
    paged = Paged([(70, 3)], 2, 32, dtype=mx.float16, bits=(8, 8))
    q = mx.random.normal((3, 4, 32)).astype(mx.float16)
    out = paged_attention(q, paged.hot, paged.pool, paged.described, scale=1.0)
    assert out.dtype == mx.float16


def test_pages_are_sealed_where_they_are():
    """The pool is large beside a page: a copy of one of its arrays would show."""
    if registry.native("append") is None:
        pytest.skip("only on machines with the native kernels")
    pool = (pack_keys(mx.zeros((512, 2, P, 64)), 8), pack_values(mx.zeros((512, 2, P, 64)), 4))
    hot = (mx.ones((4 * P, 2, 64)), mx.ones((4 * P, 2, 64)))
    index, x, moves = mx.array([5], mx.int32), mx.ones((1, 2, 64)), mx.array([[0, 1]], mx.int32)
    mx.eval(hot, pool, index, x, moves)
    size, before = min(a.nbytes for side in pool for a in side), mx.get_active_memory()
    mx.reset_peak_memory()
    for _ in range(5):
        hot, pool = append(hot, pool, index, x, x, moves)
        mx.eval(hot, pool)
    assert mx.get_peak_memory() - before < size / 2
    assert (np.array(pool[0].biases[1]) == 1).all()


def test_a_recorded_step_reads_and_keeps_packed_pages():
    kernels = registry.native("append")
    if kernels is None:
        pytest.skip("only on machines with the native kernels")

    def step(q, k, table, ids, index, hot_k, hot_v, *pools):
        pool = PackedPages(*pools[:3]), PackedPages(*pools[3:])
        hot, pool = append((hot_k, hot_v), pool, index, k, k)
        handle = paged.described.handle(kernels)
        sides = (tuple(pool[0]), tuple(pool[1]))
        how = (0.2, None, 0, None, None)
        out = kernels.paged_attention(q, hot, sides, handle, table, ids, *how)
        return out, [*hot, *sides[0], *sides[1]]

    paged = Paged([(130, 1), (70, 1)], 2, 24, bits=(8, 4))
    index = mx.array([int(paged.described.pages[2]) * P + 2], mx.int32)
    q, k = mx.random.normal((2, 6, 24)), mx.random.normal((1, 2, 24))
    given = [q, k, *paged.described.arrays, index]
    cache = [*paged.hot, *paged.pool[0], *paged.pool[1]]
    check_recorded(kernels, step, given, cache)


@pytest.mark.parametrize("bits", [(8, 4), (8, 8), (4, 8)])
@pytest.mark.parametrize("page", [4, 8, 16, 32])
def test_small_pages_are_packed_and_read_as_defined(kernel_level, page, bits):
    """With 40 channels that fill no vector. 4 tokens in 4 bits fill no word."""
    if page * bits[0] % 32:
        return
    rng = np.random.default_rng(page)
    given = [rng.normal(size=(3, 2, page, 40)).astype(np.float32) + 5 for _ in "kv"]
    hot = tuple(mx.array(x).swapaxes(1, 2).reshape(-1, 2, 40) for x in given)
    empty = mx.zeros((3, 2, page, 40))
    pool = pack_keys(empty, bits[0]), pack_values(empty, bits[1])
    none, moves = mx.zeros((0, 2, 40)), mx.array([[i, 2 - i] for i in range(3)], mx.int32)
    _, pool = append(hot, pool, mx.zeros((0,), mx.int32), none, none, moves)
    back = unpack_keys(pool[0], page), unpack_values(pool[1], 40)
    for x, n, got, read, pack in zip(given, bits, pool, back, oracle.PACK, strict=True):
        expected, numbers = pack(x[::-1], n)
        same_bits(got, expected)
        np.testing.assert_allclose(np.array(read), numbers, rtol=1e-6)
    rows = [(page - 1, 1), (5 * page, 2 * page + 1), (7 * page + 1, 3)]
    paged = Paged(rows, 2, 40, page=page, bits=bits, window=3 * page, filler=1e3)
    q = rng.normal(size=(paged.total, 4, 40)).astype(np.float32)
    expected = paged.expected(q.astype(np.float64), scale=0.2)
    np.testing.assert_allclose(run(paged, q, scale=0.2), expected, atol=2e-5)


def test_codes_that_fill_no_word_are_refused(kernel_level):
    with pytest.raises(ValueError, match="4 tokens of keys in 4 bits fill no word"):
        pack_keys(mx.zeros((1, 2, 4, 8)), 4)
    paged = Paged([(9, 1)], 2, 8, page=4, bits=(8, 8))
    keys, values = paged.pool
    pool = keys._replace(codes=keys.codes[..., :0]), values
    with pytest.raises(ValueError, match=r"8 or 4 bits|4 or 8 bits"):
        paged_attention(mx.zeros((1, 2, 8)), paged.hot, pool, paged.described, scale=1.0)


def test_bits_and_pages_that_cannot_be_packed_are_refused():
    for pack in (pack_keys, pack_values):
        for bits in (0, 2, 3, 5, 16):
            with pytest.raises(ValueError, match=f"in 4 or 8 bits, not in {bits}"):
                pack(mx.zeros((1, 2, P, 8)), bits)
        for wrong in (
            mx.zeros((1, 2, 63, 8)),
            mx.zeros((2, P, 8)),
            mx.zeros((1, 2, P, 8), mx.int32),
        ):
            with pytest.raises(ValueError, match=r"expected \[pages, heads, P, D\]"):
                pack(wrong, 8)
    with pytest.raises(ValueError, match="3 groups of 32 channels, D is 64"):
        unpack_values(pack_values(mx.zeros((1, 2, P, 80)), 4), 64)


def test_packed_arrays_that_do_not_fit_are_refused(kernel_level):
    paged = Paged([(130, 1)], 2, 40, bits=(8, 8))
    keys, values = paged.pool
    bad = [
        ("codes", (keys._replace(codes=keys.codes[..., :12]), values)),
        ("int32", (keys._replace(codes=keys.codes.astype(mx.int32)), values)),
        ("scales", (keys._replace(scales=keys.scales[:, :1]), values)),
        ("biases", (keys._replace(biases=keys.biases[..., None]), values)),
        ("float32", (keys._replace(scales=keys.scales.astype(mx.float32)), values)),
        ("codes", (keys, values._replace(codes=values.codes[..., :12]))),
        ("scales", (keys, values._replace(scales=values.scales[..., 0]))),
    ]
    q, none = mx.zeros((1, 2, 40)), mx.zeros((0, 2, 40))
    seal, nowhere = mx.array([[0, 0]], mx.int32), mx.zeros((0,), mx.int32)
    for words, pool in bad:
        with pytest.raises(ValueError, match=words):
            paged_attention(q, paged.hot, pool, paged.described, scale=1.0)
        with pytest.raises(ValueError, match=words):
            append(paged.hot, pool, nowhere, none, none, seal)


def test_pools_of_other_sizes_are_refused():
    if registry.native("attention") is None:
        pytest.skip("only on machines with the native kernels")
    paged = Paged([(130, 1)], 2, 40, bits=(8, 8))
    keys, values = paged.pool
    wider = pack_keys(mx.zeros((keys.codes.shape[0], 2, P, 41)), 8)
    fewer = PackedPages(*(x[1:] for x in values))
    q = mx.zeros((1, 2, 40))
    for words, pool in (("pool_k.codes is", (wider, values)),
                        ("pool_v.codes is", (keys, fewer)),
                        ("pool_v.codes is", (keys, pack_values(mx.zeros((6, 2, P, 72)), 4))),
                        ("pool_k.codes is", (values, values))):  # fmt: skip
        with pytest.raises(ValueError, match=f"paged_attention: {words} .*expected"):
            paged_attention(q, paged.hot, pool, paged.described, scale=1.0)
