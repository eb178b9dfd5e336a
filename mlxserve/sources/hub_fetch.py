"""Downloading a Hub model's files into Hugging Face's cache: resumed, checked, then linked.

huggingface_hub 2 throws away what an interrupted download had, so the bytes are read here: to
`blobs/<hash>.mlxserve.incomplete`, from where the last try ended, and renamed once their hash is
right. Requests go through huggingface_hub's session: its token, proxy and offline mode apply.
"""

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mlxserve.errors import ModelError
from mlxserve.report import count_bytes
from mlxserve.sources.hub_errors import FULL, KEPT, HubUnavailableError, explained
from mlxserve.sources.hub_names import HubFile, HubModel, file_size
from mlxserve.sources.pull import locked
from mlxserve.types import OnProgress

MAX_SMALL_BYTES = 64 << 20
MAX_HTTP_BYTES = 50_000_000_000  # huggingface_hub's own limit; more goes through Xet only
PIECE = 1 << 20
HEADER_BYTES = (8 << 20, 64 << 20)  # where a vocabulary is large, the header is, too
# Before each new try; a try that brought bytes starts the row anew.
PAUSES_S: tuple[float, ...] = (0.5, 1, 2, 4)


def fetch(model: HubModel, on_progress: OnProgress | None = None, *, verify: bool = False) -> Path:
    """Make sure that the model's files are here, whole, and return its directory or GGUF file.

    on_progress: called with ("wait" | "check" | "download", bytes done, bytes in all or None).
    verify: compare the hashes of files that are here, too; a damaged one is downloaded again.
    Several processes may fetch at once: one works, the others wait. Ctrl-C and errors keep what was
    downloaded, under a name that nothing takes for the file. Raises ModelError.
    """
    report = on_progress or (lambda stage, done, total: None)
    cache, snapshot = model.cache, model.cache.snapshot(model.commit)
    try:
        cache.lock.parent.mkdir(parents=True, exist_ok=True)
        with locked(cache.lock, report):
            if verify:
                _drop_damaged(model, report)
            missing = model.missing()
            _check_space(model)
            cache.blob("x").parent.mkdir(parents=True, exist_ok=True)
            total = sum(f.size_bytes for f in missing)
            done = 0
            for file in missing:
                _download(model, file, lambda n, d=done: report("download", d + n, total))
                done += file.size_bytes
            # config.json comes last: with it, the snapshot is whole.
            for file in model.files:
                if file_size(snapshot / file.name) != file.size_bytes:
                    cache.link(file.digest, snapshot / file.name)
            cache.set_commit(model.ref.revision, model.commit)
    except OSError as e:
        raise _disk_error(model, e) from e
    return model.path


def read_small(model: HubModel, file: HubFile) -> bytes:
    """A small file's content, from the cache or the Hub; nothing is written. Raises ModelError."""
    if file.size_bytes > MAX_SMALL_BYTES:
        raise ModelError(
            f"{model.ref.repo}: {file.name} has {file.size_bytes} bytes; don't trust it"
        )
    for place in (model.cache.blob(file.digest), model.cache.snapshot(model.commit) / file.name):
        with contextlib.suppress(OSError):
            if len(data := place.read_bytes()) == file.size_bytes:
                return data
    data = _read(model, file, _request(0), file.size_bytes + 1)
    digest = _digest(file)
    digest.update(data)
    if len(data) != file.size_bytes or digest.hexdigest() != file.digest:
        raise _not_as_listed(model, file)
    return data


def _read(model: HubModel, file: HubFile, request: dict[str, Any], limit: int) -> bytes:
    """The first `limit` bytes of what the Hub answers, or what there is. Raises ModelError."""
    from huggingface_hub.utils import get_session, hf_raise_for_status

    data = bytearray()
    with (
        explained(model.ref.repo, model.ref.revision, model.endpoint, file.name),
        get_session().stream("GET", _url(model, file), **request) as answer,
    ):
        hf_raise_for_status(answer)
        for piece in answer.iter_bytes():
            data += piece
            if len(data) >= limit:
                break
    return bytes(data[:limit])


def read_config(model: HubModel) -> tuple[dict[str, Any], Mapping[str, int]]:
    """The model's config.json, or what a GGUF file's header says, before it is downloaded.

    Also its weights by their GGUF type, counted; empty for a directory. A GGUF file that this
    version can't run is refused here. Raises ModelError.
    """
    if model.gguf is None:
        [file] = [f for f in model.files if f.name == "config.json"]
        try:
            config = json.loads(read_small(model, file))
        except (ValueError, RecursionError):
            config = None
        if not isinstance(config, dict):
            raise ModelError(f"{model.ref.repo}: config.json is no JSON object; try another repo")
        return config, {}
    return _gguf_config(model)


def _gguf_config(model: HubModel) -> tuple[dict[str, Any], Mapping[str, int]]:
    """A file with the header in front and a hole after it is read like the whole one."""
    from mlxserve.sources.checkpoint import open_checkpoint

    [file] = model.files
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        for limit in HEADER_BYTES:
            path.write_bytes(_read(model, file, _request(0, limit), limit))
            if file.size_bytes <= limit or not _header_is_cut(path):
                break
        os.truncate(path, max(file.size_bytes, path.stat().st_size))
        try:
            checkpoint = open_checkpoint(path)
        except ModelError as e:
            refused = str(e).replace(str(path), f"{model.ref.repo}/{file.name}")
            raise ModelError(refused) from None
        return checkpoint.config, checkpoint.elements


def _header_is_cut(path: Path) -> bool:
    from mlxserve.sources.gguf import HeaderCutError, read_gguf

    try:
        read_gguf(path)
    except HeaderCutError:
        return True
    except ModelError:
        pass  # damaged or not known, or whole, and only the weights are missing
    return False


def _download(model: HubModel, file: HubFile, report: Callable[[int], None]) -> None:
    """Bring one blob into the cache, in as many tries as it takes while bytes arrive."""
    if file.size_bytes > MAX_HTTP_BYTES:
        raise ModelError(
            f"{file.name} of {model.ref.repo} is larger than a Hub sends over plain HTTP; fetch it "
            f"with `hf download {model.ref.repo} {file.name}` and pull again, which finds it"
        )
    with _Part(model.cache.partial(file.digest), file) as part:
        resumed = part.size > 0
        _fill(model, file, part, report)
        if resumed and not part.sound():
            part.restart()  # what was left of an earlier pull was wrong
            _fill(model, file, part, report)
        part.finish(model)


def _fill(model: HubModel, file: HubFile, part: "_Part", report: Callable[[int], None]) -> None:
    """Ask for what is missing until nothing is, or several tries in a row brought nothing."""
    tries, most = 0, part.size
    while part.size < file.size_bytes:
        failure = _try(model, file, part, report)
        # Not merely more than before: a short file on the server would restart for ever.
        tries = 1 if part.size > most else tries + 1
        most = max(most, part.size)
        if part.size < file.size_bytes:
            if tries > len(PAUSES_S):
                raise failure or HubUnavailableError(
                    f"{file.name} of {model.ref.repo} ends after {part.size} of "
                    f"{file.size_bytes} bytes; try again later, {KEPT}"
                )
            time.sleep(PAUSES_S[tries - 1])


def _try(
    model: HubModel, file: HubFile, part: "_Part", report: Callable[[int], None]
) -> HubUnavailableError | None:
    """One request for what is missing. Returns a failure after which a new try makes sense."""
    from huggingface_hub.utils import get_session, hf_raise_for_status

    try:
        with (
            explained(model.ref.repo, model.ref.revision, model.endpoint, file.name),
            get_session().stream("GET", _url(model, file), **_request(part.size)) as answer,
        ):
            if answer.status_code == 416:  # no such range: the file is not what it was
                part.restart()
                return None
            hf_raise_for_status(answer)
            whole = answer.status_code != 206
            if part.size and (whole or not _starts_at(answer, part.size)):
                part.restart()
                if not whole:
                    return None
            for piece in answer.iter_bytes():
                part.write(piece, model)
                report(part.size)
    except HubUnavailableError as e:
        if not e.again:
            raise
        return e
    return None


class _Part:
    """A blob on its way: its partial file, and the hash of what is in it. Used by one thread."""

    def __init__(self, path: Path, file: HubFile) -> None:
        self.path, self.file = path, file
        self.size = 0
        self.digest = _digest(file)
        self.out = path.open("ab")
        if self.out.tell() > file.size_bytes:
            self.out.truncate(0)
        with path.open("rb") as f:
            while piece := f.read(PIECE):
                self.digest.update(piece)
                self.size += len(piece)

    def restart(self) -> None:
        """Forget what is here: the server doesn't go on from there."""
        self.out.truncate(0)
        self.size, self.digest = 0, _digest(self.file)

    def write(self, piece: bytes, model: HubModel) -> None:
        """Add bytes. Raises ModelError where there are more than the Hub listed."""
        if self.size + len(piece) > self.file.size_bytes:
            self.path.unlink(missing_ok=True)
            raise _not_as_listed(model, self.file)
        self.out.write(piece)
        self.digest.update(piece)
        self.size += len(piece)

    def sound(self) -> bool:
        """Whether it has the hash that the Hub lists."""
        return self.digest.hexdigest() == self.file.digest

    def finish(self, model: HubModel) -> None:
        """Down to the disk, check, and rename to what others look for. Raises ModelError."""
        self.out.flush()
        os.fsync(self.out.fileno())
        if not self.sound():
            self.path.unlink(missing_ok=True)
            raise _not_as_listed(model, self.file)
        os.replace(self.path, model.cache.blob(self.file.digest))

    def __enter__(self) -> "_Part":
        return self

    def __exit__(self, *_: object) -> None:
        self.out.close()


def _url(model: HubModel, file: HubFile) -> str:
    from huggingface_hub import hf_hub_url

    return hf_hub_url(model.ref.repo, file.name, revision=model.commit, endpoint=model.endpoint)


def _request(start: int, end: int | None = None) -> dict[str, Any]:
    """Headers and timeout of a request for the bytes from `start` on, before `end`."""
    from huggingface_hub import constants
    from huggingface_hub.utils import build_hf_headers

    headers = build_hf_headers() | {"Accept-Encoding": "identity"}
    if start or end:
        headers["Range"] = f"bytes={start}-{'' if end is None else end - 1}"
    return {"headers": headers, "timeout": constants.HF_HUB_DOWNLOAD_TIMEOUT}


def _starts_at(answer: Any, start: int) -> bool:
    return answer.headers.get("Content-Range", "").startswith(f"bytes {start}-")


def _digest(file: HubFile) -> Any:
    """The running hash that `file.digest` is of: SHA-256, or git's of a blob."""
    if len(file.digest) == 64:
        return hashlib.sha256()
    return hashlib.sha1(b"blob %d\0" % file.size_bytes, usedforsecurity=False)


def _drop_damaged(model: HubModel, report: OnProgress) -> None:
    """Delete the files that are here and don't have their hash."""
    snapshot = model.cache.snapshot(model.commit)
    here = [f for f in model.files if model.has(f)]
    done, total = 0, sum(f.size_bytes for f in here)
    for file in here:
        places = [snapshot / file.name, model.cache.blob(file.digest)]
        digest = _digest(file)
        with next(p for p in places if p.is_file()).open("rb") as f:
            while piece := f.read(PIECE):
                digest.update(piece)
                done += len(piece)
                report("check", done, total)
        if digest.hexdigest() != file.digest:
            for place in places:
                place.unlink(missing_ok=True)


def _check_space(model: HubModel) -> None:
    need, free = model.missing_bytes(), free_bytes(model)
    if need > free:
        raise ModelError(
            f"{model.ref} needs {count_bytes(need)} more in {model.cache.root}, where "
            f"{count_bytes(free)} are free; free some space or set HF_HOME to another disk"
        )


def free_bytes(model: HubModel) -> int:
    """What is free where the model goes."""
    place = model.cache.root.absolute()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def _disk_error(model: HubModel, e: OSError) -> ModelError:
    where = model.cache.root
    if e.errno in FULL:
        return ModelError(
            f"{where} is full ({e.strerror}): {count_bytes(model.missing_bytes())} of {model.ref} "
            f"are missing; free some space or set HF_HOME to another disk, {KEPT}"
        )
    return ModelError(
        f"writing {model.ref} to {where} failed: {e.strerror or e}; check the directory, or set "
        "HF_HOME to another one"
    )


def _not_as_listed(model: HubModel, file: HubFile) -> ModelError:
    return ModelError(
        f"{file.name} of {model.ref.repo} is not what the Hub lists (size or hash differ), so it "
        "was deleted; pull again, and check HF_ENDPOINT and the proxy if it persists"
    )
