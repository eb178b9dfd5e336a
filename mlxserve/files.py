"""Small files: a model directory's, of which none leads out of it or is too large; and ours."""

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from mlxserve.report import damaged, one_line, show, unsupported

MAX_TEXT_BYTES = 64 << 20  # the largest tokenizer.json known has about 35 MB


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


def read_text(path: Path) -> str:
    """A UTF-8 file of reasonable size. Raises ModelError."""
    try:
        with path.open("rb") as f:
            data = f.read(MAX_TEXT_BYTES + 1)
    except OSError as e:
        raise unsupported(path, f"{e.strerror}; check the path") from None
    if len(data) > MAX_TEXT_BYTES:
        raise damaged(path, f"it is larger than {MAX_TEXT_BYTES >> 20} MiB")
    try:
        return data.decode()
    except UnicodeDecodeError as e:
        raise damaged(path, f"it is not UTF-8 ({one_line(e)})") from None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of reasonable size. Raises ModelError."""
    text = read_text(path)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise damaged(path, f"it is not proper JSON ({show(str(e))})") from None
    if not isinstance(value, dict):
        raise damaged(path, "it is not a JSON object")
    return value


def replace(path: Path, data: bytes) -> None:
    """Write a whole file, as `replacing` does."""
    with replacing(path) as f:
        f.write(data)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file to write to, which takes the path's place at the end of the block.

    Who reads meanwhile gets the old file or the new one, and the old one stays if the block raises.
    The directory must exist. Raises OSError.
    """
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
