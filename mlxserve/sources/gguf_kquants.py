"""GGUF's K types -> groups of 32 in MLX's affine form.

Their blocks hold 256 weights, with scales of their own for runs of 32 (Q4_K, Q5_K) or 16 (Q6_K),
which are integers times the block's float16. (Source: ggml's `ggml-common.h` and
`dequantize_row_*`.)

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
    """The nearest groups of 32 with 8 bits, as MLX has no groups of 16.

    The step is the larger of a group's two scales over an integer k, so that 16 of the 32 weights
    are exact (up to float32's rounding) and the others at most half a step away. k is the largest
    with which the group's range fits 8 bits, from 3 up. On gemma3-270m: RMS 0.088% of the group's
    range, 0.26% at most; 255 even steps from minimum to maximum would give 0.109% and 0.20%.
    """
    q, scale, d = _q6_parts(raw)
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
    words = (n - first[..., None]).astype(np.uint8).reshape(len(raw), -1).view("<u4")
    return Affine(words, scales, biases, 8, float(error))


def q6_k_dense(raw: np.ndarray) -> np.ndarray:
    """The weights themselves: float32 `[N, K]`, computed as ggml does."""
    q, scale, d = _q6_parts(raw)
    return ((d[..., None] * scale)[..., None] * q).reshape(len(raw), -1)


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
