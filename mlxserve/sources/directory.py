"""A model directory: `config.json` and safetensors, in Hugging Face's or MLX's layout.

Everything here reads headers and JSON only; tensors are loaded lazily, once the whole is known to
be sound.
"""

import json
from pathlib import Path, PurePosixPath
from typing import Any

from mlxserve.sources.report import damaged, show, unsupported
from mlxserve.sources.safetensors import Entry, read_header

MAX_JSON_BYTES = 64 << 20
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


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of reasonable size. Raises ModelError."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise damaged(path, f"it is larger than {MAX_JSON_BYTES >> 20} MiB")
        value = json.loads(path.read_bytes().decode())
    except OSError as e:
        raise unsupported(path, f"{e.strerror}; check the path") from None
    except (ValueError, RecursionError) as e:
        raise damaged(path, f"it is not proper JSON ({show(str(e))})") from None
    if not isinstance(value, dict):
        raise damaged(path, "it is not a JSON object")
    return value


def inside(root: Path, name: str) -> Path:
    """The regular file `name` of the directory, which may not lead out of it.

    A Hub cache keeps its files in `blobs/` of the repo or of the cache, with links from
    `snapshots/<revision>/`: those are the places outside that a link may point to. Raises
    ModelError.
    """
    path = root / name
    try:
        real, home = path.resolve(strict=True), root.resolve()
    except (OSError, RuntimeError):
        raise unsupported(path, "the file is missing; download the model again") from None
    allowed = [home]
    if home.parent.name == "snapshots":
        repo = home.parent.parent
        allowed += [repo / "blobs", repo.parent / "blobs"]  # the second is shared between repos
    if not any(real.is_relative_to(place) for place in allowed):
        raise unsupported(path, f"it leads out of its directory, to {real}; copy the file into it")
    if not real.is_file():
        raise unsupported(path, "it is not a regular file; download the model again")
    return path


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
