"""Opening a model on disk, whatever its form: config and weights under Hugging Face's names."""

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import mlx.core as mx

from mlxserve.errors import RequestError
from mlxserve.kernels.native import usable_cores
from mlxserve.kernels.quantized import PackedWeight
from mlxserve.report import damaged, show, unsupported
from mlxserve.sources import directory, gguf_names, gguf_quant, mlx_quant, safetensors
from mlxserve.sources.gguf import MAGIC, GGUFFile, read_gguf
from mlxserve.sources.gguf_quant import Q6K

logger = logging.getLogger(__name__)

Weights = dict[str, mx.array | PackedWeight]


@dataclass(frozen=True, eq=False, slots=True)
class Checkpoint:
    """A model on disk that has been checked as far as its headers go.

    path: the file or directory.
    config: Hugging Face's keys, with `model_type`; how weights are quantised is not in it, since
        the weights say so themselves.
    gguf_metadata: all metadata of a GGUF file (its tokenizer is in there); None for a directory.
    size_bytes: of the weight files.
    elements: weights by their type in a GGUF file; empty for a directory.
    """

    path: Path
    config: dict[str, Any]
    gguf_metadata: Mapping[str, Any] | None
    size_bytes: int
    load: Callable[[], Weights]
    elements: Mapping[str, int] = field(default_factory=dict)

    def weights(self) -> Weights:
        """Weights by Hugging Face name, in the file's own dtypes; a quantised `X.weight` is packed.

        A directory's arrays are lazy: evaluate them on the thread that called this. Reads the files
        anew on each call. Raises ModelError for data that is damaged.
        """
        return self.load()


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
        lambda: _gguf_weights(file, tensors, q6_k),
        elements,
    )


def _gguf_weights(file: GGUFFile, tensors: list[gguf_names.NamedTensor], q6_k: Q6K) -> Weights:
    def convert(t: gguf_names.NamedTensor) -> gguf_quant.Converted:
        order = gguf_names.row_order(t.tensor.shape[0], t.heads) if t.heads else None
        return gguf_quant.to_mlx(file, t.tensor, order, q6_k=q6_k)

    weights: Weights = {}
    errors: dict[str, list[float]] = {}
    with ThreadPoolExecutor(usable_cores()) as pool:
        converted = list(pool.map(convert, tensors))
    for t, (value, error) in zip(tensors, converted, strict=True):
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
    return Checkpoint(root, config, None, size, lambda: _directory_weights(files, entries, layers))


def _directory_weights(
    files: list[Path],
    entries: Mapping[str, safetensors.Entry],
    layers: Mapping[str, mlx_quant.Quantised],
) -> Weights:
    arrays: dict[str, mx.array] = {}
    for file in files:
        arrays |= safetensors.load(file)
    for name, entry in entries.items():
        if name not in arrays or arrays[name].shape != entry.shape:
            raise damaged(entry.path, f"tensor {show(name)} changed while the model was loaded")
    weights: Weights = {}
    for layer, how in layers.items():
        weights[f"{layer}.weight"] = PackedWeight(
            arrays.pop(f"{layer}.weight"),
            arrays.pop(f"{layer}.scales"),
            arrays.pop(f"{layer}.biases", None),
            how.bits,
            how.group_size,
            how.mode,
        )
    return weights | arrays
