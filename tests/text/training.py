"""Tiny tokenizers, trained on the spot, of the kinds that models come with."""

import json
from pathlib import Path
from typing import Any

from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

CORPUS = [
    "the harbour was quiet and the boats lay tied to the wall",
    "The baker counts twelve loaves, and then she counts them again.",
    "def area(width, height):\n    return width * height\n",
    "don't stop, we've only 42 of the 1,337 pages left",
    "Der Fluss fließt träge über die Ebene; où est la gare? ¿Qué?",
    "東京の朝はとても静かです。 Привет, мир. 😀👍🏽",
    "a  b   c    d\t\te\n\nf",
] * 4

SPECIAL = ["<unk>", "<s>", "</s>", "<|turn|>"]


def byte_alphabet() -> list[str]:
    """GPT-2's characters for the 256 bytes, in order of bytes."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def byte_level(*, individual_digits: bool = False) -> Tokenizer:
    """GPT-2's kind: bytes in a printable alphabet."""
    backend = Tokenizer(models.BPE())
    split = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if individual_digits:
        digits = pre_tokenizers.Digits(individual_digits=True)
        split = pre_tokenizers.Sequence([digits, split])
    backend.pre_tokenizer = split
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def byte_fallback(*, prefix_space: bool = True) -> Tokenizer:
    """SentencePiece's BPE: words marked by a space, unknown characters as bytes.

    With prefix_space as in Llama 2, where a text gains a space and loses it again; else as Gemma.
    """
    backend = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    spaces = normalizers.Replace(" ", "▁")
    back: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix_space:
        spaces = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
        back.append(decoders.Strip(" ", 1, 0))
    backend.normalizer = spaces
    backend.decoder = decoders.Sequence(back)
    trainer = trainers.BpeTrainer(vocab_size=160, special_tokens=SPECIAL, show_progress=False)
    backend.train_from_iterator(CORPUS[:4], trainer)
    return _with_byte_tokens(backend)


def unigram() -> Tokenizer:
    """SentencePiece's other kind, with the Metaspace steps on both sides."""
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=150, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


KINDS = {
    "byte_level": byte_level,
    "byte_fallback": byte_fallback,
    "byte_fallback_plain": lambda: byte_fallback(prefix_space=False),
    "unigram": unigram,
}


def with_bos(backend: Tokenizer) -> Tokenizer:
    """Let it put <s> before every text, as many models' files do."""
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    return backend


def save(backend: Tokenizer, path: Path, **config: Any) -> Path:
    """Write a model directory: tokenizer.json, and tokenizer_config.json with these fields."""
    backend.save(str(path / "tokenizer.json"))
    fields = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", **config}
    write_json(path / "tokenizer_config.json", fields)
    return path


def write_json(file: Path, value: object) -> None:
    file.write_text(json.dumps(value), encoding="utf-8")


def gguf_metadata(backend: Tokenizer, *, pre: str) -> dict[str, object]:
    """What a GGUF file would say about a byte-level tokenizer."""
    model = json.loads(backend.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in SPECIAL else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": tokens.index("<s>"),
        "tokenizer.ggml.eos_token_id": tokens.index("</s>"),
        "tokenizer.ggml.add_bos_token": False,
    }


def _with_byte_tokens(backend: Tokenizer) -> Tokenizer:
    # The trainer can only add them as special tokens; real files have them as plain vocabulary.
    state = json.loads(backend.to_str())
    vocabulary = state["model"]["vocab"]
    for byte in range(256):
        vocabulary[f"<0x{byte:02X}>"] = len(vocabulary)
    return Tokenizer.from_str(json.dumps(state))
