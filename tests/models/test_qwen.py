"""qwen2 and qwen3 against transformers, and proof that the comparison would notice a mistake."""

import gguf
import mlx.core as mx
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from mlxserve.cache.spec import FullKV, WindowKV
from mlxserve.models.load import load_model
from mlxserve.sources.checkpoint import open_checkpoint
from tests.sources.making import write_gguf
from tests.support.dense_view import run_dense
from tests.support.tiny import Tiny, prompt, reference_logits, tiny_qwen2, tiny_qwen3

TOLERANCE = 1e-3
FULL, SLIDING = "full_attention", "sliding_attention"
WINDOWED = {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 300.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
MAKERS = {"qwen2": tiny_qwen2, "qwen3": tiny_qwen3}
CASES = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "a key head per head": {"num_key_value_heads": 4},
    "one key head": {"num_key_value_heads": 1},
    "head_dim": {"head_dim": 32},
    "eps": {"rms_norm_eps": 0.5},
    "theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}},
    "yarn": {"rope_parameters": YARN},
    "a window in the second layer": WINDOWED,
    "a window in every layer": {**WINDOWED, "max_window_layers": 0},
    "a window that is off": {**WINDOWED, "use_sliding_window": False},
    "a window beyond the last layer": {**WINDOWED, "max_window_layers": 2},
    "layer types": {**WINDOWED, "layer_types": [SLIDING, FULL]},
}


def ours(config: dict, tiny: Tiny, ids: np.ndarray, chunks=None, **changed) -> np.ndarray:
    model = load_model(config, {**tiny.weights, **changed})
    return np.array(run_dense(model, ids, chunks))


def difference(tiny: Tiny, ids: np.ndarray, config: dict | None = None, **changed) -> float:
    expected = reference_logits(tiny.reference, ids)
    assert expected.std() > 0.5, "the oracle's logits are nearly flat"
    return float(np.abs(ours(config or tiny.config, tiny, ids, **changed) - expected).max())


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("name", CASES)
def test_equals_transformers(kind, name):
    assert difference(MAKERS[kind](**CASES[name]), prompt(64)) < TOLERANCE


def test_qwen3_with_biases_equals_transformers():
    assert difference(tiny_qwen3(attention_bias=True), prompt(64)) < TOLERANCE


@pytest.mark.parametrize("kind", MAKERS)
def test_a_config_as_published_means_the_same(kind):
    """Without `layer_types`, which transformers computes and older files don't have."""
    tiny, ids = MAKERS[kind](**WINDOWED), prompt(64)
    published = {k: v for k, v in tiny.config.items() if k != "layer_types"}
    assert difference(tiny, ids, {**published, **WINDOWED}) < TOLERANCE


MUTATIONS = {
    "window + 1": {"sliding_window": 13},
    "window - 1": {"sliding_window": 11},
    "no window": {"use_sliding_window": False, "layer_types": None},
    "a window everywhere": {"layer_types": [SLIDING, SLIDING]},
    "the other layer": {"layer_types": [SLIDING, FULL]},
    "theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 9_000.0}},
    "eps": {"rms_norm_eps": 1e-2},
}


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("name", MUTATIONS)
def test_the_comparison_notices_a_changed_config(kind, name):
    tiny = MAKERS[kind](**WINDOWED)
    config = {**tiny.config, **MUTATIONS[name]}
    assert difference(tiny, prompt(64), config) > 5 * TOLERANCE


@pytest.mark.parametrize("part", ["q_proj", "k_proj", "v_proj"])
def test_the_comparison_notices_a_bias_left_out(part):
    tiny = tiny_qwen2()
    name = f"model.layers.1.self_attn.{part}.bias"
    changed = {name: mx.zeros_like(tiny.weights[name])}
    # A key bias only turns with the position: what is the same for all keys, softmax takes off.
    assert difference(tiny, prompt(64), **changed) > 20 * TOLERANCE


@pytest.mark.parametrize("part", ["q_norm", "k_norm"])
def test_the_comparison_notices_a_norm_left_out(part):
    tiny = tiny_qwen3()
    name = f"model.layers.1.self_attn.{part}.weight"
    changed = {name: mx.ones_like(tiny.weights[name])}
    assert difference(tiny, prompt(64), **changed) > 20 * TOLERANCE


@pytest.mark.parametrize("kind", MAKERS)
def test_chunks_give_what_the_whole_prompt_gives(kind):
    tiny, ids = MAKERS[kind](**WINDOWED), prompt(64)
    whole = ours(tiny.config, tiny, ids)
    for chunks in ((1, 63), (30, 1, 1, 32), (16, 16, 16, 16)):
        assert np.abs(ours(tiny.config, tiny, ids, chunks) - whole).max() < 1e-4


def test_layer_specs():
    tiny = tiny_qwen3(**WINDOWED)
    model = load_model(tiny.config, dict(tiny.weights))
    assert model.layer_specs() == [FullKV(heads=2, dim=24), WindowKV(heads=2, dim=24, window=12)]
    assert not model.float16_safe


GGUF_CASES = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0}},
    "yarn": {"rope_parameters": YARN},
}


def as_gguf(path, tiny: Tiny):
    """The file that llama.cpp's converter would write, with the gguf package's own names."""
    c = tiny.config
    arch = c["model_type"]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], n_blocks=c["num_hidden_layers"])
    rope = c["rope_parameters"]
    metadata = {
        "block_count": c["num_hidden_layers"],
        "context_length": c["max_position_embeddings"],
        "embedding_length": c["hidden_size"],
        "feed_forward_length": c["intermediate_size"],
        "attention.head_count": c["num_attention_heads"],
        "attention.head_count_kv": c["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": c["rms_norm_eps"],
        "attention.key_length": c["head_dim"],
        "attention.value_length": c["head_dim"],
        "rope.freq_base": float(rope["rope_theta"]),
    }
    if rope["rope_type"] == "yarn":
        metadata["rope.scaling.type"] = "yarn"
        metadata["rope.scaling.factor"] = rope["factor"]
        metadata["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    tensors = {
        names.get_name(name, try_suffixes=(".weight", ".bias")): (np.array(value), Kind.F32)
        for name, value in tiny.weights.items()
        if not (c["tie_word_embeddings"] and name == "lm_head.weight")
    }
    return write_gguf(path, arch, {f"{arch}.{k}": v for k, v in metadata.items()}, tensors)


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("name", GGUF_CASES)
def test_a_gguf_gives_what_the_directory_gives(tmp_path, kind, name):
    tiny, ids = MAKERS[kind](**GGUF_CASES[name]), prompt(64)
    checkpoint = open_checkpoint(as_gguf(tmp_path / "m.gguf", tiny))
    model = load_model(checkpoint.config, checkpoint.weights())
    got = np.array(run_dense(model, ids))
    assert np.abs(got - reference_logits(tiny.reference, ids)).max() < TOLERANCE
    assert (got == ours(tiny.config, tiny, ids)).all()
