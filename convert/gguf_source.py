"""A GGUF file as a source: its tensors unpacked, its config in words that mlx-lm knows, too."""

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlxserve.errors import ModelError
from mlxserve.models.registry import build
from mlxserve.sources import fingerprint, gguf_names, gguf_quant
from mlxserve.sources.gguf import GGUFFile, read_gguf
from mlxserve.sources.gguf_names import NamedTensor

from .source import Buffer, Source

# Llama 3.1 to 3.3, whose converter wrote the divisors out and not these numbers.
LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def open_gguf(path: Path) -> Source:
    """Raises ModelError for a file that is damaged, or not understood."""
    file = read_gguf(path)
    config, named = gguf_names.describe(file)
    for t in named:
        gguf_quant.check_tensor(file, t.tensor)
    safe = build(config).float16_safe
    kinds = sorted({t.tensor.type for t in named} - set(gguf_quant.PLAIN))
    return Source(
        path,
        _for_others(path, config),
        {t.name: Unpacked(t.name, file, t) for t in named},
        schemes={},
        packed=", ".join(kinds),
        fingerprint=fingerprint.model(path),
        gguf_metadata=file.metadata,
        dtype=mx.float16 if safe else mx.bfloat16,
    )


@dataclass(frozen=True, slots=True)
class Unpacked:
    """A tensor of the file in float32, its rows in Hugging Face's order."""

    name: str
    file: GGUFFile
    named: NamedTensor

    @property
    def shape(self) -> tuple[int, ...]:
        return self.named.tensor.shape

    @property
    def dtype(self) -> mx.Dtype:
        return mx.float32

    @property
    def read_bytes(self) -> int:
        return self.named.tensor.nbytes

    def fetch(self, start: int, stop: int, buffer: Buffer) -> None:
        """Raises ModelError for scales that aren't finite."""
        rows: Any = slice(start, stop)
        if self.named.heads:
            rows = gguf_names.row_order(self.shape[0], self.named.heads)[rows]
        values = gguf_quant.dense(self.file, self.named.tensor, rows)
        if stop == self.shape[0]:
            self._let_go()
        target = np.frombuffer(buffer.data, np.float32, values.size).reshape(values.shape)
        target[...] = values - np.float32(1) if self.named.plus_one else values

    def array(self, buffer: Buffer, rows: int) -> mx.array:
        return buffer.array((rows, *self.shape[1:]), mx.float32)

    def _let_go(self) -> None:
        """Take the tensor's pages out of this process, which would grow to the file's size."""
        tensor = self.named.tensor
        start = tensor.offset // mmap.PAGESIZE * mmap.PAGESIZE
        self.file.data.madvise(mmap.MADV_DONTNEED, start, tensor.offset + tensor.nbytes - start)


def _for_others(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    """The config with what mlx-lm and transformers ask for. Raises ModelError."""
    config = {key: value for key, value in config.items() if value is not None}
    scaling = config.get("rope_scaling")
    if scaling and scaling["rope_type"] == "gguf_factors":
        config["rope_scaling"] = _llama3(path, config, scaling["factors"])
    layers = config.get("layer_types", [])
    if "full_attention" in layers:
        config["sliding_window_pattern"] = layers.index("full_attention") + 1
    return config


def _llama3(path: Path, config: dict[str, Any], divisors: Sequence[float]) -> dict[str, Any]:
    """The numbers that these divisors of frequencies were computed from."""
    scaling = LLAMA3 | {"factor": max(divisors)}
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    trained, half = scaling["original_max_position_embeddings"], len(divisors)
    for i, divisor in enumerate(divisors):
        frequency = config["rope_theta"] ** (-i / half)
        turns = trained * frequency / (2 * math.pi)
        keep = min(max((turns - low) / (high - low), 0.0), 1.0)
        if abs(divisor * (keep + (1 - keep) / scaling["factor"]) - 1) > 1e-4:
            raise ModelError(
                f"{path}: its rope_freqs.weight isn't what Llama 3 has, and a config has no words "
                "for it; take the model's Hugging Face directory"
            )
    return scaling
