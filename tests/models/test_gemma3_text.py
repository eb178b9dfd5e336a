"""gemma3_text against transformers, and proof that the comparison would notice a mistake."""

import mlx.core as mx
import numpy as np
import pytest
import torch

from mlxserve.cache.spec import FullKV, WindowKV
from mlxserve.models.load import load_model
from tests.support.dense_view import run_dense
from tests.support.tiny import Tiny, prompt, reference_logits, tiny_gemma3

TOLERANCE = 2e-3
SLIDING, FULL = "sliding_attention", "full_attention"

CASES = {
    "plain": {},
    "untied": {"tie_word_embeddings": False},
    "one key head": {"num_key_value_heads": 1},
    "biases": {"attention_bias": True},
    "final softcap": {"final_logit_softcapping": 5.0},
    "all full": {"layer_types": [FULL] * 4},
    "all sliding": {"layer_types": [SLIDING] * 4, "sliding_window": 8},
    "scaled global rope": {
        "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": 100.0},
            FULL: {"rope_type": "linear", "rope_theta": 1000.0, "factor": 8.0},
        }
    },
    "published defaults": {"rope_parameters": None, "query_pre_attn_scalar": 256},
}


def ours(config: dict, tiny: Tiny, ids: np.ndarray, chunks=None) -> np.ndarray:
    model = load_model(config, dict(tiny.weights))
    return np.array(run_dense(model, ids, chunks))


@pytest.mark.parametrize("name", CASES)
def test_gemma3_equals_transformers(name):
    tiny, ids = tiny_gemma3(**CASES[name]), prompt(64)
    expected = reference_logits(tiny.reference, ids)
    assert expected.std() > 1
    assert np.abs(ours(tiny.config, tiny, ids) - expected).max() < TOLERANCE


def test_attention_softcap():
    # transformers' Gemma 3 keeps attn_logit_softcapping in its config and never hands it to its own
    # attention function, which takes it as `softcap`; pass it by hand.
    tiny, ids = tiny_gemma3(), prompt(64)
    expected = reference_logits(tiny.reference, ids, softcap=2.0)
    assert np.abs(reference_logits(tiny.reference, ids) - expected).max() > 1
    config = {**tiny.config, "attn_logit_softcapping": 2.0}
    assert np.abs(ours(config, tiny, ids) - expected).max() < TOLERANCE


OLD_ROPE = {"rope_theta": 5_000.0, "rope_local_base_freq": 100.0}


def test_old_style_keys_mean_the_same():
    rope = {
        SLIDING: {"rope_type": "default", "rope_theta": 100.0},
        FULL: {"rope_type": "linear", "rope_theta": 5_000.0, "factor": 8.0},
    }
    tiny, ids = tiny_gemma3(rope_parameters=rope), prompt(64)
    new = ours(tiny.config, tiny, ids)
    old = {k: v for k, v in tiny.config.items() if k != "rope_parameters"}
    scaling = {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    assert (ours({**old, **OLD_ROPE, **scaling}, tiny, ids) == new).all()
    nested = {FULL: {"rope_type": "linear", "factor": 8.0}, SLIDING: {"rope_type": "default"}}
    assert (ours({**old, **OLD_ROPE, "rope_parameters": nested}, tiny, ids) == new).all()


@pytest.mark.parametrize("key", ["sliding_window_pattern", "_sliding_window_pattern"])
def test_the_pattern_stands_for_layer_types(key):
    tiny, ids = tiny_gemma3(layer_types=[SLIDING, FULL, SLIDING, FULL]), prompt(64)
    config = {k: v for k, v in tiny.config.items() if k != "layer_types"} | {key: 2}
    assert (ours(config, tiny, ids) == ours(tiny.config, tiny, ids)).all()


def rope(local: float, base: float) -> dict:
    return {
        SLIDING: {"rope_type": "default", "rope_theta": local},
        FULL: {"rope_type": "default", "rope_theta": base},
    }


MUTATIONS = {
    "local theta": ("rope_parameters", rope(101.0, 5_000.0)),
    "global theta": ("rope_parameters", rope(100.0, 5_050.0)),
    "bases swapped": ("rope_parameters", rope(5_000.0, 100.0)),
    "window + 1": ("sliding_window", 13),
    "window - 1": ("sliding_window", 11),
    "scale": ("query_pre_attn_scalar", 25),
    "layer types": ("layer_types", [SLIDING, FULL, SLIDING, SLIDING]),
    "eps": ("rms_norm_eps", 1e-2),
    "attention cap": ("attn_logit_softcapping", 50.0),
    "final cap": ("final_logit_softcapping", 100.0),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_comparison_notices_a_change(name):
    tiny, ids = tiny_gemma3(), prompt(64)
    key, value = MUTATIONS[name]
    got = ours({**tiny.config, key: value}, tiny, ids)
    assert np.abs(got - reference_logits(tiny.reference, ids)).max() > 20 * TOLERANCE


def test_chunks_give_what_the_whole_prompt_gives():
    tiny, ids = tiny_gemma3(), prompt(64)
    whole = ours(tiny.config, tiny, ids)
    for chunks in ((1, 63), (30, 1, 1, 32), (16, 16, 16, 16)):
        assert np.abs(ours(tiny.config, tiny, ids, chunks) - whole).max() < 1e-3


def test_the_embedding_scale_is_rounded_to_the_compute_dtype():
    tiny = tiny_gemma3()
    ids = mx.array([3, 5, 8])
    for ours_dtype, torch_dtype in ((mx.float32, torch.float32), (mx.bfloat16, torch.bfloat16)):
        model = load_model(tiny.config, dict(tiny.weights), compute_dtype=ours_dtype)
        got = model.model.embed_tokens(ids).astype(mx.float32)
        embed = tiny.reference.model.embed_tokens.to(torch_dtype)
        with torch.no_grad():
            expected = embed(torch.tensor([3, 5, 8])).float().numpy()
        assert (np.array(got) == expected).all()


def test_layer_specs():
    tiny = tiny_gemma3()
    windowed, full = WindowKV(heads=2, dim=16, window=12), FullKV(heads=2, dim=16)
    model = load_model(tiny.config, dict(tiny.weights))
    assert model.layer_specs() == [windowed, windowed, full, windowed]
