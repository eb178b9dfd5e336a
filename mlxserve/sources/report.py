"""How the readers of model files word their errors: one line, the file, what is wrong, the fix."""

from pathlib import Path

from mlxserve.errors import ModelError


def show(value: object, limit: int = 60) -> str:
    """A value out of a file as one short, printable line."""
    text = ascii(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def damaged(path: Path, what: str) -> ModelError:
    """The error for a file that can't be what its writer meant."""
    return ModelError(f"{path}: {what}; the file is damaged or cut short, download it again")


def unsupported(path: Path, what: str) -> ModelError:
    """The error for a sound file that this version can't run; `what` ends with the fix."""
    return ModelError(f"{path}: {what}")
