"""GGUF metadata and names -> Hugging Face's: values, row order, and what is refused."""

import mlx.core as mx
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from mlxserve.errors import ModelError
from mlxserve.kernels.quantized import PackedWeight, dequantize
from mlxserve.sources.checkpoint import open_checkpoint
from mlxserve.sources.gguf_names import row_order
from tests.sources.making import (
    FF,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    VOCAB,
    llama_metadata,
    llama_tensors,
    one_line,
    write_gguf,
)


def values(weight):
    if isinstance(weight, PackedWeight):
        weight = dequantize(weight, mx.float32)
    return np.array(weight.astype(mx.float32))


@pytest.fixture
def make(tmp_path):
    def make(arch="llama", tensors=None, drop=(), **extra):
        """A checkpoint from the small model, with tensors added or dropped and metadata changed."""
        metadata = llama_metadata(arch, **extra)
        all_tensors = {n: t for n, t in llama_tensors(Kind.F32).items() if n not in drop}
        path = write_gguf(tmp_path / "m.gguf", arch, metadata, all_tensors | (tensors or {}))
        return open_checkpoint(path)

    return make


def refused(make, *parts, **kwargs):
    with pytest.raises(ModelError) as e:
        make(**kwargs)
    assert one_line(e.value, "m.gguf", *parts), str(e.value)


def test_llama_config(make):
    checkpoint = make()
    assert checkpoint.config == {
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": FF,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 50000.0,
        "rope_scaling": None,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    assert checkpoint.gguf_metadata["tokenizer.ggml.tokens"][3] == "t3"
    assert checkpoint.size_bytes == checkpoint.path.stat().st_size


def test_llama_names_are_hugging_faces(make):
    from transformers import LlamaConfig, LlamaForCausalLM

    checkpoint = make()
    model = LlamaForCausalLM(LlamaConfig(**checkpoint.config))
    want = {n: tuple(p.shape) for n, p in model.named_parameters()}
    assert {n: w.shape for n, w in checkpoint.weights().items()} == want


def test_weights_other_than_q_and_k_are_the_files(make):
    weights = make().weights()
    for file_name, name in {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "blk.1.attn_v.weight": "model.layers.1.self_attn.v_proj.weight",
        "blk.1.attn_output.weight": "model.layers.1.self_attn.o_proj.weight",
        "blk.0.ffn_norm.weight": "model.layers.0.post_attention_layernorm.weight",
        "blk.0.ffn_down.weight": "model.layers.0.mlp.down_proj.weight",
    }.items():
        np.testing.assert_array_equal(values(weights[name]), llama_tensors()[file_name][0])


def rotate(pairs, angles):
    """Rotate `[..., D / 2, 2]` by `[D / 2]` angles."""
    a, b = pairs[..., 0], pairs[..., 1]
    c, s = np.cos(angles), np.sin(angles)
    return np.stack([a * c - b * s, a * s + b * c], -1)


@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q8_0, Kind.Q4_1])
def test_rotary_embedding_means_the_same_after_the_reordering(make, kind):
    """Rotating neighbours in the file's order = rotating halves in ours, for q and k alike."""
    checkpoint = make(tensors=llama_tensors(kind))
    weights = checkpoint.weights()
    x = np.random.default_rng(5).standard_normal(HIDDEN)
    angles = 3.0 / 50000.0 ** (np.arange(HEAD_DIM // 2) * 2 / HEAD_DIM)
    scores = []
    for name, heads in (("q", HEADS), ("k", KV_HEADS)):
        ours = values(weights[f"model.layers.0.self_attn.{name}_proj.weight"])
        order = np.argsort(row_order(heads * HEAD_DIM, heads))
        theirs = rotate((ours[order] @ x).reshape(heads, -1, 2), angles).reshape(heads, -1)
        halves = (ours @ x).reshape(heads, 2, -1).swapaxes(1, 2)
        mine = rotate(halves, angles).swapaxes(1, 2).reshape(heads, -1)
        scores.append((theirs, mine))
    for head in range(HEADS):
        q, k = scores[0], scores[1]
        np.testing.assert_allclose(
            q[0][head] @ k[0][head // 2], q[1][head] @ k[1][head // 2], rtol=1e-12
        )
    # and the file's own rows are where that order says
    q_file = llama_tensors(Kind.F32)["blk.0.attn_q.weight"][0]
    if kind == Kind.F32:
        q = values(weights["model.layers.0.self_attn.q_proj.weight"])
        np.testing.assert_array_equal(q, q_file[row_order(HEADS * HEAD_DIM, HEADS)])


def test_row_order_undoes_the_converters():
    # two heads of four: the converter writes rows 0 2 1 3 of each
    assert row_order(8, 2).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert row_order(6, 1).tolist() == [0, 2, 4, 1, 3, 5]


def test_biases_follow_their_rows(make):
    bias = np.arange(HEADS * HEAD_DIM, dtype=np.float32)
    checkpoint = make(tensors={f"blk.{i}.attn_q.bias": (bias, Kind.F32) for i in range(LAYERS)})
    assert checkpoint.config["attention_bias"] is True
    got = values(checkpoint.weights()["model.layers.1.self_attn.q_proj.bias"])
    assert got.tolist() == row_order(len(bias), HEADS).tolist()


def test_untied_output(make):
    checkpoint = make(tensors={"output.weight": (np.ones((VOCAB, HIDDEN)), Kind.F32)})
    assert checkpoint.config["tie_word_embeddings"] is False
    assert checkpoint.weights()["lm_head.weight"].shape == (VOCAB, HIDDEN)


def test_head_dim_from_key_length(make):
    q = np.ones((HEADS * 8, HIDDEN)), Kind.F32
    kv = np.ones((KV_HEADS * 8, HIDDEN)), Kind.F32
    tensors = {f"blk.{i}.attn_{n}.weight": q if n == "q" else kv for i in range(2) for n in "qkv"}
    extra = {"attention__key_length": 8, "attention__value_length": 8, "rope__dimension_count": 8}
    assert make(tensors=tensors, **extra).config["head_dim"] == 8


def test_sliding_window_is_mistral(make):
    config = make(attention__sliding_window=64).config
    assert (config["model_type"], config["sliding_window"]) == ("mistral", 64)
    assert "sliding_window" not in make(attention__sliding_window=0).config


def test_defaults(make):
    config = make(attention__head_count_kv=None, rope__freq_base=None, vocab_size=None,
                  rope__dimension_count=None, tensors={
        f"blk.{i}.attn_{n}.weight": (np.ones((HIDDEN, HIDDEN)), Kind.F32)
        for i in range(2) for n in "kv"
    }).config  # fmt: skip
    assert (config["num_key_value_heads"], config["rope_theta"]) == (HEADS, 10000.0)


def test_uniform_lists_count_as_one_number(make):
    assert make(attention__head_count=[HEADS] * LAYERS).config["num_attention_heads"] == HEADS
    refused(make, "attention.head_count", attention__head_count=[HEADS, HEADS + 1])


def test_rope_scaling(make):
    factors = np.array([1, 1, 1, 1.5, 4, 8, 8, 8], np.float32)
    tensors = {"rope_freqs.weight": (factors, Kind.F32)}
    checkpoint = make(tensors=tensors)
    assert checkpoint.config["rope_scaling"] == {
        "rope_type": "gguf_factors",
        "factors": factors.tolist(),
    }
    assert not any("rope" in name for name in checkpoint.weights())
    linear = make(rope__scaling__type="linear", rope__scaling__factor=8.0).config
    assert linear["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}
    yarn = make(
        rope__scaling__type="yarn",
        rope__scaling__factor=4.0,
        rope__scaling__original_context_length=32,
        rope__scaling__yarn_beta_fast=16.0,
        rope__scaling__attn_factor=1.0,
    ).config
    assert yarn["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 16.0,
    }
    assert make(rope__scaling__type="none").config["rope_scaling"] is None
    refused(make, "longrope", rope__scaling__type="longrope")
    refused(make, "rope_freqs", tensors=tensors, rope__scaling__type="linear")
    refused(make, "scaling.factor", "8.0", rope__scaling__factor=8.0)
    refused(make, "rope_freqs", tensors={"rope_freqs.weight": (factors * 0, Kind.F32)})
    refused(make, "rope_freqs", tensors={"rope_freqs.weight": (factors, Kind.F16)})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("expert_count", 8),
        ("attention__clamp_kqv", 8.0),
        ("logit_scale", 0.5),
        ("attn_logit_softcapping", 50.0),
        ("attention__causal", False),
        ("rope__dimension_count", 8),
        ("attention__value_length", 8),
        ("attention__scale", 0.1),
        ("attention__layer_norm_epsilon", 1e-5),
        ("rope__scaling__yarn_log_multiplier", 0.1),
        ("made_up", "x\ny"),
        ("made_up_list", [1, 2]),
    ],
)
def test_keys_that_change_the_mathematics_are_refused(make, key, value):
    refused(make, f"llama.{key.replace('__', '.')}", **{key: value})


def test_keys_that_say_nothing_special_pass(make):
    make(expert_count=0, attention__causal=True, attention__clamp_kqv=0.0)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("block_count", 10**6),
        ("block_count", 0),
        ("block_count", "two"),
        ("block_count", None),
        ("attention__head_count", 3),
        ("attention__head_count_kv", 4),
        ("attention__layer_norm_rms_epsilon", -1.0),
        ("attention__layer_norm_rms_epsilon", None),
        ("embedding_length", True),
        ("context_length", None),
    ],
)
def test_impossible_values_are_damage(make, key, value):
    refused(make, "", **{key: value})


def test_tensors_that_do_not_belong_are_refused(make):
    one = np.ones(4), Kind.F32
    refused(make, "blk.0.attn_qkv.weight", tensors={"blk.0.attn_qkv.weight": one})
    refused(make, "blk.7.attn_norm.weight", tensors={"blk.7.attn_norm.weight": one})
    refused(make, "mm.0.weight", tensors={"mm.0.weight": one})
    refused(make, "blk.0.attn_norm.scale", tensors={"blk.0.attn_norm.scale": one})
    refused(make, "token_embd.weight", drop=("token_embd.weight",))


def test_a_vocabulary_larger_than_the_embedding_is_damage(make):
    small = {"token_embd.weight": (np.ones((VOCAB - 1, HIDDEN)), Kind.F32)}
    refused(make, "vocabulary", VOCAB, VOCAB - 1, tensors=small)


def test_other_architectures_are_refused_by_name(make):
    refused(make, "'mamba'", "gemma3, llama, qwen2 and qwen3", arch="mamba")


def test_splits_are_refused(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", metadata=llama_metadata() | {"split.count": 3})
    with pytest.raises(ModelError, match="one of 3 parts"):
        open_checkpoint(path)


@pytest.fixture
def gemma(tmp_path):
    def gemma(**extra):
        norms = ("attn_q_norm", HEAD_DIM), ("attn_k_norm", HEAD_DIM), ("post_ffw_norm", HIDDEN)
        rng = np.random.default_rng(9)
        tensors = llama_tensors(Kind.F32)
        for i in range(LAYERS):
            for name, n in (*norms, ("post_attention_norm", HIDDEN)):
                tensors[f"blk.{i}.{name}.weight"] = rng.standard_normal(n), Kind.F32
        metadata = llama_metadata("gemma3", attention__key_length=HEAD_DIM, **extra)
        path = write_gguf(tmp_path / "m.gguf", "gemma3", metadata, tensors)
        return open_checkpoint(path), tensors

    return gemma


def test_gemma3_has_hugging_faces_names_and_norms(gemma):
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    checkpoint, tensors = gemma(attention__sliding_window=16)
    config = checkpoint.config
    model = Gemma3ForCausalLM(Gemma3TextConfig(**config))
    weights = checkpoint.weights()
    want = {n: tuple(p.shape) for n, p in model.named_parameters()}
    assert {n: w.shape for n, w in weights.items()} == want
    for name, file_name in (
        ("model.norm", "output_norm"),
        ("model.layers.1.input_layernorm", "blk.1.attn_norm"),
        ("model.layers.1.post_attention_layernorm", "blk.1.post_attention_norm"),
        ("model.layers.1.pre_feedforward_layernorm", "blk.1.ffn_norm"),
        ("model.layers.1.post_feedforward_layernorm", "blk.1.post_ffw_norm"),
        ("model.layers.1.self_attn.q_norm", "blk.1.attn_q_norm"),
    ):
        file_values = tensors[f"{file_name}.weight"][0].astype(np.float32)
        np.testing.assert_array_equal(values(weights[f"{name}.weight"]), file_values - 1)
    q = tensors["blk.0.attn_q.weight"][0]
    np.testing.assert_array_equal(values(weights["model.layers.0.self_attn.q_proj.weight"]), q)


def test_gemma3_config(gemma):
    config = gemma(attention__sliding_window=16, rope__scaling__type="linear",
                   rope__scaling__factor=8.0)[0].config  # fmt: skip
    assert config["model_type"] == "gemma3_text"
    assert config["query_pre_attn_scalar"] == HEAD_DIM
    assert config["rope_local_base_freq"] == 10000.0
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}
    assert config["layer_types"] == ["sliding_attention"] * 2
    short = gemma(attention__sliding_window=16, attention__sliding_window_pattern=2)[0]
    assert short.config["layer_types"] == ["sliding_attention", "full_attention"]
    with pytest.raises(ModelError, match="sliding_window"):
        gemma()
