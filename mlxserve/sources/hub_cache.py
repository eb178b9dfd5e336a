"""Hugging Face's cache on disk, which other programs share: where things lie, what is whole.

`<cache>/models--owner--name/` holds `blobs/<hash>`, `snapshots/<commit>/<file>` (links to blobs)
and `refs/<revision>` (a commit). A blob may in turn be a link into `<cache>/blobs/`, which
huggingface_hub shares between repos.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mlxserve.errors import ModelError
from mlxserve.files import read_json
from mlxserve.report import unsupported
from mlxserve.sources import directory

COMMIT = re.compile(r"[0-9a-f]{40}")
PARTIAL = ".mlxserve.incomplete"
# Not models of their own: vision towers, and data for making quantised files.
SIDE_FILES = ("mmproj", "imatrix")


def cache_root() -> Path:
    """The cache's directory, as HF_HUB_CACHE, HF_HOME and XDG_CACHE_HOME have it."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE).expanduser()


@dataclass(frozen=True, slots=True)
class RepoCache:
    """One model repo's part of the cache. repo: `owner/name`, checked by whoever made it."""

    root: Path
    repo: str

    @property
    def folder(self) -> Path:
        """Everything of this repo."""
        return self.root / ("models--" + self.repo.replace("/", "--"))

    @property
    def lock(self) -> Path:
        """A lock that only we use: huggingface_hub may delete its own while it is held."""
        return self.root / ".locks" / self.folder.name / "mlxserve.lock"

    def blob(self, digest: str) -> Path:
        """The content with this hash."""
        return self.folder / "blobs" / digest

    def partial(self, digest: str) -> Path:
        """The part of it that is here. Ours alone: huggingface_hub 2 deletes and never resumes."""
        return self.folder / "blobs" / (digest + PARTIAL)

    def snapshot(self, commit: str) -> Path:
        """The files of a commit."""
        return self.folder / "snapshots" / commit

    def commit(self, revision: str) -> str | None:
        """The commit that a branch or tag had when it was last pulled."""
        if COMMIT.fullmatch(revision):
            return revision
        try:
            text = (self.folder / "refs" / revision).read_text().strip()
        except (OSError, ValueError):
            return None
        return text if COMMIT.fullmatch(text) else None

    def set_commit(self, revision: str, commit: str) -> None:
        """Remember what a branch or tag is now."""
        if COMMIT.fullmatch(revision) or self.commit(revision) == commit:
            return
        ref = self.folder / "refs" / revision
        ref.parent.mkdir(parents=True, exist_ok=True)
        new = ref.with_name(f"{ref.name}.{os.getpid()}.tmp")
        new.write_text(commit)
        os.replace(new, ref)

    def link(self, digest: str, pointer: Path) -> None:
        """Make a snapshot's file point to its blob."""
        pointer.parent.mkdir(parents=True, exist_ok=True)
        new = pointer.with_name(f"{pointer.name}.{os.getpid()}.tmp")
        new.unlink(missing_ok=True)
        new.symlink_to(os.path.relpath(self.blob(digest), pointer.parent))
        os.replace(new, pointer)


def whole(snapshot: Path) -> bool:
    """Whether a snapshot has config, tokenizer and all weights of a model directory."""
    if not (snapshot / "config.json").is_file():
        return False
    if not any((snapshot / n).is_file() for n in ("tokenizer.json", "tokenizer.model")):
        return False
    if (snapshot / directory.INDEX).is_file():
        try:
            shards = read_json(snapshot / directory.INDEX).get("weight_map")
        except ModelError:
            return False
        if not isinstance(shards, dict) or not shards:
            return False
        return all(isinstance(s, str) and (snapshot / s).is_file() for s in set(shards.values()))
    return (snapshot / directory.SINGLE).is_file()


def gguf_files(snapshot: Path) -> list[str]:
    """The snapshot's GGUF models, as names relative to it."""
    found = (p.relative_to(snapshot).as_posix() for p in snapshot.rglob("*.gguf") if p.is_file())
    return sorted(name for name in found if is_model_file(name))


def is_model_file(name: str) -> bool:
    """Whether the name is that of a GGUF model, and not of something that goes with one."""
    last = name.rpartition("/")[2].lower()
    return last.endswith(".gguf") and not any(side in last for side in SIDE_FILES)


def check_links(cache: RepoCache, path: Path) -> Path:
    """Return the path if no link of it, or in it, leads out of the cache. Raises ModelError."""
    homes = [cache.folder.resolve(), (cache.root / "blobs").resolve()]
    for file in [path, *(path.rglob("*") if path.is_dir() else ())]:
        real = file.resolve()
        if not any(real.is_relative_to(home) for home in homes):
            raise unsupported(file, f"it leads out of its repo, to {real}; delete {cache.folder}")
    return path


def repos(root: Path) -> Iterator[RepoCache]:
    """The model repos of the cache, by name."""
    try:
        names = sorted(p.name for p in root.iterdir() if p.is_dir())
    except OSError:
        return
    for name in names:
        kind, _, repo = name.partition("--")
        if kind == "models" and repo.count("--") == 1:
            yield RepoCache(root, repo.replace("--", "/"))


def snapshots(cache: RepoCache) -> Iterator[tuple[str, Path]]:
    """The repo's snapshots, each with the shortest revision that names it."""
    refs: dict[str, str] = {}
    folder = cache.folder / "refs"
    for path in sorted(folder.rglob("*"), reverse=True) if folder.is_dir() else ():
        name = path.relative_to(folder).as_posix()
        if path.is_file() and (commit := cache.commit(name)):
            kept = refs.get(commit)
            refs[commit] = name if kept != "main" else kept
    base = cache.folder / "snapshots"
    for path in sorted(base.iterdir()) if base.is_dir() else ():
        if path.is_dir() and COMMIT.fullmatch(path.name):
            yield refs.get(path.name, path.name), path


def size_of(folder: Path) -> int:
    """Bytes of all files below, each counted once, however many links lead to it."""
    files = {p.resolve() for p in folder.rglob("*") if p.is_file()}
    return sum(p.stat().st_size for p in files)
