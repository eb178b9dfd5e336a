"""What a Hub has of a model, which files of it are needed, and whether they are here.

Nothing here downloads weights; `hub_fetch` does.
"""

import json
import re
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from mlxserve.errors import ModelError
from mlxserve.report import count_bytes, show
from mlxserve.sources import directory
from mlxserve.sources.hub_cache import (
    COMMIT,
    RepoCache,
    cache_root,
    check_links,
    gguf_files,
    is_model_file,
    whole,
)
from mlxserve.sources.hub_errors import explained
from mlxserve.sources.hub_fetch import read_small
from mlxserve.sources.hub_names import HubFile, HubModel, HubRef, unsafe

QUICK_S = 5.0  # for a question whose answer is not needed
PATIENT_S = 15.0
MAX_LISTED = 20

_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_SPLIT = re.compile(r"-\d{5}-of-\d{5}\.gguf$")

_SMALL = {
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
}
_OLD_TOKENIZERS = {"tokenizer.model", "vocab.json", "merges.txt"}
_TEMPLATES = "additional_chat_templates/"


def find(ref: HubRef, *, cache: Path | None = None) -> Path | None:
    """The model's directory or file in the cache if all of it is here. Asks no Hub.

    Raises ModelError if a link in it leads out of the cache.
    """
    repo = RepoCache(cache or cache_root(), ref.repo)
    commit = repo.commit(ref.revision)
    snapshot = repo.snapshot(commit) if commit else None
    if snapshot is None or not snapshot.is_dir():
        return None
    if ref.file is None and ref.quant is None and whole(snapshot):
        return check_links(repo, snapshot)
    names = [n for n in gguf_files(snapshot) if ref.file in (None, n)]
    names = [n for n in names if ref.quant is None or _has_quant(n, ref.quant)]
    return check_links(repo, snapshot / names[0]) if len(names) == 1 else None


def look_up(
    ref: HubRef,
    *,
    endpoint: str | None = None,
    cache: Path | None = None,
    timeout_s: float = PATIENT_S,
) -> HubModel:
    """Ask the Hub for the model's files: one request, two where the weights have an index.

    Raises ModelError for what can't be had or run (no such repo, a gated one, pickled weights),
    HubUnavailableError where the Hub can't be asked now.
    """
    repo = RepoCache(cache or cache_root(), ref.repo)
    endpoint = _endpoint(endpoint)
    commit, files = _listing(ref, endpoint, timeout_s)
    by_name = {f.name: f for f in files}
    model = HubModel(ref, commit, tuple(files), None, endpoint, repo)
    safetensors = directory.INDEX in by_name or directory.SINGLE in by_name
    if ref.file or ref.quant or (not safetensors and any(is_model_file(n) for n in by_name)):
        chosen = _choose_gguf(ref, files)
        return replace(model, files=(chosen,), gguf=chosen.name)
    if not safetensors:
        raise _no_weights(ref, by_name)
    if "config.json" not in by_name:
        raise ModelError(f"{ref.repo} has no config.json; give a model in the transformers layout")
    names = {n for n in by_name if n in _SMALL or _is_template(n)}
    if "tokenizer.json" not in by_name:
        names |= _OLD_TOKENIZERS & by_name.keys()
    names |= _weights(model, by_name)
    order = sorted(names - {"config.json"}, key=lambda n: (n.endswith(".safetensors"), n))
    return replace(model, files=tuple(by_name[n] for n in [*order, "config.json"]))


def _endpoint(given: str | None) -> str:
    from huggingface_hub import constants

    endpoint = (given or constants.ENDPOINT).rstrip("/")
    if not endpoint.startswith(("http://", "https://")):
        raise ModelError(f"HF_ENDPOINT is {show(endpoint)}; it must begin with https://")
    return endpoint


def _listing(ref: HubRef, endpoint: str, timeout_s: float) -> tuple[str, list[HubFile]]:
    """The commit that the revision is now, and its files.

    HfApi.model_info asks the same, after half a second of imports, and trusts the answer's form.
    """
    from urllib.parse import quote

    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    url = f"{endpoint}/api/models/{ref.repo}/revision/{quote(ref.revision, safe='')}"
    try:
        with explained(ref.repo, ref.revision, endpoint):
            answer = get_session().get(
                url, headers=build_hf_headers(), params={"blobs": True}, timeout=timeout_s
            )
            hf_raise_for_status(answer)
            data = answer.json()
        return _commit(data, ref), [_file(entry, ref) for entry in data["siblings"]]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise ModelError(
            f"{endpoint} answered for {ref.repo} with something that is no list of files "
            f"({show(str(e), 80)}); check HF_ENDPOINT and the proxy"
        ) from e


def _commit(data: Any, ref: HubRef) -> str:
    commit = data["sha"]
    if not isinstance(commit, str) or not COMMIT.fullmatch(commit):
        raise ValueError(f"commit {commit!r}")
    if COMMIT.fullmatch(ref.revision) and commit != ref.revision:
        raise ValueError(f"commit {commit} for {ref.revision}")
    return commit


def _file(entry: Any, ref: HubRef) -> HubFile:
    name, size = entry["rfilename"], entry.get("size")
    digest = (entry.get("lfs") or {}).get("sha256") or entry.get("blobId")
    if not isinstance(name, str) or unsafe(name):
        raise ModelError(
            f"{ref.repo} has a file {show(name)}, which leads out of the repo; don't trust it"
        )
    if type(size) is not int or size < 0 or not _DIGEST.fullmatch(str(digest)):
        raise ValueError(f"{name!r} has size {size!r} and hash {digest!r}")
    return HubFile(name, size, str(digest))


def _weights(model: HubModel, by_name: dict[str, HubFile]) -> set[str]:
    """The weight files, and their index: those that the index names, no others."""
    if directory.INDEX not in by_name:
        return {directory.SINGLE}
    repo = model.ref.repo
    try:
        index = json.loads(read_small(model, by_name[directory.INDEX]))
        shards = set(index["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise ModelError(f"{repo}: {directory.INDEX} is damaged ({show(str(e))})") from e
    for shard in shards:
        if not isinstance(shard, str) or unsafe(shard) or not shard.endswith(".safetensors"):
            raise ModelError(f"{repo}: its index names a shard {show(shard)}; don't trust it")
        if shard not in by_name:
            raise ModelError(f"{repo}: its index names {show(shard)}, which is not in the repo")
    return {directory.INDEX, *shards}


def _is_template(name: str) -> bool:
    return name.startswith(_TEMPLATES) and name.endswith(".jinja") and name.count("/") == 1


def _choose_gguf(ref: HubRef, files: list[HubFile]) -> HubFile:
    """The one GGUF file that the name means. Raises ModelError with the choice there is."""
    models = [f for f in files if is_model_file(f.name)]
    found = [f for f in models if ref.file in (None, f.name)]
    found = [f for f in found if ref.quant is None or _has_quant(f.name, ref.quant)]
    if any(_SPLIT.search(f.name) for f in found) and (ref.file or ref.quant or len(models) == 1):
        raise ModelError(
            f"{found[0].name} of {ref.repo} is one part of several; this version reads GGUF models "
            "of one file, take a smaller quantisation or join the parts with llama-gguf-split"
        )
    if len(found) == 1:
        return found[0]
    if not models:
        raise ModelError(f"{ref.repo} has no .gguf file; write {ref.repo} for its safetensors")
    listed = found or models
    shown = ", ".join(f"{f.name} ({count_bytes(f.size_bytes)})" for f in listed[:MAX_LISTED])
    more = f" and {len(listed) - MAX_LISTED} more" if len(listed) > MAX_LISTED else ""
    had = "has several GGUF files" if found else f"has no {show(ref.file or ref.quant)}"
    raise ModelError(
        f"{ref.repo} {had}: {shown}{more}; write {ref.repo}/FILE or, by what only one name has, "
        f"{ref.repo}:Q4_K_M"
    )


def _has_quant(name: str, quant: str) -> bool:
    last = PurePosixPath(name).name
    return re.search(rf"(?:^|[-._]){re.escape(quant)}(?=[-.])", last, re.IGNORECASE) is not None


def _no_weights(ref: HubRef, by_name: dict[str, HubFile]) -> ModelError:
    pickled = sorted(n for n in by_name if n.endswith(directory.PICKLES))
    if pickled:
        return ModelError(
            f"{ref.repo}: the weights are pickled ({show(pickled[0])}), and no pickle is ever "
            "opened; look for a repo with safetensors"
        )
    other = sorted(n for n in by_name if n.endswith((".safetensors", ".npz", ".onnx", ".h5")))
    had = f" (only {show(other[0])})" if other else ""
    return ModelError(
        f"{ref.repo} has no {directory.SINGLE}, no {directory.INDEX} and no GGUF file{had}; "
        "give a repo with a language model"
    )
