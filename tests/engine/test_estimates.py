"""Estimates against worked examples, real arrays, and pages counted one by one."""

import itertools
import math
import random

import mlx.core as mx
import pytest

from mlxserve.cache.spec import (
    PAGE_TOKENS,
    UNPACKED,
    FullKV,
    KVBits,
    Latent,
    State,
    WindowKV,
    page_bytes,
    token_bytes,
)
from mlxserve.engine import estimates as est
from mlxserve.errors import RequestError
from mlxserve.kernels.pages import pack_keys, pack_values

KIB, GIB = 2**10, 2**30
LLAMA_8B = [FullKV(8, 128)] * 32
MIXED = [
    FullKV(3, 40),
    WindowKV(2, 24, window=100),
    WindowKV(2, 24, window=100, keep=5),
    Latent(48, 8),
    State(((3, 5), (7,))),
]


def test_cache_of_32_layers():
    assert token_bytes(LLAMA_8B, 2) == 128 * KIB
    assert est.sealed_bytes(LLAMA_8B, 8192, 2) == GIB
    assert 16 * est.sealed_bytes(LLAMA_8B, 8192, 2) == 16 * GIB


def test_cache_of_80_layers():
    assert token_bytes([FullKV(8, 128)] * 80, 2) == 320 * KIB


def test_cache_of_latents():
    assert token_bytes([Latent(512, 64)] * 61, 2) == 70_272


def test_what_a_pool_holds():
    assert est.tokens_in_pool(53 * GIB, 128 * KIB) == 434_176
    assert est.most_users(53 * GIB, est.sealed_bytes(LLAMA_8B, 8192, 2)) == 53


def test_decode_is_bound_by_bandwidth():
    assert est.decode_tokens_per_s(16 * 10**9, 3.35e12) == pytest.approx(209.375)
    # Weights are read once for all, caches one by one.
    assert est.decode_tokens_per_s(16 * 10**9, 3.2e12, 10**9, 16) == pytest.approx(1600)


def test_prefill_is_bound_by_arithmetic():
    assert est.prefill_s(8 * 10**9, 2000, 989e12, 0.5) == pytest.approx(0.0647, abs=5e-5)


def test_littles_law():
    assert est.requests_in_flight(4, 6) == 24


def test_tokens_per_pass():
    assert est.tokens_per_pass(0.7, 4) == pytest.approx((1 - 0.7**5) / (1 - 0.7))
    assert est.tokens_per_pass(0.7, 4) == pytest.approx(2.8, abs=0.05)
    assert est.tokens_per_pass(0, 4) == 1
    assert est.tokens_per_pass(1, 4) == 5


def test_what_tokens_and_requests_cost():
    assert est.unit_cost(3.0, 2500, 10**6) == pytest.approx(0.333, abs=5e-4)
    assert est.unit_cost(3.0, 2500, 10**6, 0.4) == pytest.approx(0.833, abs=5e-4)
    assert est.unit_cost(3.0, 2500, 10**6, 0.4, 0.3) == pytest.approx(1.08, abs=5e-3)
    assert est.unit_cost(3.0, 6, 1000, 0.4, 0.3) == pytest.approx(0.4514, abs=5e-5)


def test_break_even():
    assert est.break_even_tokens(25_000, 2.00, 0.40) == pytest.approx(15.625e9)


@pytest.mark.parametrize("dim", [1, 31, 33, 64, 80, 100])
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("bits", [KVBits(8, 8), KVBits(8, 4), KVBits(4, 8), KVBits(4, 4)])
def test_packed_pages_take_what_their_arrays_take(heads, dim, bits):
    page = mx.random.normal((1, heads, PAGE_TOKENS, dim))
    arrays = [*pack_keys(page, bits.keys), *pack_values(page, bits.values)]
    assert page_bytes(FullKV(heads, dim), 2, bits) == sum(array.nbytes for array in arrays)


@pytest.mark.parametrize("bits", [KVBits(8, 0), KVBits(0, 4)])
def test_pages_of_which_one_side_is_packed(bits):
    page = mx.random.normal((1, 3, PAGE_TOKENS, 33)).astype(mx.bfloat16)
    keys = pack_keys(page, bits.keys) if bits.keys else [page]
    values = pack_values(page, bits.values) if bits.values else [page]
    told = page_bytes(FullKV(3, 33), 2, bits)
    assert told == sum(array.nbytes for array in (*keys, *values))


@pytest.mark.full
@pytest.mark.parametrize("keep", [0, 1, 63, 64, 65, 200])
@pytest.mark.parametrize("window", [1, 2, 63, 64, 65, 66, 128, 130, 400])
def test_window_pages_are_those_that_queries_see(window, keep):
    spec = WindowKV(2, 24, window, keep)
    most = 0
    for tokens in range(700):  # cached, so that the next query stands at this position
        seen = {*range(max(0, tokens - window + 1), tokens), *range(min(keep, tokens))}
        sealed = {key // PAGE_TOKENS for key in seen} & set(range(tokens // PAGE_TOKENS))
        most = max(most, len(sealed))
        assert est.sealed_pages(spec, tokens) == most


def test_full_layers_and_latents_keep_every_page():
    for spec in (FullKV(3, 40), Latent(48, 8)):
        assert [est.sealed_pages(spec, n) for n in (0, 63, 64, 127, 128)] == [0, 0, 1, 1, 2]


def test_a_sequence_over_layers_of_every_kind():
    bits = KVBits(8, 4)
    # 1000 tokens complete 15 pages. Windows see 99 earlier tokens, which touch 2; 5 kept ones, 1.
    sealed = (
        15 * page_bytes(MIXED[0], 4, bits)
        + 2 * page_bytes(MIXED[1], 4, bits)
        + 3 * page_bytes(MIXED[2], 4, bits)
        + 15 * 64 * 56 * 4
    )
    states = (3 * 5 + 7) * 4
    per_token = (2 * 3 * 40 + 2 * 2 * 24 + 2 * 2 * 24 + 56) * 4
    assert est.sealed_bytes(MIXED, 1000, 4, bits) == sealed
    assert est.hot_bytes(MIXED, 4) == 2 * 64 * per_token
    assert est.sequence_bytes(MIXED, 1000, 4, bits) == sealed + 2 * 64 * per_token + states
    assert est.read_bytes(MIXED, 1000, 4, bits) == sealed + 1000 % 64 * per_token + states


@pytest.mark.parametrize("specs", [LLAMA_8B, MIXED, MIXED[1:3], MIXED[4:]])
@pytest.mark.parametrize("bits", [UNPACKED, KVBits(4, 4)])
def test_the_longest_context_fits_and_a_longer_one_does_not(specs, bits):
    limit = 700
    sizes = [est.sequence_bytes(specs, n, 2, bits) for n in range(1, limit + 1)]
    for users in (1, 3):
        for room in (0, users * sizes[0] - 1, *(users * n for n in set(sizes)), 10**12):
            fits = [n for n, size in enumerate(sizes, 1) if users * size <= room]
            longest = est.longest_context(specs, users, room, 2, bits, limit_tokens=limit)
            assert fits == list(range(1, longest + 1))


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda x: est.decode_tokens_per_s(x, 1e9), "weight_bytes"),
        (lambda x: est.decode_tokens_per_s(1, x), "bandwidth"),
        (lambda x: est.prefill_s(1, 1, x), "flops_per_s"),
        (lambda x: est.prefill_s(1, 1, 1e12, x), "utilisation"),
        (lambda x: est.requests_in_flight(x, 1), "requests_per_s"),
        (lambda x: est.requests_in_flight(1, x), "latency_s"),
        (lambda x: est.tokens_per_pass(x, 4), "acceptance"),
        (lambda x: est.unit_cost(x, 1, 1), "hourly"),
        (lambda x: est.unit_cost(1, x, 1), "per_s"),
        (lambda x: est.unit_cost(1, 1, 1, x), "utilisation"),
        (lambda x: est.unit_cost(1, 1, 1, 1, x), "overhead"),
        (lambda x: est.break_even_tokens(x, 2, 1), "fixed"),
        (lambda x: est.break_even_tokens(1, 2, x), "own"),
        (lambda x: est.tokens_in_pool(x, 1), "pool_bytes"),
    ],
)
@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_a_number_that_is_out_of_range_is_named(call, name, value):
    with pytest.raises(RequestError, match=f"^{name} is {value:g}; it must be"):
        call(value)


def test_own_tokens_that_never_pay():
    with pytest.raises(RequestError, match="own is 2; it must be below"):
        est.break_even_tokens(100, 2, 2)


@pytest.mark.parametrize("seed", range(20))
def test_layers_are_placed_as_well_as_trying_all_places_finds(seed):
    rng = random.Random(seed)
    needs = [rng.randint(1, 100) for _ in range(rng.randint(4, 9))]
    memories = [rng.randint(1, 50) for _ in range(rng.randint(1, 4))]
    first = rng.randint(0, 300)

    def worst(counts):
        shares, begin = [], 0
        for host, count in enumerate(counts):
            held = sum(needs[begin : begin + count]) + first * (host == 0)
            shares.append(held / memories[host])
            begin += count
        return max(shares)

    every = itertools.product(range(1, len(needs) + 1), repeat=len(memories))
    best = min(worst(counts) for counts in every if sum(counts) == len(needs))
    found = est.place_layers(needs, memories, first)
    assert sum(found) == len(needs)
    assert worst(found) == pytest.approx(best)


def test_more_hosts_than_layers_are_refused():
    with pytest.raises(RequestError, match="capacities are 3 for 2 layers"):
        est.place_layers([1, 1], [1, 1, 1])
