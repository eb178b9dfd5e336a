"""Rotations against a plain float64 computation and against transformers' frequencies."""

import mlx.core as mx
import numpy as np
import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from mlxserve.errors import ModelError
from mlxserve.models.base import ConfigReader
from mlxserve.models.rope import Rope, make_rope, rope_from_config


def rotate(x: np.ndarray, positions: np.ndarray, frequencies: np.ndarray) -> np.ndarray:
    angle = positions[:, None, None] * frequencies.astype(np.float64)
    half = x.shape[-1] // 2
    a, b = x[..., :half].astype(np.float64), x[..., half:].astype(np.float64)
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


@settings(max_examples=30, deadline=None)
@given(
    positions=st.lists(st.integers(0, 4000), min_size=1, max_size=9),
    heads=st.integers(1, 5),
    dim=st.sampled_from([2, 8, 64, 80]),
)
def test_any_tokens_at_any_positions(positions, heads, dim):
    x = np.random.default_rng(0).normal(size=(len(positions), heads, dim)).astype(np.float32)
    frequencies = 10_000.0 ** (-np.arange(0, dim, 2) / dim)
    rope, at = Rope(list(frequencies)), mx.array(positions, dtype=mx.int32)
    got, keys = rope(mx.array(x), mx.array(x[:, :1]), at)
    # float32 angles of up to 4000 radians are off by up to 2e-4 or so.
    expected = rotate(x, np.array(positions), frequencies)
    np.testing.assert_allclose(np.array(got), expected, atol=2e-3)
    np.testing.assert_array_equal(np.array(keys), np.array(got)[:, :1])


def test_a_row_does_not_depend_on_its_neighbours():
    x = mx.random.normal((5, 3, 16))
    positions = mx.array([900, 3, 0, 77, 3], dtype=mx.int32)
    rope = make_rope({"rope_theta": 10_000.0}, head_dim=16, context_tokens=64)
    together, _ = rope(x, x, positions)
    for i in range(5):
        alone, _ = rope(x[i : i + 1], x[i : i + 1], positions[i : i + 1])
        assert mx.array_equal(together[i : i + 1], alone)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
def test_keeps_the_dtype(dtype):
    x = mx.zeros((2, 1, 8), dtype=dtype)
    rope = make_rope({"rope_type": "yarn", "factor": 2.0, "rope_theta": 100.0,
                      "attention_factor": 1.5}, head_dim=8, context_tokens=64)  # fmt: skip
    assert [y.dtype for y in rope(x, x, mx.array([0, 1], dtype=mx.int32))] == [dtype, dtype]


REFERENCE = [
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 8192},
    {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 4096},
    {"rope_type": "yarn", "factor": 4.0},
    {"rope_type": "yarn", "factor": 1.0},
    {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 512},
    {"rope_type": "yarn", "factor": 4.0, "beta_fast": 20.0, "beta_slow": 2.0, "truncate": False},
    {"rope_type": "yarn", "factor": 4.0, "beta_fast": 1.0, "beta_slow": 1.0, "truncate": False},
    {"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    {"rope_type": "yarn", "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 1.3},
    {"rope_type": "yarn", "factor": 40.0, "mscale": 0.707},
    {"rope_type": "yarn", "factor": 40.0, "attention_factor": 0.9, "mscale": 1.0},
]  # fmt: skip


@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("params", REFERENCE, ids=lambda p: "-".join(map(str, p.values())))
def test_frequencies_equal_transformers(params, dim, theta):
    params = {**params, "rope_theta": theta}
    config = transformers.LlamaConfig(
        hidden_size=dim, num_attention_heads=1, max_position_embeddings=2048, rope_parameters=params
    )
    expected, gain = ROPE_INIT_FUNCTIONS[params["rope_type"]](config)
    rope = make_rope(params, head_dim=dim, context_tokens=2048)
    np.testing.assert_allclose(1 / np.array(rope.periods), expected.numpy(), rtol=2e-6)
    assert rope.gain == pytest.approx(gain, rel=1e-12)


def test_gguf_factors_divide_the_frequencies():
    factors = [1.0, 2.0, 4.0, 8.0]
    params = {"rope_type": "gguf_factors", "factors": factors, "rope_theta": 100.0}
    rope = make_rope(params, head_dim=8, context_tokens=64)
    expected = 100.0 ** (-np.arange(0, 8, 2) / 8) / np.array(factors)
    np.testing.assert_allclose(1 / np.array(rope.periods), expected, rtol=1e-6)


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}

BAD = [
    ({"rope_type": "dynamic", "factor": 2.0}, "'dynamic'.*default, gguf_factors, linear"),
    ({"rope_type": "linear"}, "linear: factor is missing"),
    ({"rope_type": "linear", "factor": 0}, "factor is 0"),
    ({"rope_type": "linear", "factor": "2"}, "factor is '2'"),
    ({"rope_type": "linear", "factor": float("nan")}, "factor is nan"),
    ({"rope_type": "linear", "factor": 2.0, "beta_fast": 32}, "beta_fast=32"),
    ({"rope_type": "default", "factor": 2.0}, "factor=2.0"),
    ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    ({"rope_type": "default", "mrope_section": [1, 2]}, "mrope_section"),
    ({"rope_type": "default", "rope_theta": 1.0}, "rope_theta is 1"),
    ({"rope_type": "default", "rope_theta": True}, "rope_theta is True"),
    ({**LLAMA3, "low_freq_factor": 4.0}, "high_freq_factor is 4"),
    ({"rope_type": "llama3", "factor": 8.0}, "llama3: high_freq_factor is missing"),
    ({**LLAMA3, "original_max_position_embeddings": -1}, "original_max_position_embeddings is -1"),
    ({"rope_type": "yarn"}, "yarn: factor is missing"),
    ({"rope_type": "yarn", "factor": 2.0, "truncate": 1}, "truncate is 1"),
    ({"rope_type": "yarn", "factor": 2.0, "attention_factor": -1.0}, "attention_factor is -1"),
    ({"rope_type": "yarn", "factor": 2.0, "low_freq_factor": 1.0}, "low_freq_factor=1.0"),
    ({"rope_type": "gguf_factors"}, "factors is missing"),
    ({"rope_type": "gguf_factors", "factors": [1.0]}, "must be 4 numbers"),
    ({"rope_type": "gguf_factors", "factors": [1.0, 1.0, 0.0, 1.0]}, "a factor is 0"),
]  # fmt: skip


@pytest.mark.parametrize(("params", "message"), BAD, ids=lambda p: str(p)[:40])
def test_bad_parameters_are_refused_by_name(params, message):
    with pytest.raises(ModelError, match=message):
        make_rope({"rope_theta": 10_000.0, **params}, head_dim=8, context_tokens=64)


def test_odd_head_dim():
    with pytest.raises(ModelError, match="head_dim is 7"):
        make_rope({"rope_theta": 10_000.0}, head_dim=7, context_tokens=64)


CONTRADICTIONS = [
    {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}},
    {"rope_scaling": {"rope_type": "linear", "factor": 2.0},
     "rope_parameters": {"rope_type": "linear", "factor": 4.0}},
    {"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2.0}},
]  # fmt: skip


@pytest.mark.parametrize("config", CONTRADICTIONS, ids=str)
def test_spellings_that_contradict_each_other(config):
    reader = ConfigReader({"model_type": "llama", **config})
    with pytest.raises(ModelError, match="the same wherever it is given"):
        rope_from_config(reader, head_dim=8, context_tokens=64)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear'; it must be an object"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_type is none"),
        ({"rope_parameters": {"full_attention": 3}}, "rope_parameters.full_attention is 3"),
    ],
)
def test_wrong_containers(config, message):
    reader = ConfigReader({"model_type": "gemma3_text", **config})
    with pytest.raises(ModelError, match=message):
        rope_from_config(reader, head_dim=8, context_tokens=64, layer_type="full_attention")
