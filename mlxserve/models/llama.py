"""Llama and its relatives: llama (with SmolLM2) and mistral, which adds a sliding window.

Llama 2 (Touvron et al. 2023, arXiv:2307.09288), Mistral 7B (Jiang et al. 2023, arXiv:2310.06825).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxserve.cache.spec import FullKV, LayerSpec, WindowKV
from mlxserve.models.base import ConfigReader, LayerView, View, Weights
from mlxserve.models.layers import (
    Embedding,
    GatedMLP,
    Linear,
    NextNorm,
    NoNorm,
    RMSNorm,
    output_head,
    project,
    run_blocks,
)
from mlxserve.models.rope import Rope, rope_from_config
from mlxserve.models.tensor_parallel import Shard, shard_of


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """The part of config.json that decides the result, for every model built of these blocks.

    windows: per layer, how many tokens attention sees; None where it is full.
    qk_norm: RMS norms on each head's queries and keys, before they are rotated.
    """

    vocab_size: int
    context_tokens: int
    width: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    windows: tuple[int | None, ...]
    qk_norm: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    tied: bool
    rope: Rope

    @property
    def layers(self) -> int:
        return len(self.windows)


def read_config(config: Mapping[str, Any]) -> LlamaConfig:
    """Raises ModelError for keys and values that this model doesn't implement."""
    reader = ConfigReader(config)
    mistral = reader.model_type == "mistral"
    width = reader.integer("hidden_size")
    heads, kv_heads = reader.heads(kv_default=8 if mistral else None)
    if reader.get("head_dim") is None and width % heads:
        raise reader.error("hidden_size", width, f"a multiple of the {heads} heads")
    head_dim = reader.integer("head_dim", width // heads)
    context_tokens = reader.integer("max_position_embeddings")
    reader.only("hidden_act", "silu")
    layers = reader.integer("num_hidden_layers")
    bias = reader.flag("attention_bias", False)
    parsed = LlamaConfig(
        vocab_size=reader.integer("vocab_size"),
        context_tokens=context_tokens,
        width=width,
        inner=reader.integer("intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        eps=reader.number("rms_norm_eps", 1e-6),
        windows=((_window(reader, config) if mistral else None),) * layers,
        qk_norm=False,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=reader.flag("mlp_bias", False),
        tied=reader.flag("tie_word_embeddings", False),
        rope=rope_from_config(reader, head_dim=head_dim, context_tokens=context_tokens),
    )
    reader.finish()
    return parsed


def _window(reader: ConfigReader, config: Mapping[str, Any]) -> int | None:
    # Here null is a value: full attention. A file without the key means the first Mistral's 4096.
    if "sliding_window" in config and reader.get("sliding_window") is None:
        return None
    return reader.integer("sliding_window", 4096)


class Attention(nn.Module):
    """Grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245) with rotary positions."""

    def __init__(self, c: LlamaConfig, shard: Shard) -> None:
        super().__init__()
        self.head_dim = c.head_dim
        self.scale = c.head_dim**-0.5
        self.rope = c.rope
        queries, keys = len(shard.heads) * c.head_dim, len(shard.kv_heads) * c.head_dim
        self.q_proj = Linear(c.width, queries, bias=c.qkv_bias)
        self.k_proj = Linear(c.width, keys, bias=c.qkv_bias)
        self.v_proj = Linear(c.width, keys, bias=c.qkv_bias)
        self.o_proj = Linear(queries, c.width, bias=c.output_bias, group=shard.group)
        self.q_norm = RMSNorm(c.head_dim, c.eps) if c.qk_norm else None
        self.k_norm = RMSNorm(c.head_dim, c.eps) if c.qk_norm else None

    def __call__(self, x: mx.array, positions: mx.array, layer: LayerView) -> mx.array:
        T = x.shape[0]
        projected = project(x, self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (y.reshape(T, -1, self.head_dim) for y in projected)
        q, k = self.rope(q, k, positions, self.q_norm, self.k_norm)
        out = layer.attend(q, k, v, scale=self.scale)
        return self.o_proj(out.reshape(T, -1))


class Block(nn.Module):
    """One layer: attention and MLP, each normalised before and added to the stream."""

    def __init__(self, c: LlamaConfig, shard: Shard) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(c.width, c.eps)
        self.self_attn = Attention(c, shard)
        self.post_attention_layernorm = RMSNorm(c.width, c.eps)
        self.mlp = GatedMLP(c.width, len(shard.inner), "silu", bias=c.mlp_bias, group=shard.group)

    def __call__(
        self, x: mx.array, h: mx.array, positions: mx.array, layer: LayerView, norm: NextNorm
    ) -> tuple[mx.array, mx.array]:
        attended = self.self_attn(h, positions, layer)
        x, h = self.post_attention_layernorm.of_sum(attended, x)
        return norm.of_sum(self.mlp(h), x)


class Trunk(nn.Module):
    """Everything but the output head; named `model` in checkpoints."""

    def __init__(self, c: LlamaConfig, shard: Shard) -> None:
        super().__init__()
        ids = shard.vocabulary
        self.embed_tokens = (
            Embedding(len(ids), c.width, first=ids.start, group=shard.group)
            if shard.first
            else None
        )
        self.layers = {str(i): Block(c, shard) for i in shard.layers}
        self.norm = RMSNorm(c.width, c.eps) if shard.last else NoNorm(c.eps)

    def __call__(self, x: mx.array, view: View) -> mx.array:
        if self.embed_tokens is not None:
            x = self.embed_tokens(x)
        return run_blocks(self.layers, self.norm, x, view)


class Llama(nn.Module):
    """See `models.base.Model`."""

    def __init__(self, c: LlamaConfig, shard: Shard) -> None:
        super().__init__()
        self.config = c
        self.vocab_size = c.vocab_size
        self.context_tokens = c.context_tokens
        self.dtype = mx.float32
        self.float16_safe = True
        self.shard = shard
        self.own_layers = shard.layers
        self.model = Trunk(c, shard)
        own_head = shard.first and not c.tied
        self.lm_head = Linear(c.width, len(shard.vocabulary)) if own_head else None

    def layer_specs(self) -> list[LayerSpec]:
        c, kv_heads = self.config, len(self.shard.kv_heads)
        full = FullKV(kv_heads, c.head_dim)
        return [
            full if window is None else WindowKV(kv_heads, c.head_dim, window)
            for window in c.windows
        ]

    def __call__(self, x: mx.array, view: View) -> mx.array:
        return self.model(x, view)

    def logits(self, h: mx.array) -> mx.array:
        out = output_head(h, self.lm_head, self.model.embed_tokens)
        return self.shard.group.gather(out, self.shard.vocabulary_widths)

    def sanitize(self, weights: Weights) -> Weights:
        return weights


def build(config: Mapping[str, Any], shard: Shard | None = None) -> Llama:
    """Raises ModelError for a config that this model doesn't implement."""
    c = read_config(config)
    return Llama(c, shard or shard_of(c))
