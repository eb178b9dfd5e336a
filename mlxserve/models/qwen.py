"""Qwen 2 and Qwen 3: llama's blocks with biases, or with norms on queries and keys.

Qwen2 (Yang et al. 2024, arXiv:2407.10671), Qwen3 (Qwen Team 2025, arXiv:2505.09388).
"""

from collections.abc import Mapping
from typing import Any

from mlxserve.models.base import ConfigReader
from mlxserve.models.llama import Llama, LlamaConfig
from mlxserve.models.rope import rope_from_config
from mlxserve.models.tensor_parallel import Shard, shard_of

LAYER_TYPES = ("full_attention", "sliding_attention")


def read_config(config: Mapping[str, Any]) -> LlamaConfig:
    """Raises ModelError for keys and values that these models don't implement."""
    reader = ConfigReader(config)
    qwen3 = reader.model_type == "qwen3"
    width = reader.integer("hidden_size")
    heads, kv_heads = reader.heads(kv_default=None)
    if not qwen3 and reader.get("head_dim") is None and width % heads:
        raise reader.error("hidden_size", width, f"a multiple of the {heads} heads")
    head_dim = reader.integer("head_dim", 128 if qwen3 else width // heads)
    context_tokens = reader.integer("max_position_embeddings")
    reader.only("hidden_act", "silu")
    # Qwen 2 has these three biases whatever its config says, and no others.
    bias = reader.flag("attention_bias", False) if qwen3 else False
    parsed = LlamaConfig(
        vocab_size=reader.integer("vocab_size"),
        context_tokens=context_tokens,
        width=width,
        inner=reader.integer("intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        eps=reader.number("rms_norm_eps", 1e-6),
        windows=_windows(reader, config),
        qk_norm=qwen3,
        qkv_bias=bias if qwen3 else True,
        output_bias=bias,
        mlp_bias=False,
        tied=reader.flag("tie_word_embeddings", False),
        rope=rope_from_config(reader, head_dim=head_dim, context_tokens=context_tokens),
    )
    reader.finish()
    return parsed


def _windows(reader: ConfigReader, config: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Per layer: from `layer_types`, or else the layers from `max_window_layers` on are windowed.

    All of it only with `use_sliding_window`; published files carry the other keys without it.
    """
    layers = reader.integer("num_hidden_layers")
    first, types = reader.get("max_window_layers", 28), reader.get("layer_types")
    # Here null is a value: full attention. A file without the key means 4096.
    given = reader.get("sliding_window") is not None or "sliding_window" not in config
    wanted = reader.flag("use_sliding_window", False)
    window = reader.integer("sliding_window", 4096) if wanted and given else None
    if types is None:
        if window is None:
            return (None,) * layers
        if isinstance(first, bool) or not isinstance(first, int) or first < 0:
            raise reader.error("max_window_layers", first, "a whole number of at least 0")
        return tuple(window if i >= first else None for i in range(layers))
    if not isinstance(types, list) or len(types) != layers:
        raise reader.error("layer_types", types, f"a list of {layers} entries, one per layer")
    for name in types:
        if name not in LAYER_TYPES:
            raise reader.error("layer_types entry", name, " or ".join(LAYER_TYPES))
        if name == "sliding_attention" and window is None:
            raise reader.error(
                "layer_types entry", name, "full_attention where use_sliding_window is false"
            )
    return tuple(window if name == "sliding_attention" else None for name in types)


def build(config: Mapping[str, Any], shard: Shard | None = None) -> Llama:
    """Raises ModelError for a config that these models don't implement."""
    c = read_config(config)
    model = Llama(c, shard or shard_of(c))
    model.float16_safe = False  # trained in bfloat16; that less range is enough was not measured
    return model
