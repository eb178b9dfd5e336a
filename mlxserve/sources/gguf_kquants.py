"""GGUF's K types -> groups of 32 in MLX's affine form.

Their blocks hold 256 weights, with scales of their own for runs of 32 (Q4_K, Q5_K) or 16 (Q2_K,
Q3_K, Q6_K), which are integers times the block's float16. (Source: ggml's `ggml-common.h` and
`dequantize_row_*`.) MLX has no groups of 16, so the latter become the nearest groups of 32.

Such a product needs up to 19 bits, so scales and biases are float32, which holds it exactly. Metal
rounds them to the dtype that the model computes in. Measured on gemma3-270m, as parts of a group's
range: in float16 weights of Q4_K move by up to 0.075% (RMS 0.016%), a hundredth of a quantisation
step; in bfloat16 (gemma3, qwen) by up to 0.55% (RMS 0.125%), and those of Q8_0 by up to 0.29%.
"""

import numpy as np

from mlxserve.sources.gguf_bits import Affine, halves, nibble_words, nibbles, pack


def q4_k(raw: np.ndarray) -> Affine:
    """`d, dmin`, 12 bytes of scales and minima, 128 bytes: x = d * scale * q - dmin * minimum.

    32 bytes hold one run of 32 weights in their low halves and the next in their high halves.
    """
    blocks = raw.reshape(len(raw), -1, 144)
    words = nibble_words(blocks[..., 16:].reshape(*blocks.shape[:2], 4, 32))
    return Affine(words, *_scales(blocks), 4)


def q5_k(raw: np.ndarray) -> Affine:
    """As Q4_K, with 32 bytes before the 128: bit r of byte i is the fifth of weight i of run r."""
    blocks = raw.reshape(len(raw), -1, 176)
    runs = blocks[..., 48:].reshape(*blocks.shape[:2], 4, 32)
    fifth = (blocks[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    q = nibbles(runs).reshape(fifth.shape) | (fifth << 4)
    return Affine(pack(q.reshape(len(raw), -1), 5), *_scales(blocks), 5)


def _scales(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scales and biases of the 8 runs of each block: float32 `[N, blocks * 8]`.

    The 6-bit numbers lie in 12 bytes: the first four runs' scales and minima in the low 6 bits of
    bytes 0 to 7; the others' low halves in bytes 8 to 11 and their top 2 bits above the former.
    """
    low, low_min, mixed = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scale = np.concatenate((low & 63, (mixed & 15) | ((low >> 6) << 4)), axis=-1)
    minimum = np.concatenate((low_min & 63, (mixed >> 4) | ((low_min >> 6) << 4)), axis=-1)
    d, dmin = (halves(blocks, at).astype(np.float32)[..., None] for at in (0, 2))
    return (d * scale).reshape(len(blocks), -1), (-dmin * minimum).reshape(len(blocks), -1)


def q6_k(raw: np.ndarray) -> Affine:
    """The nearest groups of 32 with 8 bits, as MLX has no groups of 16."""
    return _nearest(*_q6_parts(raw))


def q6_k_dense(raw: np.ndarray) -> np.ndarray:
    """The weights themselves: float32 `[N, K]`, computed as ggml does."""
    return _product(*_q6_parts(raw))


def q3_k(raw: np.ndarray) -> Affine:
    """As `q6_k`."""
    return _nearest(*_q3_parts(raw))


def q3_k_dense(raw: np.ndarray) -> np.ndarray:
    """As `q6_k_dense`."""
    return _product(*_q3_parts(raw))


def q2_k(raw: np.ndarray) -> Affine:
    """255 even steps from the minimum to the maximum of 32 weights: half a step is 0.2% of that."""
    groups = q2_k_dense(raw).reshape(len(raw), -1, 32)
    low, spread = groups.min(-1), np.ptp(groups, axis=-1)
    step = spread / 255
    n = np.rint((groups - low[..., None]) / np.where(step > 0, step, 1)[..., None])
    off = np.abs(n * step[..., None] + low[..., None] - groups).max(-1)
    error = (off / np.where(spread > 0, spread, 1)).max()
    words = n.astype(np.uint8).reshape(len(raw), -1).view("<u4")
    return Affine(words, step, low, 8, float(error))


def q2_k_dense(raw: np.ndarray) -> np.ndarray:
    """x = d * scale * q - dmin * minimum in runs of 16: float32 `[N, K]`.

    16 bytes of scales, with minima in their high halves, 64 bytes with the 2 bits of 4 runs of 32
    each, `d` and `dmin`.
    """
    blocks = raw.reshape(len(raw), -1, 84)
    d, dmin = (halves(blocks, at).astype(np.float32)[..., None] for at in (80, 82))
    q = _pairs_of_bits(blocks[..., 16:80])
    scales = d * (blocks[..., :16] & 15)
    minima = dmin * (blocks[..., :16] >> 4)
    return (scales[..., None] * q - minima[..., None]).reshape(len(raw), -1)


def _product(q: np.ndarray, scale: np.ndarray, d: np.ndarray) -> np.ndarray:
    return ((d[..., None] * scale)[..., None] * q).reshape(len(q), -1)


def _nearest(q: np.ndarray, scale: np.ndarray, d: np.ndarray) -> Affine:
    """Groups of 32 with 8 bits for pairs of runs; the arguments as `_q6_parts` gives them.

    The step is the larger of a group's two scales over an integer k, so that 16 of the 32 weights
    are exact (up to float32's rounding) and the others at most half a step away. k is the largest
    with which the group's range fits 8 bits, from 3 up. On gemma3-270m: RMS 0.088% of the group's
    range, 0.26% at most; 255 even steps from minimum to maximum would give 0.109% and 0.20%.
    """
    values = (q * scale[..., None]).reshape(*scale.shape[:-1], 32)  # in units of d
    low, high = values.min(-1), values.max(-1)
    spread = (high - low).astype(np.float32)
    larger = np.abs(scale).max(-1).astype(np.float32)
    # A group without range is its bias alone.
    k = np.floor(254 * larger / np.maximum(spread, 1))
    per_unit = np.where(spread > 0, k / np.maximum(larger, 1), 0)
    exact = values * per_unit[..., None]
    n = np.rint(exact)
    error = (np.abs(n - exact).max(-1) / np.maximum(spread * per_unit, 1)).max()
    first = n.min(-1)
    step = np.where(spread > 0, larger / np.maximum(k, 1), 0)
    scales = d * step
    biases = d * np.where(spread > 0, first * step, low)
    words = (n - first[..., None]).astype(np.uint8).reshape(len(q), -1).view("<u4")
    return Affine(words, scales, biases, 8, float(error))


def _q6_parts(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q - 32: int16 `[N, blocks * 8, 2, 16]`; scales: int16, without the 16; d: `[N, blocks * 8]`.

    Each half of a block has 64 bytes of low halves (as in Q4_K) and 32 bytes with the two top bits
    of 4 weights each, for 4 runs of 32. 16 signed bytes of scales and `d` follow.
    """
    blocks = raw.reshape(len(raw), -1, 210)
    n = blocks.shape[1]
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    top = (blocks[..., 128:192].reshape(len(raw), n, 2, 1, 32) >> shifts) & 3
    low = nibbles(blocks[..., :128].reshape(len(raw), n, 2, 64)).reshape(top.shape)
    q = (low | (top << 4)).astype(np.int16) - 32
    scale = np.ascontiguousarray(blocks[..., 192:208]).view(np.int8).astype(np.int16)
    d = np.repeat(halves(blocks, 208).astype(np.float32), 8, axis=-1)
    return q.reshape(len(raw), n * 8, 2, 16), scale.reshape(len(raw), n * 8, 2), d


def _q3_parts(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """As `_q6_parts`, for q - 4 of 3 bits and scales - 32 of 6 bits.

    32 bytes whose bit r is the top bit of run r's weights, 64 bytes of low bits as in Q2_K, 12
    bytes of scales (low halves of 8 and 8, then the top 2 bits of 4, 4, 4 and 4), and `d`.
    """
    blocks = raw.reshape(len(raw), -1, 110)
    n = blocks.shape[1]
    top = (blocks[..., None, :32] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    low = _pairs_of_bits(blocks[..., 32:96]).reshape(len(raw), n, 8, 32)
    q = (low | (top << 2)).astype(np.int16) - 4
    packed, tops = blocks[..., 96:104], blocks[..., None, 104:108]
    tops = (tops >> np.arange(0, 8, 2, dtype=np.uint8)[:, None]) & 3
    six = np.concatenate((packed & 15, packed >> 4), axis=-1) | (tops.reshape(len(raw), n, 16) << 4)
    d = np.repeat(halves(blocks, 108).astype(np.float32), 8, axis=-1)
    scale = six.astype(np.int16) - 32
    return q.reshape(len(raw), n * 8, 2, 16), scale.reshape(len(raw), n * 8, 2), d


def _pairs_of_bits(packed: np.ndarray) -> np.ndarray:
    """64 bytes `[N, blocks, 64]` -> numbers of 2 bits in runs of 16: `[N, blocks, 16, 16]`.

    32 bytes hold four runs of 32 weights, the first in their lowest bits.
    """
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    q = (packed.reshape(*packed.shape[:2], 2, 1, 32) >> shifts) & 3
    return q.reshape(*packed.shape[:2], 16, 16)
