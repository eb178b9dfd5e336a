"""Every mutant of the Metal attention is caught: barriers deleted, bounds moved, strides swapped.

A mutant is caught where the emulator finds fault with it, or where its result is wrong. One that
isn't says that a test is missing, or that the line has no purpose.
"""

import dataclasses
from functools import cache

import mlx.core as mx
import numpy as np
import pytest

from mlxserve.kernels.attention import Options
from mlxserve.kernels.metal import paged_attention
from tests.kernels.paged import Paged
from tests.metal.mutation import attends_rightly, mutants_of
from tests.support.metal import cost, emulate
from tests.support.mutants import params

pytestmark = pytest.mark.full

KERNELS = {kernel.name: kernel for kernel in (paged_attention.PARTS, paged_attention.MERGE)}

# What is between a bound and its neighbours, and where things lie: (old, new).
SWAPPED = {
    "paged_attention": [
        ("TILE, part_end)", "TILE, part_end - 1)"),
        ("TILE, part_end)", "TILE, part_end + 1)"),
        ("t * TILE, part_begin)", "t * TILE, part_begin + 1)"),
        ("t * TILE, part_begin)", "t * TILE, part_begin - 1)"),
        ("t * TILE + TILE", "t * TILE + TILE - 1"),
        ("t / TILES < sealed", "t / TILES + 1 < sealed"),
        ("4 + t / TILES", "4"),
        ("4 + t / TILES", "5 + t / TILES"),
        ("in_pool ? VECTORS : kv_heads * VECTORS", "in_pool ? kv_heads * VECTORS : VECTORS"),
        ("(id * kv_heads + kv_head) * PAGE", "(id + kv_head) * PAGE"),
        ("(id * kv_heads + kv_head) * PAGE", "(id * kv_heads) * PAGE"),
        ("* PAGE + begin % PAGE) * D", "* PAGE) * D"),
        ("(id * PAGE + begin % PAGE) * kv_heads", "(id * PAGE) * kv_heads"),
        ("* kv_heads + kv_head) * D;", "* kv_heads) * D;"),
        ("pool_k : hot_k", "hot_k : pool_k"),
        ("pool_v : hot_v", "pool_v : hot_k"),
        ("keys[from / VECTORS * step", "keys[from / VECTORS * VECTORS"),
        ("values[from / VECTORS * step", "values[from / VECTORS * VECTORS"),
        ("* LINE + to % VECTORS] = keys", "* VECTORS + to % VECTORS] = keys"),
        ("* LINE + to % VECTORS] = values", "* VECTORS + to % VECTORS] = values"),
        ("count * VECTORS - 1", "count * VECTORS"),
        ("count * VECTORS - 1", "count * VECTORS - 2"),
        ("tile[token * LINE + c]", "tile[token * VECTORS + c]"),
        ("j * LINE * 4", "j * VECTORS * 4"),
        ("long(task[0]) * q_heads + q_head", "long(task[0]) * q_heads"),
        ("long(task[0]) * q_heads + q_head", "long(task[0]) + q_head"),
        ("work[item * (4 + PAGES) + thread_id]", "work[thread_id]"),
        ("work[item * (4 + PAGES) + thread_id]", "work[item * 4 + thread_id]"),
        ("queries)[i] = unpack", "queries)[i / 2] = unpack"),
        ("h * (D / 4) + c * 2]", "h * (D / 4) + c]"),
        ("c * 2 + 1", "c * 2"),
        ("/ (G / H);", "/ G;"),
        ("simd_gid * TILE * LINE", "0"),
        ("seen - now", "seen"),
        ("top[h] - now", "0.0f"),
        ("sum[h] * keep", "sum[h]"),
        ("out[h][i] *= keep", "out[h][i] *= 1.0f"),
        ("part == 0 ? weight : 0.0f", "weight"),
        ("share * found", "found"),
        ("value += share *", "value += "),
        ("found[simd_gid * H + h]", "found[h]"),
        ("long(item) * q_heads + q_head", "long(item) * q_heads"),
        ("h * WORDS + lane", "lane"),
        ("scale = how[0]", "scale = 1.0f"),
        ("long(q_head + h) * items", "long(q_head) * items"),
        ("long(q_head + h) * items + item", "long(q_head + h) + item"),
        ("/ how[1]", ""),
        ("+= NSG)", "+= 2 * NSG)"),
        ("part_begin / TILE + simd_gid", "simd_gid"),
        ("part_begin / TILE + simd_gid", "part_begin / TILE + simd_gid + 1"),
    ],
    "paged_attention_merge": [
        ("rows)[row]", "rows)[0]"),
        ("row_items.x", "row_items.y"),
        ("row_items.y", "row_items.x"),
        ("long(head) * tops_shape[1] + item", "long(head) * tops_shape[1]"),
        ("long(head) * tops_shape[1] + item", "item"),
        ("found[i * 2]", "found[i]"),
        ("newer_found[i * 2]", "newer_found[i]"),
        ("found[mine * 2]", "found[mine]"),
        ("found[mine * 2 + 1]", "found[mine * 2]"),
        ("newer_found[mine * 2]", "newer_found[mine]"),
        ("newer_found[mine * 2 + 1]", "newer_found[mine * 2]"),
        ("newer_rows)[row]", "rows)[row]"),
        ("newer_rows)[row]", "newer_rows)[0]"),
        ("newer_items.x - older", "newer_items.x"),
        ("older + newer_items.y", "newer_items.y"),
        ("older + newer_items.y", "older"),
        ("newer_tops_shape[1] + newer_item", "tops_shape[1] + newer_item"),
        ("newer_tops_shape[1] + newer_item", "newer_tops_shape[1]"),
        ("long(head) * newer_tops_shape[1]", "newer_tops_shape[1]"),
        ("? partial_pairs : newer_pairs", "? partial_pairs : partial_pairs"),
        ("? item : newer_item", "? item : item"),
        ("+ part) * q_heads + head", "+ j) * q_heads + head"),
        ("+ part) * q_heads + head", "+ part) * q_heads"),
        ("long(row) * q_heads + head", "long(row) + head"),
        ("share_j * simd_broadcast", "simd_broadcast"),
        ("share_j * pairs", "pairs"),
        ("newer_found[mine * 2]) - largest)", "newer_found[mine * 2]))"),
        ("float(sinks[head]) - largest", "float(sinks[head])"),
        ("value[i].y / total", "value[i].x / total"),
        ("if (SINKS) total", "if (!SINKS) total"),
        ("int i = lane; i < items", "int i = lane + 1; i < items"),
        ("first += 32", "first += 64"),
    ],
}  # fmt: skip

# Mutants that compute the same, and why.
NEVER_TAKEN = "the guard inside is false for the turn that it adds"
EQUIVALENT = {
    "<= at const float seen = token < count ? score[h] : LOWEST; [28]": (
        "the score of no token: it may raise what is subtracted, its weight is 0 because the next "
        "line looks again"
    ),
    "<= at const float weight = token < count ? metal::precise::exp(seen - now) : 0.0f; [30]": (
        "exp(LOWEST - now) is 0"
    ),
    "<= at UNROLL for (int i = 0; i < PAIRS; i++) { [28]": NEVER_TAKEN,
    "<= at UNROLL for (int i = 0; i < PAIRS; i++) { [24]": NEVER_TAKEN,
    "<= at UNROLL for (int i = 0; i < PAIRS; i++) [26]": NEVER_TAKEN,
    "<= at UNROLL for (int i = 0; i < PAIRS; i++) [28]": NEVER_TAKEN,
    "<= at for (int first = 0; first < items; first += 32) { [25]": "a block of no items",
    "+ 1 < at for (int over = TILE; over < 32; over *= 2) score[h] += "
    "simd_shuffle_xor(score[h], ushort(over)); [30]": "16 is all that there is below 32",
    "+ 1 < at if (c < D) { [7]": "both are even",
}


def mutants():
    return [mutant for mutant in every_mutant() if mutant[1] not in EQUIVALENT]


def every_mutant():
    for name, kernel in KERNELS.items():
        for what, source in mutants_of(kernel.source, SWAPPED[name]):
            yield name, what, source


@cache
def case(index):
    """Inputs and the right result: windows; tiles of half the size, sinks and caps; many parts."""
    rng = np.random.default_rng(index + 11)  # in each simdgroup some head has its largest score
    if index == 0:
        cache = Paged([(63, 1), (0, 1), (300, 1), (450, 1)], 2, 80, window=200, dtype=mx.float16)
        # Heads whose scores are thousands apart: exp overflows where the largest isn't subtracted.
        q = mx.array(rng.normal(size=(4, 4, 80)) * [[[1], [3e3], [3e3], [3e3]]]).astype(mx.float16)
        how = Options(0.11, 200)
    elif index == 1:
        cache = Paged([(64, 1), (270, 1)], 2, 192, dtype=mx.float16)
        q = mx.array(rng.normal(size=(2, 24, 192))).astype(mx.float16)
        how = Options(0.07, sinks=mx.array(rng.normal(size=24) + 3), softcap=2.0)
    elif index == 2:
        cache = Paged([(34 * 256, 1)], 1, 64, dtype=mx.float16)
        q = mx.array(rng.normal(size=(1, 1, 64)) * 3).astype(mx.float16)
        how = Options(0.12)
    else:  # parts of packed pages and of hot ones
        cache = Paged([(70, 1), (5, 1), (3, 1), (600, 1)], 2, 64, dtype=mx.float16, bits=(8, 8))
        q = mx.array(rng.normal(size=(4, 4, 64)) * [[[1], [3e3], [3e3], [1]]]).astype(mx.float16)
        how = Options(0.12)
    sinks = None if how.sinks is None else np.array(how.sinks, np.float64)
    expected = cache.expected(
        np.array(q, np.float64), scale=how.scale, sinks=sinks, softcap=how.softcap
    )
    return q, cache, how, expected


def works(index, source_of):
    """Whether nothing is wrong with the kernels, one of them in another form."""

    def run(launch):
        kernel = launch.kernel
        if kernel.name in source_of:
            kernel = dataclasses.replace(kernel, source=source_of[kernel.name])
        launch = dataclasses.replace(launch, kernel=kernel)
        long = index > 1 and launch.kernel.name != "paged_attention_merge"
        return emulate(launch, mode="fast" if long else "check", timeout_s=20)

    return attends_rightly(run, *case(index))


def reads_what_it_sees(kernel):
    """Whether a kernel loads every byte of the tokens that are seen, and no other."""
    q, cache, how, _ = case(0)
    plan = cache.described.decode_plan(how.window)
    ((launch, _),) = paged_attention.parts(q, cache.hot, cache.pool, plan, scale=1.0, softcap=None)
    buffers = cost(dataclasses.replace(launch, kernel=kernel)).buffers
    loaded = [buffers[name].loads.distinct_bytes for name in ("hot_k", "hot_v", "pool_k", "pool_v")]
    seen = sum(min(start + 1, how.window) for start, _ in cache.rows)
    return sum(loaded) == seen * 2 * 80 * 2 * 2


def test_the_kernels_as_they_are_work():
    assert all(works(index, {}) for index in range(4))
    assert reads_what_it_sees(paged_attention.PARTS)


def test_mutants_that_are_left_out_exist():
    assert EQUIVALENT.keys() <= {what for _, what, _ in every_mutant()}


@pytest.mark.parametrize(
    ("name", "what", "source"), params(mutants(), lambda name, what, _: f"{name}: {what}")
)
def test_a_mutant_is_caught(name, what, source):
    cases = (0, 1) if name == "paged_attention" else (0, 3, 1, 2)
    if all(works(index, {name: source}) for index in cases):
        assert name == "paged_attention"
        assert not reads_what_it_sees(dataclasses.replace(KERNELS[name], source=source))
