"""The launch that reads a row's packed pages: sealed ones in 8 or 4 bits, see `kernels.pages`.

Bytes it has to move, for each page and KV head: D * 64 codes of the keys and D scales and biases;
64 * Dp codes of the values, where Dp is D up to a multiple of 32, and Dp / 32 scales and biases for
each token; and of each part as `paged_attention` says. Of the bytes of plain pages that is 0.55
with 8 bits and 0.30 with 4. A part has twice or four times as many pages as a plain one, since what
it writes and the merge reads is as much as there.
"""

from typing import cast

import mlx.core as mx

from mlxserve.kernels.metal.launch import Kernel, Launch, source
from mlxserve.kernels.metal.plan import MAX_LANE_NUMBERS, Parts
from mlxserve.kernels.pages import (
    PAGE_TOKENS,
    VALUE_GROUP,
    PackedPages,
    Pool,
    PoolSides,
    packed_bits,
)

SIMDGROUPS = 8  # of a threadgroup: each takes a page
TILE_BYTES = 2048  # of a simdgroup's codes in threadgroup memory


def part_pages(key_bits: int, value_bits: int) -> int:
    """Pages of a part of packed pages; 0 where `packed_attention` reads none.

    With 8 query heads for a KV head, to write and read a part's result is as much as 0.9 pages in 4
    bits, or half a page in 8.
    """
    if not key_bits:
        return 0
    return 16 if key_bits == value_bits == 4 else 8


def packed_parts(
    q: mx.array,
    pool: PoolSides,
    parts: Parts,
    how: mx.array,
    *,
    softcap: bool,
) -> Launch:
    """Partial `[items, Hq, D]` and tops `[Hq, items, 2]`, float32, of the parts of packed pages.

    q: in the cache's dtype; pool: keys packed, values packed or plain; how: scale and softcap.
    """
    key_bits, value_bits = packed_bits(pool)
    value_bits = value_bits or 16
    keys, values = cast(tuple[PackedPages, Pool], pool)
    # Plain values have no scales: what stands in their place isn't read.
    values = values if isinstance(values, PackedPages) else PackedPages(values, *keys[1:])
    (_, q_heads, dim), kv_heads = q.shape, keys.codes.shape[1]
    group = q_heads // kv_heads
    heads = _heads_together(group, dim)
    channels, tokens = _channels(dim, key_bits), _tokens(dim, value_bits)
    template = {
        "T": q.dtype,
        "D": dim,
        "G": group,
        "H": heads,
        "NSG": SIMDGROUPS,
        "KB": key_bits,
        "VB": value_bits,
        "PAGES": parts.pages,
        "CHANNELS": channels,
        "SCALED_CHANNELS": _scaled_channels(dim, channels),
        "TOKENS": tokens,
        "SCALED_TOKENS": _scaled_tokens(dim, tokens),
        "SOFTCAP": softcap,
    }
    threads = 32 * SIMDGROUPS
    return Launch(
        kernel=PACKED_PARTS,
        arrays=(q, *keys, *values, parts.work, how),
        template=tuple(template.items()),
        grid=(parts.items * threads, kv_heads * (group // heads), 1),
        threadgroup=(threads, 1, 1),
        shapes=((parts.items, q_heads, dim), (q_heads, parts.items, 2)),
        dtypes=(mx.float32, mx.float32),
    )


def _heads_together(group: int, dim: int) -> int:
    """Query heads of a threadgroup: as many as registers hold, in equal shares.

    Each takes four channels of a lane in each turn, and the scores of two tokens.
    """
    most = MAX_LANE_NUMBERS // (4 * -(-dim // 128) + 2)
    return max(n for n in range(1, group + 1) if group % n == 0 and n <= most)


def _channels(dim: int, bits: int) -> int:
    """Channels of keys in a tile: equal shares in fours."""
    most = TILE_BYTES * 8 // (PAGE_TOKENS * bits)
    return max(n for n in range(4, most + 1, 4) if dim % n == 0)


def _scaled_channels(dim: int, channels: int) -> int:
    """Channels whose scales are loaded together: those of tiles that fill a line of 128 bytes."""
    return min(n for n in range(channels, dim + 1, channels) if dim % n == 0 and n >= 64)


def _tokens(dim: int, bits: int) -> int:
    """Tokens of values in a tile: equal shares of a page."""
    channels = dim if bits == 16 else -(-dim // VALUE_GROUP) * VALUE_GROUP
    return max(n for n in (4, 8, 16, 32, 64) if n * channels * bits <= TILE_BYTES * 8)


def _scaled_tokens(dim: int, tokens: int) -> int:
    """Tokens whose scales are loaded together: those of tiles that fill lines of 128 bytes."""
    groups = -(-dim // VALUE_GROUP)
    return min(n for n in (4, 8, 16, 32, 64) if n >= tokens and n * groups % 64 == 0)


PACKED_PARTS = Kernel(
    "packed_attention",
    (
        *("q", "k_codes", "k_scales", "k_biases", "v_codes", "v_scales", "v_biases"),
        *("work", "how"),
    ),
    ("partial", "tops"),
    source("packed_attention.metal"),
    source("numbers.metal") + source("codes.metal"),
)
