"""The Metal decode attention, executed from its source, against float64 on odd shapes."""

import functools

import mlx.core as mx
import numpy as np
import pytest

from mlxserve.kernels import attention
from mlxserve.kernels.metal import attention_check, paged_attention
from mlxserve.kernels.metal.paged_attention import Found
from mlxserve.kernels.metal.plan import DecodePlan
from mlxserve.kernels.uses import AttentionUse
from tests.kernels.paged import Paged
from tests.support.metal import emulate, generated_source, mlx_source
from tests.support.metal.clang import has_fused_multiply_add

# Rows as (start, n): the first token, both sides of a page's border, a part's border, a long one.
RAGGED = [(0, 1), (63, 1), (64, 1), (255, 1), (256, 1), (700, 1)]
FEW = [(5, 1), (130, 1)]
TOLERANCE = {mx.float16: 2e-3, mx.bfloat16: 2e-2}


def run(rows, kv_heads, group, dim, dtype, *, window=None, softcap=None, sinks=False, **options):
    """Kernel and float64, for q of unit variance: outputs are at most a few units large."""
    cache = Paged(rows, kv_heads, dim, window=window, dtype=dtype)
    rng = np.random.default_rng(1)
    q = mx.array(rng.normal(size=(cache.total, kv_heads * group, dim))).astype(dtype)
    sink = mx.array(rng.normal(size=kv_heads * group) * 2).astype(dtype) if sinks else None
    how = attention.Options(dim**-0.5, window, 0, sink, softcap)
    launch = functools.partial(emulate, **options)
    out = attention._metal(launch, q, cache.hot, cache.pool, cache.described, how)
    assert out.dtype == dtype
    wide = [None if a is None else np.array(a.astype(mx.float32), np.float64) for a in (q, sink)]
    expected = cache.expected(wide[0], scale=dim**-0.5, sinks=wide[1], softcap=softcap)
    return np.array(out.astype(mx.float32)), expected


def check(*shape, **options):
    got, expected = run(*shape, **options)
    np.testing.assert_allclose(got, expected, atol=TOLERANCE[shape[4]])


@pytest.mark.full
@pytest.mark.parametrize(
    "dtype", [mx.float16, pytest.param(mx.bfloat16, marks=pytest.mark.slow)], ids=["f16", "bf16"]
)
@pytest.mark.parametrize("dim", attention_check.HEAD_DIMS)
def test_every_head_dim(dim, dtype):
    check(FEW, 2, 3, dim, dtype)


@pytest.mark.full
@pytest.mark.parametrize("group", [1, 2, 3, 8, 12, 16, 24])
def test_query_heads_share_a_key_head(group):
    check(FEW, 2, group, 128, mx.float16)


def test_ragged_rows():
    check(RAGGED, 1, 3, 64, mx.float16)


@pytest.mark.full
@pytest.mark.parametrize(("group", "dim"), [(20, 64), (32, 64), (9, 96), (8, 192), (8, 256)])
def test_large_groups_in_equal_shares(group, dim):
    check(FEW, 1, group, dim, mx.float16)


@pytest.mark.parametrize("heads", [1, 2, 3])
def test_so_few_heads_that_mlx_changes_an_address_space(heads):
    check([(5, 1)], 1, heads, 64, mx.float16)


@pytest.mark.full
@pytest.mark.parametrize("window", [1, 33, 64, 65, 300])
def test_windows(window):
    check(RAGGED, 2, 2, 72, mx.float16, window=window)


@pytest.mark.parametrize("options", [{"softcap": 3.0}, {"sinks": True}], ids=["softcap", "sinks"])
def test_options(options):
    check(RAGGED, 2, 3, 64, mx.float16, **options)


def test_all_options_together():
    check(RAGGED, 2, 3, 192, mx.bfloat16, window=70, softcap=2.0, sinks=True)


def test_a_row_of_more_parts_than_a_simdgroup_has_lanes():
    check([(33 * 256 + 10, 1)], 1, 1, 64, mx.float16, mode="fast")


def test_pages_that_are_not_sealed_yet():
    cache = Paged([(200, 1)], 2, 64, dtype=mx.float16, sealed=False)
    q = mx.random.normal((1, 2, 64), key=mx.random.key(0)).astype(mx.float16)
    how = attention.Options(0.125)
    out = attention._metal(emulate, q, cache.hot, cache.pool, cache.described, how)
    expected = cache.expected(np.array(q, np.float64), scale=0.125)
    np.testing.assert_allclose(np.array(out), expected, atol=2e-3)


@pytest.mark.full
@pytest.mark.parametrize("order", ["reverse", "random"])
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=["f16", "bf16"])
@pytest.mark.parametrize("dim", [80, 256])
def test_whatever_order_threads_run_in(order, dtype, dim):
    check(RAGGED, 1, 3, dim, dtype, window=300, order=order, seed=3)


@pytest.mark.full
@pytest.mark.parametrize(
    "freedom",
    [
        {"flush_to_zero": True},
        {"reversed_reductions": True},
        {"fused_multiply_add": True},
        {"ulp_noise": 4},
    ],
    ids=lambda freedom: next(iter(freedom)),
)
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=["f16", "bf16"])
def test_what_a_gpu_may_do_differently(freedom, dtype):
    if "fused_multiply_add" in freedom and not has_fused_multiply_add():
        pytest.skip("only on processors with a fused multiply-add")
    check(RAGGED, 1, 3, 80, dtype, sinks=True, softcap=5.0, **freedom)


def test_rows_of_a_prompt_between_rows_of_one_token():
    check([(70, 1), (60, 9), (0, 1), (3, 2), (64, 1)], 2, 2, 64, mx.float16)


def test_only_rows_of_a_prompt():
    check([(60, 9), (0, 3)], 2, 2, 64, mx.float16)


def test_a_row_gives_the_same_bits_alone_and_in_a_batch():
    rows = [(700, 1), (64, 1), (300, 1)]
    together = Paged(rows, 2, 64, dtype=mx.bfloat16)
    q = mx.random.normal((3, 6, 64), key=mx.random.key(0)).astype(mx.bfloat16)
    how = attention.Options(0.125)
    cache = (together.hot, together.pool)
    out = attention._metal(emulate, q, *cache, together.described, how)
    for i in range(3):
        table = together.described.table[i : i + 1].copy()
        table[0, 0] = 0
        alone = attention.PagedRows(table, together.described.pages)
        got = attention._metal(emulate, q[i : i + 1], *cache, alone, how)
        assert mx.array_equal(got, out[i : i + 1])


def test_the_source_that_mlx_generates_is_the_one_that_is_emulated():
    cache = Paged(FEW, 2, 64, dtype=mx.bfloat16)
    q = mx.zeros((2, 6, 64), mx.bfloat16)
    plan = cache.described.decode_plan(None)
    parts = paged_attention.parts(q, cache.hot, cache.pool, plan, scale=1.0, softcap=2.0)
    found = [Found(*map(mx.zeros, launch.shapes), rows) for launch, rows in parts]
    merge = paged_attention.merge(found, plan.count, mx.zeros(6, mx.bfloat16), mx.bfloat16)
    for launch in (*(launch for launch, _ in parts), merge):
        assert generated_source(launch) == mlx_source(launch)


@pytest.mark.parametrize(("use", "reason"), [
    (AttentionUse(9, 3, 64, "float16"), ""),
    (AttentionUse(9, 3, 60, "float16"), "head dim 60"),
    (AttentionUse(9, 3, 64, "float32"), "float32"),
    (AttentionUse(10, 3, 64, "float16"), "10 query heads"),
    (AttentionUse(9, 3, 64, "float16", window=64, keep=4), "the first 4 tokens"),
    (AttentionUse(9, 3, 64, "float16", key_bits=8, value_bits=4), ""),
    (AttentionUse(9, 3, 64, "float16", key_bits=8), ""),
    (AttentionUse(9, 3, 64, "float16", value_bits=8), "keys in 16 bits beside values in 8"),
])  # fmt: skip
def test_layers_that_it_cannot_serve_are_named(use, reason):
    named = attention_check.unsupported(use)
    assert reason in named if reason else named == ""


def test_rows_of_several_tokens_are_refused_by_the_plan():
    cache = Paged([(5, 3)], 1, 64)
    with pytest.raises(ValueError, match="rows of one token, got 3"):
        DecodePlan(cache.described.table, cache.described.pages, None)
