"""What models ask of ops: against their configs."""

import mlx.core as mx
import pytest

from mlxserve.config import EngineConfig
from mlxserve.engine.cache_plan import cache_uses
from mlxserve.kernels.quantized import PackedWeight
from mlxserve.kernels.uses import AttentionUse, MatmulUse, NormUse, RopeUse
from mlxserve.models.registry import build
from mlxserve.models.uses import attention_uses, matmul_uses, other_uses
from tests.support.tiny import tiny_gemma3, tiny_llama, tiny_mistral, tiny_qwen3


@pytest.mark.parametrize(("tiny", "expected"), [
    (tiny_llama(), {AttentionUse(4, 2, 16, "float16"): [0, 1]}),
    (tiny_mistral(), {AttentionUse(4, 2, 16, "float16", window=16): [0, 1]}),
    (tiny_qwen3(), {AttentionUse(4, 2, 24, "float16"): [0, 1]}),
    (tiny_gemma3(attn_logit_softcapping=30.0), {
        AttentionUse(4, 2, 16, "float16", window=12, softcap=30.0): [0, 1, 3],
        AttentionUse(4, 2, 16, "float16", softcap=30.0): [2],
    }),
], ids=["llama", "mistral", "qwen3", "gemma3"])  # fmt: skip
def test_uses_follow_the_config(tiny, expected):
    assert attention_uses(build(tiny.config), mx.float16) == expected


@pytest.mark.parametrize(("options", "dtype", "expected"), [
    ({"kv_bits": "8/4"}, mx.float16, {"key_bits": 8, "value_bits": 4}),
    ({"kv_bits": "4/16"}, mx.float16, {"key_bits": 4}),
    ({"kv_bits": 16}, mx.float32, {}),  # a cache in 16 bits where the model computes in 32
    ({"max_kv_size": 100, "keep": 4}, mx.float16, {"window": 96, "keep": 4}),
])  # fmt: skip
def test_uses_follow_the_settings_of_the_cache(options, dtype, expected):
    model, config = build(tiny_llama().config), EngineConfig(**options)
    use = AttentionUse(4, 2, 16, "float16", **expected)
    assert cache_uses(model, dtype, config) == {use: [0, 1]}


def test_a_trace_computes_nothing():
    wide = {"hidden_size": 4096, "intermediate_size": 16384, "vocab_size": 64_000}
    config = tiny_llama().config | wide
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    attention_uses(build(config), mx.bfloat16)
    assert mx.get_peak_memory() - before < 1_000_000


@pytest.mark.parametrize("tied", [False, True])
def test_matrices_of_one_form_and_shape_are_one_use(tied):
    tiny = tiny_llama(tie_word_embeddings=tied)
    # Layers in 4 bits, and the embedding and the head in 8.
    weights = {}
    for name, w in tiny.weights.items():
        if w.ndim == 2 and not (tied and name == "lm_head.weight"):
            bits = 4 if "layers" in name else 8
            w = PackedWeight(*mx.quantize(w, 32, bits), bits, 32)
        weights[name] = w
    dense = "model.layers.1.self_attn.v_proj.weight"
    weights[dense] = tiny.weights[dense]
    found = matmul_uses(build(tiny.config), weights, mx.bfloat16)
    form = {"group": 32, "dtype": "bfloat16"}
    head = "model.embed_tokens" if tied else "lm_head"
    layers = [f"model.layers.{i}" for i in range(2)]
    assert {use: sorted(names) for use, names in found.items()} == {
        MatmulUse(64, 64, 4, **form): [f"{at}.self_attn.{n}_proj" for at in layers for n in "oq"],
        MatmulUse(32, 64, 4, **form): [
            f"{layers[0]}.self_attn.k_proj",
            f"{layers[0]}.self_attn.v_proj",
            f"{layers[1]}.self_attn.k_proj",
        ],
        MatmulUse(96, 64, 4, **form): [
            f"{at}.mlp.{n}_proj" for at in layers for n in ("gate", "up")
        ],
        MatmulUse(64, 96, 4, **form): [f"{at}.mlp.down_proj" for at in layers],
        MatmulUse(97, 64, 8, **form): [head],
    }
    for use in matmul_uses(build(tiny.config), weights, mx.bfloat16, deterministic=True):
        assert use.deterministic


@pytest.mark.parametrize(("tiny", "inner", "dim"), [
    (tiny_llama(), False, 16), (tiny_qwen3(), False, 24), (tiny_gemma3(), True, 16),
], ids=["llama", "qwen3", "gemma3"])  # fmt: skip
def test_norms_and_rotations_follow_the_config(tiny, inner, dim):
    """As they are asked for in 16 bits; on a CPU float32 has native kernels."""
    normed = "q_norm" in " ".join(tiny.weights)
    assert set(other_uses(build(tiny.config), mx.bfloat16)) == {
        NormUse(64, "bfloat16", inner=inner),
        RopeUse(4, 2, dim, "bfloat16", norms=normed),
    }
