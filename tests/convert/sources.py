"""Models to convert, small and random, and what a conversion left."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlxserve_convert
import numpy as np
from mlxserve_convert import Conversion

from tests.support.model_dir import END_ID, VOCAB_SIZE, write_model_dir
from tests.support.tiny import Tiny, tiny_gemma3, tiny_llama, tiny_qwen3

MAKERS = {"llama": tiny_llama, "qwen3": tiny_qwen3, "gemma3": tiny_gemma3}
# Rows that divide into groups of 128, of which some are several pieces in the tests below.
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "head_dim": 32,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 512,
    "eos_token_id": END_ID,
}


def tiny(kind: str = "llama", dtype: mx.Dtype = mx.bfloat16, **overrides: Any) -> Tiny:
    """A random model in `dtype`, which its config states."""
    made = MAKERS[kind](**{**SIZES, **overrides})
    weights = {name: w.astype(dtype) for name, w in made.weights.items()}
    if made.config["tie_word_embeddings"]:
        weights.pop("lm_head.weight", None)
    config = {**made.config, "torch_dtype": str(dtype).removeprefix("mlx.core.")}
    return made._replace(config=config, weights=weights)


def convert(
    source: str | Path, to: str | Path, *, quality: bool = False, **options: Any
) -> Conversion:
    """`mlxserve_convert.convert`; most tests aren't about comparing models, which takes seconds."""
    return mlxserve_convert.convert(source, to, quality=quality, **options)


def write(path: Path, model: Tiny | None = None) -> Path:
    path.mkdir(parents=True)
    return write_model_dir(path, model or tiny())


def tensors(path: Path) -> dict[str, mx.array]:
    """All tensors of a directory, by MLX's own reader."""
    found: dict[str, mx.array] = {}
    for file in sorted(path.glob("model*.safetensors")):
        found |= mx.load(str(file))  # type: ignore[arg-type]
    return found


def config(path: Path) -> dict[str, Any]:
    return json.loads((path / "config.json").read_text())


def same(a: mx.array, b: mx.array) -> bool:
    """Equal in dtype, shape and every bit."""
    return a.dtype == b.dtype and a.shape == b.shape and bits(a) == bits(b)


def bits(a: mx.array) -> bytes:
    return np.array(mx.contiguous(a).view(mx.uint8)).tobytes()


def linears(weights: dict[str, mx.array]) -> list[str]:
    """The matrices of a model by the names of their modules."""
    return [name.removesuffix(".weight") for name, w in weights.items() if w.ndim == 2]
