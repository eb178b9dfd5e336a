"""A directory of safetensors as a source: plain tensors, and matrices that MLX has quantised."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlxserve.kernels.quantized import PackedWeight, dequantize
from mlxserve.sources import directory, fingerprint, mlx_quant
from mlxserve.sources.mlx_quant import Quantised
from mlxserve.sources.safetensors import Entry, read_into

from .source import Buffer, Source, Tensor

# What headers call a type -> MLX's.
FLOATS = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}
TYPES = FLOATS | {"U32": mx.uint32, "U8": mx.uint8}  # also of packed numbers


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
        return FLOATS[scales.dtype]
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
        return FLOATS.get(self.entry.dtype, mx.int32)

    @property
    def read_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.size

    def fetch(self, start: int, stop: int, buffer: Buffer) -> None:
        read_into(buffer.data, self.entry, range(start, stop))

    def array(self, buffer: Buffer, rows: int) -> mx.array:
        return buffer.array((rows, *self.shape[1:]), self.dtype)


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
        return sum(math.prod(e.shape) * TYPES[e.dtype].size for e in self.entries)

    def fetch(self, start: int, stop: int, buffer: Buffer) -> None:
        """One part's rows after the other's."""
        at = 0
        for entry in self.entries:
            at += read_into(buffer.data[at:], entry, range(start, stop))

    def array(self, buffer: Buffer, rows: int) -> mx.array:
        arrays, at = [], 0
        for entry in self.entries:
            part = buffer.array((rows, *entry.shape[1:]), TYPES[entry.dtype], at)
            arrays.append(part)
            at += part.nbytes
        biases = arrays[2] if len(arrays) > 2 else None
        how = self.scheme
        packed = PackedWeight(arrays[0], arrays[1], biases, how.bits, how.group_size, how.mode)
        return dequantize(packed, mx.float32).astype(self.dtype)
