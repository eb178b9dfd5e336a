"""The Metal attention of rows of several tokens, executed from its source, against float64."""

import functools

import mlx.core as mx
import numpy as np
import pytest

from mlxserve.kernels import attention, registry
from mlxserve.kernels.attention import Options, PagedRows
from mlxserve.kernels.metal import chunk_attention, chunk_check
from mlxserve.kernels.metal.plan import ChunkPlan
from mlxserve.kernels.pages import PackedPages
from mlxserve.kernels.uses import AttentionUse, ChunkUse
from tests.kernels.paged import Paged
from tests.support.metal import emulate, generated_source, mlx_source
from tests.support.metal.clang import has_fused_multiply_add

# Rows as (start, n): a sequence's first tokens, two from within a page across its end, and a page.
RAGGED = [(0, 9), (60, 7), (64, 64)]
FEW = [(0, 3), (62, 5)]
OWN_PAGE = [(0, 5), (70, 6)]  # as rows are where pages are packed: each within its own page
BITS = [(8, 8), (8, 4), (4, 8), (4, 4), (8, None), (4, None)]
TOLERANCE = {mx.float16: 2e-3, mx.bfloat16: 2e-2}


def attend(cache, q, how, **options):
    """By the kernels for rows of one token, and for longer ones."""
    launch = functools.partial(emulate, **options)
    return attention._metal(launch, q, cache.hot, cache.pool, cache.described, how, launch)


def check(
    rows, kv_heads, group, dim, *, dtype=mx.float16, bits=(None, None), window=None, softcap=None,
    sinks=False, sealed=True, **options,
):  # fmt: skip
    """Kernels against float64, for q of unit variance: outputs are at most a few units large."""
    cache = Paged(rows, kv_heads, dim, window=window, dtype=dtype, bits=bits, sealed=sealed)
    rng = np.random.default_rng(1)
    q = mx.array(rng.normal(size=(cache.total, kv_heads * group, dim))).astype(dtype)
    sink = mx.array(rng.normal(size=kv_heads * group) * 2).astype(dtype) if sinks else None
    out = attend(cache, q, Options(dim**-0.5, window, 0, sink, softcap), **options)
    assert out.dtype == dtype
    wide = [None if a is None else np.array(a.astype(mx.float32), np.float64) for a in (q, sink)]
    expected = cache.expected(wide[0], scale=dim**-0.5, sinks=wide[1], softcap=softcap)
    got = np.array(out.astype(mx.float32))
    np.testing.assert_allclose(got, expected, atol=TOLERANCE[dtype])


def test_ragged_rows():
    check(RAGGED, 1, 3, 64)


@pytest.mark.full
@pytest.mark.parametrize(("dim", "dtype"), [
    (72, mx.float16), (80, mx.bfloat16), (128, mx.bfloat16), (192, mx.float16), (256, mx.bfloat16),
    pytest.param(96, mx.float16, marks=pytest.mark.slow),
    pytest.param(112, mx.float16, marks=pytest.mark.slow),
])  # fmt: skip
def test_head_dims(dim, dtype):
    check(FEW, 2, 2, dim, dtype=dtype, mode="fast")


@pytest.mark.full
@pytest.mark.parametrize("group", [1, 8, 9, 71])
def test_query_heads_share_a_key_head(group):
    check(FEW, 2, group, 64, mode="fast")


@pytest.mark.full
@pytest.mark.parametrize("window", [1, 33, 64, 65, 100])
def test_windows(window):
    check([(0, 9), (61, 5), (200, 70)], 1, 2, 64, window=window, mode="fast")


@pytest.mark.full
@pytest.mark.parametrize("options", [{"softcap": 3.0}, {"sinks": True}], ids=["softcap", "sinks"])
def test_options(options):
    check(FEW, 2, 3, 64, mode="fast", **options)


@pytest.mark.full
def test_all_options_together_where_simdgroups_share_rows():
    how = {"window": 70, "softcap": 2.0, "sinks": True}
    check([(0, 3), (150, 12)], 2, 3, 192, dtype=mx.bfloat16, **how)


@pytest.mark.full
@pytest.mark.parametrize("bits", BITS)
def test_every_pair_of_bits(bits):
    check(OWN_PAGE, 2, 2, 64, bits=bits, mode="fast")


@pytest.mark.full
@pytest.mark.parametrize(("dim", "bits"), [
    (72, (8, 4)), (128, (4, 4)), (256, (8, 8)),
    pytest.param(80, (8, 8), marks=pytest.mark.slow),
    pytest.param(112, (4, 4), marks=pytest.mark.slow),
    pytest.param(192, (4, None), marks=pytest.mark.slow),
])  # fmt: skip
def test_head_dims_of_packed_pages(dim, bits):
    check([(70, 6)], 2, 2, dim, bits=bits, dtype=mx.bfloat16, mode="fast")


@pytest.mark.full
def test_all_options_together_over_packed_pages():
    how = {"window": 70, "softcap": 2.0, "sinks": True}
    check([(0, 3), (140, 9)], 2, 3, 64, bits=(8, 4), **how)


def test_rows_of_a_prompt_among_rows_of_one_token():
    check([(70, 1), (60, 9), (0, 1), (3, 2), (64, 1)], 2, 2, 64, mode="fast")


def test_pages_that_are_not_sealed_yet():
    check([(60, 75)], 2, 1, 64, sealed=False, mode="fast")


@pytest.mark.full
def test_more_queries_than_a_block_has():
    check([(70, 130)], 1, 1, 64)


@pytest.mark.full
@pytest.mark.parametrize("order", ["reverse", "random"])
@pytest.mark.parametrize(("dim", "bits"), [
    (64, (4, 8)), pytest.param(192, (None, None), marks=pytest.mark.slow),
])  # fmt: skip
def test_whatever_order_threads_run_in(order, dim, bits):
    check([(68, 4)], 1, 9, dim, bits=bits, window=60, order=order, seed=3)


@pytest.mark.full
@pytest.mark.parametrize("freedom", [
    {"flush_to_zero": True},
    {"reversed_reductions": True},
    {"fused_multiply_add": True},
    {"ulp_noise": 4},
], ids=lambda freedom: next(iter(freedom)))  # fmt: skip
def test_what_a_gpu_may_do_differently(freedom):
    if "fused_multiply_add" in freedom and not has_fused_multiply_add():
        pytest.skip("only on processors with a fused multiply-add")
    check([(70, 3)], 1, 3, 64, bits=(8, 8), sinks=True, softcap=5.0, mode="fast", **freedom)


@pytest.mark.parametrize(("dim", "bits"), [
    (64, (None, None)),
    pytest.param(192, (None, None), marks=pytest.mark.full),
    pytest.param(64, (8, 8), marks=pytest.mark.full),
])  # fmt: skip
def test_a_query_has_the_same_bits_in_every_chunk_and_batch(dim, bits):
    """Rows over the same pages, which begin and end elsewhere, with another row before them."""
    cache = Paged([(128, 40), (3, 4)], 2, dim, window=100, dtype=mx.float16, bits=bits)
    q = mx.random.normal((44, 6, dim), key=mx.random.key(0)).astype(mx.float16)
    how = Options(0.125, 100)
    whole = attend(cache, q, how, mode="fast")
    described = cache.described
    for begin, end in ((0, 23), (23, 40), (11, 13)):
        n = end - begin
        first, other = described.table.copy()
        first[[0, 1, 2]] = 2, n, 128 + begin
        other[[0, 1]] = 0, 2
        cache.described = PagedRows(np.stack([other, first]), described.pages)
        part = mx.concatenate([q[40:42], q[begin:end]])
        got = attend(cache, part, how, mode="fast")
        assert mx.array_equal(got, mx.concatenate([whole[40:42], whole[begin:end]]))


@pytest.mark.full
def test_what_a_window_hides_changes_no_bit():
    """In a page that is half in sight, packed keys may be large there and values NaN."""
    cache = Paged([(150, 4)], 1, 64, window=50, dtype=mx.float16, bits=(8, 8))
    q = mx.random.normal((4, 2, 64), key=mx.random.key(0)).astype(mx.float16)
    before = attend(cache, q, Options(0.125, 50))
    keys, values = cache.pool
    hidden = (150 - 49) % 64
    page_id = cache.described.pages[0]
    scales = np.array(values.scales)
    scales[page_id, :, :hidden] = np.nan
    codes = np.array(keys.codes)
    codes[page_id, :, :, : hidden // 4] = 0xFFFFFFFF
    keys = PackedPages(mx.array(codes), keys.scales, keys.biases)
    cache.pool = keys, PackedPages(values.codes, mx.array(scales), values.biases)
    assert mx.array_equal(attend(cache, q, Options(0.125, 50)), before)


@pytest.mark.parametrize("side", [0, 1], ids=["keys", "values"])
def test_what_is_not_a_number_shows(side):
    cache = Paged([(60, 7)], 1, 64, dtype=mx.float16)
    sides = [np.array(x) for x in cache.hot]
    sides[side][cache.described.pages[0] * 64 + 3, 0, 5] = np.nan
    cache.hot = tuple(map(mx.array, sides))
    q = mx.ones((7, 1, 64), mx.float16)
    assert mx.isnan(attend(cache, q, Options(0.125), mode="fast")).any(axis=-1).all()


def test_another_type_of_queries_is_that_of_the_output():
    cache = Paged(FEW, 1, 64, dtype=mx.float16)
    q = mx.random.normal((cache.total, 1, 64), key=mx.random.key(0)).astype(mx.float16)
    out = attend(cache, q.astype(mx.float32), Options(0.125), mode="fast")
    assert out.dtype == mx.float32
    assert mx.array_equal(out.astype(mx.float16), attend(cache, q, Options(0.125), mode="fast"))


@pytest.mark.parametrize("heads", [1, 2, 3])
@pytest.mark.parametrize("bits", [(None, None), (8, 8)])
def test_the_source_that_mlx_generates_is_the_one_that_is_emulated(heads, bits):
    """Also with so few heads that MLX changes an address space."""
    cache = Paged([(1, 2)], 1, 64, dtype=mx.bfloat16, bits=bits)
    plan = cache.described.chunk_plan(None, heads, 64)
    q, sinks = mx.zeros((2, heads, 64), mx.bfloat16), mx.zeros(heads, mx.bfloat16)
    launch = chunk_attention.chunk_launch(
        q, cache.hot, cache.pool, plan, scale=1.0, sinks=sinks, softcap=2.0
    )
    assert generated_source(launch) == mlx_source(launch)


@pytest.mark.parametrize(("use", "reason"), [
    (ChunkUse(9, 3, 64, "float16"), ""),
    (ChunkUse(9, 3, 60, "float16"), "head dim 60 is none of 64"),
    (ChunkUse(9, 3, 64, "float32"), "float32"),
    (ChunkUse(9, 3, 64, "float16", window=64, keep=4), "the first 4 tokens"),
    (ChunkUse(9, 3, 64, "float16", key_bits=8), ""),
    (ChunkUse(9, 3, 64, "float16", value_bits=8), "keys in 16 bits beside values in 8"),
])  # fmt: skip
def test_layers_that_it_cannot_serve_are_named(use, reason):
    named = chunk_check.unsupported(use)
    assert reason in named if reason else named == ""


def test_rows_with_kept_pages_are_refused_by_the_plan():
    cache = Paged([(200, 3)], 1, 64, window=70, keep=4)
    with pytest.raises(ValueError, match="no kept pages, got 1"):
        ChunkPlan(cache.described.table, cache.described.pages, 70, 1, 64)


@pytest.fixture
def emulated(monkeypatch):
    """Metal attention wherever a use was chosen."""
    monkeypatch.setenv("MLXSERVE_METAL_STAND_IN", "tests.support.stand_ins.emulated")
    monkeypatch.setenv("MLXSERVE_KERNELS", "reference,attention=metal")
    registry.forget()
    yield
    registry.forget()


@pytest.mark.full
@pytest.mark.parametrize("kind", [AttentionUse, ChunkUse])
def test_each_kernel_serves_its_rows_where_it_was_chosen(emulated, kind):
    cache = Paged([(5, 1), (62, 5), (130, 1)], 2, 64, dtype=mx.float16)
    q = mx.random.normal((7, 2, 64), key=mx.random.key(0)).astype(mx.float16)
    given = (q, cache.hot, cache.pool, cache.described)
    reference = attention.paged_attention(*given, scale=0.125)
    registry.choose([kind(2, 2, 64, "float16")])
    got = attention.paged_attention(*given, scale=0.125)
    np.testing.assert_allclose(np.array(got), np.array(reference), atol=2e-3)
    alone = np.array([True, *[False] * 5, True])
    served = (np.array(got) != np.array(reference)).any(axis=(1, 2))
    np.testing.assert_array_equal(served, alone if kind is AttentionUse else ~alone)
