"""safetensors files that are written in place: where each tensor goes is known from the start."""

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from mlxserve.sources.directory import SINGLE

from .plan import Part

METADATA = {"format": "mlx"}
ALIGNMENT = 8  # of the data, as safetensors' own writer has it


class Place(NamedTuple):
    """Where a tensor lies: the file's name, and the offset of its first byte."""

    file: str
    offset: int
    nbytes: int


class Shard(NamedTuple):
    """A file to be: its name, its header, and its size in bytes."""

    file: str
    header: bytes
    size: int


def lay_out(shards: Sequence[Sequence[Part]]) -> tuple[list[Shard], dict[str, Place]]:
    """Files for these tensors, and the place of each."""
    files, places = [], {}
    for i, parts in enumerate(shards, 1):
        name = SINGLE if len(shards) == 1 else f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        header = _header(parts)
        at = len(header)
        for part in parts:
            places[part.name] = Place(name, at, part.nbytes)
            at += part.nbytes
        files.append(Shard(name, header, at))
    return files, places


def create(folder: Path, shard: Shard) -> None:
    """The file in its whole size, with its header. Raises OSError, also where there is no room."""
    with (folder / shard.file).open("xb") as f:
        if hasattr(os, "posix_fallocate"):  # macOS has no such call: there a full disk shows later
            os.posix_fallocate(f.fileno(), 0, shard.size)
        else:
            f.truncate(shard.size)
        f.write(shard.header)


def index(places: dict[str, Place], parameters: int) -> str:
    """The index file's text, `model.safetensors.index.json`."""
    total = sum(place.nbytes for place in places.values())
    found = {
        "metadata": {"total_size": total, "total_parameters": parameters},
        "weight_map": {name: places[name].file for name in sorted(places)},
    }
    return json.dumps(found, indent=4)


def _header(parts: Iterable[Part]) -> bytes:
    entries: dict[str, object] = {"__metadata__": METADATA}
    at = 0
    for part in parts:
        span = [at, at + part.nbytes]
        entries[part.name] = {"dtype": part.dtype, "shape": part.shape, "data_offsets": span}
        at += part.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
