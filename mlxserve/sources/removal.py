"""Removing a pulled model from this machine, and nothing else."""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxserve import config
from mlxserve.errors import ModelError
from mlxserve.report import show
from mlxserve.sources import hub
from mlxserve.sources.catalog import CATALOG, Catalog
from mlxserve.sources.hub_cache import RepoCache, cache_root, size_of
from mlxserve.sources.hub_names import HubRef, parse
from mlxserve.sources.pull import LOCK, locked


@dataclass(frozen=True, slots=True)
class Removal:
    """What removing a model frees; `run` does it."""

    size_bytes: int
    run: Callable[[], None]


def removal(name: str, *, catalog: Catalog = CATALOG, cache: Path | None = None) -> Removal:
    """What `rm` of this model takes away: a catalog model, or a repo of Hugging Face's cache.

    With `@revision`, `:QUANT` or `/file.gguf` only that part of the repo. Raises ModelError for a
    model that is not here, and for anything but a name: a path is never removed.
    """
    if name in catalog:
        return _from_catalog(name)
    ref = parse(name)
    if ref is None:
        raise ModelError(
            f"{show(name, 200)} is not the name of a pulled model; `mlxserve ls` lists them, and a "
            "file of your own is yours to delete"
        )
    repo = RepoCache(cache or cache_root(), ref.repo)

    def run() -> None:
        repo.lock.parent.mkdir(parents=True, exist_ok=True)
        with locked(repo.lock, _silent):
            _from_cache(repo, ref).run()  # looked up anew: a pull may have ended in between

    return Removal(_from_cache(repo, ref).size_bytes, run)


def _from_cache(repo: RepoCache, ref: HubRef) -> Removal:
    if not repo.folder.is_dir():
        raise _not_here(ref)
    if ref.file or ref.quant:
        return _one_file(repo, ref)
    if ref.revision != "main":
        return _revision(repo, ref)
    return Removal(size_of(repo.folder), lambda: _remove_repo(repo))


def _from_catalog(name: str) -> Removal:
    """Everything of the model but its lock, which a pull may wait for."""
    folder = config.home() / "models" / name
    paths = [p for p in folder.iterdir() if p.name != LOCK] if folder.is_dir() else []
    if not paths:
        raise _not_here(name)

    def run() -> None:
        with locked(folder / LOCK, _silent):
            for path in paths:
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)

    return Removal(sum(p.lstat().st_size for p in paths), run)


def _silent(stage: str, done: int, total: int | None) -> None:
    pass


def _not_here(what: object) -> ModelError:
    return ModelError(f"{what} is not on this machine; `mlxserve ls` lists what is")


def _one_file(repo: RepoCache, ref: HubRef) -> Removal:
    """A GGUF file goes with its blob, unless another snapshot has the same blob."""
    path = hub.find(ref, cache=repo.root)
    if path is None or path.is_dir():
        raise _not_here(ref)
    others = [p for p in (repo.folder / "snapshots").rglob("*") if not p.is_dir() and p != path]
    if not others:
        return Removal(size_of(repo.folder), lambda: _remove_repo(repo))
    blob = _target(path)
    shared = any(_target(p) == blob for p in others)

    def run() -> None:
        path.unlink()
        if blob != path and not shared and blob.parent == repo.folder / "blobs":
            blob.unlink(missing_ok=True)

    return Removal(0 if shared else path.stat().st_size, run)


def _revision(repo: RepoCache, ref: HubRef) -> Removal:
    commit = repo.commit(ref.revision)
    if commit is None or not repo.snapshot(commit).is_dir():
        raise _not_here(ref)
    if [path.name for path in (repo.folder / "snapshots").iterdir()] == [commit]:
        return Removal(size_of(repo.folder), lambda: _remove_repo(repo))
    strategy = _strategy(repo, [commit])
    if strategy is None:
        raise ModelError(f"{repo.folder} is damaged; `mlxserve rm {ref.repo}` removes all of it")
    # huggingface_hub deletes what links point to, wherever that is.
    if any(not path.is_relative_to(repo.folder.resolve()) for path in strategy.blobs):
        raise ModelError(f"{repo.folder} has links that lead out of it; delete it yourself")
    return Removal(strategy.expected_freed_size, strategy.execute)


def _remove_repo(repo: RepoCache) -> None:
    """All of a repo: by huggingface_hub where it knows it, since blobs may be shared."""
    try:
        known = [path.name for path in (repo.folder / "snapshots").iterdir()]
    except OSError:
        known = []
    if known and (strategy := _strategy(repo, known)) is not None:
        strategy.execute()
    if repo.folder.exists():  # never finished, or damaged
        shutil.rmtree(repo.folder)


def _strategy(repo: RepoCache, commits: list[str]) -> Any:
    """huggingface_hub's plan for deleting these commits; None for a repo that it can't read."""
    from huggingface_hub import scan_cache_dir

    info = scan_cache_dir(repo.root)
    here = {
        revision.commit_hash
        for known in info.repos
        if known.repo_type == "model" and known.repo_id == repo.repo
        for revision in known.revisions
    }
    return info.delete_revisions(*commits) if here.issuperset(commits) else None


def _target(path: Path) -> Path:
    """Where a link leads in one step; a file itself."""
    if not path.is_symlink():
        return path
    return Path(os.path.abspath(path.parent / os.readlink(path)))
