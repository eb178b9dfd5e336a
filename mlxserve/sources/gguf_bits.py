"""Bit work on GGUF's blocks that the converters share: NumPy arrays of bytes in and out."""

from typing import NamedTuple

import numpy as np

GROUP = 32


class Affine(NamedTuple):
    """Rows of weights as `scale * q + bias` over groups of 32 along K.

    words: uint32 `[N, K * bits / 32]`, q packed low bits first; scales, biases: `[N, K / 32]`,
    float16, or float32 where float16 could not hold them. error: the largest difference from the
    file's weights, relative to the range of its group; 0 where they are equal.
    """

    words: np.ndarray
    scales: np.ndarray
    biases: np.ndarray
    bits: int
    error: float = 0.0


def halves(blocks: np.ndarray, at: int) -> np.ndarray:
    """The float16 at byte `at` of every block `[..., bytes]` -> `[...]`."""
    return np.ascontiguousarray(blocks[..., at : at + 2]).view("<f2")[..., 0]


def pack(q: np.ndarray, bits: int) -> np.ndarray:
    """Bytes `[N, K]`, each below 2**bits, without their empty bits: uint32 `[N, K * bits / 32]`.

    Eight bytes are a uint64, whose neighbouring bytes, then pairs, then fours are pushed together.
    """
    x = np.ascontiguousarray(q).view("<u8")
    for width in (8, 16, 32):
        used = width // 8 * bits
        low = np.uint64(sum(((1 << used) - 1) << at for at in range(0, 64, 2 * width)))
        high = (x >> np.uint64(width - used)) & (low << np.uint64(used))
        x = (x & low) | high
    packed = x.view(np.uint8).reshape(len(q), -1, 8)[..., :bits]
    return np.ascontiguousarray(packed).reshape(len(q), -1).view("<u4")


def unpack(words: np.ndarray, bits: int) -> np.ndarray:
    """The inverse of `pack`: uint32 `[N, K * bits / 32]` -> bytes `[N, K]`."""
    raw = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return raw
    eights = np.zeros((len(raw), raw.shape[1] // bits, 8), np.uint8)
    eights[..., :bits] = raw.reshape(len(raw), -1, bits)
    shifts = np.arange(0, 8 * bits, bits, dtype=np.uint64)
    q = (eights.view("<u8") >> shifts) & np.uint64((1 << bits) - 1)
    return q.astype(np.uint8).reshape(len(raw), -1)


def nibbles(packed: np.ndarray) -> np.ndarray:
    """Bytes `[..., B]` -> `[..., 2, B]`: their low halves, then their high halves."""
    x = np.ascontiguousarray(packed).view("<u8")
    mask = np.uint64(0x0F0F0F0F0F0F0F0F)
    both = np.stack((x & mask, (x >> np.uint64(4)) & mask), axis=-2)
    return both.view(np.uint8)


def nibble_words(packed: np.ndarray) -> np.ndarray:
    """`pack(nibbles(packed), 4)` in half the time: bytes `[N, ..., B]` -> uint32 `[N, ...]`.

    Two neighbouring bytes are read as one number: its low halves are neighbours among the low
    halves, its high halves among the high ones.
    """
    pairs = np.ascontiguousarray(packed).view("<u2")
    out = np.empty((*pairs.shape[:-1], 2, pairs.shape[-1]), np.uint8)
    out[..., 0, :] = (pairs & 0x0F) | ((pairs >> 4) & 0xF0)
    out[..., 1, :] = ((pairs >> 4) & 0x0F) | ((pairs >> 8) & 0xF0)
    return out.reshape(len(out), -1).view("<u4")


# Byte -> 8 bytes: bit i of it becomes bit 4 of byte i.
_SPREAD = (
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little") << 4
).view("<u8")[:, 0]


def fifth_bits(packed: np.ndarray) -> np.ndarray:
    """Bytes `[..., B]` -> `[..., 8 * B]`: bit i, low first, becomes the value 16 of byte i."""
    return _SPREAD[packed].view(np.uint8)
