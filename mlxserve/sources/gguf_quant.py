"""GGUF tensor data -> MLX arrays; quantised types become MLX's affine groups of 32.

A Q4_1 block is `d, m` (float16) and 16 bytes, x = d * q + m; a Q4_0 block is `d` and 16 bytes,
x = d * (q - 8). Byte j holds weight j in its low half and weight j + 16 in its high half. Q5_0 and
Q5_1 (x = d * (q - 16), x = d * q + m) have 4 bytes of fifth bits before these 16. A Q8_0 block is
`d` and 32 signed bytes, x = d * q. (Source: ggml's `ggml-common.h` and `dequantize_row_*`.) All of
these convert exactly; for K types see `gguf_kquants`.
"""

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

import mlx.core as mx
import numpy as np

from mlxserve.errors import ModelError
from mlxserve.kernels.quantized import PackedWeight, column_ranges
from mlxserve.report import damaged, show, unsupported
from mlxserve.sources import gguf_kquants
from mlxserve.sources.gguf import GGUFFile, GGUFTensor
from mlxserve.sources.gguf_bits import (
    GROUP,
    Affine,
    fifth_bits,
    halves,
    nibble_words,
    nibbles,
    pack,
    unpack,
)

Q6K = Literal["8bit", "16bit"]

PLAIN = ("F32", "F16", "BF16")
CHUNK_BYTES = 1 << 20  # converted at a time, as a Q6_K weight needs 20 bytes on the way


class Converted(NamedTuple):
    """A tensor in MLX. error: the largest difference from the file's values, relative to the range
    of its group of 32; 0 where all are equal."""

    value: mx.array | PackedWeight
    error: float = 0.0


def check_tensor(file: GGUFFile, tensor: GGUFTensor) -> None:
    """Raise ModelError if `to_mlx` could not convert the tensor; looks at no data."""
    known = (*PLAIN, *_QUANTISED)
    if tensor.type not in known:
        raise unsupported(
            file.path,
            f"tensor {show(tensor.name)} has type {tensor.type}; this version reads "
            f"{', '.join(known)}, so take the model in one of these (Q4_K_M or Q8_0)",
        )
    if tensor.type in _QUANTISED and len(tensor.shape) != 2:
        raise unsupported(
            file.path,
            f"tensor {show(tensor.name)} is {tensor.type} of shape {tensor.shape}; quantised "
            "tensors must be matrices, take the model in F16",
        )
    if not all(tensor.shape):
        raise damaged(file.path, f"tensor {show(tensor.name)} has shape {tensor.shape}")


def group_size(kind: str, q6_k: Q6K) -> int | None:
    """How many numbers of a tensor of this type share a scale in MLX; None where it is dense."""
    return None if kind in PLAIN or (kind in ROUNDED and q6_k == "16bit") else GROUP


def to_mlx(
    file: GGUFFile,
    tensor: GGUFTensor,
    rows: np.ndarray | None = None,
    columns: range | None = None,
    *,
    q6_k: Q6K = "8bit",
) -> Converted:
    """The tensor, or a part of it, in its own precision.

    rows: `[n]` integers; row i of the result is row rows[i] of the file (rows are independent, so a
    quantised matrix is reordered without loss), and no others are read. columns: of a matrix, in
    whole groups where it is quantised. F32, F16 and BF16 become arrays; quantised types a
    PackedWeight whose float32 values equal the file's: scales and biases are float16, or float32
    for K types. Q2_K, Q3_K and Q6_K differ: they become the nearest 8-bit PackedWeight, or with
    q6_k="16bit" a float16 array. Raises ModelError for another type, or for scales that are not
    finite.
    """
    check_tensor(file, tensor)
    raw = file.raw(tensor).reshape(tensor.shape[0], -1)
    if group_size(tensor.type, q6_k) is not None:
        return _packed(file, tensor, raw, rows, columns or range(tensor.shape[1]))
    if rows is not None:
        raw = raw[rows]
    match tensor.type:
        case "F32":
            values = raw.view("<f4")
        case "F16":
            values = raw.view("<f2")
        case "BF16":
            values = raw.view("<u2")
        case _:
            values, error = _float16(file, tensor, raw)
            return Converted(mx.array(_columns(values, columns)), error)
    values = _columns(values.reshape(-1, *tensor.shape[1:]), columns)
    array = mx.array(values)
    return Converted(array.view(mx.bfloat16) if tensor.type == "BF16" else array)


def _columns(values: np.ndarray, columns: range | None) -> np.ndarray:
    return values if columns is None else values[:, columns.start : columns.stop]


def _packed(
    file: GGUFFile, tensor: GGUFTensor, raw: np.ndarray, rows: np.ndarray | None, columns: range
) -> Converted:
    convert = _QUANTISED[tensor.type]
    n = len(raw) if rows is None else len(rows)
    whole: list[np.ndarray] = []
    bits, error = 0, 0.0
    with np.errstate(over="ignore", invalid="ignore"):  # what overflows is found below
        for start, chunk in _chunks(raw, rows):
            part = convert(chunk)
            words, groups = column_ranges(columns, part.bits, GROUP)
            arrays = (
                _columns(part.words, words),
                _columns(part.scales, groups),
                _columns(part.biases, groups),
            )
            whole = whole or [np.empty((n, a.shape[1]), a.dtype) for a in arrays]
            for target, source in zip(whole, arrays, strict=True):
                target[start : start + len(chunk)] = source
            bits, error = part.bits, max(error, part.error)
    words, scales, biases = whole
    if not (np.isfinite(scales).all() and np.isfinite(biases).all()):
        raise _not_finite(file, tensor)
    packed = PackedWeight(mx.array(words), mx.array(scales), mx.array(biases), bits, GROUP)
    return Converted(packed, error)


def _float16(file: GGUFFile, tensor: GGUFTensor, raw: np.ndarray) -> tuple[np.ndarray, float]:
    values, error = np.empty((len(raw), tensor.shape[1]), np.float16), 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        for start, chunk in _chunks(raw, None):
            exact = ROUNDED[tensor.type](chunk)
            rounded = values[start : start + len(chunk)] = exact.astype(np.float16)
            groups = exact.reshape(-1, GROUP)
            off = np.abs(rounded.reshape(-1, GROUP) - groups).max(-1)
            spread = np.maximum(np.ptp(groups, axis=-1), np.finfo(np.float32).tiny)
            error = max(error, float((off / spread).max()))
    if not np.isfinite(values).all():
        raise _not_finite(file, tensor)
    return values, error


def dense(file: GGUFFile, tensor: GGUFTensor, rows: np.ndarray | slice) -> np.ndarray:
    """Some rows of the tensor as the file means them: float32, `[n, ...]`.

    rows: of the first axis, in this order. Raises ModelError for another type, or for scales that
    are not finite.
    """
    check_tensor(file, tensor)
    raw = file.raw(tensor).reshape(tensor.shape[0], -1)[rows]
    with np.errstate(over="ignore", invalid="ignore"):
        match tensor.type:
            case "F32":
                values = raw.view("<f4")
            case "F16":
                values = raw.view("<f2").astype(np.float32)
            case "BF16":
                values = (raw.view("<u2").astype("<u4") << 16).view("<f4")
            case _:
                values = _unpacked(tensor.type, raw)
    if not np.isfinite(values).all():
        raise _not_finite(file, tensor)
    return values.reshape(len(raw), *tensor.shape[1:])


def _unpacked(kind: str, raw: np.ndarray) -> np.ndarray:
    if kind in ROUNDED:
        return ROUNDED[kind](raw)
    part = _QUANTISED[kind](raw)
    q = unpack(part.words, part.bits).reshape(len(raw), -1, GROUP)
    scales, biases = (a.astype(np.float32)[..., None] for a in (part.scales, part.biases))
    return (scales * q + biases).reshape(len(raw), -1)


def _chunks(raw: np.ndarray, rows: np.ndarray | None) -> Iterator[tuple[int, np.ndarray]]:
    """Some rows of `[N, bytes]` at a time, in the order of `rows`, and where they begin."""
    step = max(1, CHUNK_BYTES // raw.shape[1])
    for start in range(0, len(raw) if rows is None else len(rows), step):
        some = slice(start, start + step)
        yield start, raw[some] if rows is None else raw[rows[some]]


def _not_finite(file: GGUFFile, tensor: GGUFTensor) -> ModelError:
    return damaged(file.path, f"tensor {show(tensor.name)} has scales that are not finite")


def _q4_0(raw: np.ndarray) -> Affine:
    blocks = raw.reshape(len(raw), -1, 18)
    scales = halves(blocks, 0)
    return Affine(nibble_words(blocks[..., 2:]), scales, scales * np.float16(-8), 4)


def _q4_1(raw: np.ndarray) -> Affine:
    blocks = raw.reshape(len(raw), -1, 20)
    return Affine(nibble_words(blocks[..., 4:]), halves(blocks, 0), halves(blocks, 2), 4)


def _q5_0(raw: np.ndarray) -> Affine:
    blocks = raw.reshape(len(raw), -1, 22)
    scales = halves(blocks, 0)
    return Affine(_q5(blocks[..., 2:]), scales, scales * np.float16(-16), 5)


def _q5_1(raw: np.ndarray) -> Affine:
    blocks = raw.reshape(len(raw), -1, 24)
    return Affine(_q5(blocks[..., 4:]), halves(blocks, 0), halves(blocks, 2), 5)


def _q8_0(raw: np.ndarray) -> Affine:
    """q is signed: flipping its top bit adds 128, which the bias takes off again."""
    blocks = raw.reshape(len(raw), -1, 34)
    scales = halves(blocks, 0)
    words = (blocks[..., 2:] ^ np.uint8(0x80)).reshape(len(raw), -1).view("<u4")
    return Affine(words, scales, scales * np.float16(-128), 8)


def _q5(packed: np.ndarray) -> np.ndarray:
    q = nibbles(packed[..., 4:]).reshape(len(packed), -1)
    return pack(q | fifth_bits(packed[..., :4]).reshape(len(packed), -1), 5)


_QUANTISED: dict[str, Callable[[np.ndarray], Affine]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": gguf_kquants.q2_k,
    "Q3_K": gguf_kquants.q3_k,
    "Q4_K": gguf_kquants.q4_k,
    "Q5_K": gguf_kquants.q5_k,
    "Q6_K": gguf_kquants.q6_k,
}

# Types that MLX has no equal of -> what gives their weights.
ROUNDED: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "Q2_K": gguf_kquants.q2_k_dense,
    "Q3_K": gguf_kquants.q3_k_dense,
    "Q6_K": gguf_kquants.q6_k_dense,
}
