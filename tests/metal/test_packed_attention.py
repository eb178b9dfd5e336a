"""The Metal decode attention over packed pages, executed from its source, against float64."""

import functools

import mlx.core as mx
import numpy as np
import pytest

from mlxserve.kernels import attention, registry
from mlxserve.kernels.attention import Options, PagedRows
from mlxserve.kernels.metal import packed_attention, paged_attention
from mlxserve.kernels.metal.paged_attention import Found
from mlxserve.kernels.pages import PackedPages, packed_bits
from mlxserve.kernels.uses import AttentionUse
from tests.kernels.paged import Paged
from tests.support.metal import emulate, generated_source, mlx_source
from tests.support.metal.clang import has_fused_multiply_add

# Rows as (start, n): hot pages alone, the last token of a page and the first of the next, a part's
# border, and more pages than simdgroups.
RAGGED = [(0, 1), (63, 1), (64, 1), (511, 1), (512, 1), (580, 1)]
FEW = [(5, 1), (130, 1)]
BITS = [(8, 8), (8, 4), (4, 8), (4, 4), (8, None), (4, None)]
TOLERANCE = {mx.float16: 2e-3, mx.bfloat16: 2e-2}


def attend(cache, q, how, **options):
    launch = functools.partial(emulate, **options)
    return attention._metal(launch, q, cache.hot, cache.pool, cache.described, how)


def check(
    rows, kv_heads, group, dim, bits, *, dtype=mx.float16, window=None, softcap=None, sinks=False,
    **options,
):  # fmt: skip
    """Kernels against float64, for q of unit variance: outputs are at most a few units large."""
    cache = Paged(rows, kv_heads, dim, window=window, dtype=dtype, bits=bits)
    rng = np.random.default_rng(1)
    q = mx.array(rng.normal(size=(cache.total, kv_heads * group, dim))).astype(dtype)
    sink = mx.array(rng.normal(size=kv_heads * group) * 2).astype(dtype) if sinks else None
    out = attend(cache, q, Options(dim**-0.5, window, 0, sink, softcap), **options)
    assert out.dtype == dtype
    wide = [None if a is None else np.array(a.astype(mx.float32), np.float64) for a in (q, sink)]
    expected = cache.expected(wide[0], scale=dim**-0.5, sinks=wide[1], softcap=softcap)
    got = np.array(out.astype(mx.float32))
    np.testing.assert_allclose(got, expected, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.full
def test_every_pair_of_bits(bits):
    check(FEW, 2, 3, 64, bits)


def test_ragged_rows():
    check(RAGGED, 1, 2, 64, (8, 4), mode="fast")


@pytest.mark.full
@pytest.mark.parametrize(("dim", "bits"), [
    (72, (8, 8)), (192, (4, 4)), (256, (8, None)),
    pytest.param(80, (4, None), marks=pytest.mark.slow),
    pytest.param(96, (4, 8), marks=pytest.mark.slow),
    pytest.param(112, (4, 4), marks=pytest.mark.slow),
    pytest.param(128, (8, 8), marks=pytest.mark.slow),
])  # fmt: skip
def test_head_dims(dim, bits):
    check([(70, 1)], 1, 2, dim, bits, dtype=mx.bfloat16)


@pytest.mark.full
@pytest.mark.parametrize(("group", "dim"), [(1, 64), (8, 64), (8, 256), (12, 128)])
def test_query_heads_share_a_key_head(group, dim):
    check(FEW, 2, group, dim, (8, 8), mode="fast")


@pytest.mark.full
@pytest.mark.parametrize("window", [1, 33, 64, 65, 300])
def test_windows(window):
    check(RAGGED, 1, 2, 80, (8, 4), window=window, mode="fast")


def test_all_options_together():
    check(FEW, 2, 3, 64, (4, 8), dtype=mx.bfloat16, window=70, softcap=2.0, sinks=True)


@pytest.mark.full
@pytest.mark.parametrize("order", ["forward", "reverse", "random"])
def test_whatever_order_threads_run_in(order):
    check([(580, 1)], 1, 3, 128, (8, 8), window=500, order=order, seed=3)


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
    check([(200, 1)], 1, 3, 80, (4, 4), sinks=True, softcap=5.0, mode="fast", **freedom)


def test_rows_of_a_prompt_between_rows_of_one_token():
    check([(70, 1), (64, 9), (0, 1), (64, 1)], 2, 2, 64, (8, 8), mode="fast")


def test_only_rows_without_packed_pages():
    check([(5, 1), (63, 1)], 2, 2, 64, (8, 8), mode="fast")


@pytest.mark.full
@pytest.mark.parametrize("position", [127, 90])
def test_rows_without_hot_pages(position):
    """Up to the last token of the pool's, and to one before it."""
    cache = Paged([(128, 1)], 1, 64, dtype=mx.float16, bits=(8, 8))
    q = mx.random.normal((1, 2, 64), key=mx.random.key(0)).astype(mx.float16)
    table = np.array([[0, 1, position, 0, 2, 0, 0]])
    cache.described = PagedRows(table, cache.described.pages[:2])
    got = attend(cache, q, Options(0.125), mode="fast")
    ((keys, values),) = cache.tokens
    cache.rows, cache.tokens = [(position, 1)], [(keys[: position + 1], values[: position + 1])]
    expected = cache.expected(np.array(q, np.float64), scale=0.125)
    np.testing.assert_allclose(np.array(got), expected, atol=2e-3)


@pytest.mark.full
def test_a_row_gives_the_same_bits_alone_and_in_a_batch():
    rows = [(580, 1), (5, 1), (64, 1), (300, 1)]
    cache = Paged(rows, 2, 64, dtype=mx.bfloat16, bits=(4, 4))
    q = mx.random.normal((4, 6, 64), key=mx.random.key(0)).astype(mx.bfloat16)
    how = Options(0.125)
    out = attend(cache, q, how, mode="fast")
    described = cache.described
    for i in range(len(rows)):
        table = described.table[i : i + 1].copy()
        table[0, 0] = 0
        cache.described = PagedRows(table, described.pages)
        assert mx.array_equal(attend(cache, q[i : i + 1], how, mode="fast"), out[i : i + 1])


@pytest.mark.full
@pytest.mark.parametrize("dim", [64, 80])
def test_what_a_window_hides_changes_no_bit(dim):
    """In a page that is half in sight, keys may be large there and values NaN."""
    cache = Paged([(150, 1)], 1, dim, window=50, dtype=mx.float16, bits=(8, 8))
    q = mx.random.normal((1, 2, dim), key=mx.random.key(0)).astype(mx.float16)
    before = attend(cache, q, Options(0.125, 50))
    keys, values = cache.pool
    hidden = (150 - 49) % 64
    codes = np.ascontiguousarray(keys.codes).view(np.uint8).copy()
    codes[..., :hidden] = 255
    scales, biases = np.array(values.scales), np.array(values.biases)
    scales[..., :hidden, :] = np.nan
    biases[..., :hidden, :] = np.nan
    cache.pool = (
        PackedPages(mx.array(codes.view(np.uint32)), *keys[1:]),
        PackedPages(values.codes, mx.array(scales), mx.array(biases)),
    )
    assert mx.array_equal(attend(cache, q, Options(0.125, 50)), before)


@pytest.mark.full
def test_a_page_that_is_not_a_number_shows():
    """A number that isn't finite makes its group NaN as it is packed, and so what reads it."""
    cache = Paged([(70, 1)], 1, 64, dtype=mx.float16, bits=(8, 8))
    keys, values = cache.pool
    scales = np.array(keys.biases)
    scales[cache.described.pages[0], 0, 3] = np.nan
    cache.pool = (PackedPages(keys.codes, keys.scales, mx.array(scales)), values)
    q = mx.ones((1, 1, 64), mx.float16)
    assert mx.isnan(attend(cache, q, Options(0.125), mode="fast")).all()


def test_the_source_that_mlx_generates_is_the_one_that_is_emulated():
    cache = Paged(FEW, 2, 64, dtype=mx.bfloat16, bits=(8, 4))
    q = mx.zeros((2, 6, 64), mx.bfloat16)
    packed_pages = packed_attention.part_pages(*packed_bits(cache.pool))
    plan = cache.described.decode_plan(None, packed_pages)
    parts = paged_attention.parts(q, cache.hot, cache.pool, plan, scale=1.0, softcap=None)
    found = [Found(*map(mx.zeros, launch.shapes), rows) for launch, rows in parts]
    merge = paged_attention.merge(found, plan.count, None, mx.bfloat16)
    launches = [*(launch for launch, _ in parts), merge]
    assert [launch.kernel.name for launch in launches] == [
        "packed_attention",
        "paged_attention",
        "paged_attention_merge",
    ]
    for launch in launches:
        assert generated_source(launch) == mlx_source(launch)


@pytest.fixture
def emulated(monkeypatch):
    """Metal attention wherever a use was chosen."""
    monkeypatch.setenv("MLXSERVE_METAL_STAND_IN", "tests.support.stand_ins.emulated")
    monkeypatch.setenv("MLXSERVE_KERNELS", "reference,attention=metal")
    registry.forget()
    yield
    registry.forget()


@pytest.mark.full
def test_the_op_takes_the_kernel_that_was_chosen_for_its_bits(emulated, monkeypatch):
    cache = Paged(FEW, 2, 64, dtype=mx.float16, bits=(8, 4))
    q = mx.random.normal((2, 2, 64), key=mx.random.key(0)).astype(mx.float16)
    given = (q, cache.hot, cache.pool, cache.described)
    reference = attention.paged_attention(*given, scale=0.125)
    registry.choose([AttentionUse(2, 2, 64, "float16", key_bits=8, value_bits=8)])
    assert mx.array_equal(attention.paged_attention(*given, scale=0.125), reference)
    registry.choose([AttentionUse(2, 2, 64, "float16", key_bits=8, value_bits=4)])
    got = attention.paged_attention(*given, scale=0.125)
    assert not mx.array_equal(got, reference)
    np.testing.assert_allclose(np.array(got), np.array(reference), atol=2e-3)
