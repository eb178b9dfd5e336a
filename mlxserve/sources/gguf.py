"""Reading GGUF: metadata as plain Python values, tensors as places in a memory-mapped file.

The format is described in the `docs/gguf.md` of the ggml project: a header with counts, the
metadata, the list of tensors, then their data from the next multiple of the alignment on. Every
count, length and offset comes from the file, so each is checked against the file's size before it
is used.
"""

import math
import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mlxserve.errors import ModelError
from mlxserve.report import damaged, show, unsupported

MAGIC = b"GGUF"
MAX_PAIRS = 1 << 16
MAX_TENSORS = 1 << 20
MAX_DIMS = 4
MAX_ARRAY = 1 << 24  # a vocabulary has 300 thousand entries
MAX_NESTING = 4

# Type number -> name, weights per block, bytes per block (ggml's `ggml_type`).
TENSOR_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 36),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
}

_STRING, _ARRAY, _BOOL = 8, 9, 7
# Type number of a metadata value -> its NumPy type, for those of fixed size.
_NUMBERS: dict[int, str] = {
    0: "u1",
    1: "i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    _BOOL: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Where a tensor lies. shape: NumPy's order, `[N, K]`; offset: bytes from the file's start."""

    name: str
    type: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, eq=False, slots=True)
class GGUFFile:
    """An open GGUF file. `metadata` holds plain Python values; `data` maps the whole file."""

    path: Path
    version: int
    metadata: dict[str, object]
    tensors: dict[str, GGUFTensor]
    data: mmap.mmap

    @property
    def size_bytes(self) -> int:
        return len(self.data)

    def raw(self, tensor: GGUFTensor) -> np.ndarray:
        """The tensor's bytes: uint8 `[nbytes]`, a read-only view of the mapped file."""
        return np.frombuffer(self.data, np.uint8, tensor.nbytes, tensor.offset)


class HeaderCutError(ModelError):
    """The file ends before its metadata and tensor list do."""


def read_gguf(path: Path) -> GGUFFile:
    """Read a GGUF file's metadata and tensor list (versions 2 and 3, little endian).

    Tensor data is mapped and not read. Raises ModelError for a file that can't be opened, is no
    GGUF file, has another version or byte order, or is damaged or cut short anywhere.
    """
    try:
        with path.open("rb") as f:
            data = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError:
        raise damaged(path, "the file is empty") from None
    except OSError as e:
        raise unsupported(path, f"{e.strerror}; check the path") from None
    return _Reader(path, data).file()


class _Reader:
    """A cursor over the mapped file that never leaves it. Used by one thread, for one read."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.pos = 0

    def file(self) -> GGUFFile:
        magic = self.bytes(4, "the magic number")
        if magic != MAGIC:
            raise damaged(self.path, f"it starts with {show(magic)} and not with 'GGUF'")
        version = self.number("<I", "the version")
        if version not in (2, 3):
            if struct.unpack(">I", struct.pack("<I", version))[0] in (2, 3):
                raise unsupported(
                    self.path, "this GGUF file is big endian; convert it to little endian"
                )
            raise unsupported(
                self.path, f"GGUF version {version}; versions 2 and 3 work, convert the model again"
            )
        n_tensors = self.count("<Q", "tensors", MAX_TENSORS, 8 + 4 + 8 + 4 + 8)
        n_pairs = self.count("<Q", "metadata entries", MAX_PAIRS, 8 + 4 + 1)
        metadata: dict[str, object] = {}
        for i in range(n_pairs):
            key = self.string(f"the name of metadata entry {i}")
            if key in metadata:
                raise damaged(self.path, f"metadata key {show(key)} comes twice")
            metadata[key] = self.value(self.number("<I", f"the type of {show(key)}"), show(key))
        heads = [self.tensor_head(i) for i in range(n_tensors)]
        return GGUFFile(
            self.path, version, metadata, self.place(heads, self.alignment(metadata)), self.data
        )

    def tensor_head(self, i: int) -> tuple[str, str, tuple[int, ...], int, int]:
        """One entry of the tensor list: name, type, shape, offset within the data, bytes."""
        name = self.string(f"the name of tensor {i}")
        shown = f"tensor {show(name)}"
        n_dims = self.number("<I", f"{shown}'s dimensions")
        if not 1 <= n_dims <= MAX_DIMS:
            raise damaged(self.path, f"{shown} has {n_dims} dimensions, 1 to {MAX_DIMS} can be")
        shape = tuple(self.number("<Q", f"{shown}'s shape") for _ in range(n_dims))[::-1]
        number = self.number("<I", f"{shown}'s type")
        offset = self.number("<Q", f"{shown}'s offset")
        if number not in TENSOR_TYPES:
            raise unsupported(
                self.path,
                f"{shown} has type number {number}, which is not known; use a Q4_1 or Q8_0 file",
            )
        kind, block, block_bytes = TENSOR_TYPES[number]
        if shape[-1] % block:
            raise damaged(self.path, f"{shown} has rows of {shape[-1]}, no multiple of {block}")
        return name, kind, shape, offset, math.prod(shape) // block * block_bytes

    def place(
        self, heads: list[tuple[str, str, tuple[int, ...], int, int]], alignment: int
    ) -> dict[str, GGUFTensor]:
        """Offsets from the file's start, checked: tensors lie in the file and don't overlap."""
        start = -(-self.pos // alignment) * alignment
        tensors: dict[str, GGUFTensor] = {}
        for name, kind, shape, offset, nbytes in heads:
            if name in tensors:
                raise damaged(self.path, f"tensor {show(name)} comes twice")
            if offset % alignment:
                raise damaged(self.path, f"tensor {show(name)} is not aligned to {alignment} bytes")
            if start + offset + nbytes > len(self.data):
                raise damaged(
                    self.path,
                    f"tensor {show(name)} ends at byte {start + offset + nbytes}, "
                    f"the file at {len(self.data)}",
                )
            tensors[name] = GGUFTensor(name, kind, shape, start + offset, nbytes)
        end = 0
        for t in sorted(tensors.values(), key=lambda t: t.offset):
            if t.offset < end:
                raise damaged(self.path, f"tensor {show(t.name)} overlaps the one before it")
            end = t.offset + t.nbytes
        return tensors

    def alignment(self, metadata: dict[str, object]) -> int:
        value = metadata.get("general.alignment", 32)
        if not isinstance(value, int) or not 8 <= value <= 1 << 20 or value & (value - 1):
            raise damaged(
                self.path, f"general.alignment is {show(value)}, no power of two from 8 on"
            )
        return value

    def value(self, kind: int, what: str, depth: int = 0) -> object:
        """A metadata value: int, float, bool, str, or a list of these."""
        if kind == _STRING:
            return self.string(what)
        if kind == _ARRAY:
            return self.array(what, depth)
        if kind not in _NUMBERS:
            raise damaged(self.path, f"{what} has value type {kind}, which does not exist")
        return self.numbers(kind, 1, what)[0]

    def array(self, what: str, depth: int) -> list[object]:
        kind = self.number("<I", f"the element type of {what}")
        if kind in _NUMBERS:
            n = self.count(
                "<Q", f"elements of {what}", MAX_ARRAY, np.dtype(_NUMBERS[kind]).itemsize
            )
            return self.numbers(kind, n, what)
        if kind == _STRING:
            return self.strings(self.count("<Q", f"elements of {what}", MAX_ARRAY, 8), what)
        if kind != _ARRAY or depth == MAX_NESTING:
            raise damaged(self.path, f"{what} has elements of type {kind} at depth {depth}")
        n = self.count("<Q", f"elements of {what}", MAX_ARRAY, 4 + 8)
        return [self.array(what, depth + 1) for _ in range(n)]

    def numbers(self, kind: int, n: int, what: str) -> list[object]:
        dtype = np.dtype(_NUMBERS[kind])
        raw = self.bytes(n * dtype.itemsize, what)
        # A bool byte other than 0 and 1 reads as true rather than as undefined behaviour.
        values = np.frombuffer(raw, "u1") != 0 if kind == _BOOL else np.frombuffer(raw, dtype)
        return values.tolist()

    def strings(self, n: int, what: str) -> list[object]:
        """n strings in a row: a vocabulary has up to 300 thousand, so the loop is kept bare."""
        data, pos, size = self.data, self.pos, len(self.data)
        length_at: Callable[[mmap.mmap, int], tuple[int]] = struct.Struct("<Q").unpack_from
        values: list[object] = []
        try:
            for _ in range(n):
                end = pos + 8 + length_at(data, pos)[0]
                if end > size:
                    raise self.cut(what)
                values.append(data[pos + 8 : end].decode())
                pos = end
        except struct.error:
            raise self.cut(what) from None
        except UnicodeDecodeError:
            raise damaged(self.path, f"element {len(values)} of {what} is not UTF-8") from None
        self.pos = pos
        return values

    def string(self, what: str) -> str:
        raw = self.bytes(self.number("<Q", what), what)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise damaged(self.path, f"{what} is not UTF-8") from None

    def count(self, form: str, what: str, limit: int, least_bytes: int) -> int:
        """A number of items, each of `least_bytes` or more, that the rest of the file can hold."""
        n = self.number(form, f"the number of {what}")
        if n > limit:
            raise damaged(self.path, f"{n} {what} don't fit in a GGUF file")
        if n * least_bytes > len(self.data) - self.pos:
            raise self.header_cut(f"{n} {what} don't fit in the file")
        return n

    def number(self, form: str, what: str) -> int:
        return struct.unpack(form, self.bytes(struct.calcsize(form), what))[0]

    def bytes(self, n: int, what: str) -> bytes:
        if n > len(self.data) - self.pos:
            raise self.cut(what)
        self.pos += n
        return self.data[self.pos - n : self.pos]

    def cut(self, what: str) -> Exception:
        return self.header_cut(f"it ends inside {what} (at {len(self.data)} bytes)")

    def header_cut(self, what: str) -> Exception:
        return HeaderCutError(*damaged(self.path, what).args)
