"""llama and mistral against transformers, and proof that the comparison would notice a mistake."""

import numpy as np
import pytest

from mlxserve.cache.spec import FullKV, WindowKV
from mlxserve.models.load import load_model
from tests.support.dense_view import run_dense
from tests.support.tiny import Tiny, prompt, reference_logits, tiny_llama, tiny_mistral

TOLERANCE = 2e-3
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 300.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}

CASES = {
    "grouped heads": {},
    "a key head per head": {"num_key_value_heads": 4},
    "one key head": {"num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "head_dim apart from hidden_size": {"head_dim": 24},
    "eps": {"rms_norm_eps": 0.5},
    "theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}},
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 3.0}},
    "llama3": {"rope_parameters": LLAMA3},
    "yarn": {"rope_parameters": YARN},
    "yarn untruncated": {"rope_parameters": {**YARN, "truncate": False, "beta_fast": 8}},
    "yarn attention_factor": {"rope_parameters": {**YARN, "attention_factor": 1.5}},
    "yarn mscale": {"rope_parameters": {**YARN, "mscale": 2.0, "mscale_all_dim": 0.5}},
}


def ours(config: dict, tiny: Tiny, ids: np.ndarray, chunks=None) -> np.ndarray:
    model = load_model(config, dict(tiny.weights))
    return np.array(run_dense(model, ids, chunks))


@pytest.mark.parametrize("name", CASES)
def test_llama_equals_transformers(name):
    tiny, ids = tiny_llama(**CASES[name]), prompt(64)
    expected = reference_logits(tiny.reference, ids)
    assert expected.std() > 0.5, "the oracle's logits are nearly flat"
    assert np.abs(ours(tiny.config, tiny, ids) - expected).max() < TOLERANCE


@pytest.mark.parametrize("window", [1, 15, 16, 100, None])
def test_mistral_equals_transformers(window):
    tiny, ids = tiny_mistral(sliding_window=window), prompt(64)
    expected = reference_logits(tiny.reference, ids)
    assert np.abs(ours(tiny.config, tiny, ids) - expected).max() < TOLERANCE


def test_old_style_rope_keys_mean_the_same():
    tiny, ids = tiny_llama(rope_parameters=LLAMA3), prompt(64)
    old = {k: v for k, v in tiny.config.items() if k != "rope_parameters"}
    scaling = {k: v for k, v in LLAMA3.items() if k != "rope_theta"}
    for config in (
        {**old, "rope_theta": 500.0, "rope_scaling": scaling},
        {**old, "rope_theta": 500.0, "rope_scaling": {**scaling, "type": "llama3"}},
    ):
        assert (ours(config, tiny, ids) == ours(tiny.config, tiny, ids)).all()


MUTATIONS = {
    "theta": ("rope_parameters", {**LLAMA3, "rope_theta": 501.0}),
    "factor": ("rope_parameters", {**LLAMA3, "factor": 9.0}),
    "low_freq_factor": ("rope_parameters", {**LLAMA3, "low_freq_factor": 1.2}),
    "high_freq_factor": ("rope_parameters", {**LLAMA3, "high_freq_factor": 5.0}),
    "trained": ("rope_parameters", {**LLAMA3, "original_max_position_embeddings": 40}),
    "type": ("rope_parameters", {"rope_type": "default", "rope_theta": 500.0}),
    "eps": ("rms_norm_eps", 1e-2),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_comparison_notices_a_changed_llama(name):
    tiny, ids = tiny_llama(rope_parameters=LLAMA3), prompt(64)
    key, value = MUTATIONS[name]
    expected = reference_logits(tiny.reference, ids)
    assert np.abs(ours({**tiny.config, key: value}, tiny, ids) - expected).max() > 5 * TOLERANCE


YARN_MUTATIONS = {
    "factor": 5.0,
    "truncate": False,
    "attention_factor": 1.2,
    "beta_fast": 3,
    "beta_slow": 3,
    "original_max_position_embeddings": 128,
}


@pytest.mark.parametrize("key", YARN_MUTATIONS)
def test_the_comparison_notices_changed_yarn(key):
    tiny, ids = tiny_llama(rope_parameters=YARN), prompt(64)
    config = {**tiny.config, "rope_parameters": {**YARN, key: YARN_MUTATIONS[key]}}
    expected = reference_logits(tiny.reference, ids)
    assert np.abs(ours(config, tiny, ids) - expected).max() > 5 * TOLERANCE


@pytest.mark.parametrize("window", [15, 17, None])
def test_the_comparison_notices_a_window_off_by_one(window):
    tiny, ids = tiny_mistral(), prompt(64)
    got = ours({**tiny.config, "sliding_window": window}, tiny, ids)
    assert np.abs(got - reference_logits(tiny.reference, ids)).max() > 50 * TOLERANCE


@pytest.mark.parametrize("make", [tiny_llama, tiny_mistral])
def test_chunks_give_what_the_whole_prompt_gives(make):
    tiny, ids = make(), prompt(64)
    whole = ours(tiny.config, tiny, ids)
    for chunks in ((1, 63), (30, 1, 1, 32), (16, 16, 16, 16)):
        assert np.abs(ours(tiny.config, tiny, ids, chunks) - whole).max() < 1e-4


def test_layer_specs():
    tiny = tiny_llama()
    model = load_model(tiny.config, dict(tiny.weights))
    assert model.layer_specs() == [FullKV(heads=2, dim=16)] * 2
    assert (model.vocab_size, model.context_tokens) == (97, 256)
    tiny = tiny_mistral()
    model = load_model(tiny.config, dict(tiny.weights))
    assert model.layer_specs() == [WindowKV(heads=2, dim=16, window=16)] * 2


def test_mistral_without_the_key_has_the_first_mistrals_window():
    tiny = tiny_mistral()
    config = {k: v for k, v in tiny.config.items() if k != "sliding_window"}
    assert load_model(config, dict(tiny.weights)).layer_specs()[0].window == 4096
