"""Whole requests through the Metal attention: joining, leaving, prompts between decoding rows."""

import queue

import mlx.core as mx
import pytest

from mlxserve.config import EngineConfig
from mlxserve.engine.core import Core
from mlxserve.kernels import registry
from mlxserve.models.load import load_model
from mlxserve.types import Request, SamplingParams
from tests.support.tiny import prompt, tiny_gemma3, tiny_llama, tiny_mistral

pytestmark = pytest.mark.full

LONG = {"max_position_embeddings": 2048}
MODELS = {
    "llama": lambda: tiny_llama(head_dim=64, **LONG),
    "windows": lambda: tiny_mistral(head_dim=72, sliding_window=70, **LONG),
    "gemma3": lambda: tiny_gemma3(head_dim=64, **LONG),
}


@pytest.fixture(autouse=True)
def choices_anew():
    yield
    registry.forget()


def answers(monkeypatch, tiny, kernels, stand_in):
    """Of rows of unequal lengths, in bfloat16: tokens with their log-probabilities."""
    monkeypatch.setenv("MLXSERVE_KERNELS", kernels)
    monkeypatch.setenv("MLXSERVE_METAL_STAND_IN", stand_in)
    registry.forget()
    model = load_model(tiny.config, dict(tiny.weights), compute_dtype=mx.bfloat16)
    core = Core(model, EngineConfig(max_batch=4, max_batched_tokens=48))
    asked = [
        Request(
            id=f"r{i}",
            prompt_ids=tuple(int(t) for t in prompt(5 + 61 * i, seed=i)),
            params=SamplingParams(max_tokens=3 + 2 * i, top_logprobs=1, temperature=0),
        )
        for i in range(3)
    ]
    out = queue.SimpleQueue()
    core.admit(asked, out, 0.0)
    while core.busy:
        core.advance()
        core.check_integrity()
    got = {request.id: [] for request in asked}
    while not out.empty():
        delivery = out.get()
        assert delivery.error is None
        got[delivery.request_id].append((delivery.token_id, delivery.logprob.logprob))
    return got


@pytest.mark.parametrize("name", MODELS)
def test_answers_are_those_of_the_reference(monkeypatch, name):
    tiny = MODELS[name]()
    emulated = "tests.support.stand_ins.emulated"
    got = answers(monkeypatch, tiny, "reference,attention=metal", emulated)
    expected = answers(monkeypatch, tiny, "reference", "")
    for request, tokens in expected.items():
        # Up to where rounding may have led to another token.
        for (token, logprob), (want, wanted) in zip(got[request], tokens, strict=False):
            assert abs(logprob - wanted) < 0.05
            if token != want:
                break
        assert got[request][0][0] == tokens[0][0]


def test_a_model_that_the_kernel_cannot_serve_is_refused_by_name_where_it_is_asked_for(monkeypatch):
    monkeypatch.setenv("MLXSERVE_METAL_STAND_IN", "tests.support.stand_ins.emulated")
    monkeypatch.setenv("MLXSERVE_KERNELS", "reference,attention=metal")
    registry.forget()
    tiny = tiny_llama(head_dim=32, **LONG)
    with pytest.raises(Exception, match="head dim 32 is none of 64"):
        load_model(tiny.config, dict(tiny.weights), compute_dtype=mx.bfloat16)
