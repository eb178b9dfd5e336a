"""Whole requests through the Metal kernels: joining, leaving, prompts between decoding rows."""

import queue
from functools import partial

import mlx.core as mx
import pytest

from mlxserve.config import EngineConfig
from mlxserve.engine.cache_plan import cache_uses
from mlxserve.engine.core import Core
from mlxserve.kernels import registry
from mlxserve.kernels.quantized import PackedWeight
from mlxserve.models.load import load_model
from mlxserve.types import Request, SamplingParams
from tests.support.stand_ins import emulated
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


def answers(monkeypatch, tiny, kernels, stand_in, rows=range(3), apart=61, **options):
    """Of rows of unequal lengths, in bfloat16: tokens with their log-probabilities."""
    monkeypatch.setenv("MLXSERVE_KERNELS", kernels)
    monkeypatch.setenv("MLXSERVE_METAL_STAND_IN", stand_in)
    registry.forget()
    config = EngineConfig(**{"max_batch": 4, "max_batched_tokens": 48, **options})
    model = load_model(
        tiny.config,
        dict(tiny.weights),
        compute_dtype=mx.bfloat16,
        uses=partial(cache_uses, config=config),
        deterministic=config.deterministic,
    )
    core = Core(model, config)
    asked = [
        Request(
            id=f"r{i}",
            prompt_ids=tuple(int(t) for t in prompt(5 + apart * i, seed=i)),
            params=SamplingParams(max_tokens=3 + 2 * i, top_logprobs=1, temperature=0),
        )
        for i in rows
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


@pytest.fixture
def launched(monkeypatch):
    """Names of the kernels that were launched, and how many rows matmuls had."""
    names, run = set(), emulated.run

    def take_down(launch):
        matmul = launch.kernel.name == "quantized_matmul"
        names.add(launch.arrays[0].shape[0] if matmul else launch.kernel.name)
        return run(launch)

    monkeypatch.setattr(emulated, "run", take_down)
    return names


@pytest.mark.parametrize(("name", "options"), [
    pytest.param("llama", {}, marks=pytest.mark.slow),  # as the full layer of the last
    ("windows", {}),
    ("gemma3", {}),
    pytest.param("llama", {"kv_bits": 8}, marks=pytest.mark.slow),
    ("windows", {"kv_bits": "8/4"}),
    ("llama", {"max_kv_size": 100}),
], ids=str)  # fmt: skip
def test_answers_are_those_of_the_reference(monkeypatch, launched, name, options):
    tiny = MODELS[name]()
    metal = "reference,attention=metal,append=metal"
    got = answers(monkeypatch, tiny, metal, emulated.__name__, **options)
    packed = {"packed_attention", "pack_pages"} if "kv_bits" in options else set()
    assert launched == {"paged_attention", "paged_attention_merge", "chunk_attention"} | packed
    expected = answers(monkeypatch, tiny, "reference", "", **options)
    for request, tokens in expected.items():
        # Up to where rounding may have led to another token.
        for (token, logprob), (want, wanted) in zip(got[request], tokens, strict=False):
            assert abs(logprob - wanted) < 0.05
            if token != want:
                break
        assert got[request][0][0] == tokens[0][0]


def test_a_model_that_the_kernel_cannot_serve_is_refused_by_name_where_it_is_asked_for(monkeypatch):
    monkeypatch.setenv("MLXSERVE_METAL_STAND_IN", emulated.__name__)
    monkeypatch.setenv("MLXSERVE_KERNELS", "reference,attention=metal")
    registry.forget()
    tiny = tiny_llama(head_dim=32, **LONG)
    with pytest.raises(Exception, match="head dim 32 is none of 64"):
        load_model(tiny.config, dict(tiny.weights), compute_dtype=mx.bfloat16)


def quantised(bits, group=32):
    """A small model, since matmuls are many, with every matrix packed."""
    small = {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    tiny = tiny_llama(head_dim=64, **small, **LONG)
    weights = {}
    for name, w in tiny.weights.items():
        if w.ndim == 2:
            w = PackedWeight(*mx.quantize(w.astype(mx.bfloat16), group, bits), bits, group)
        weights[name] = w
    return tiny._replace(weights=weights)


@pytest.mark.parametrize("bits", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_an_answer_is_the_same_alone_and_in_a_batch(monkeypatch, launched, bits):
    """Bit for bit, where steps take prompts whole."""
    tiny = quantised(bits)
    metal = "reference,attention=metal,matmul=metal"
    given = monkeypatch, tiny, metal, emulated.__name__
    options = {"deterministic": True, "max_batched_tokens": 512, "apart": 14}
    together = answers(*given, rows=range(2), **options)
    assert {1, 2, 5 + 19} <= launched  # of decoding, and of prompts
    assert len({tuple(answer) for answer in together.values()}) == 2
    for row in range(2):
        assert answers(*given, rows=[row], **options) == {f"r{row}": together[f"r{row}"]}


def test_without_that_the_kernel_serves_few_rows(monkeypatch, launched):
    """Others have MLX's own; and answers are those of the reference, but for its rounding."""
    tiny = quantised(4)
    kernels = "reference,matmul=metal"
    got = answers(monkeypatch, tiny, kernels, emulated.__name__)
    assert launched
    assert launched <= set(range(2, 17))
    expected = answers(monkeypatch, tiny, "reference", "")
    for request, (first, *_) in expected.items():
        assert got[request][0][0] == first[0]
        assert abs(got[request][0][1] - first[1]) < 0.05
