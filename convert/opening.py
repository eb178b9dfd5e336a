"""Opening what is to be converted, whatever its form."""

from pathlib import Path

from mlxserve.errors import ModelError
from mlxserve.sources.gguf import MAGIC

from .directory_source import open_directory
from .gguf_source import open_gguf
from .source import Source


def open_source(path: Path) -> Source:
    """The model at `path`: a directory of safetensors, or a GGUF file.

    Only headers are read, and checked against the files' sizes. Raises ModelError.
    """
    try:
        if path.is_dir():
            return open_directory(path)
        with path.open("rb") as f:
            is_gguf = f.read(len(MAGIC)) == MAGIC
    except OSError as e:
        raise ModelError(f"{path}: {e.strerror}; check the path and its permissions") from None
    if is_gguf or path.suffix == ".gguf":
        return open_gguf(path)
    raise ModelError(f"{path} is no model; give a model's directory or a .gguf file")
