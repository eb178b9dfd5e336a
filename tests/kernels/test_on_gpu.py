"""Metal kernels on a real GPU, against NumPy in float64."""

import mlx.core as mx
import numpy as np
import pytest

from mlxserve.kernels import selfcheck
from mlxserve.kernels.metal import launch
from mlxserve.kernels.metal.chunk_attention import chunk_attention
from mlxserve.kernels.metal.packed_attention import part_pages
from mlxserve.kernels.metal.paged_attention import decode_attention
from mlxserve.kernels.metal.plan import DecodePlan
from mlxserve.kernels.metal.quantized_matmul import MAX_ROWS, quantized_rows
from mlxserve.kernels.uses import AttentionUse, ChunkUse, MatmulUse
from tests.kernels.paged import Paged
from tests.metal.matmuls import exact, random_case

pytestmark = pytest.mark.skipif(not mx.metal.is_available(), reason="only on Macs with Metal")

USES = [
    AttentionUse(32, 8, 128, "bfloat16"),
    AttentionUse(9, 3, 64, "float16"),
    AttentionUse(4, 1, 256, "bfloat16", window=512),
    AttentionUse(8, 8, 80, "float16", softcap=50.0),
    AttentionUse(64, 8, 64, "bfloat16", window=128, sinks=True),
    AttentionUse(32, 8, 128, "bfloat16", key_bits=8, value_bits=8),
    AttentionUse(9, 3, 64, "float16", key_bits=4, value_bits=4),
    AttentionUse(4, 1, 256, "bfloat16", window=512, key_bits=8, value_bits=4),
    AttentionUse(8, 8, 80, "float16", softcap=50.0, sinks=True, key_bits=4),
]
POSITIONS = (0, 63, 64, 127, 255, 256, 257, 900, 3000)
CHUNKS = [(0, 7), (64, 64), (130, 20), (960, 33)]  # start and tokens


def decode(use, cache, q, **how):
    plan = cache.described.decode_plan(use.window, part_pages(use.key_bits, use.value_bits))
    return decode_attention(q, cache.hot, cache.pool, plan, **how, run=launch.run)


def chunk(use, cache, q, **how):
    plan = cache.described.chunk_plan(use.window, use.q_heads // use.kv_heads, use.dim)
    return chunk_attention(q, cache.hot, cache.pool, plan, **how, run=launch.run)


@pytest.mark.parametrize("use", USES, ids=str)
@pytest.mark.parametrize(
    ("attend", "rows"),
    [(decode, [(position, 1) for position in POSITIONS]), (chunk, CHUNKS)],
    ids=["decode", "chunks"],
)
def test_attention(use, attend, rows):
    dtype = getattr(mx, use.dtype)
    bits = use.key_bits or None, use.value_bits or None
    paged = Paged(rows, use.kv_heads, use.dim, window=use.window, dtype=dtype, bits=bits)
    rng = np.random.default_rng(1)
    q = mx.array(rng.normal(size=(paged.total, use.q_heads, use.dim)).astype(np.float32))
    q = q.astype(dtype)
    sinks = rng.normal(size=use.q_heads).astype(np.float32) if use.sinks else None
    how = {"scale": use.dim**-0.5, "softcap": use.softcap}
    got = attend(use, paged, q, **how, sinks=None if sinks is None else mx.array(sinks))
    wide = np.array(q.astype(mx.float32), np.float64)
    expected = paged.expected(wide, **how, sinks=sinks)
    spacing = 2.0**-10 if dtype == mx.float16 else 2.0**-7
    largest = np.abs(expected).max(axis=(1, 2), keepdims=True)
    difference = np.abs(np.array(got.astype(mx.float32)) - expected)
    assert (difference / largest).max() < spacing


def test_a_row_has_the_same_bits_alone_and_in_a_batch():
    use = USES[0]
    rows = [(position, 1) for position in POSITIONS]
    paged = Paged(rows, use.kv_heads, use.dim, dtype=mx.bfloat16)
    q = mx.random.normal((len(rows), use.q_heads, use.dim)).astype(mx.bfloat16)

    def attend(table):
        plan = DecodePlan(table, paged.described.pages, None)
        how = {"scale": use.dim**-0.5, "sinks": None, "softcap": None, "run": launch.run}
        return decode_attention(q, paged.hot, paged.pool, plan, **how)

    together = attend(paged.described.table)
    for i in range(len(rows)):
        assert mx.array_equal(attend(paged.described.table[i : i + 1])[0], together[i])


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_matmul(bits, group, dtype):
    """Right, and each row with the bits of the largest batch in every other one."""
    x, packed = random_case(MAX_ROWS + 1, 77, 9 * group, bits, group, dtype)
    expected = exact(x, packed)
    (together,) = launch.run(quantized_rows(x, packed))
    difference = np.abs(np.array(together.astype(mx.float32)) - expected).max()
    assert difference < (2.0**-10 if dtype == mx.float16 else 2.0**-7) * np.abs(expected).max()
    for count in range(1, MAX_ROWS + 1):
        (got,) = launch.run(quantized_rows(x[:count], packed))
        assert mx.array_equal(got, together[:count]), count


@pytest.mark.parametrize(
    "use",
    [USES[0], ChunkUse(32, 8, 128, "bfloat16"), MatmulUse(14336, 4096, 4, 64, "bfloat16")],
    ids=str,
)
def test_this_gpu_passes_the_check(use):
    verdict = selfcheck.examine(use)
    assert verdict.failure == ""
