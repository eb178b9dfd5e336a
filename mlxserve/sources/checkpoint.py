"""Opening a model on disk, whatever its form: config and weights under Hugging Face's names."""

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, get_args

import mlx.core as mx
import numpy as np

from mlxserve.errors import RequestError
from mlxserve.kernels.native import usable_cores
from mlxserve.kernels.quantized import PackedWeight, column_ranges
from mlxserve.report import damaged, show, unsupported
from mlxserve.sources import directory, gguf_names, gguf_quant, mlx_quant, safetensors
from mlxserve.sources.gguf import MAGIC, GGUFFile, read_gguf
from mlxserve.sources.gguf_quant import Q6K

logger = logging.getLogger(__name__)

QUANTISED_PARTS = ("weight", "scales", "biases")  # of one matrix

Weights = dict[str, mx.array | PackedWeight]
Shape = tuple[int, ...]
# Which part of a tensor to take, by its name and shape: a range for each axis, or None of it.
Region = Callable[[str, Shape], tuple[range, ...] | None]


def everything(name: str, shape: Shape) -> tuple[range, ...]:
    """The `Region` of a whole tensor."""
    return tuple(range(n) for n in shape)


class Stored(NamedTuple):
    """A tensor as headers describe it; a quantised one by the shape that it stands for.

    group_size: numbers of a row that share a scale, None where it isn't quantised.
    not_floating: the dtype where that is no floating type.
    """

    shape: Shape
    group_size: int | None
    not_floating: str = ""


@dataclass(frozen=True, eq=False, slots=True)
class Checkpoint:
    """A model on disk that has been checked as far as its headers go.

    path: the file or directory.
    config: Hugging Face's keys, with `model_type`; how weights are quantised is not in it, since
        the weights say so themselves.
    gguf_metadata: all metadata of a GGUF file (its tokenizer is in there); None for a directory.
    size_bytes: of the weight files.
    tensors: those that `weights` gives, by name.
    elements: weights by their type in a GGUF file; empty for a directory.
    """

    path: Path
    config: dict[str, Any]
    gguf_metadata: Mapping[str, Any] | None
    size_bytes: int
    tensors: Mapping[str, Stored]
    load: Callable[[Region], Weights]
    elements: Mapping[str, int] = field(default_factory=dict)

    def weights(self, region: Region = everything) -> Weights:
        """Weights by Hugging Face name, in the file's own dtypes; a quantised `X.weight` is packed.

        region: what to take of each, whole groups of a quantised matrix. Of a directory no more is
        read than that, at once; of a GGUF file whole rows. A directory's arrays are lazy: evaluate
        them on the thread that called this. Reads the files anew on each call. Raises ModelError
        for data that is damaged.
        """
        return self.load(region)


def open_checkpoint(path: Path, *, gguf_q6_k: Q6K = "8bit") -> Checkpoint:
    """Open a `.gguf` file or a model directory (Hugging Face's or MLX's layout).

    gguf_q6_k: what a GGUF file's Q6_K tensors (Q2_K and Q3_K, too) become, for which MLX has no
        equal: the nearest "8bit" form or float16 ("16bit"). `weights()` logs how near that was.

    Only headers are read; what they say is checked against the files' sizes, so a file cut short is
    found here. Raises ModelError, in one line with the fix, for anything else that can't be loaded
    exactly; RequestError for another gguf_q6_k.
    """
    if gguf_q6_k not in get_args(Q6K):
        raise RequestError(f"gguf_q6_k is {show(gguf_q6_k)}; use one of {', '.join(get_args(Q6K))}")
    try:
        if path.is_dir():
            return _open_directory(path)
        if path.is_file():
            return _open_file(path, gguf_q6_k)
        exists = path.exists()
    except OSError as e:
        raise unsupported(path, f"{e.strerror}; check the path and its permissions") from None
    if exists:
        raise unsupported(path, "it is neither a file nor a directory; give a model")
    raise unsupported(path, "there is no such file or directory; check the path")


def _open_file(path: Path, q6_k: Q6K) -> Checkpoint:
    with path.open("rb") as f:
        magic = f.read(len(MAGIC))
    if magic != MAGIC and path.suffix != ".gguf":
        fix = "give a .gguf file or a model's directory"
        if path.suffix in directory.PICKLES:
            raise unsupported(path, f"it may be a pickle, and no pickle is ever opened; {fix}")
        raise unsupported(path, f"it is not a GGUF file; {fix}")
    file = read_gguf(path)
    config, tensors = gguf_names.describe(file)
    elements: Counter[str] = Counter()
    for t in tensors:
        gguf_quant.check_tensor(file, t.tensor)
        elements[t.tensor.type] += math.prod(t.tensor.shape)
    return Checkpoint(
        path,
        config,
        file.metadata,
        file.size_bytes,
        {
            t.name: Stored(t.tensor.shape, gguf_quant.group_size(t.tensor.type, q6_k))
            for t in tensors
        },
        lambda region: _gguf_weights(file, tensors, q6_k, region),
        elements,
    )


def _gguf_weights(
    file: GGUFFile, tensors: list[gguf_names.NamedTensor], q6_k: Q6K, region: Region
) -> Weights:
    parts = {t.name: part for t in tensors if (part := region(t.name, t.tensor.shape)) is not None}
    tensors = [t for t in tensors if t.name in parts]

    def convert(t: gguf_names.NamedTensor) -> gguf_quant.Converted:
        n = t.tensor.shape[0]
        rows, *rest = parts[t.name]
        columns = rest[0] if len(rest) == 1 else None
        order = gguf_names.row_order(n, t.heads) if t.heads else np.arange(n)
        some = order[rows.start : rows.stop] if t.heads or len(rows) < n else None
        return gguf_quant.to_mlx(file, t.tensor, some, columns, q6_k=q6_k)

    weights: Weights = {}
    errors: dict[str, list[float]] = {}
    with ThreadPoolExecutor(usable_cores()) as pool:
        # What isn't converted is only copied, and its dtype set: in this thread, to which a lazy
        # operation belongs.
        packed = [t for t in tensors if t.tensor.type not in gguf_quant.PLAIN]
        converted = dict(zip((t.name for t in packed), pool.map(convert, packed), strict=True))
    for t in tensors:
        value, error = converted.pop(t.name, None) or convert(t)
        if t.tensor.type in gguf_quant.ROUNDED:
            errors.setdefault(t.tensor.type, []).append(error)
        if t.plus_one and not isinstance(value, PackedWeight):
            value = value - 1
        weights[t.name] = value
    if errors:
        logger.warning(
            "%s: %s tensors were converted to %s; the largest error is %.2g%% of the range of "
            "32 weights%s",
            file.path.name,
            " and ".join(f"{len(those)} {kind}" for kind, those in sorted(errors.items())),
            q6_k.replace("bit", " bits"),
            100 * max(max(those) for those in errors.values()),
            "; mlxserve.load(..., gguf_q6_k='16bit') is more exact" if q6_k == "8bit" else "",
        )
    return weights


def _open_directory(root: Path) -> Checkpoint:
    config = directory.read_config(root)
    entries = directory.read_entries(root)
    layers = mlx_quant.quantised_layers(root / "config.json", config, entries)
    files = sorted({e.path for e in entries.values()})
    for key in ("quantization", "quantization_config"):
        config.pop(key, None)
    size = sum(f.stat().st_size for f in files)
    return Checkpoint(
        root,
        config,
        None,
        size,
        dict(_stored(entries, layers)),
        lambda region: _directory_weights(files, entries, layers, region),
    )


def _stored(
    entries: Mapping[str, safetensors.Entry], layers: Mapping[str, mlx_quant.Quantised]
) -> Iterator[tuple[str, Stored]]:
    for name, entry in entries.items():
        layer, _, part = name.rpartition(".")
        if layer not in layers or part not in QUANTISED_PARTS:
            floating = entry.dtype in mlx_quant.FLOATS
            yield name, Stored(entry.shape, None, "" if floating else entry.dtype)
        elif part == "weight":
            how = layers[layer]
            yield name, Stored(_stored_shape(entry, how), how.group_size)


def _stored_shape(weight: safetensors.Entry, how: mlx_quant.Quantised) -> Shape:
    """Of the matrix whose packed words these are."""
    n, words = weight.shape
    return n, words * 32 // how.bits


def _directory_weights(
    files: list[Path],
    entries: Mapping[str, safetensors.Entry],
    layers: Mapping[str, mlx_quant.Quantised],
    region: Region,
) -> Weights:
    arrays: dict[str, mx.array] = {}
    for file in files:
        arrays |= safetensors.load(file)
    for name, entry in entries.items():
        if name not in arrays or arrays[name].shape != entry.shape:
            raise damaged(entry.path, f"tensor {show(name)} changed while the model was loaded")
    wanted = dict(_wanted(entries, layers, region))
    arrays = {name: arrays[name] for name in wanted}
    parts = {name: some for name, some in wanted.items() if not _whole(some, entries[name].shape)}
    with ThreadPoolExecutor(usable_cores()) as pool:
        read = pool.map(lambda name: safetensors.read(entries[name], *parts[name]), parts)
        for name, bits in zip(parts, read, strict=True):
            arrays[name] = entries[name].array(bits)
    weights: Weights = {}
    for layer, how in layers.items():
        if f"{layer}.weight" not in arrays:
            continue
        weights[f"{layer}.weight"] = PackedWeight(
            arrays.pop(f"{layer}.weight"),
            arrays.pop(f"{layer}.scales"),
            arrays.pop(f"{layer}.biases", None),
            how.bits,
            how.group_size,
            how.mode,
        )
    return weights | arrays


def _wanted(
    entries: Mapping[str, safetensors.Entry],
    layers: Mapping[str, mlx_quant.Quantised],
    region: Region,
) -> Iterator[tuple[str, tuple[range, ...]]]:
    """The tensors in the files of which something is wanted, and what."""
    for name, entry in entries.items():
        layer, _, part = name.rpartition(".")
        if layer not in layers or part not in QUANTISED_PARTS:
            if (some := region(name, entry.shape)) is not None:
                yield name, some
            continue
        how, weight = layers[layer], entries[f"{layer}.weight"]
        some = region(f"{layer}.weight", _stored_shape(weight, how))
        if some is not None:
            rows, columns = some
            words, groups = column_ranges(columns, how.bits, how.group_size)
            yield name, (rows, words if part == "weight" else groups)


def _whole(ranges: tuple[range, ...], shape: Shape) -> bool:
    return all(len(some) == n for some, n in zip(ranges, shape, strict=True))
