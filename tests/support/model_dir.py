"""A tiny random model as a directory in Hugging Face's layout: what a user would point us at."""

import json
from pathlib import Path

import mlx.core as mx
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from tests.support.tiny import Tiny, tiny_llama

SPECIAL = ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
VOCAB_SIZE = 256 + len(SPECIAL)
END_ID = 256
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_tokenizer() -> tokenizers.Tokenizer:
    """One token per byte, and the special ones after them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: i for i, char in enumerate(alphabet)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def write_thinking_model_dir(path: Path) -> Path:
    """The same of a model that knows `<think>` and `</think>` as tokens, and thinks first."""
    tiny = tiny_llama(vocab_size=VOCAB_SIZE + 2, max_position_embeddings=2048, eos_token_id=END_ID)
    write_model_dir(path, tiny)
    backend = byte_tokenizer()
    tags = [tokenizers.AddedToken(tag, special=False) for tag in ("<think>", "</think>")]
    backend.add_tokens(tags)
    backend.save(str(path / "tokenizer.json"))
    template = CHAT_TEMPLATE.replace("<|assistant|>{% endif", "<|assistant|><think>{% endif")
    settings = {"eos_token": SPECIAL[0], "chat_template": template}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


def write_model_dir(path: Path, tiny: Tiny | None = None) -> Path:
    """Write config, weights, tokenizer and template; returns the directory."""
    tiny = tiny or tiny_llama(
        vocab_size=VOCAB_SIZE, max_position_embeddings=2048, eos_token_id=END_ID
    )
    (path / "config.json").write_text(json.dumps(tiny.config))
    mx.save_safetensors(str(path / "model.safetensors"), tiny.weights, {"format": "pt"})
    byte_tokenizer().save(str(path / "tokenizer.json"))
    settings = {"eos_token": SPECIAL[0], "chat_template": CHAT_TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path
