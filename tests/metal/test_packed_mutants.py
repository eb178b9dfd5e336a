"""Every mutant of the Metal attention over packed pages is caught; see test_mutants.py."""

import dataclasses
from functools import cache

import mlx.core as mx
import numpy as np
import pytest

from mlxserve.kernels.attention import Options, PagedRows
from mlxserve.kernels.metal import packed_attention, paged_attention
from mlxserve.kernels.metal.launch import source
from mlxserve.kernels.pages import PackedPages
from tests.kernels.paged import Paged
from tests.metal.mutation import attends_rightly, kernel_mutants
from tests.support.metal import cost, emulate
from tests.support.mutants import params

pytestmark = pytest.mark.full

KERNEL = packed_attention.PACKED_PARTS
CODES, NUMBERS = source("codes.metal"), source("numbers.metal")
# What is between a bound and its neighbours, and where things lie: (old, new).
SWAPPED = [
    ("GROUPS * 32;", "D;"),
    ("task[4 + page]", "task[4]"),
    ("task[4 + page]", "task[5 + page]"),
    ("page]) * kv_heads + kv_head", "page]) + kv_head"),
    (" * kv_heads + kv_head;", " * kv_heads;"),
    ("part_begin - page * PAGE, 0", "part_begin - page * PAGE + 1, 0"),
    ("part_begin - page * PAGE, 0", "part_begin - page * PAGE - 1, 0"),
    ("part_end - page", "part_end - 1 - page"),
    ("part_end - page", "part_end + 1 - page"),
    ("at * (D * KEY_VECTORS)", "at * KEY_VECTORS"),
    ("k_scales + at * (D / 4)", "k_scales + at * (D / 4) + 1"),
    ("k_biases + at * (D / 4)", "k_scales + at * (D / 4)"),
    ("keys + c * KEY_VECTORS", "keys"),
    ("key_scales + c / 4", "key_scales"),
    ("key_biases + c / 4", "key_biases"),
    ("c % SCALED_CHANNELS == 0", "c == 0"),
    ("(c % SCALED_CHANNELS + i) / 4", "i / 4"),
    ("unpack<half>(four[k])", "unpack<half>(four[0])"),
    ("(i + k) * 32 + lane", "i * 32 + lane"),
    ("* by.x + by.y;", "* by.x;"),
    ("four_codes<VB>(tile, q_at) * by.x + by.y", "four_codes<VB>(tile, q_at) * by.x"),
    ("(c + i) / 4]", "i / 4]"),
    ("queries[h * QUADS", "queries[0 * QUADS"),
    ("query.y * key[1]", "query.y * key[0]"),
    ("score[h] += query.x", "score[h] = query.x"),
    ("token = lane * 2", "token = lane"),
    ("/ how[1]", ""),
    ("scale = how[0]", "scale = 1.0f"),
    ("token >= begin && ", ""),
    (" && token < end", ""),
    ("token + 1 >= begin && ", ""),
    (" && token + 1 < end", ""),
    ("simd_broadcast(top, ushort(h))", "top"),
    ("metal::max(before, ", "metal::max(LOWEST, "),
    ("metal::max(x, y)", "x"),
    ("before - now", "0.0f"),
    ("x - now", "x"),
    ("y - now", "y"),
    ("score[h].x + score[h].y", "score[h].x"),
    ("lane == h", "lane == 0"),
    ("sum * keep + total", "total"),
    ("sum * keep + total", "sum + total"),
    ("out[h][i] *= keep", "out[h][i] *= 1.0f"),
    ("at * (PAGE * VALUE_VECTORS)", "at * VALUE_VECTORS"),
    ("v_scales + at * (PAGE * GROUPS / 4)", "v_scales + at * (PAGE * GROUPS / 8)"),
    ("v_biases + at * (PAGE * GROUPS / 4)", "v_scales + at * (PAGE * GROUPS / 4)"),
    ("begin / TOKENS * TOKENS", "begin"),
    ("begin / TOKENS * TOKENS", "0"),
    ("values + t * VALUE_VECTORS", "values"),
    ("value_scales + scales_at", "value_scales"),
    ("value_biases + scales_at", "value_biases"),
    ("t == first_tile || ", ""),
    (" || t % SCALED_TOKENS == 0", ""),
    ("t / SCALED_TOKENS * VALUE_SCALES", "t * VALUE_SCALES / SCALED_TOKENS"),
    ("t % SCALED_TOKENS + from", "from"),
    ("t % SCALED_TOKENS + from", "t + from"),
    ("PAIRED ? lane / 16 : k", "k"),
    ("PAIRED ? lane / 16 : k", "0"),
    ("t + from >= begin && ", ""),
    (" && t + from < end", ""),
    ("if (seen && ", "if ("),
    ("from * (DP / 4) + quad", "from * QUADS + quad"),
    ("from * (DP / 4) + quad + i * 32", "from * (DP / 4) + quad"),
    ("scaled_token * GROUPS + quad / 8", "scaled_token * GROUPS"),
    ("quad / 8 + i * 4", "quad / 8"),
    ("words.y));", "words.x));"),
    ("(t + j) / 2", "j / 2"),
    ("(t + j) / 2", "(t + j) / 2 + 1"),
    ("lane < 16 ? weight.x : weight.y", "weight.x"),
    ("weight.y * value[SIDE - 1]", "weight.x * value[SIDE - 1]"),
    ("value[SIDE - 1][i];", "value[0][i];"),
    ("+= NSG) {", "+= 2 * NSG) {"),
    ("page = simd_gid", "page = 0"),
    ("tiles + simd_gid * TILE", "tiles"),
    ("affines + simd_gid * SCALES", "affines"),
    ("found[simd_gid * H + lane]", "found[lane]"),
    ("value += simd_shuffle_xor(value, ushort(16))", "value += value"),
    ("[n * QUADS + at]", "[at]"),
    ("first + i / QUADS", "i / QUADS"),
    ("share * found", "found"),
    ("value += share *", "value +="),
    ("out_at + first * QUADS + i", "out_at + i"),
    ("long(item) * q_heads + q_head", "long(item) * q_heads"),
    ("long(q_head + h) * items + item", "long(q_head + h) + item"),
    ("long(task[0]) * q_heads + q_head", "long(task[0]) * q_heads"),
    ("long(task[0]) * q_heads + q_head", "q_head"),
    ("work[item * (4 + PAGES) + thread_id]", "work[thread_id]"),
    ("/ (G / H);", "/ G;"),
]  # fmt: skip
SWAPPED_CODES = [
    ("(bias << 16)", "(bias << 15)"),
    ("scale >> 16", "scale"),
    ("bias & 0xffff0000u", "bias"),
    ("odd.x, even.y", "even.y, odd.x"),
    ("both & 255u", "both & 127u"),
    ("both >> 8", "both >> 7"),
    ("both & 15u", "both & 7u"),
    ("both >> 4", "both & 15u"),
]  # fmt: skip
SWAPPED_NUMBERS = [
    ("(word >> 8) & 255u", "word & 255u"),
    ("(word >> 16) & 255u", "(word >> 8) & 255u"),
    ("word >> 24", "word >> 25"),
    ("(word >> 4) & 15u", "word & 15u"),
    ("(word >> 8) & 15u", "(word >> 4) & 15u"),
    ("(word >> 12) & 15u", "(word >> 11) & 15u"),
]  # fmt: skip

# Mutants that compute the same, and why.
MULTIPLES = "both are multiples of the step"
EQUIVALENT = {
    "+ 1 < at for (int c = 0; c < D; c += CHANNELS) { [19]": MULTIPLES,
    "+ 1 < at for (int i = 0; i < CHANNELS; i += 4) { [21]": MULTIPLES,
    "+ 1 < at for (int j = 0; j < TOKENS; j += 2) { [21]": MULTIPLES,
    "<= at if (seen && (FULL || quad + i * 32 < QUADS)) { [44]": (
        "a lane more unpacks what lies behind a token's values, and nobody takes it"
    ),
    "<= at UNROLL for (int first = 0; first < H; first += TOGETHER) { [32]": "a turn of no heads",
}


def mutants():
    return [mutant for mutant in every_mutant() if mutant[0] not in EQUIVALENT]


def every_mutant():
    headers = {"codes": (CODES, SWAPPED_CODES), "numbers": (NUMBERS, SWAPPED_NUMBERS)}
    return kernel_mutants(KERNEL, SWAPPED, headers)


@cache
def case(index):
    """Inputs and the right result.

    First windows, parts that end within a page, with it and after its first token, and a head dim
    that tiles don't fit; then a whole part, of more pages than simdgroups, and two tokens at once;
    then more heads than fit in a tile; then plain values.
    """
    rng = np.random.default_rng(index + 11)
    if index == 0:
        rows = [(70, 1), (70, 1), (70, 1), (256, 1)]
        cache = Paged(rows, 2, 80, dtype=mx.float16, bits=(8, 4))
        cut_short(cache, [70, 31, 32, 192], window=96)
        # Heads whose scores are thousands apart: exp overflows where the largest isn't subtracted.
        q = mx.array(rng.normal(size=(4, 4, 80)) * [[[1], [3e3], [3e3], [3e3]]]).astype(mx.float16)
        how = Options(0.11, 96)
    elif index == 1:
        cache = Paged([(64, 1), (1024, 1)], 2, 64, dtype=mx.float16, bits=(4, 4))
        scales = np.where(np.arange(18) % 3, 1e3, 1)[:, None]
        q = mx.array(rng.normal(size=(2, 18, 64)) * scales).astype(mx.float16)
        how = Options(0.2)
    else:
        cache = Paged([(200, 1)], 1, 192, dtype=mx.float16, bits=(8, 8 if index == 2 else None))
        q = mx.array(rng.normal(size=(1, 10, 192))).astype(mx.float16)
        how = Options(0.07, softcap=2.0)
    expected = cache.expected(np.array(q, np.float64), scale=how.scale, softcap=how.softcap)
    return q, cache, how, expected


def cut_short(cache, positions, window):
    """Let rows end at these positions, and make NaN what isn't seen of values in sealed pages."""
    table = cache.described.table.copy()
    table[:, 2] = positions
    keys, values = cache.pool
    scales, biases = np.array(values.scales), np.array(values.biases)
    for _, _, position, base, sealed, at, _ in table:
        for i in range(sealed):
            tokens = (base + i) * 64 + np.arange(64)
            hidden = (tokens > position) | (tokens <= position - window)
            page_id = cache.described.pages[at + i]
            scales[page_id, :, hidden] = np.nan
            biases[page_id, :, hidden] = np.nan
    cache.pool = keys, PackedPages(values.codes, mx.array(scales), mx.array(biases))
    cache.described = PagedRows(table, cache.described.pages)
    cache.rows = [(position, 1) for position in positions]
    kept = zip(positions, cache.tokens, strict=True)
    cache.tokens = [[x[: position + 1] for x in kv] for position, kv in kept]
    cache.window = window


def works(index, kernel):
    """Whether nothing is wrong with the kernels, the packed one in this form."""

    def run(launch):
        ours = launch.kernel.name == kernel.name
        if ours:
            launch = dataclasses.replace(launch, kernel=kernel)
        return emulate(launch, mode="check" if ours else "fast", timeout_s=20)

    return attends_rightly(run, *case(index))


def loaded_bytes(kernel):
    """Of the codes that it loads in the first case, of keys and of values."""
    q, cache, how, _ = case(0)
    plan = cache.described.decode_plan(how.window, 8)
    (launch, _), _ = paged_attention.parts(q, cache.hot, cache.pool, plan, scale=1.0, softcap=None)
    buffers = cost(dataclasses.replace(launch, kernel=kernel)).buffers
    return [buffers[name].loads.bytes for name in ("k_codes", "v_codes")]


# Three rows' page and three of the last row's, for two heads; of the values, halves of three.
SEEN = [2 * 6 * 80 * 64, 2 * (64 + 32 + 64 + 32 + 64 + 32) * 48]


def test_the_kernel_as_it_is_works():
    assert all(works(index, KERNEL) for index in range(4))
    assert loaded_bytes(KERNEL) == SEEN


def test_mutants_that_are_left_out_exist():
    assert EQUIVALENT.keys() <= {what for what, _, _ in every_mutant()}


@pytest.mark.parametrize(("what", "text", "header"), params(mutants(), lambda what, *_: what))
def test_a_mutant_is_caught(what, text, header):
    mutant = dataclasses.replace(KERNEL, source=text, header=header)
    if all(works(index, mutant) for index in range(4)):
        assert loaded_bytes(mutant) != SEEN
