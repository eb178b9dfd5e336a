"""A directory of safetensors as a source: plain tensors, and matrices that MLX has quantised."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlxserve.errors import ModelError
from mlxserve.kernels.quantized import PackedWeight, dequantize
from mlxserve.report import damaged
from mlxserve.sources import directory, fingerprint, mlx_quant
from mlxserve.sources.mlx_quant import Quantised
from mlxserve.sources.safetensors import Entry

from .source import Source, Tensor, check_finite

# What headers call a type -> MLX's type, and NumPy's of the same bits.
FLOATS: dict[str, tuple[mx.Dtype, str]] = {
    "F32": (mx.float32, "<u4"),
    "F16": (mx.float16, "<u2"),
    "BF16": (mx.bfloat16, "<u2"),
}


def open_directory(root: Path) -> Source:
    """Only headers are read, and checked against the files' sizes. Raises ModelError."""
    config = directory.read_config(root)
    entries = directory.read_entries(root)
    schemes = mlx_quant.quantised_layers(root / "config.json", config, entries)
    tensors: dict[str, Tensor] = {}
    for name, entry in entries.items():
        layer, _, part = name.rpartition(".")
        if layer not in schemes or part not in ("weight", "scales", "biases"):
            tensors[name] = Plain(name, entry)
        elif part == "weight":
            parts = [entries.get(f"{layer}.{p}") for p in ("weight", "scales", "biases")]
            dtype = _packed_dtype(config, parts[1])
            tensors[name] = Packed(name, [p for p in parts if p], schemes[layer], dtype)
    for key in ("quantization", "quantization_config"):
        config.pop(key, None)
    how = sorted({f"{s.mode} of {s.bits} bits" for s in schemes.values()})
    return Source(root, config, tensors, schemes, ", ".join(how), fingerprint.model(root))


def _packed_dtype(config: Mapping[str, Any], scales: Entry | None) -> mx.Dtype:
    """What packed numbers are unpacked to: the scales' type, or the config's where that is none."""
    if scales is not None and scales.dtype in FLOATS:
        return FLOATS[scales.dtype][0]
    named = str(config.get("torch_dtype") or config.get("dtype"))
    return {"float32": mx.float32, "float16": mx.float16}.get(named, mx.bfloat16)


@dataclass(frozen=True, slots=True)
class Plain:
    """A tensor as a safetensors file has it."""

    name: str
    entry: Entry

    @property
    def shape(self) -> tuple[int, ...]:
        return self.entry.shape

    @property
    def dtype(self) -> mx.Dtype:
        """Of integers, too, which no model has: the plan refuses them."""
        return FLOATS[self.entry.dtype][0] if self.entry.dtype in FLOATS else mx.int32

    @property
    def read_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.size

    def fetch(self, start: int, stop: int) -> np.ndarray:
        """The numbers' bits. Raises ModelError for what is NaN or infinite."""
        rows = _read_rows(self.entry, FLOATS[self.entry.dtype][1], start, stop)
        check_finite(self.name, rows, self.dtype)
        return rows

    def array(self, fetched: np.ndarray) -> mx.array:
        return mx.array(fetched).view(self.dtype)


@dataclass(frozen=True, slots=True)
class Packed:
    """A matrix that MLX has quantised: its words, scales and perhaps biases."""

    name: str
    entries: list[Entry]
    scheme: Quantised
    dtype: mx.Dtype

    @property
    def shape(self) -> tuple[int, ...]:
        n, words = self.entries[0].shape
        return n, words * 32 // self.scheme.bits

    @property
    def read_bytes(self) -> int:
        return sum(math.prod(e.shape) * _NUMPY[e.dtype].itemsize for e in self.entries)

    def fetch(self, start: int, stop: int) -> list[np.ndarray]:
        """Some rows of each of the tensors. Raises ModelError for scales that aren't finite."""
        parts = []
        for entry in self.entries:
            rows = _read_rows(entry, _NUMPY[entry.dtype].str, start, stop)
            if entry.dtype in FLOATS:
                check_finite(self.name, rows, FLOATS[entry.dtype][0])
            parts.append(rows)
        return parts

    def array(self, fetched: list[np.ndarray]) -> mx.array:
        arrays = [mx.array(part) for part in fetched]
        for i, entry in enumerate(self.entries):
            if entry.dtype in FLOATS:
                arrays[i] = arrays[i].view(FLOATS[entry.dtype][0])
        biases = arrays[2] if len(arrays) > 2 else None
        how = self.scheme
        packed = PackedWeight(arrays[0], arrays[1], biases, how.bits, how.group_size, how.mode)
        return dequantize(packed, mx.float32).astype(self.dtype)


_NUMPY = {name: np.dtype(bits) for name, (_, bits) in FLOATS.items()} | {
    "U32": np.dtype("<u4"),
    "U8": np.dtype("u1"),
}


def _read_rows(entry: Entry, dtype: str, start: int, stop: int) -> np.ndarray:
    """Some rows of a tensor. Raises ModelError where the file can't be read, or ends."""
    rows = np.empty((stop - start, *entry.shape[1:]), dtype)
    row_bytes = rows.nbytes // max(1, stop - start)
    target = rows.data.cast("B") if rows.size else memoryview(b"")
    try:
        with entry.path.open("rb", buffering=0) as f:
            f.seek(entry.offset + start * row_bytes)
            while target:
                if not (n := f.readinto(target)):
                    raise damaged(entry.path, "it became shorter while it was read")
                target = target[n:]
    except OSError as e:
        raise ModelError(f"{entry.path}: {e.strerror}; check the disk") from None
    return rows
