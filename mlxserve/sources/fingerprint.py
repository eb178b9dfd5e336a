"""A short name for the contents of files, cheap however large they are."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

SAMPLES = 64
SAMPLE_BYTES = 4096
DIGITS = 16
TOKENIZER_FILES = ("tokenizer*.json", "tokenizer.model", "vocab.json", "merges.txt")


def model(path: Path) -> str:
    """Of a model's weights and config. path: a GGUF file or a directory."""
    if path.is_file():
        return _of([path])
    return _of([*path.glob("*.safetensors"), path / "config.json"])


def tokenizer(path: Path) -> str:
    """Of what turns its text into tokens, chat template included; a GGUF file holds both."""
    if path.is_file():
        return _of([path])
    found = [file for pattern in TOKENIZER_FILES for file in path.glob(pattern)]
    return _of([*found, *path.glob("*.jinja")])


def _of(files: Iterable[Path]) -> str:
    """SHA-256, shortened, over sizes and 64 samples of 4 KiB from each file, small ones whole.

    Other weights differ in their samples. It isn't proof against a file made to look like another.
    """
    digest = hashlib.sha256()
    for file in sorted(set(files)):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as f:
            if size <= SAMPLES * SAMPLE_BYTES:
                digest.update(f.read())
                continue
            for i in range(SAMPLES):
                f.seek(i * (size - SAMPLE_BYTES) // (SAMPLES - 1))
                digest.update(f.read(SAMPLE_BYTES))
    return digest.hexdigest()[:DIGITS]
