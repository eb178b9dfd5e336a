"""The launch that packs a side of full hot pages, several at once: see `kernels.pages`.

Bytes it has to move, for each page and KV head: 64 * D numbers of 16 bits; of the keys D * 64 codes
and D scales and biases, of the values 64 * Dp codes and 64 * Dp / 32 scales and biases, where Dp is
D up to a multiple of 32.
"""

import mlx.core as mx

from mlxserve.kernels.metal.launch import Kernel, Launch, source
from mlxserve.kernels.pages import PAGE_TOKENS, VALUE_GROUP

THREADS = 128
TILE_NUMBERS = 8192  # of 16 bits, in threadgroup memory


def pack_launch(hot: mx.array, ids: mx.array, bits: int, *, keys: bool) -> Launch:
    """Codes, scales and biases of the pages `ids`, as `pack_keys` or `pack_values` have them.

    hot: `[n_hot * 64, Hk, D]`, float16 or bfloat16, D even; ids: int32 `[n]`, of hot pages.
    """
    _, heads, dim = hot.shape
    pages = ids.shape[0]
    groups = -(-dim // VALUE_GROUP)
    channels, tokens = _channels(dim), _tokens(dim)
    if keys:
        tiles = dim // channels
        codes, affine = (dim, PAGE_TOKENS * bits // 32), (dim,)
    else:
        tiles = PAGE_TOKENS // tokens
        codes, affine = (PAGE_TOKENS, groups * VALUE_GROUP * bits // 32), (PAGE_TOKENS, groups)
    template = {
        "T": hot.dtype,
        "IS_HALF": hot.dtype == mx.float16,
        "KEYS": keys,
        "BITS": bits,
        "D": dim,
        "C": channels,
        "R": tokens,
        "THREADS": THREADS,
    }
    outer = (pages, heads)
    return Launch(
        kernel=PACK_PAGES,
        arrays=(hot, ids),
        template=tuple(template.items()),
        grid=(tiles * THREADS, heads, pages),
        threadgroup=(THREADS, 1, 1),
        shapes=((*outer, *codes), (*outer, *affine), (*outer, *affine)),
        dtypes=(mx.uint32, mx.float16, mx.float16),
    )


def _channels(dim: int) -> int:
    """Channels of keys in a tile: equal shares, and an even number, whose words are whole."""
    most = TILE_NUMBERS // PAGE_TOKENS
    return max(n for n in range(2, most + 1, 2) if dim % n == 0)


def _tokens(dim: int) -> int:
    """Tokens of values in a tile: equal shares of a page."""
    return max(n for n in (1, 2, 4, 8, 16, 32, 64) if n * dim <= TILE_NUMBERS)


PACK_PAGES = Kernel(
    "pack_pages",
    ("hot", "ids"),
    ("codes", "scales", "biases"),
    source("pack_pages.metal"),
    source("numbers.metal") + source("places.metal"),
)
