"""Reading safetensors files: the header is checked against the file before MLX maps a tensor.

The format (huggingface/safetensors, README): eight bytes with the header's length, a JSON object
from names to dtype, shape and byte range, then the data, without gaps.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlxserve.report import damaged, show, unsupported

MAX_HEADER_BYTES = 100 << 20
MAX_DIMS = 8

# Name in the header -> MLX's, for the dtypes that MLX loads as they are.
DTYPES: dict[str, mx.Dtype] = {
    "BOOL": mx.bool_,
    "U8": mx.uint8,
    "I8": mx.int8,
    "U16": mx.uint16,
    "I16": mx.int16,
    "F16": mx.float16,
    "BF16": mx.bfloat16,
    "U32": mx.uint32,
    "I32": mx.int32,
    "F32": mx.float32,
    "U64": mx.uint64,
    "I64": mx.int64,
}


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor as its header describes it. dtype: the header's word, `F16`, `U32`, ...

    offset: of its first byte in the file.
    """

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int

    def array(self, bits: np.ndarray) -> mx.array:
        """What `read` gave, in the tensor's own dtype."""
        return mx.array(bits).view(DTYPES[self.dtype])


def read_header(path: Path) -> dict[str, Entry]:
    """The tensors of a safetensors file, by name; reads only the header.

    Raises ModelError for a file that can't be opened, is damaged or cut short, or holds a dtype
    that MLX has no equal of.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as f:
            length = int.from_bytes(f.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                raise damaged(path, f"a header of {length} bytes can't be in {size} bytes")
            text = f.read(length)
    except OSError as e:
        raise unsupported(path, f"{e.strerror}; check the path") from None
    try:
        header = json.loads(text.decode(), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as e:
        raise damaged(path, f"the header is not proper JSON ({show(str(e))})") from None
    if not isinstance(header, dict):
        raise damaged(path, "the header is not a JSON object")
    header.pop("__metadata__", None)
    spans: list[tuple[int, int, str]] = []
    entries: dict[str, Entry] = {}
    for name, value in header.items():
        entries[name], begin, end = _entry(path, name, value, 8 + length)
        spans.append((begin, end, name))
    position = 0
    for begin, end, name in sorted(spans):
        if begin != position:
            raise damaged(path, f"tensor {show(name)} starts at {begin} and not at {position}")
        position = end
    if position != size - 8 - length:
        raise damaged(path, f"it has {size - 8 - length} bytes of data and should have {position}")
    return entries


def load(path: Path) -> dict[str, mx.array]:
    """The tensors of a file that `read_header` passed, lazily: bytes are read at evaluation."""
    try:
        loaded = mx.load(str(path), format="safetensors")
    except (RuntimeError, ValueError) as e:
        raise damaged(path, f"MLX can't load it ({show(str(e))})") from None
    if not isinstance(loaded, dict):
        raise damaged(path, "it holds no named tensors")
    return loaded


def read(entry: Entry, rows: range, columns: range | None = None) -> np.ndarray:
    """Part of a tensor now, as unsigned integers with its numbers' bits; reads no other bytes.

    rows: of the first axis. columns: of the second one of a matrix; None: all that a row has.
    Returns `[len(rows), ...]`. Any thread. Raises ModelError where the file can't be read, or ends.
    """
    size = DTYPES[entry.dtype].size
    rest = entry.shape[1:] if columns is None else (len(columns),)
    found = np.empty((len(rows), *rest), f"<u{size}")
    if not found.size:
        return found
    row_bytes = math.prod(entry.shape[1:]) * size
    first = entry.offset + rows.start * row_bytes
    if columns is None or len(columns) == entry.shape[1]:
        runs = iter([(first, found.reshape(-1).view(np.uint8).data)])
    else:
        starts = range(first + columns.start * size, first + len(rows) * row_bytes, row_bytes)
        runs = zip(starts, (row.data for row in found.view(np.uint8)), strict=True)
    _fill(entry.path, runs)
    return found


def read_into(buffer: memoryview, entry: Entry, rows: range) -> int:
    """The same of whole rows, to the buffer's start. Returns how many bytes they are."""
    row_bytes = math.prod(entry.shape[1:]) * DTYPES[entry.dtype].size
    nbytes = len(rows) * row_bytes
    _fill(entry.path, iter([(entry.offset + rows.start * row_bytes, buffer[:nbytes])]))
    return nbytes


def _fill(path: Path, runs: Iterator[tuple[int, memoryview]]) -> None:
    """Read each run of bytes, from where it begins in the file, into its place."""
    try:
        with path.open("rb", buffering=0) as f:
            for start, target in runs:
                f.seek(start)
                while target:
                    if not (n := f.readinto(target)):
                        raise damaged(path, "it became shorter while it was read")
                    target = target[n:]
    except OSError as e:
        raise unsupported(path, f"{e.strerror}; check the disk") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name comes twice")
    return found


def _entry(path: Path, name: str, value: Any, data: int) -> tuple[Entry, int, int]:
    """One header entry, and where its bytes begin and end in the data, which is at byte `data`."""
    match value:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [begin, end]} if (
            all(type(n) is int and 0 <= n < 2**63 for n in (begin, end, *shape))
            and len(shape) <= MAX_DIMS
        ):
            pass
        case _:
            raise damaged(path, f"tensor {show(name)} is described as {show(value)}")
    if dtype not in DTYPES:
        raise unsupported(
            path,
            f"tensor {show(name)} has dtype {show(dtype)}; this version reads {', '.join(DTYPES)}, "
            "convert the model to BF16",
        )
    if end - begin != math.prod(shape) * DTYPES[dtype].size:
        raise damaged(path, f"tensor {show(name)} has {end - begin} bytes for shape {show(shape)}")
    return Entry(path, dtype, tuple(shape), data + begin), begin, end
