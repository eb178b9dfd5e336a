"""A model directory: `config.json` and safetensors, in Hugging Face's or MLX's layout.

Everything here reads headers and JSON only; tensors are loaded lazily, once the whole is known to
be sound.
"""

from pathlib import Path, PurePosixPath
from typing import Any

from mlxserve.files import inside, read_json
from mlxserve.report import damaged, show, unsupported
from mlxserve.sources.safetensors import Entry, read_header

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def read_config(root: Path) -> dict[str, Any]:
    """The directory's `config.json`. Raises ModelError if it is missing or names no model type."""
    path = root / "config.json"
    if not path.exists():
        if not any(root.iterdir()):
            raise unsupported(root, "the directory is empty; download the model into it again")
        raise unsupported(
            root,
            "there is no config.json; give the directory of a Hugging Face model, or a .gguf file "
            "itself",
        )
    config = read_json(inside(root, "config.json"))
    if not isinstance(config.get("model_type"), str):
        raise unsupported(path, "it has no model_type; give the directory of a Hugging Face model")
    return config


def read_entries(root: Path) -> dict[str, Entry]:
    """Every tensor of the directory, by name, over all shards.

    Raises ModelError for a missing or damaged shard, a tensor that comes twice or that the index
    names and no shard has, a path that leaves the directory, and weights that are pickled only.
    """
    weight_map: dict[str, Any] = {}
    if (root / INDEX).exists():
        index = inside(root, INDEX)
        found = read_json(index).get("weight_map")
        if not isinstance(found, dict) or not found:
            raise damaged(index, "it has no weight_map")
        weight_map = found
        shards = sorted({_shard_name(index, v) for v in weight_map.values()})
    elif (root / SINGLE).exists():
        shards = [SINGLE]
    else:
        raise _no_weights(root)
    entries: dict[str, Entry] = {}
    owner: dict[str, str] = {}
    for shard in shards:
        for name, entry in read_header(inside(root, shard)).items():
            if name in entries:
                raise damaged(root, f"tensor {show(name)} is in both {owner[name]} and {shard}")
            entries[name], owner[name] = entry, shard
    for name, shard in weight_map.items():
        if owner.get(name) != shard:
            raise damaged(root, f"{INDEX} has tensor {show(name)} in {shard}, and it is not there")
    return entries


def _shard_name(index: Path, value: object) -> str:
    if not isinstance(value, str) or not value.isprintable() or not value.endswith(".safetensors"):
        raise damaged(index, f"it names a shard {show(value)}")
    pure = PurePosixPath(value)
    if pure.is_absolute() or ".." in pure.parts or "\\" in value:
        raise unsupported(index, f"shard {show(value)} leads out of the directory; don't trust it")
    return value


def _no_weights(root: Path) -> Exception:
    names = sorted(p.name for p in root.iterdir())
    pickled = [n for n in names if n.endswith(PICKLES)]
    if pickled:
        return unsupported(
            root,
            f"the weights are pickled ({show(pickled[0])}), and no pickle is ever opened; convert "
            "them to safetensors",
        )
    others = [n for n in names if n.endswith((".safetensors", ".npz", ".gguf"))]
    had = f" (only {show(others[0])})" if others else ""
    return unsupported(
        root, f"there is no {SINGLE} and no {INDEX}{had}; download the model's weights into it"
    )
