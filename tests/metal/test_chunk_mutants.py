"""Every mutant of the Metal attention of chunks is caught; see test_mutants.py."""

import dataclasses
from functools import cache

import mlx.core as mx
import numpy as np
import pytest

from mlxserve.kernels import attention
from mlxserve.kernels.attention import Options, PagedRows
from mlxserve.kernels.metal import chunk_attention
from mlxserve.kernels.metal.launch import source
from mlxserve.kernels.pages import PackedPages
from tests.kernels.paged import Paged
from tests.metal.mutation import kernel_mutants
from tests.support.metal import KernelError, cost, emulate
from tests.support.mutants import params

pytestmark = pytest.mark.full

KERNEL = chunk_attention.CHUNK
# What is between a bound and its neighbours, and where things lie: (old, new).
SWAPPED = [
    ("(CHANNELS + 15) / 16", "CHANNELS / 16"),
    ("row.y * G - item.y", "row.y * G"),
    ("start + item.y / G - window + 1", "start + item.y / G - window"),
    ("start + item.y / G - window + 1", "start + item.y / G - window + 2"),
    ("(item.y + count - 1) / G", "(item.y + count - 1) / G + 1"),
    ("(item.y + count - 1) / G", "(item.y + count - 1) / G - 1"),
    ("simd_gid / SHARES * 8", "simd_gid * 8"),
    ("start + (item.y + own) / G - window + 1", "start + (item.y + own) / G + 1"),
    ("own + 8, count) - 1", "own + 8, count) - 8"),
    ("start + (item.y + own + matrix_line) / G", "start + (item.y + own) / G"),
    ("start + (item.y + own + matrix_line) / G", "start + (own + matrix_line) / G"),
    ("position - window + 1", "position - window"),
    ("position - window + 1", "position - window + 2"),
    ("item.y + i / WIDTH", "i / WIDTH"),
    ("row.x + folded / G", "folded / G"),
    ("row.x + folded / G", "row.x"),
    ("kv_head * G + folded % G) * VECTORS;", "kv_head * G) * VECTORS;"),
    ("kv_head * G + folded % G) * VECTORS;", "folded % G) * VECTORS;"),
    ("simd_gid % SHARES * CHANNELS", "0"),
    ("(own + matrix_line) * LINE * 4 + channel", "matrix_line * LINE * 4 + channel"),
    ("+ channel / 2 + c * 8 + column", "+ c * 8 + column"),
    ("tile_words[at + 1])", "tile_words[at])"),
    ("scale = how[0]", "scale = 1.0f"),
    ("sinks[kv_head * G + ", "sinks["),
    ("(item.y + own + matrix_line) % G]", "(own + matrix_line) % G]"),
    ("column == 0 ? 1.0f : 0.0f", "1.0f"),
    ("int page = low / PAGE", "int page = first_page"),
    ("int page = low / PAGE", "int page = low / PAGE + 1"),
    ("pages[pages_at + page - first_page]", "pages[page - first_page]"),
    ("pages[pages_at + page - first_page]", "pages[pages_at + page]"),
    ("low - page * PAGE, 0)", "low - page * PAGE + 1, 0)"),
    ("low - page * PAGE, 0)", "low - page * PAGE - 1, 0)"),
    ("last + 1 - page * PAGE", "last - page * PAGE"),
    ("last + 1 - page * PAGE", "last + 2 - page * PAGE"),
    ("own_low < (page + 1) * PAGE", "own_low < page * PAGE"),
    ("own_last >= page * PAGE", "own_last > page * PAGE + 63"),
    ("id * kv_heads + kv_head;", "id * kv_heads;"),
    ("id * PAGE * kv_heads + kv_head", "id * PAGE * kv_heads"),
    ("in_pool ? VECTORS : kv_heads * VECTORS", "VECTORS"),
    ("k + pool_at * (D * KEY_VECTORS)", "k + id * (D * KEY_VECTORS)"),
    ("k_scales + pool_at * D", "k_scales + id * D"),
    ("k_biases + pool_at * D", "k_scales + pool_at * D"),
    ("unpack<T>(query[c].y)", "unpack<T>(query[c].x)"),
    ("channel + c * 16 + matrix_line * 2", "c * 16 + matrix_line * 2"),
    ("channel + c * 16 + matrix_line * 2", "channel + c * 16 + matrix_line"),
    ("unpack<half>(affines[at + 1])", "first_by"),
    ("t * 4 + column / 2", "t * 4"),
    ("(line, two) * first_by.x + first_by.y", "(line, two) * first_by.x"),
    ("(line + KEY_VECTORS + 1, two)", "(line + KEY_VECTORS, two)"),
    ("second_by.x + second_by.y", "second_by.x"),
    ("multiply_add(score[t], float2(x.y, y.y), second)", ""),
    ("(in_pool ? (const device uint4*)k", "(!in_pool ? (const device uint4*)k"),
    ("tile, keys + t * 8 * step, step, begin", "tile, keys, step, begin"),
    ("step, begin - t * 8, end - t * 8", "step, begin, end - t * 8"),
    ("step, begin - t * 8, end - t * 8", "step, begin - t * 8, end"),
    ("step, begin - t * 8, end - t * 8", "VECTORS, begin - t * 8, end - t * 8"),
    ("(i * 8 + column) * LINE * 4", "(i * 8 + matrix_line) * LINE * 4"),
    ("channel / 2 + c * 8 + matrix_line", "c * 8 + matrix_line"),
    ("tile_words[at + LINE * 4]", "tile_words[at]"),
    ("multiply_add(score[t + i], float2(x.y, y.y)", "multiply_add(score[t + i], float2(x.x, y.x)"),
    ("thread_id ^ 32", "thread_id"),
    ("score[t] += others[t * THREADS]", "score[t] += others[0]"),
    ("page * PAGE + t * 8 + column", "t * 8 + column"),
    ("score[t] *= scale", ""),
    ("/ how[1]", ""),
    ("token < position_low || ", ""),
    ("token > position) score[t].x", "token >= position) score[t].x"),
    ("token + 1 < position_low", "token < position_low"),
    ("token + 1 > position", "token > position"),
    ("metal::max(score[t].x, score[t].y)", "score[t].x"),
    ("now = row_max(now);", ""),
    ("exp(top - now)", "exp(top)"),
    ("top = now;", ""),
    ("sum *= keep;", ""),
    ("exp(score[t] - now)", "exp(score[t])"),
    ("sum += score[t].x + score[t].y", "sum += score[t].x"),
    ("out_sums[c] *= keep", "out_sums[c] *= 1.0f"),
    ("v + pool_at * (PAGE * VALUE_VECTORS)", "v + id * (PAGE * VALUE_VECTORS)"),
    ("v_scales + pool_at * (PAGE * GROUPS)", "v_scales + id * (PAGE * GROUPS)"),
    ("v_biases + pool_at * (PAGE * GROUPS)", "v_scales + pool_at * (PAGE * GROUPS)"),
    ("tile, values, VALUE_VECTORS, begin, end", "tile, values, VALUE_VECTORS, 0, end"),
    ("tile, values, VALUE_VECTORS, begin, end", "tile, values, VALUE_VECTORS, begin, PAGE"),
    ("begin * GROUPS, end * GROUPS", "0, end * GROUPS"),
    ("begin * GROUPS, end * GROUPS", "begin * GROUPS, PAGE * GROUPS"),
    ("int token = t * 8 + matrix_line", "int token = t * 8"),
    ("channel + c * 8 + column;", "c * 8 + column;"),
    ("token * GROUPS + at / 32", "token * GROUPS"),
    ("(line, at / 2) * by.x + by.y", "(line, at / 2) * by.x"),
    ("(in_pool ? (const device uint4*)v", "(!in_pool ? (const device uint4*)v"),
    ("tile, values + t * 8 * step, step, begin", "tile, values, step, begin"),
    ("(i * 8 + matrix_line) * LINE * 4", "matrix_line * LINE * 4"),
    ("(channel + column) / 2", "column / 2"),
    ("score[t + i], unpack<T>(tile", "score[t], unpack<T>(tile"),
    ("tile_words[at + c * 4]", "tile_words[at]"),
    ("sum = row_sum(sum);", ""),
    ("(own + matrix_line) * LINE) + channel + column", "(own + matrix_line) * LINE) + column"),
    ("(own + matrix_line) * LINE) + channel", "matrix_line * LINE) + channel"),
    ("out_line[c * 8] =", "out_line[c * 4] ="),
    ("out_sums[c].y / sum", "out_sums[c].x / sum"),
    ("item.y + i / VECTORS", "i / VECTORS"),
    ("row_pages.w + folded / G", "folded / G"),
    ("kv_head * G + folded % G) * VECTORS;\n  ((device", "folded % G) * VECTORS;\n  ((device"),
    ("tile[i / VECTORS * LINE + i % VECTORS]", "tile[i / VECTORS * WIDTH + i % VECTORS]"),
]  # fmt: skip
HEADERS = {
    "lines": [
        ("(LINES * VECTORS + THREADS - 1) / THREADS", "LINES * VECTORS / THREADS"),
        ("line >= begin && ", ""),
        (" && line < end", ""),
        ("&& at < FILLED", ""),
        ("line * (VECTORS + 1) + at", "line * VECTORS + at"),
        ("line * step + at", "line * FILLED + at"),
        ("i >= begin && ", ""),
        (" && i < end", ""),
        ("uint(biases[i]) << 16", "uint(scales[i]) << 16"),
    ],
    "matrices": [
        ("lane / 16 * 4", "lane / 16 * 3"),
        ("lane / 8 % 2 * 4", "lane / 4 % 2 * 4"),
        ("x = metal::max(x, simd_shuffle_xor(x, ushort(1)));", ""),
        ("x, simd_shuffle_xor(x, ushort(8))", "x, simd_shuffle_xor(x, ushort(4))"),
        ("x += simd_shuffle_xor(x, ushort(1));", ""),
        ("x + simd_shuffle_xor(x, ushort(8))", "x + simd_shuffle_xor(x, ushort(2))"),
    ],
}

# Mutants that compute the same, and why.
BITS = "bits are 4, 8 or 16"
NEVER_SEEN = "a simdgroup computes what all its queries are blind to"
EQUIVALENT = {
    "+ 1 < at UNROLL for (int t = 0; t < MATRICES; t += ROWS / 8) { [28]": (
        "it is a multiple of the step"
    ),
    "+ 1 < at if (KB < 16 && in_pool) { [8]": BITS,
    "+ 1 < at if (VB < 16 && in_pool) { [8]": BITS,
    "<= at const int own_last = own < count ? start + (item.y + metal::min(own + 8, count) - 1) / G"
    " : -1; [24]": "a simdgroup without rows computes what nobody takes",
    "<= at const bool attends = own_low < (page + 1) * PAGE && own_last >= page * PAGE; [30]": (
        NEVER_SEEN
    ),
}


def mutants():
    return [mutant for mutant in every_mutant() if mutant[0] not in EQUIVALENT]


def every_mutant():
    headers = {name: (source(f"{name}.metal"), swapped) for name, swapped in HEADERS.items()}
    return kernel_mutants(KERNEL, SWAPPED, headers)


@cache
def case(index):
    """Inputs and the right result.

    First plain pages, a window of which one token lies in the oldest page, and a head dim that
    matrices don't fit; then packed ones, with sinks, a window that hides what isn't a number, a
    block that begins within a token's heads and sees a page less than the one before, and a row
    that ends in the pool; then two simdgroups for eight rows.
    """
    rng = np.random.default_rng(index + 11)
    if index == 0:
        cache = Paged([(0, 3), (61, 6), (226, 9)], 2, 72, window=100, dtype=mx.float16)
        # Rows whose scores are thousands apart: exp overflows where the largest isn't subtracted.
        scales = np.where(np.arange(18) % 3, 3e3, 1)[:, None, None]
        q, how = rng.normal(size=(18, 6, 72)) * scales, Options(0.11, 100)
    elif index == 1:
        rows = [(70, 5), (200, 15), (128, 6)]
        cache = Paged(rows, 2, 64, window=148, dtype=mx.float16, bits=(8, 4))
        end_in_the_pool(cache, 100)
        hide(cache)
        q, sinks = rng.normal(size=(26, 10, 64)), mx.array(rng.normal(size=10) * 2)
        how = Options(0.2, 148, sinks=sinks)
    else:
        cache = Paged([(84, 20)], 1, 192, window=30, dtype=mx.float16, bits=(4, 8))
        q, how = rng.normal(size=(20, 2, 192)), Options(0.07, 30, softcap=2.0)
    q = mx.array(q).astype(mx.float16)
    sinks = None if how.sinks is None else np.array(how.sinks, np.float64)
    options = {"scale": how.scale, "sinks": sinks, "softcap": how.softcap}
    return q, cache, how, cache.expected(np.array(q, np.float64), **options)


def end_in_the_pool(cache, start):
    """Let the last row begin earlier, and so end within a sealed page."""
    table = cache.described.table.copy()
    table[-1, 2] = start
    end = start + table[-1, 1]
    cache.described = PagedRows(table, cache.described.pages)
    cache.rows[-1] = start, table[-1, 1]
    cache.tokens[-1] = [x[:end] for x in cache.tokens[-1]]


def hide(cache):
    """Make NaN what no query sees of packed values."""
    keys, values = cache.pool
    scales, biases = np.array(values.scales), np.array(values.biases)
    for _, n, start, base, sealed, at, _ in cache.described.table:
        for i in range(sealed):
            tokens = (base + i) * 64 + np.arange(64)
            hidden = (tokens <= start - cache.window) | (tokens >= start + n)
            scales[cache.described.pages[at + i], :, hidden] = np.nan
            biases[cache.described.pages[at + i], :, hidden] = np.nan
    cache.pool = keys, PackedPages(values.codes, mx.array(scales), mx.array(biases))


def works(index, kernel):
    """Whether nothing is wrong with the kernel in this form."""
    q, cache, how, expected = case(index)

    def run(launch):
        return emulate(dataclasses.replace(launch, kernel=kernel), timeout_s=20)

    try:
        out = attention._metal(None, q, cache.hot, cache.pool, cache.described, how, run)
    except (KernelError, OSError):  # the latter where it calls what isn't defined
        return False
    return np.allclose(np.array(out, np.float64), expected, atol=2e-3)


def loaded_bytes(kernel, index):
    """Of keys and values, all accesses together."""
    q, cache, how, _ = case(index)
    plan = cache.described.chunk_plan(how.window, q.shape[1] // cache.hot[0].shape[1], q.shape[2])
    options = {"scale": 1.0, "sinks": how.sinks, "softcap": how.softcap}
    launch = chunk_attention.chunk_launch(q, cache.hot, cache.pool, plan, **options)
    buffers = cost(dataclasses.replace(launch, kernel=kernel)).buffers
    names = ("hot_k", "hot_v", "k", "v", "k_scales", "k_biases", "v_scales", "v_biases")
    return sum(buffers[name].loads.bytes for name in names)


# That there is no need to read more in each case; packed keys are read in whole pages.
SEEN = [
    (3 + 67 + 108) * 2 * 2 * 72 * 2,  # each row is one block
    # The second row has two blocks, of tokens from 200 and from 212 on. Values have two groups.
    (11 + 21 + 23) * 2 * 2 * 64 * 2
    + 2 * (1 + 3 + 2 + 2) * 64 * (64 + 4)
    + 2 * (64 + 192 - 53 + 192 - 65 + 106) * (32 + 2 * 4),
    # Two blocks, of tokens from 84 and from 100 on, which see those from 55 and from 71 on.
    192 * (32 + 4) + (64 - 55) * (192 + 6 * 4) + (100 - 64 + 104 - 71) * 2 * 192 * 2,
]


def test_the_kernel_as_it_is_works():
    assert all(works(index, KERNEL) for index in range(3))
    assert [loaded_bytes(KERNEL, index) for index in range(3)] == SEEN


def test_mutants_that_are_left_out_exist():
    assert EQUIVALENT.keys() <= {what for what, _, _ in every_mutant()}


@pytest.mark.parametrize(
    ("what", "text", "header"), params(mutants(), lambda what, *_: what, one_in=32)
)
def test_a_mutant_is_caught(what, text, header):
    mutant = dataclasses.replace(KERNEL, source=text, header=header)
    if all(works(index, mutant) for index in range(3)):
        assert [loaded_bytes(mutant, index) for index in range(3)] != SEEN
