"""What a config may hold: published files load, whatever could change the result is refused."""

import pytest

from mlxserve.errors import ModelError
from mlxserve.models import gemma3_text, llama, qwen
from mlxserve.models.registry import build

SMOLLM2_135M = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 576,
    "initializer_range": 0.041666666666666664, "intermediate_size": 1536, "is_llama_config": True,
    "max_position_embeddings": 8192, "mlp_bias": False, "model_type": "llama",
    "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3, "pad_token_id": 2,
    "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_interleaved": False, "rope_scaling": None,
    "rope_theta": 100000, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
    "transformers_version": "4.42.3", "use_cache": True, "vocab_size": 49152,
}  # fmt: skip
LLAMA_32_1B = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "head_dim": 64,
    "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
    "intermediate_size": 8192, "max_position_embeddings": 131072, "mlp_bias": False,
    "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 16,
    "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
    "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                     "original_max_position_embeddings": 8192, "rope_type": "llama3"},
    "rope_theta": 500000.0, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "transformers_version": "4.45.0.dev0", "use_cache": True, "vocab_size": 128256,
    "quantization": {"group_size": 64, "bits": 4}, "quantization_config": {"bits": 4},
}  # fmt: skip
MISTRAL_7B = {
    "architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2,
    "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mistral",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.34.0",
    "use_cache": True, "vocab_size": 32000,
}  # fmt: skip
GEMMA3_1B = {
    "architectures": ["Gemma3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "attn_logit_softcapping": None, "bos_token_id": 2, "cache_implementation": "hybrid",
    "eos_token_id": [1, 106], "final_logit_softcapping": None, "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152, "initializer_range": 0.02,
    "intermediate_size": 6912, "max_position_embeddings": 32768, "model_type": "gemma3_text",
    "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1,
    "pad_token_id": 0, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000,
    "sliding_window": 512, "sliding_window_pattern": 6, "torch_dtype": "bfloat16",
    "transformers_version": "4.50.0.dev0", "use_cache": True, "vocab_size": 262144,
}  # fmt: skip
QWEN25_7B = {
    "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151645, "hidden_act": "silu", "hidden_size": 3584, "initializer_range": 0.02,
    "intermediate_size": 18944, "max_position_embeddings": 32768, "max_window_layers": 28,
    "model_type": "qwen2", "num_attention_heads": 28, "num_hidden_layers": 28,
    "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
    "sliding_window": 131072, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "transformers_version": "4.43.1", "use_cache": True, "use_sliding_window": False,
    "vocab_size": 152064,
}  # fmt: skip
QWEN3_06B = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 1024, "initializer_range": 0.02, "intermediate_size": 3072,
    "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3",
    "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16", "transformers_version": "4.51.0",
    "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip


def test_published_configs():
    smol = llama.read_config(SMOLLM2_135M)
    assert (smol.heads, smol.kv_heads, smol.head_dim, smol.tied) == (9, 3, 64, True)
    assert set(smol.windows) == {None}
    assert llama.read_config(LLAMA_32_1B).context_tokens == 131072
    mistral = llama.read_config(MISTRAL_7B)
    assert (mistral.windows, mistral.head_dim, mistral.tied) == ((4096,) * 32, 128, False)
    gemma = gemma3_text.read_config(GEMMA3_1B)
    assert gemma.tied
    assert [i for i, sliding in enumerate(gemma.sliding) if not sliding] == [5, 11, 17, 23]
    assert gemma.scale == 1 / 16
    newer = {**GEMMA3_1B, "use_bidirectional_attention": False, "_sliding_window_pattern": 6}
    assert gemma3_text.read_config(newer).sliding == gemma.sliding
    qwen2 = qwen.read_config(QWEN25_7B)
    assert (qwen2.windows, qwen2.head_dim, qwen2.tied) == ((None,) * 28, 128, False)
    assert (qwen2.qkv_bias, qwen2.output_bias, qwen2.qk_norm) == (True, False, False)
    qwen3 = qwen.read_config(QWEN3_06B)
    assert (qwen3.windows, qwen3.head_dim, qwen3.tied) == ((None,) * 28, 128, True)
    assert (qwen3.qkv_bias, qwen3.output_bias, qwen3.qk_norm) == (False, False, True)


def test_which_of_qwens_layers_have_a_window():
    on = {**QWEN25_7B, "use_sliding_window": True}
    assert set(qwen.read_config(on).windows) == {None}  # all 28 layers come before the 28th
    assert qwen.read_config({**on, "max_window_layers": 26}).windows[25:] == (None, 131072, 131072)
    assert set(qwen.read_config({**on, "max_window_layers": 0}).windows) == {131072}
    assert set(qwen.read_config({**on, "sliding_window": None}).windows) == {None}
    del on["sliding_window"]
    assert set(qwen.read_config({**on, "max_window_layers": 0}).windows) == {4096}
    types = ["sliding_attention", *["full_attention"] * 27]
    assert qwen.read_config({**on, "layer_types": types}).windows == (4096, *[None] * 27)


@pytest.mark.parametrize("value", [None, False, [], {}])
def test_an_unknown_key_that_is_off_is_fine(value):
    llama.read_config({**SMOLLM2_135M, "some_new_feature": value})


@pytest.mark.parametrize(
    ("base", "change", "message"),
    [
        (SMOLLM2_135M, {"some_new_feature": 0.5}, "some_new_feature=0.5"),
        (SMOLLM2_135M, {"some_new_feature": 0}, "some_new_feature=0"),
        (SMOLLM2_135M, {"rope_interleaved": True}, "rope_interleaved=True"),
        (SMOLLM2_135M, {"pretraining_tp": 2}, "pretraining_tp=2"),
        (SMOLLM2_135M, {"sliding_window": 4096}, "sliding_window=4096"),
        (SMOLLM2_135M, {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        (SMOLLM2_135M, {"logit_scale": 0.1}, "logit_scale=0.1"),
        (SMOLLM2_135M, {"num_local_experts": 8}, "num_local_experts=8"),
        (SMOLLM2_135M, {"auto_map": {"AutoModel": "x.Y"}}, "auto_map="),
        (SMOLLM2_135M, {"hidden_act": "gelu"}, "hidden_act is 'gelu'; it must be 'silu'"),
        (SMOLLM2_135M, {"num_key_value_heads": 4}, "num_key_value_heads is 4.*divisor of the 9"),
        (SMOLLM2_135M, {"num_attention_heads": 7, "num_key_value_heads": 7}, "hidden_size is 576"),
        (SMOLLM2_135M, {"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        (SMOLLM2_135M, {"num_hidden_layers": True}, "num_hidden_layers is True"),
        (SMOLLM2_135M, {"num_hidden_layers": "30"}, "num_hidden_layers is '30'"),
        (SMOLLM2_135M, {"vocab_size": None}, "no vocab_size"),
        (SMOLLM2_135M, {"rms_norm_eps": -1e-5}, "rms_norm_eps is -1e-05"),
        (SMOLLM2_135M, {"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
        (SMOLLM2_135M, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        (MISTRAL_7B, {"sliding_window": 0}, "sliding_window is 0"),
        (MISTRAL_7B, {"layer_types": ["full_attention"] * 32}, "layer_types="),
        (QWEN25_7B, {"layer_types": ["full_attention"]}, "layer_types is .*28 entries"),
        (QWEN25_7B, {"layer_types": ["chunked"] * 28}, "layer_types entry is 'chunked'"),
        (QWEN25_7B, {"layer_types": ["sliding_attention"] * 28}, "use_sliding_window is false"),
        (QWEN25_7B, {"use_sliding_window": 1}, "use_sliding_window is 1"),
        (QWEN25_7B, {"use_sliding_window": True, "sliding_window": 0}, "sliding_window is 0"),
        (
            QWEN25_7B,
            {"use_sliding_window": True, "max_window_layers": -1},
            "max_window_layers is -1",
        ),
        (QWEN25_7B, {"num_attention_heads": 27, "num_key_value_heads": 1}, "hidden_size is 3584"),
        (QWEN25_7B, {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        (QWEN25_7B, {"use_mrope": True}, "use_mrope=True"),
        (QWEN3_06B, {"num_experts": 8}, "num_experts=8"),
        (GEMMA3_1B, {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        (GEMMA3_1B, {"hidden_activation": "silu"}, "hidden_activation is 'silu'"),
        (GEMMA3_1B, {"layer_types": ["full_attention"]}, "layer_types is .*26 entries"),
        (GEMMA3_1B, {"layer_types": ["chunked"] * 26}, "layer_types entry is 'chunked'"),
        (GEMMA3_1B, {"sliding_window_pattern": 0}, "sliding_window_pattern is 0"),
        (GEMMA3_1B, {"final_logit_softcapping": -3.0}, "final_logit_softcapping is -3.0"),
        (GEMMA3_1B, {"rope_parameters": {"rope_type": "default"}}, "keyed by layer type"),
        (GEMMA3_1B, {"model_type": "gemma3"}, "'gemma3' isn't supported .did you mean gemma3_text"),
        (GEMMA3_1B, {"model_type": "zzz"}, "supported: gemma3_text, llama, mistral, qwen2, qwen3"),
        (GEMMA3_1B, {"model_type": None}, "model_type is None"),
    ],
    ids=lambda p: str(p)[:60],
)
def test_refused_by_name(base, change, message):
    with pytest.raises(ModelError, match=message) as caught:
        build({**base, **change})
    assert "\n" not in str(caught.value)
