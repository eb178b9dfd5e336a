"""GGUF tensor data -> MLX arrays. Blocks of 32 weights become MLX's affine groups of 32, exactly.

A Q4_1 block is `d, m` (float16) and 16 bytes, x = d * q + m; a Q4_0 block is `d` and 16 bytes,
x = d * (q - 8); a Q8_0 block is `d` and 32 signed bytes, x = d * q. In the 4-bit blocks, byte j
holds weight j in its low half and weight j + 16 in its high half; MLX wants neighbours in one byte.
(Source: ggml's `ggml-common.h` and `dequantize_row_*`.)
"""

import mlx.core as mx
import numpy as np

from mlxserve.kernels.quantized import PackedWeight
from mlxserve.sources.gguf import GGUFFile, GGUFTensor
from mlxserve.sources.report import damaged, show, unsupported

PLAIN = ("F32", "F16", "BF16")
QUANTISED = ("Q4_0", "Q4_1", "Q8_0")
GROUP = 32


def check_tensor(file: GGUFFile, tensor: GGUFTensor) -> None:
    """Raise ModelError if `to_mlx` could not convert the tensor; looks at no data."""
    if tensor.type not in PLAIN + QUANTISED:
        raise unsupported(
            file.path,
            f"tensor {show(tensor.name)} has type {tensor.type}; this version reads "
            f"{', '.join(PLAIN + QUANTISED)}, so take the model in one of these (Q4_1 or Q8_0)",
        )
    if tensor.type in QUANTISED and len(tensor.shape) != 2:
        raise unsupported(
            file.path,
            f"tensor {show(tensor.name)} is {tensor.type} of shape {tensor.shape}; quantised "
            "tensors must be matrices, take the model in F16",
        )
    if not all(tensor.shape):
        raise damaged(file.path, f"tensor {show(tensor.name)} has shape {tensor.shape}")


def to_mlx(
    file: GGUFFile, tensor: GGUFTensor, rows: np.ndarray | None = None
) -> mx.array | PackedWeight:
    """The tensor in its own precision.

    rows: `[N]` integers; row i of the result is row rows[i] of the file (rows are independent, so a
    quantised matrix is reordered without loss). F32, F16 and BF16 become arrays of `tensor.shape`;
    Q4_0, Q4_1 and Q8_0 a PackedWeight with float16 scales and biases whose float32 values equal the
    file's exactly. Raises ModelError for another type, or for scales that are not finite.
    """
    check_tensor(file, tensor)
    raw = file.raw(tensor).reshape(tensor.shape[0], -1)
    if rows is not None:
        raw = raw[rows]
    match tensor.type:
        case "F32":
            return mx.array(raw.view("<f4").reshape(tensor.shape))
        case "F16":
            return mx.array(raw.view("<f2").reshape(tensor.shape))
        case "BF16":
            return mx.array(raw.view("<u2").reshape(tensor.shape)).view(mx.bfloat16)
        case "Q8_0":
            words, scales, biases = _q8_0(raw)
        case "Q4_0":
            words, scales, biases = _q4_0(raw)
        case _:
            words, scales, biases = _q4_1(raw)
    if not (np.isfinite(scales).all() and np.isfinite(biases).all()):
        raise damaged(
            file.path, f"tensor {show(tensor.name)} has scales that are not finite in float16"
        )
    bits = 8 if tensor.type == "Q8_0" else 4
    return PackedWeight(mx.array(words), mx.array(scales), mx.array(biases), bits, GROUP)


def _half(blocks: np.ndarray, at: int) -> np.ndarray:
    """The float16 at byte `at` of every block `[N, groups, bytes]` -> `[N, groups]`."""
    return np.ascontiguousarray(blocks[..., at : at + 2]).view("<f2")[..., 0]


def _nibbles(blocks: np.ndarray, at: int) -> np.ndarray:
    """16 bytes of every block `[N, groups, bytes]`, reordered: uint32 `[N, groups * 4]`.

    Two neighbouring bytes are read as one number: its low halves are weights 2b and 2b + 1, its
    high halves 2b + 16 and 2b + 17.
    """
    pairs = np.ascontiguousarray(blocks[..., at : at + 16]).view("<u2")
    out = np.empty((*pairs.shape[:2], 16), np.uint8)
    out[..., :8] = (pairs & 0x0F) | ((pairs >> 4) & 0xF0)
    out[..., 8:] = ((pairs >> 4) & 0x0F) | ((pairs >> 8) & 0xF0)
    return out.reshape(len(out), -1).view("<u4")


def _q4_1(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    blocks = raw.reshape(len(raw), -1, 20)
    return _nibbles(blocks, 4), _half(blocks, 0), _half(blocks, 2)


def _q4_0(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    blocks = raw.reshape(len(raw), -1, 18)
    scales = _half(blocks, 0)
    with np.errstate(over="ignore"):
        return _nibbles(blocks, 2), scales, scales * np.float16(-8)


def _q8_0(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q is signed: flipping its top bit adds 128, which the bias takes off again."""
    blocks = raw.reshape(len(raw), -1, 34)
    scales = _half(blocks, 0)
    words = (blocks[..., 2:] ^ np.uint8(0x80)).reshape(len(raw), -1).view("<u4")
    with np.errstate(over="ignore"):
        return words, scales, scales * np.float16(-128)
