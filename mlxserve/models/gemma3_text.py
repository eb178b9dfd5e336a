"""Gemma 3, text only (Gemma Team 2025, arXiv:2503.19786).

Norms before and after each half of a layer, norms on queries and keys, and a sliding window in most
layers, which have a rotary base of their own.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxserve.cache.spec import FullKV, LayerSpec, WindowKV
from mlxserve.kernels.quantized import PackedWeight
from mlxserve.kernels.softcap import soft_cap
from mlxserve.models.base import ConfigReader, LayerView, View, Weights
from mlxserve.models.layers import (
    Embedding,
    GatedMLP,
    InnerNorm,
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

ACTIVATION = "gelu_pytorch_tanh"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma3Config:
    """The part of config.json that decides the result. sliding: for each layer, is it windowed."""

    vocab_size: int
    context_tokens: int
    width: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    scale: float
    window: int
    sliding: tuple[bool, ...]
    attention_bias: bool
    attention_cap: float | None
    logit_cap: float | None
    tied: bool
    global_rope: Rope
    local_rope: Rope

    @property
    def layers(self) -> int:
        return len(self.sliding)


def read_config(config: Mapping[str, Any]) -> Gemma3Config:
    """Raises ModelError for keys and values that this model doesn't implement."""
    reader = ConfigReader(config)
    heads, kv_heads = reader.heads(kv_default=4)
    head_dim = reader.integer("head_dim", 256)
    context_tokens = reader.integer("max_position_embeddings", 131_072)
    reader.only("hidden_activation", ACTIVATION)
    parsed = Gemma3Config(
        vocab_size=reader.integer("vocab_size"),
        context_tokens=context_tokens,
        width=reader.integer("hidden_size"),
        inner=reader.integer("intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        eps=reader.number("rms_norm_eps", 1e-6),
        scale=reader.number("query_pre_attn_scalar", 256) ** -0.5,
        window=reader.integer("sliding_window", 4096),
        sliding=_sliding(reader),
        attention_bias=reader.flag("attention_bias", False),
        attention_cap=reader.optional_number("attn_logit_softcapping"),
        logit_cap=reader.optional_number("final_logit_softcapping"),
        tied=reader.flag("tie_word_embeddings", True),
        global_rope=rope_from_config(
            reader,
            head_dim=head_dim,
            context_tokens=context_tokens,
            layer_type="full_attention",
            default_theta=1_000_000.0,
        ),
        local_rope=rope_from_config(
            reader,
            head_dim=head_dim,
            context_tokens=context_tokens,
            layer_type="sliding_attention",
            theta_key="rope_local_base_freq",
        ),
    )
    reader.finish()
    return parsed


def _sliding(reader: ConfigReader) -> tuple[bool, ...]:
    """From `layer_types`, or from the older pattern n: every n-th layer is full."""
    layers = reader.integer("num_hidden_layers")
    pattern = reader.integer("sliding_window_pattern", reader.integer("_sliding_window_pattern", 6))
    types = reader.get("layer_types")
    if types is None:
        return tuple((i + 1) % pattern != 0 for i in range(layers))
    if not isinstance(types, list) or len(types) != layers:
        raise reader.error("layer_types", types, f"a list of {layers} entries, one per layer")
    for name in types:
        if name not in ("full_attention", "sliding_attention"):
            raise reader.error("layer_types entry", name, "full_attention or sliding_attention")
    return tuple(name == "sliding_attention" for name in types)


class Attention(nn.Module):
    """Grouped-query attention with normalised queries and keys, windowed or full."""

    def __init__(self, c: Gemma3Config, shard: Shard, sliding: bool) -> None:
        super().__init__()
        self.head_dim = c.head_dim
        self.scale = c.scale
        self.cap = c.attention_cap
        self.rope = c.local_rope if sliding else c.global_rope
        queries, keys = len(shard.heads) * c.head_dim, len(shard.kv_heads) * c.head_dim
        self.q_proj = Linear(c.width, queries, bias=c.attention_bias)
        self.k_proj = Linear(c.width, keys, bias=c.attention_bias)
        self.v_proj = Linear(c.width, keys, bias=c.attention_bias)
        self.o_proj = Linear(queries, c.width, bias=c.attention_bias, group=shard.group)
        self.q_norm = RMSNorm(c.head_dim, c.eps)
        self.k_norm = RMSNorm(c.head_dim, c.eps)

    def __call__(self, x: mx.array, positions: mx.array, layer: LayerView) -> mx.array:
        T = x.shape[0]
        projected = project(x, self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (y.reshape(T, -1, self.head_dim) for y in projected)
        q, k = self.rope(q, k, positions, self.q_norm, self.k_norm)
        out = layer.attend(q, k, v, scale=self.scale, softcap=self.cap)
        return self.o_proj(out.reshape(T, -1))


class Block(nn.Module):
    """One layer: attention and MLP, each normalised before and after, then added to the stream."""

    def __init__(self, c: Gemma3Config, shard: Shard, sliding: bool) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(c.width, c.eps)
        self.self_attn = Attention(c, shard, sliding)
        self.post_attention_layernorm = InnerNorm(c.width)
        self.pre_feedforward_layernorm = RMSNorm(c.width, c.eps)
        self.mlp = GatedMLP(c.width, len(shard.inner), ACTIVATION, group=shard.group)
        self.post_feedforward_layernorm = InnerNorm(c.width)

    def __call__(
        self, x: mx.array, h: mx.array, positions: mx.array, layer: LayerView, norm: NextNorm
    ) -> tuple[mx.array, mx.array]:
        attended = self.self_attn(h, positions, layer)
        after = self.post_attention_layernorm
        x, h = self.pre_feedforward_layernorm.of_sum(attended, x, inner=after)
        return norm.of_sum(self.mlp(h), x, inner=self.post_feedforward_layernorm)


class Trunk(nn.Module):
    """Everything but the output head; named `model` in checkpoints."""

    def __init__(self, c: Gemma3Config, shard: Shard) -> None:
        super().__init__()
        # A Python number takes the array's dtype: in bfloat16 sqrt(3072) becomes the 55.5 that the
        # model was trained with.
        scale, ids = c.width**0.5, shard.vocabulary
        self.embed_tokens = (
            Embedding(len(ids), c.width, scale=scale, first=ids.start, group=shard.group)
            if shard.first
            else None
        )
        self.layers = {str(i): Block(c, shard, c.sliding[i]) for i in shard.layers}
        self.norm = RMSNorm(c.width, c.eps) if shard.last else NoNorm(c.eps)

    def __call__(self, x: mx.array, view: View) -> mx.array:
        if self.embed_tokens is not None:
            x = self.embed_tokens(x)
        return run_blocks(self.layers, self.norm, x, view)


class Gemma3(nn.Module):
    """See `models.base.Model`."""

    def __init__(self, c: Gemma3Config, shard: Shard) -> None:
        super().__init__()
        self.config = c
        self.vocab_size = c.vocab_size
        self.context_tokens = c.context_tokens
        self.dtype = mx.float32
        self.float16_safe = False  # the 270M model's residual stream reaches 104,000
        self.shard = shard
        self.own_layers = shard.layers
        self.model = Trunk(c, shard)
        own_head = shard.first and not c.tied
        self.lm_head = Linear(c.width, len(shard.vocabulary)) if own_head else None

    def layer_specs(self) -> list[LayerSpec]:
        c, kv_heads = self.config, len(self.shard.kv_heads)
        full, windowed = FullKV(kv_heads, c.head_dim), WindowKV(kv_heads, c.head_dim, c.window)
        return [windowed if sliding else full for sliding in c.sliding]

    def __call__(self, x: mx.array, view: View) -> mx.array:
        return self.model(x, view)

    def logits(self, h: mx.array) -> mx.array:
        out = output_head(h, self.lm_head, self.model.embed_tokens)
        whole = self.shard.group.gather(out, self.shard.vocabulary_widths)
        return soft_cap(whole, self.config.logit_cap)

    def sanitize(self, weights: Weights) -> Weights:
        """Adds the 1 that Gemma leaves out of its norm weights, in float32: no bit is lost."""
        out = dict(weights)
        for name, value in weights.items():
            if name.endswith("norm.weight") and not isinstance(value, PackedWeight):
                out[name] = value.astype(mx.float32) + 1
        return out


def build(config: Mapping[str, Any], shard: Shard | None = None) -> Gemma3:
    """Raises ModelError for a config that this model doesn't implement."""
    c = read_config(config)
    return Gemma3(c, shard or shard_of(c))
