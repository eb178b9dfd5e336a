"""Native paged attention against NumPy in float64, and against itself, bit for bit."""

import itertools
import os
import subprocess
import sys

import mlx.core as mx
import numpy as np
import pytest

from mlxserve.config import CPU_LEVELS
from mlxserve.kernels import attention, native, registry
from mlxserve.kernels.attention import PagedRows, paged_attention
from tests.kernels.paged import P, Paged

ROWS = [(0, 1), (63, 1), (64, 1), (200, 1), (0, 70), (60, 10), (128, 64), (130, 1), (5, 200)]
# (query heads, key heads, dim): groups of 1, 3 and 8; dims that fill no vector, and large ones.
HEADS = [(4, 4, 16), (9, 3, 64), (8, 1, 72), (3, 1, 80), (2, 2, 96), (6, 2, 112), (8, 1, 256)]
ODD_HEADS = [(5, 5, 1), (3, 1, 7), (16, 2, 17), (100, 1, 33)]


@pytest.fixture(autouse=True)
def kernels():
    module = registry.native("attention")
    if module is None:
        pytest.skip("only on machines with the native kernels")
    return module


def run(paged, q, **how):
    if how.get("sinks") is not None:
        how["sinks"] = mx.array(np.asarray(how["sinks"], np.float32))
    q32 = mx.array(np.asarray(q, np.float32))
    how = {"window": paged.window, "keep": paged.keep, **how}
    return np.array(paged_attention(q32, paged.hot, paged.pool, paged.described, **how))


def options(name, hq):
    rng = np.random.default_rng(hq)
    how = {}
    if name in ("softcap", "both"):
        how["softcap"] = 2.0
    if name in ("sinks", "both"):
        how["sinks"] = rng.normal(size=hq).astype(np.float32)
    return how


def check(paged, hq, dim, **how):
    q = np.random.default_rng(dim).normal(size=(paged.total, hq, dim)).astype(np.float32)
    how["scale"] = dim**-0.5
    out = run(paged, q, **how)
    np.testing.assert_allclose(out, paged.expected(q.astype(np.float64), **how), atol=3e-6)


@pytest.mark.full
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_shapes_and_dtypes(heads, dtype):
    hq, hk, dim = heads
    check(Paged(ROWS, hk, dim, dtype=dtype), hq, dim)
    check(Paged(ROWS, hk, dim, dtype=dtype, window=100), hq, dim, **options("both", hq))


@pytest.mark.full
@pytest.mark.parametrize("heads", ODD_HEADS)
def test_odd_shapes(heads):
    hq, hk, dim = heads
    for dtype, window in itertools.product((mx.float32, mx.float16), (None, 33)):
        check(Paged(ROWS, hk, dim, dtype=dtype, window=window), hq, dim)


@pytest.mark.full
@pytest.mark.parametrize("window", [None, 1, 2, 16, 63, 64, 65, 100, 1000])
@pytest.mark.parametrize("name", ["plain", "softcap", "sinks", "both"])
def test_options(window, name):
    for hq, hk, dim in ((6, 2, 24), (8, 1, 64)):
        check(Paged(ROWS, hk, dim, window=window), hq, dim, **options(name, hq))


@pytest.mark.full
@pytest.mark.parametrize("sealed", [True, False])
def test_lengths_around_page_borders(sealed):
    rows = [(start, 1) for start in (0, 1, 62, 63, 64, 65, 126, 127, 128, 129, 191, 192, 193)]
    rows += [(0, n) for n in (1, 63, 64, 65, 127, 128, 129)]
    rows += [(64, 64), (63, 65), (63, 66), (1, 63)]
    check(Paged(rows, 2, 32, sealed=sealed), 6, 32)
    check(Paged(rows, 2, 32, sealed=sealed, window=64), 6, 32)


def test_a_token_that_is_not_a_number_spoils_only_the_queries_that_see_it():
    paged = Paged([(0, 100)], 1, 32, sealed=False)
    page = int(paged.described.pages[0])
    for which in (0, 1):
        hot = [np.array(x) for x in paged.hot]
        hot[which][page * P + 40] = np.nan
        q = mx.random.normal((100, 2, 32))
        pair = (mx.array(hot[0]), mx.array(hot[1]))
        for window in (None, 10):
            how = {"scale": 1.0, "window": window}
            out = np.array(paged_attention(q, pair, paged.pool, paged.described, **how))
            spoilt = np.isnan(out).any(axis=(1, 2))
            end = 100 if window is None else 50
            assert spoilt[40:end].all()
            assert not spoilt[:40].any()
            assert not spoilt[end:].any()


def whole_and_parts(window, name, length, cuts, **made):
    """A sequence in one chunk, and cut in pieces, all over the same pages."""
    hq, hk, dim = 6, 2, 40
    q = np.random.default_rng(1).normal(size=(length, hq, dim)).astype(np.float32)
    paged = Paged([(0, length)], hk, dim, window=window, sealed=False, **made)
    how = {"scale": dim**-0.5, **options(name, hq)}
    whole = run(paged, q, **how)
    parts = []
    for start, end in itertools.pairwise(cuts):
        table = np.array([[0, end - start, start, 0, 0, 0, 0]])
        paged.described = PagedRows(table, paged.described.pages, paged.described.page_tokens)
        parts.append(run(paged, q[start:end], **how))
    return whole, np.concatenate(parts)


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("name", ["plain", "both"])
@pytest.mark.parametrize("chunk", [1, 2, 7, 31, 64, 100, 200])
def test_chunks_of_any_size_give_the_same_bits(window, name, chunk):
    length = 300
    cuts = [*range(0, length, chunk), length]
    whole, parts = whole_and_parts(window, name, length, cuts)
    np.testing.assert_array_equal(whole, parts)
    whole, parts = whole_and_parts(window, name, length, cuts, dtype=mx.float16)
    np.testing.assert_array_equal(whole, parts)


def test_a_row_gives_the_same_bits_alone_and_in_a_batch():
    """A long row alone is split over the threads; in a batch it is not, or elsewhere."""
    rows = [(5000, 1), (3000, 5), (0, 1), (700, 130), *[(100 + i, 1) for i in range(12)]]
    for window, name in ((None, "plain"), (90, "both")):
        paged = Paged(rows, 3, 64, window=window)
        q = np.random.default_rng(2).normal(size=(paged.total, 9, 64)).astype(np.float32)
        how = {"scale": 0.125, **options(name, 9)}
        together, table = run(paged, q, **how), paged.described.table
        for row in table:
            part = slice(row[0], row[0] + row[1])
            paged.described = PagedRows(np.array([[0, *row[1:]]]), paged.described.pages)
            np.testing.assert_array_equal(run(paged, q[part], **how), together[part])


def test_sealed_and_hot_pages_give_the_same_bits():
    q = np.random.default_rng(3).normal(size=(9, 6, 40)).astype(np.float32)
    outs = [run(Paged([(500, 9)], 2, 40, sealed=sealed), q, scale=0.2) for sealed in (True, False)]
    np.testing.assert_array_equal(*outs)


DIGEST = """
import hashlib
import numpy as np
from tests.kernels.paged import Paged
from tests.kernels.test_attention_native import ROWS, run
digest = hashlib.sha256()
packed = {"bits": (8, 4)}
for rows, how in (
    ([(7000, 1)], {}), ([(3000, 20)], packed), ([(40000, 1), (20000, 9)], {}), (ROWS, packed),
    ([(7000, 1)], {"window": 5000, "keep": 900}), ([(900, 200)], {"page": 4, "sides": 1}),
    ([(3000, 90)], {"window": 900, "keep": 70, "bits": (8, 4), "filler": 0.0}),
):
    paged = Paged(rows, 1, 32, **how)
    q = np.random.default_rng(0).normal(size=(paged.total, 4, 32))
    digest.update(run(paged, q, scale=0.2).tobytes())
print(digest.hexdigest())
"""


@pytest.mark.full
def test_the_number_of_threads_changes_no_bit():
    """Also where a context is so long that its pages are done in several rounds."""
    answers = set()
    for threads in ("1", "2", "5"):
        env = {**os.environ, "MLXSERVE_CPU_THREADS": threads}
        done = subprocess.run(
            [sys.executable, "-c", DIGEST], env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        answers.add(done.stdout)
    assert len(answers) == 1


@pytest.mark.parametrize("level", CPU_LEVELS)
def test_every_instruction_level_agrees(kernels, level):
    before = kernels.level()
    if not kernels.set_level(level):
        pytest.skip(f"only on processors with {level}")
    try:
        attention.check(kernels)
    finally:
        kernels.set_level(before)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_queries_of_16_bits_come_back_in_their_dtype(dtype):
    paged = Paged([(70, 3)], 2, 32, dtype=dtype)
    q = mx.random.normal((3, 4, 32)).astype(dtype)
    out = paged_attention(q, paged.hot, paged.pool, paged.described, scale=1.0)
    assert out.dtype == dtype


def test_what_does_not_fit_is_refused_by_name():
    paged = Paged([(70, 3)], 2, 32)
    good = {"q": mx.zeros((3, 4, 32)), "hot": paged.hot, "pool": paged.pool, "window": None}
    hot_k, pool_k = paged.hot[0], paged.pool[0]
    bad = [
        ("q has shape .*expected 3 dimensions", {"q": mx.zeros((3, 128))}),
        ("q has D=16, the cache has D=32", {"q": mx.zeros((3, 4, 16))}),
        ("rows cover 3 tokens, q has 4", {"q": mx.zeros((4, 4, 32))}),
        ("3 query heads can't share 2", {"q": mx.zeros((3, 3, 32))}),
        ("hot_v is float16, expected float32", {"hot": (hot_k, hot_k.astype(mx.float16))}),
        ("hot_k is int32", {"hot": (hot_k.astype(mx.int32), hot_k)}),
        ("hot_v is .*expected", {"hot": (hot_k, hot_k[:64])}),
        ("hot_k is .*whole pages", {"hot": (hot_k[1:], hot_k[1:])}),
        ("pool_k is .*expected", {"pool": (pool_k[:, :, :32], pool_k)}),
        ("pool_v is .*expected", {"pool": (pool_k, pool_k[:1])}),
        ("the rows. pages reach", {"pool": (pool_k[:0], pool_k[:0])}),
        ("sinks is .*expected", {"sinks": mx.zeros((5,))}),
        ("window is 0", {"window": 0}),
        ("softcap is 0", {"softcap": 0.0}),
    ]
    for words, change in bad:
        how = {**good, **change}
        q, hot, pool = how.pop("q"), how.pop("hot"), how.pop("pool")
        with pytest.raises(ValueError, match=f"paged_attention: {words}"):
            paged_attention(q, hot, pool, paged.described, scale=1.0, **how)


@pytest.mark.parametrize(
    ("words", "table", "pages"),
    [
        ("table has 6 columns", np.zeros((1, 6)), []),
        ("row 0 doesn't begin where", [[1, 1, 0, 0, 0, 0, 0]], [0]),
        ("row 0 doesn't begin where", [[0, 0, 0, 0, 0, 0, 0]], [0]),
        ("row 1 doesn't begin where", [[0, 1, 0, 0, 0, 0, 0], [2, 1, 0, 0, 0, 0, 0]], [0]),
        ("row 0 begins before", [[0, 1, -1, 0, 0, 0, 0]], [0]),
        ("row 0 begins before", [[0, 1, 63, 1, 0, 0, 0]], [0]),
        ("row 0 ends beyond", [[0, 20, 2**31 - 10, 2**25 - 1, 0, 0, 0]], [0, 1]),
        ("row 0 needs 2 pages", [[0, 1, 64, 0, 0, 0, 0]], [0]),
        ("row 0 needs 1 pages", [[0, 1, 0, 0, 2, 0, 0]], [0]),
        ("row 0 needs 1 pages", [[0, 1, 0, 0, 0, -1, 0]], [0]),
        ("row 0 has a page with the id -3", [[0, 1, 0, 0, 0, 0, 0]], [-3]),
        ("row 0 keeps -1 pages", [[0, 1, 300, 3, 0, 0, -1]], [0]),
        ("row 0 keeps 4 pages, its others begin at 3", [[0, 1, 300, 3, 0, 0, 4]], [0]),
        ("row 0 needs 4 pages", [[0, 1, 300, 3, 0, 0, 2]], [0, 0, 0]),
    ],
)
def test_a_description_that_does_not_hold_together_is_refused(kernels, words, table, pages):
    with pytest.raises(ValueError, match=words):
        PagedRows(np.array(table), np.array(pages)).handle(kernels)


@pytest.mark.parametrize("page_tokens", [0, 2, 48, 128])
def test_rows_of_pages_that_nobody_has_are_refused(kernels, page_tokens):
    rows = PagedRows(np.array([[0, 1, 0, 0, 0, 0, 0]]), np.array([0]), page_tokens)
    with pytest.raises(ValueError, match=f"page_tokens is {page_tokens}, expected a power of two"):
        rows.handle(kernels)


def test_no_rows_give_nothing():
    paged = Paged([(0, 1)], 2, 32)
    none = PagedRows(np.zeros((0, 7)), np.zeros(0))
    out = paged_attention(mx.zeros((0, 4, 32)), paged.hot, paged.pool, none, scale=1.0)
    assert out.shape == (0, 4, 32)


def test_the_check_takes_little_time(kernels):
    assert native.load().module is kernels
    attention.check(kernels)
