"""Sealed pages in 8 or 4 bits: keys in groups per channel, values in groups per token.

Keys have channels that are large in every token, values don't (KIVI, Liu et al. 2024,
arXiv:2402.02750). A number is `code * scale + bias` in float32, where the product is exact.
"""

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

PAGE_TOKENS = 64  # P, cache.spec's, which this package may not import
PAGE_SIZES = (4, 8, 16, 32, 64)  # what P may be: small pages make short tests
VALUE_GROUP = 32  # channels that share a scale
LARGEST = 65504.0  # of float16


class PackedPages(NamedTuple):
    """Keys or values of a whole pool, packed. To MLX it is a tuple of three arrays.

    codes: uint32, low bits first, as `mx.quantize` lays them
        keys: `[pages, Hk, D, P * bits / 32]`, a channel's P tokens end to end;
        values: `[pages, Hk, P, Dp * bits / 32]`, a token's channels, up to a multiple of 32.
    scales, biases: float16, one for each group
        keys: `[pages, Hk, D]`; values: `[pages, Hk, P, Dp / 32]`.
    """

    codes: mx.array
    scales: mx.array
    biases: mx.array


# One side of a pool, keys or values: plain, `[pages, Hk, P, D]`, or packed.
Pool = mx.array | PackedPages
# Of one layer, keys and values, or one side that is both: hot pages, or a plain pool; and any pool.
Sides = tuple[mx.array, ...]
PoolSides = tuple[Pool, ...]


def dtype_name(dtype: mx.Dtype) -> str:
    """MLX's name for it: `float16`."""
    return str(dtype).removeprefix("mlx.core.")


def page_tokens(pool: PoolSides) -> int:
    """P, which is the third size of the values' array.

    Raises ValueError for what P can't be, and for keys that are the values too and packed.
    """
    if len(pool) == 1 and isinstance(pool[0], PackedPages):
        raise ValueError("pool_k is packed, expected plain numbers where keys are the values too")
    shape = arrays_of(pool[-1])[0].shape
    if len(shape) != 4 or shape[2] not in PAGE_SIZES:
        raise ValueError(f"a pool is {shape}, expected pages of 4, 8, 16, 32 or 64 tokens")
    return shape[2]


def arrays_of(pool: Pool) -> tuple[mx.array, ...]:
    """The plain array, or codes, scales and biases."""
    return tuple(pool) if isinstance(pool, PackedPages) else (pool,)


def pool_of(arrays: Sequence[mx.array]) -> Pool:
    """What `arrays_of` took apart."""
    return PackedPages(*arrays) if len(arrays) > 1 else arrays[0]


def pack_keys(keys: mx.array, bits: int) -> PackedPages:
    """Pages of keys in codes of `bits` bits, 8 or 4.

    keys: `[pages, Hk, P, D]`, floating. Of each group, with `top = 2^bits - 1` and in float32:

        bias = float16(min)    scale = float16((max - min) / top)
        code = clip(rint((x - bias) / scale), 0, top), or 0 where scale is 0

    Codes are taken against the rounded scale and bias, so that they are off by half a step. Scales
    and biases stop at float16's largest number. A group with a number that isn't finite becomes NaN
    as a whole, so that it shows. Raises ValueError for other bits, shapes and dtypes, and where a
    channel's codes fill no word: 4 tokens in 4 bits.
    """
    _check_pages(keys, bits)
    tokens = keys.shape[2]
    if tokens * bits % 32:
        raise ValueError(f"{tokens} tokens of keys in {bits} bits fill no word of 32")
    codes, scales, biases = _pack(keys.swapaxes(2, 3), tokens, bits)
    return PackedPages(codes, scales.squeeze(-1), biases.squeeze(-1))


def pack_values(values: mx.array, bits: int) -> PackedPages:
    """Pages of values, in the same way as `pack_keys`, in groups of 32 channels of a token.

    values: `[pages, Hk, P, D]`. A last group that D doesn't fill repeats the last channel.
    """
    _check_pages(values, bits)
    return _pack(values, VALUE_GROUP, bits)


def unpack_keys(packed: PackedPages, tokens: int = PAGE_TOKENS) -> mx.array:
    """Float32 `[pages, Hk, P, D]`, P = `tokens`. Raises ValueError where the arrays don't fit."""
    bits = _key_bits(packed, tokens)
    per_group = PackedPages(packed.codes, packed.scales[..., None], packed.biases[..., None])
    return _unpack(per_group, tokens, bits).swapaxes(2, 3)


def unpack_values(packed: PackedPages, dim: int) -> mx.array:
    """Float32 `[pages, Hk, P, D]`, D = `dim`. Raises ValueError where the arrays don't fit."""
    bits = _value_bits(packed)
    if packed.scales.shape[-1] != -(-dim // VALUE_GROUP):
        raise ValueError(
            f"packed values have {packed.scales.shape[-1]} groups of 32 channels, D is {dim}"
        )
    return _unpack(packed, VALUE_GROUP, bits)[..., :dim]


def keys_like(pool: Pool, keys: mx.array) -> Pool:
    """Pages of keys, `[pages, Hk, P, D]`, in the form that the pool's have."""
    if not isinstance(pool, PackedPages):
        return keys
    return pack_keys(keys, _key_bits(pool, keys.shape[2]))


def values_like(pool: Pool, values: mx.array) -> Pool:
    """Pages of values, `[pages, Hk, P, D]`, in the form that the pool's have."""
    return pack_values(values, _value_bits(pool)) if isinstance(pool, PackedPages) else values


def packed_bits(pool: PoolSides) -> tuple[int, int]:
    """Of keys and of values in pages of 64 tokens, 0 where they are plain.

    By two shapes alone, since every layer of a step asks: that arrays fit isn't checked.
    """
    keys, values = pool
    return side_bits("keys", keys), side_bits("values", values)


def side_bits(side: str, pool: Pool) -> int:
    """The same of one side. side: "keys" or "values"."""
    if not isinstance(pool, PackedPages):
        return 0
    if side == "keys":
        return pool.codes.shape[-1] * 32 // PAGE_TOKENS
    return pool.codes.shape[-1] // pool.scales.shape[-1]


def _key_bits(packed: PackedPages, tokens: int) -> int:
    return _bits("keys", packed, packed.codes.shape[:3], tokens)


def _value_bits(packed: PackedPages) -> int:
    groups = packed.scales.shape[-1]
    return _bits("values", packed, (*packed.codes.shape[:3], groups), groups * VALUE_GROUP)


def _bits(what: str, packed: PackedPages, per_group: tuple[int, ...], numbers: int) -> int:
    """8 or 4, from shapes. per_group: of scales; numbers: codes of a row. Raises ValueError."""
    codes, scales, biases = packed
    dtypes = [x.dtype for x in packed]
    if dtypes != [mx.uint32, mx.float16, mx.float16]:
        raise ValueError(f"packed {what} are {dtypes}, expected uint32, float16 and float16")
    if codes.ndim != 4 or not scales.shape == biases.shape == per_group:
        raise ValueError(
            f"packed {what} have codes {codes.shape}, scales {scales.shape} and biases "
            f"{biases.shape}, which don't fit together"
        )
    for bits in (8, 4):
        if codes.shape[3] * 32 == numbers * bits:
            return bits
    raise ValueError(
        f"packed {what} have {codes.shape[3]} words for {numbers} codes, expected 8 or 4 bits each"
    )


def _check_pages(x: mx.array, bits: int) -> None:
    if bits not in (4, 8):
        raise ValueError(f"pages are packed in 4 or 8 bits, not in {bits}")
    if x.ndim != 4 or x.shape[2] not in PAGE_SIZES or not mx.issubdtype(x.dtype, mx.floating):
        raise ValueError(
            f"pages are {x.shape} in {x.dtype}, expected [pages, heads, P, D] in a floating type, "
            "P 4, 8, 16, 32 or 64"
        )


def _pack(x: mx.array, group: int, bits: int) -> PackedPages:
    """Groups along the last axis, which is filled up to whole ones. x: `[pages, Hk, rows, n]`."""
    *outer, n = x.shape
    top = (1 << bits) - 1
    # What fills up a group is one of its numbers, and so changes neither its min nor its max.
    x = mx.pad(x.astype(mx.float32), [(0, 0)] * 3 + [(0, -n % group)], mode="edge")
    groups = x.shape[-1] // group
    x = x.reshape(*outer, groups, group)
    low, high = x.min(-1) + 0.0, x.max(-1) + 0.0  # either may be -0, by chance
    finite = mx.isfinite(x).all(-1)
    biases = mx.where(finite, mx.clip(low, -LARGEST, LARGEST), mx.nan)
    scales = mx.where(finite, mx.minimum((high - low) / top, LARGEST), 0.0)
    biases, scales = biases.astype(mx.float16), scales.astype(mx.float16)
    bias, scale = biases.astype(mx.float32)[..., None], scales.astype(mx.float32)[..., None]
    codes = mx.clip(mx.round((x - bias) / scale), 0, top)
    codes = mx.where(scale > 0, codes, 0.0).astype(mx.uint32)
    codes = codes.reshape(*outer, groups * group * bits // 32, 32 // bits)
    words = mx.left_shift(codes, mx.arange(0, 32, bits, dtype=mx.uint32)).sum(-1)
    return PackedPages(words, scales, biases)


def _unpack(packed: PackedPages, group: int, bits: int) -> mx.array:
    """The inverse, with the last group whole. scales, biases: `[pages, Hk, rows, groups]`."""
    shifts = mx.arange(0, 32, bits, dtype=mx.uint32)
    codes = mx.right_shift(packed.codes[..., None], shifts) & ((1 << bits) - 1)
    codes = codes.flatten(-2).astype(mx.float32)
    codes = mx.unflatten(codes, -1, (packed.scales.shape[-1], group))
    scales, biases = (x.astype(mx.float32)[..., None] for x in (packed.scales, packed.biases))
    return (codes * scales + biases).flatten(-2)


def empty_pool(side: str, shape: tuple[int, int, int, int], dtype: mx.Dtype, bits: int) -> Pool:
    """Zeros, `[pages, Hk, P, D]`: plain in `dtype` where bits is 0, or packed.

    side: "keys" or "values".
    """
    if not bits:
        return mx.zeros(shape, dtype)
    pack = pack_keys if side == "keys" else pack_values
    page = pack(mx.zeros((1, *shape[1:])), bits)
    return PackedPages(*(mx.zeros((shape[0], *x.shape[1:]), x.dtype) for x in page))
