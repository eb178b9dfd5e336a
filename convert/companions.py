"""The small files of a model: config, tokenizer, chat template, generation settings, licence."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlxserve.files import inside
from mlxserve.text.decoding import make_decoder
from mlxserve.text.gguf_vocab import read_gguf_vocab

from .source import Source

COPIED = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
    "LICENSE*",
    "NOTICE*",
)

Files = dict[str, bytes | Path]
"""Name in the output -> its contents, or the file to copy."""


def companions(source: Source, config: Mapping[str, Any]) -> Files:
    """All small files but the model card. Raises ModelError for a file or vocabulary it can't use.

    A directory's are copied as they are; those of a GGUF file are made of its metadata.
    """
    files: Files = {"config.json": _json(dict(sorted(config.items())))}
    if source.gguf_metadata is not None:
        return files | _from_gguf(source.gguf_metadata)
    for pattern in COPIED:
        for path in sorted(source.path.glob(pattern)):
            name = str(path.relative_to(source.path))
            files[name] = inside(source.path, name)
    return files


def size_of(files: Files) -> int:
    """Bytes of them all."""
    return sum(f.stat().st_size if isinstance(f, Path) else len(f) for f in files.values())


def write(files: Files, folder: Path) -> None:
    """Write or copy them. Raises OSError."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content.read_bytes() if isinstance(content, Path) else content)


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def _from_gguf(metadata: Mapping[str, Any]) -> Files:
    """A tokenizer in Hugging Face's layout, as transformers, mlx-lm and mlxserve read it."""
    from tokenizers import processors

    parts = read_gguf_vocab(metadata)
    backend = parts.backend
    backend.decoder = make_decoder(parts.decoding)
    if parts.prefix_ids:
        # transformers goes by tokenizer.json alone, so what comes before a prompt stands there.
        prefix = [(backend.id_to_token(i), i) for i in parts.prefix_ids]
        backend.post_processor = processors.TemplateProcessing(
            single=[token for token, _ in prefix] + ["$A"],
            pair=[token for token, _ in prefix] + ["$A", "$B"],
            special_tokens=prefix,
        )
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": bool(parts.prefix_ids),
        "clean_up_tokenization_spaces": False,
        **parts.special_tokens,
    }
    ends: dict[str, Any] = {"eos_token_id": sorted(parts.eos_ids)}
    if parts.bos_id is not None:
        ends["bos_token_id"] = parts.bos_id
    files: Files = {
        "tokenizer.json": backend.to_str().encode(),
        "tokenizer_config.json": _json(settings),
        "generation_config.json": _json(ends),
    }
    for name, template in parts.chat_templates.items():
        path = (
            "chat_template.jinja"
            if name == "default"
            else f"additional_chat_templates/{name}.jinja"
        )
        files[path] = template.encode()
    return files
