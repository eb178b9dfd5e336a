"""Tiny random models of real architectures, built by transformers: the oracle of parity tests.

Weights are drawn larger than at a real model's initialisation, whose near-uniform logits would let
wrong attention pass.
"""

from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import torch
import transformers

VOCAB_SIZE = 97


class Tiny(NamedTuple):
    """reference: a transformers model, float32; config: its config.json; weights: its tensors."""

    reference: Any
    config: dict[str, Any]
    weights: dict[str, mx.array]


def tiny_llama(seed: int = 0, **overrides: Any) -> Tiny:
    """Two layers, 4 query and 2 key heads of 16. overrides: keys of the config."""
    return _tiny(transformers.LlamaConfig, transformers.LlamaForCausalLM, seed, overrides)


def tiny_mistral(seed: int = 0, **overrides: Any) -> Tiny:
    """As `tiny_llama`, with a sliding window of 16 in every layer."""
    overrides = {"sliding_window": 16, **overrides}
    return _tiny(transformers.MistralConfig, transformers.MistralForCausalLM, seed, overrides)


def tiny_gemma3(seed: int = 0, **overrides: Any) -> Tiny:
    """Four layers, the third full and the others with a window of 12, and two rotary bases."""
    sliding, full = "sliding_attention", "full_attention"
    overrides = {
        "num_hidden_layers": 4,
        "layer_types": [sliding, sliding, full, sliding],
        "sliding_window": 12,
        "query_pre_attn_scalar": 24,
        "rope_parameters": {
            sliding: {"rope_type": "default", "rope_theta": 100.0},
            full: {"rope_type": "default", "rope_theta": 5_000.0},
        },
        **overrides,
    }
    return _tiny(transformers.Gemma3TextConfig, transformers.Gemma3ForCausalLM, seed, overrides)


def tiny_qwen2(seed: int = 0, **overrides: Any) -> Tiny:
    """As `tiny_llama`, with biases on queries, keys and values."""
    return _tiny(transformers.Qwen2Config, transformers.Qwen2ForCausalLM, seed, overrides)


def tiny_qwen3(seed: int = 0, **overrides: Any) -> Tiny:
    """As `tiny_llama`, with norms on queries and keys, and heads of 24: wider than the stream."""
    overrides = {"head_dim": 24, **overrides}
    return _tiny(transformers.Qwen3Config, transformers.Qwen3ForCausalLM, seed, overrides)


def prompt(tokens: int = 64, seed: int = 1) -> np.ndarray:
    """Random ids, int32 `[tokens]`."""
    ids = np.random.default_rng(seed).integers(0, VOCAB_SIZE, tokens)
    return ids.astype(np.int32)


def reference_logits(reference: Any, ids: np.ndarray, **kwargs: Any) -> np.ndarray:
    """transformers' own logits over a whole prompt, float32 `[T, V]`."""
    with torch.no_grad():
        out = reference(torch.from_numpy(ids.astype(np.int64))[None], use_cache=False, **kwargs)
    return out.logits[0].numpy()


def to_mx(state: dict[str, torch.Tensor]) -> dict[str, mx.array]:
    return {name: mx.array(tensor.numpy()) for name, tensor in state.items()}


def _tiny(config_class: Any, model_class: Any, seed: int, overrides: dict[str, Any]) -> Tiny:
    torch.set_num_threads(1)
    sizes = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "attn_implementation": "eager",
    }
    config = config_class(**{**sizes, **overrides})
    with torch.device("cpu"):
        model = model_class(config).to(torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(_random(name, weight.shape, generator))
    return Tiny(model, config.to_dict(), to_mx(model.state_dict()))


def _random(name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(shape, generator=generator)
    if name.endswith("norm.weight"):
        return 1 + 0.3 * noise
    if name.endswith("bias"):
        return 0.5 * noise
    if "embed_tokens" in name:
        return noise * shape[-1] ** -0.25
    # Sharp attention: query and key weights this large give scores with a spread of a few units.
    gain = 1.6 if "q_proj" in name or "k_proj" in name else 1.0
    return gain * noise * shape[-1] ** -0.5
