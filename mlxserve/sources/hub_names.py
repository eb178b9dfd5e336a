"""Names of the Hugging Face Hub, and what they stand for.

A name is `owner/name`, then `:Q4_K_M` or `/path/file.gguf` for one of several GGUF files, then
`@revision` (a branch, a tag or a commit).
"""

import re
from dataclasses import dataclass
from pathlib import Path

from mlxserve.errors import ModelError
from mlxserve.report import show
from mlxserve.sources.hub_cache import RepoCache

SCHEME = "owner/name, owner/name:Q4_K_M or owner/name/file.gguf, each with @revision if need be"

_REF = re.compile(
    r"(?P<repo>[^/:@]+/[^/:@]+)(?:/(?P<file>[^:@]+)|:(?P<quant>[^/:@]+))?(?:@(?P<revision>.+))?",
    re.DOTALL,
)
_PART = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]*[A-Za-z0-9_])?")
_REVISION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+/-]*")
_QUANT = re.compile(r"[A-Za-z0-9_]+")


@dataclass(frozen=True, slots=True)
class HubRef:
    """A model as a user names it. file: a GGUF file of the repo; quant: what its name has."""

    repo: str
    revision: str = "main"
    file: str | None = None
    quant: str | None = None

    def __str__(self) -> str:
        one = f"/{self.file}" if self.file else f":{self.quant}" if self.quant else ""
        return self.repo + one + ("" if self.revision == "main" else f"@{self.revision}")


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repo. digest: SHA-256, or for small files git's SHA-1, in hex."""

    name: str
    size_bytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class HubModel:
    """What a pull of `ref` needs, as the Hub lists it at `commit`.

    files: config.json is the last one, so that a snapshot that has it is whole. gguf: the one file
    that is the model, or None where it is the directory.
    """

    ref: HubRef
    commit: str
    files: tuple[HubFile, ...]
    gguf: str | None
    endpoint: str
    cache: RepoCache

    @property
    def path(self) -> Path:
        """Where the model lies once it was pulled."""
        snapshot = self.cache.snapshot(self.commit)
        return snapshot / self.gguf if self.gguf else snapshot

    @property
    def size_bytes(self) -> int:
        """All files together."""
        return sum(f.size_bytes for f in self.files)

    @property
    def weight_bytes(self) -> int:
        """The files that hold weights."""
        return sum(f.size_bytes for f in self.files if f.name.endswith((".safetensors", ".gguf")))

    def missing(self) -> list[HubFile]:
        """The files that are not here, or not whole."""
        return [f for f in self.files if not self.has(f)]

    def has(self, file: HubFile) -> bool:
        """Whether the file is in the cache."""
        places = (self.cache.blob(file.digest), self.cache.snapshot(self.commit) / file.name)
        return any(file_size(place) == file.size_bytes for place in places)

    def missing_bytes(self) -> int:
        """What is still to be downloaded."""
        return sum(
            f.size_bytes - min(f.size_bytes, file_size(self.cache.partial(f.digest)) or 0)
            for f in self.missing()
        )


def parse(text: str) -> HubRef | None:
    """The model that `text` names, or None if it has not the form of a Hub name.

    Raises ModelError for one that has the form, and in it what no Hub has or what leads elsewhere.
    """
    match = _REF.fullmatch(text)
    if match is None or text[0] in "./~\\" or match["repo"].endswith((".gguf", ".safetensors")):
        return None
    repo, file, quant, revision = match["repo"], match["file"], match["quant"], match["revision"]
    if "--" in repo or ".." in repo or not all(_PART.fullmatch(p) for p in repo.split("/")):
        raise _bad(text, f"{show(repo)} can't be a repo's name")
    if len(repo) > 96:
        raise _bad(text, "a repo's name has at most 96 characters")
    if revision is not None and (
        not _REVISION.fullmatch(revision)
        or any(p in ("", ".", "..") or p.endswith(".lock") for p in revision.split("/"))
        or ".." in revision
        or len(revision) > 200
    ):
        hint = "; :QUANT comes before @revision" if ":" in revision else ""
        raise _bad(text, f"{show(revision)} can't be a revision{hint}")
    if file is not None:
        if unsafe(file):
            raise _bad(text, f"{show(file)} leads out of the repo")
        if not file.endswith(".gguf"):
            raise _bad(text, f"{show(file)} is no .gguf file")
    if quant is not None and not _QUANT.fullmatch(quant):
        raise _bad(text, f"{show(quant)} can't be a kind of quantisation")
    return HubRef(repo, revision or "main", file, quant)


def unsafe(name: str) -> bool:
    """Whether a file's name could lead out of the directory that it is put into."""
    parts = name.split("/")
    return (
        any(p in ("", ".", "..") for p in parts)
        or "\\" in name
        or ":" in parts[0]
        or not name.isprintable()
        or len(name) > 400
    )


def _bad(text: str, why: str) -> ModelError:
    return ModelError(f"{show(text, 120)}: {why}; write {SCHEME}")


def file_size(path: Path) -> int | None:
    """Bytes of a file, None where there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return None
