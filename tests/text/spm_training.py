"""Tiny SentencePiece models, trained on the spot by the `sentencepiece` library."""

import functools
import io
import random
from pathlib import Path
from typing import Any

import pytest

from tests.text.training import CORPUS, write_json

PLAIN = {
    "model_type": "bpe",
    "vocab_size": 420,
    "byte_fallback": True,
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
}
USER_DEFINED = ["<tool>", "\n", "\n\n", "  "]

SPM_KINDS: dict[str, dict[str, Any]] = {
    "llama": PLAIN | {"split_digits": True, "allow_whitespace_only_pieces": True},
    "whole_texts": PLAIN | {"split_by_whitespace": False, "allow_whitespace_only_pieces": True},
    "gemma": PLAIN | {"add_dummy_prefix": False, "user_defined_symbols": USER_DEFINED},
    "user_defined": PLAIN | {"user_defined_symbols": USER_DEFINED},
    "normalised": {"model_type": "bpe", "vocab_size": 200},
    "unigram": {"model_type": "unigram", "vocab_size": 150},
    "unigram_bytes": PLAIN | {"model_type": "unigram"},
}

# Few letters, so that one place of a text can be merged in many ways.
_MIXED = ["".join(random.Random(i).choices("ab ", k=60)) for i in range(100)]
MIXED_LETTERS = PLAIN | {"vocab_size": 300, "split_by_whitespace": False}


@functools.cache
def train(kind: str) -> bytes:
    """The .model file of a kind."""
    mixed = kind == "mixed_letters"
    return train_with(MIXED_LETTERS if mixed else SPM_KINDS[kind], _MIXED if mixed else CORPUS)


def train_with(options: dict[str, Any], corpus: list[str] = CORPUS) -> bytes:
    sentencepiece = pytest.importorskip("sentencepiece")
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus),
        model_writer=out,
        minloglevel=2,
        hard_vocab_limit=False,
        **options,
    )
    return out.getvalue()


@functools.cache
def processor(kind: str) -> Any:
    """The library itself, for a kind: the oracle."""
    return pytest.importorskip("sentencepiece").SentencePieceProcessor(model_proto=train(kind))


def save_model(kind: str, path: Path, **config: Any) -> Path:
    """Write a model directory: tokenizer.model, and tokenizer_config.json with these fields."""
    (path / "tokenizer.model").write_bytes(train(kind))
    if config:
        write_json(path / "tokenizer_config.json", config)
    return path


def spm_metadata(kind: str) -> dict[str, Any]:
    """What a GGUF file would say about a BPE model."""
    model = processor(kind)
    ids = range(model.get_piece_size())

    def number(i: int) -> int:
        kinds = {2: model.is_unknown(i), 3: model.is_control(i), 6: model.is_byte(i)}
        user_defined = SPM_KINDS.get(kind, {}).get("user_defined_symbols", [])
        kinds[4] = model.id_to_piece(i).replace("▁", " ") in user_defined
        return next((number for number, yes in kinds.items() if yes), 1)

    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [model.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [model.get_score(i) for i in ids],
        "tokenizer.ggml.token_type": [number(i) for i in ids],
    }
