"""Attention with kept tokens, small pages and values that are the keys.

Every implementation against NumPy in float64, and the native one against itself, bit for bit.
"""

import itertools

import mlx.core as mx
import numpy as np
import pytest

from mlxserve.kernels import registry
from mlxserve.kernels.attention import PagedRows, paged_attention
from mlxserve.kernels.pages import pack_keys
from tests.kernels.paged import P, Paged, check_recorded
from tests.kernels.test_attention_native import options, run

# Windows below, at and above a page; kept tokens below, at and above one.
WINDOWS = (1, 20, P, 100)
KEEPS = (1, 10, P, P + 6, 150)


def ragged(page, keep):
    """Decode rows and chunks that cross pages: before, at and beyond the end of the kept tokens."""
    decode = [
        (s, 1) for s in {0, 1, keep - 1, keep, keep + 1, 2 * page, 5 * page - 1, 9 * page + 1}
    ]
    return [*decode, (0, keep + page), (5 * page, 1), (6 * page - 3, 2 * page + 5), (keep, 7)]


def check(paged, hq, dim, tolerance=2e-5, **how):
    q = np.random.default_rng(dim).normal(size=(paged.total, hq, dim)).astype(np.float32)
    how = {"scale": dim**-0.5, **how}
    expected = paged.expected(q.astype(np.float64), **how)
    np.testing.assert_allclose(run(paged, q, **how), expected, atol=tolerance)


@pytest.mark.full
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16], ids=str)
def test_kept_tokens_are_seen_beside_the_window(kernel_level, window, keep, dtype):
    """What no query sees is not a number, also within the last kept page."""
    rows = ragged(P, keep)
    for sealed in (True, False):
        paged = Paged(rows, 2, 24, window=window, keep=keep, dtype=dtype, sealed=sealed)
        assert paged.described.table[:, 6].any() == sealed
        check(paged, 4, 24)


@pytest.mark.full
@pytest.mark.parametrize("name", ["softcap", "sinks", "both"])
@pytest.mark.parametrize(("window", "keep"), [(20, 10), (100, 70)])
def test_kept_tokens_with_other_options(kernel_level, name, window, keep):
    paged = Paged(ragged(P, keep), 1, 17, window=window, keep=keep)
    check(paged, 3, 17, **options(name, 3))


@pytest.mark.full
@pytest.mark.parametrize("bits", [(8, 8), (4, 8), (8, None), (None, 4)])
@pytest.mark.parametrize(("window", "keep"), [(20, 10), (100, 70)])
def test_kept_tokens_of_packed_pages(kernel_level, bits, window, keep):
    paged = Paged(ragged(P, keep), 2, 40, window=window, keep=keep, bits=bits, filler=1e3)
    check(paged, 4, 40)


@pytest.mark.full
@pytest.mark.parametrize("page", [4, 8, 16, 32])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_pages_of_other_sizes(kernel_level, page, dtype):
    for window, keep in ((None, 0), (page - 1, 0), (3 * page, 0), (5, 3), (2 * page, page + 1)):
        for sealed in (True, False):
            rows = ragged(page, keep or 7)
            paged = Paged(rows, 2, 24, page=page, window=window, keep=keep, dtype=dtype,
                          sealed=sealed)  # fmt: skip
            check(paged, 4, 24, **options("both", 4))


@pytest.mark.full
@pytest.mark.parametrize("page", [4, 16, P])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16], ids=str)
def test_values_that_are_the_keys(kernel_level, page, dtype):
    """Of one head for all queries, as latents are."""
    for window, keep in ((None, 0), (page + 3, 2)):
        paged = Paged(ragged(page, 5), 1, 40, page=page, window=window, keep=keep, dtype=dtype,
                      sides=1)  # fmt: skip
        check(paged, 6, 40)
        check(paged, 6, 40, **options("both", 6))


@pytest.mark.full
@pytest.mark.parametrize("made", [
    {"window": 20, "keep": 10},
    {"window": 100, "keep": 70, "bits": (8, 4)},
    {"window": 30, "keep": 64, "dtype": mx.float16},
    {"window": 9, "keep": 5, "page": 4},
    {"page": 16},
    {"page": 8, "bits": (4, 8)},
    {"sides": 1},
    {"sides": 1, "page": 8, "window": 50, "keep": 20},
], ids=str)  # fmt: skip
def test_a_query_gets_the_same_bits_alone_in_a_batch_and_in_any_chunk(native_level, made):
    """On any number of threads: the long row is split over them only where it is alone."""
    rows = [(2500, 1), (700, 5), (0, 1), (40, 130), *[(100 + i, 1) for i in range(9)]]
    heads = 1 if made.get("sides") else 3
    paged = Paged(rows, heads, 40, **{"filler": 1e3, **made})
    q = np.random.default_rng(2).normal(size=(paged.total, 6, 40)).astype(np.float32)
    how = {"scale": 0.2, **options("both", 6)}
    together, described = run(paged, q, **how), paged.described
    for (first, n, start, *rest), step in itertools.product(described.table, (1, 3, 64, 1000)):
        for low in range(0, n, step):
            now = min(step, n - low)
            row = np.array([[0, now, start + low, *rest]])
            paged.described = PagedRows(row, described.pages, described.page_tokens)
            part = slice(first + low, first + low + now)
            np.testing.assert_array_equal(run(paged, q[part], **how), together[part])


def test_kept_pages_and_all_pages_give_the_same_bits(native_level):
    """A row whose pages in between are gone, and one that still has all of them."""
    made = {"window": 70, "keep": 80}
    q = np.random.default_rng(3).normal(size=(9, 6, 40)).astype(np.float32)
    some, every = (Paged([(500, 9)], 2, 40, sealed=sealed, **made) for sealed in (True, False))
    assert some.described.table[0, 6] == 2
    assert every.described.table[0, 6] == 0
    np.testing.assert_array_equal(run(some, q, scale=0.2), run(every, q, scale=0.2))


def test_a_token_that_no_query_sees_may_be_anything(native_level):
    """Beside seen ones in the same page, whichever queries are computed together."""
    paged = Paged([(40, 20)], 1, 32, window=10, keep=5, sealed=False)
    page = int(paged.described.pages[0])
    hot = [np.array(x) for x in paged.hot]
    for at, spoilt in ((6, []), (2, range(20)), (45, range(5, 15))):
        changed = [x.copy() for x in hot]
        for x in changed:
            x[page * P + at] = np.nan
        q = mx.random.normal((20, 2, 32))
        how = {"scale": 1.0, "window": 10, "keep": 5}
        pair = tuple(map(mx.array, changed))
        out = np.array(paged_attention(q, pair, paged.pool, paged.described, **how))
        assert np.flatnonzero(np.isnan(out).any(axis=(1, 2))).tolist() == list(spoilt)


@pytest.mark.parametrize(("made", "how"), [
    ({"window": 20}, {"window": 100}),
    ({"window": 20, "keep": 10}, {"window": 20, "keep": 65}),
    ({"window": 20, "keep": 10}, {"window": 90, "keep": 10}),
    ({"window": 20}, {"window": 20, "keep": 1}),
])  # fmt: skip
def test_keys_of_pages_that_are_gone_must_not_be_needed(kernel_level, made, how):
    paged = Paged([(200, 1)], 1, 16, **made)
    q = mx.zeros((1, 1, 16))
    with pytest.raises(ValueError, match="sees keys of pages that it doesn't have"):
        paged_attention(q, paged.hot, paged.pool, paged.described, scale=1.0, **how)


def test_what_does_not_fit_is_refused(kernel_level):
    paged = Paged([(70, 3)], 2, 32)
    hot, pool = paged.hot, paged.pool
    small = tuple(x[:, :, :16] for x in pool)
    bad = [
        ("keep is 3, expected .*0 where there is no window", hot, pool, {"keep": 3}),
        ("keep is -1, expected 0 or more", hot, pool, {"keep": -1, "window": 5}),
        ("rows are of pages of 64 tokens, the cache has pages of 16", hot, small, {}),
        ("expected pages of", hot, tuple(x[:, :, :48] for x in pool), {}),
        ("pool_k is packed", hot[:1], (pack_keys(pool[0], 8),), {}),
        ("hot has 2 sides and pool has 1", hot, pool[:1], {}),
    ]
    for words, some_hot, some_pool, how in bad:
        with pytest.raises(ValueError, match=words):
            paged_attention(mx.zeros((3, 4, 32)), some_hot, some_pool, paged.described, scale=1.0,
                            **how)  # fmt: skip


def test_a_step_over_values_that_are_the_keys_is_recorded():
    """The cache has one array a layer, which the recorded step writes where it is."""
    kernels = registry.native("append")
    if kernels is None:
        pytest.skip("only on machines with the native kernels")

    def step(q, k, table, ids, index, moves, hot, pool):
        hot, pool = kernels.append((hot,), ((pool,),), index, (k,), moves)
        handle = paged.described.handle(kernels)
        how = (0.2, None, 0, None, None)
        out = kernels.paged_attention(q, (hot,), ((pool,),), handle, table, ids, *how)
        return out, [hot, pool]

    paged = Paged([(130, 1), (70, 1)], 1, 24, sides=1)
    page = int(paged.described.pages[2])
    index = mx.array([page * P + 2], mx.int32)
    moves = mx.array([[page, 0]], mx.int32)
    q, k = mx.random.normal((2, 6, 24)), mx.random.normal((1, 1, 24))
    given = [q, k, *paged.described.arrays, index, moves]
    cache = [paged.hot[0], paged.pool[0]]
    check_recorded(kernels, step, given, cache)
