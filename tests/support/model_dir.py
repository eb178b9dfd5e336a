"""A tiny random model as a directory in Hugging Face's layout: what a user would point us at."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

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


class Packing(NamedTuple):
    """How `write_weights` quantises matrices, as mlx-lm would."""

    bits: int
    group_size: int
    mode: str = "affine"


def write_weights(
    path: Path, tiny: Tiny, packing: Packing | None = None, dtype: mx.Dtype | None = mx.float32
) -> Path:
    """Write config and weights only. packing: of all matrices; dtype: of the rest, and of scales,
    None to keep it.

    Makes the directory if it isn't there, and returns it.
    """
    path.mkdir(exist_ok=True)
    config, arrays = dict(tiny.config), {}
    for name, value in tiny.weights.items():
        value = value if dtype is None else value.astype(dtype)
        if packing is None or value.ndim != 2:
            arrays[name] = value
            continue
        parts = mx.quantize(value, packing.group_size, packing.bits, packing.mode)
        layer = name.removesuffix(".weight")
        kinds = ("weight", "scales", "biases")
        arrays |= {f"{layer}.{kind}": part for kind, part in zip(kinds, parts, strict=False)}
    if packing is not None:
        config["quantization"] = packing._asdict()
    (path / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(path / "model.safetensors"), arrays, {"format": "pt"})
    return path


THINK = [tokenizers.AddedToken(tag, special=False) for tag in ("<think>", "</think>")]


def write_thinking_model_dir(
    path: Path,
    marks: Sequence[tokenizers.AddedToken] = THINK,
    opening: str = "<think>",
    end: str = SPECIAL[0],
) -> Path:
    """The same of a model that knows marks of thinking as tokens.

    opening: what its template ends with; the marks in it say how it thinks. end: ends an answer.
    """
    size, end_id = VOCAB_SIZE + len(marks), END_ID + SPECIAL.index(end)
    tiny = tiny_llama(vocab_size=size, max_position_embeddings=2048, eos_token_id=end_id)
    write_model_dir(path, tiny)
    backend = byte_tokenizer()
    backend.add_tokens(list(marks))
    backend.save(str(path / "tokenizer.json"))
    template = CHAT_TEMPLATE.replace("<|assistant|>{% endif", f"<|assistant|>{opening}{{% endif")
    settings = {"eos_token": end, "chat_template": template}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


def write_model_dir(path: Path, tiny: Tiny | None = None, packing: Packing | None = None) -> Path:
    """Write config, weights, tokenizer and template; returns the directory."""
    tiny = tiny or tiny_llama(
        vocab_size=VOCAB_SIZE, max_position_embeddings=2048, eos_token_id=END_ID
    )
    write_weights(path, tiny, packing, None if packing is None else mx.float32)
    byte_tokenizer().save(str(path / "tokenizer.json"))
    settings = {"eos_token": SPECIAL[0], "chat_template": CHAT_TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path
