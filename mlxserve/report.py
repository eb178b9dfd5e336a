"""How errors are worded: one line, the file, what is wrong, the fix; and sizes for people."""

import json
from pathlib import Path

from mlxserve.errors import DamagedError, ModelError


def show(value: object, limit: int = 60) -> str:
    """A value out of a file as one short, printable line."""
    text = ascii(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def show_json(value: object, limit: int = 100) -> str:
    """A value that came as JSON, as JSON on one short line, since its sender knows no other."""
    try:
        text = json.dumps(value, ensure_ascii=True)
    except (TypeError, ValueError, RecursionError):
        text = ascii(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def clip(where: str, limit: int = 100) -> str:
    """A path into a value: as deep as it may be, a message still has room for what is wrong."""
    return where if len(where) <= limit else where[: limit - 3] + "..."


def one_line(error: Exception) -> str:
    """What another library's error says, short and on one line."""
    return " ".join(str(error).split())[:500]


def count_bytes(n: int) -> str:
    """A size for people: `87.5 MB`."""
    size = float(n)
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def count_binary(n: float) -> str:
    """Memory for people, in powers of 1024: `1.5 GiB`."""
    size = float(n)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def damaged(path: Path, what: str, fix: str = "download it again") -> DamagedError:
    """The error for a file that can't be what its writer meant."""
    return DamagedError(f"{path}: {what}; the file is damaged or cut short, {fix}")


def unsupported(path: Path, what: str) -> ModelError:
    """The error for a sound file that this version can't run; `what` ends with the fix."""
    return ModelError(f"{path}: {what}")
