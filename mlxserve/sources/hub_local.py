"""The Hub's models that are on this machine."""

from dataclasses import dataclass
from pathlib import Path

from mlxserve.errors import ModelError
from mlxserve.files import read_json
from mlxserve.sources.hub_cache import cache_root, gguf_files, repos, size_of, snapshots, whole


@dataclass(frozen=True, slots=True)
class HubInstalled:
    """A model of the Hub that is here, whole. kind: `gguf`, or config.json's model_type."""

    name: str
    kind: str
    path: Path
    size_bytes: int


def installed(*, cache: Path | None = None) -> list[HubInstalled]:
    """The models in Hugging Face's cache, whoever downloaded them, by name."""
    found: list[HubInstalled] = []
    for repo in repos(cache or cache_root()):
        for revision, snapshot in snapshots(repo):
            at = "" if revision == "main" else f"@{revision}"
            files = gguf_files(snapshot)
            complete = whole(snapshot)
            if complete:
                kind, size = _kind(snapshot), size_of(snapshot)
                found.append(HubInstalled(repo.repo + at, kind, snapshot, size))
            for name in files:
                one = "" if len(files) == 1 and not complete else f"/{name}"
                path = snapshot / name
                found.append(HubInstalled(repo.repo + one + at, "gguf", path, path.stat().st_size))
    return found


def _kind(snapshot: Path) -> str:
    try:
        return str(read_json(snapshot / "config.json").get("model_type"))
    except ModelError:
        return "unknown"
