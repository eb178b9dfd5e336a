"""What memory is said to be needed, against what MLX measures while requests run."""

import gc
import queue
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlxserve.config import EngineConfig
from mlxserve.engine import cache_plan
from mlxserve.engine.core import Core
from mlxserve.engine.footprint import loaded_bytes
from mlxserve.errors import CapacityError
from mlxserve.kernels import matmul
from mlxserve.kernels import registry as kernels
from mlxserve.memory import MOST_LOGITS, PLAIN_LOGITS, CachePlan
from mlxserve.models import registry
from mlxserve.models.activations import step_shape
from mlxserve.models.load import load_model
from mlxserve.types import MAX_TOP_LOGPROBS, Request, SamplingParams
from tests.support.composed import ComposedModel, Kind

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        kernels.recorder() is None, reason="only on machines with the native kernels"
    ),
]

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": 2000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "tie_word_embeddings": True,
}
GEMMA = {"query_pre_attn_scalar": 32, "rope_local_base_freq": 1e4, "sliding_window": 256}
OF_ARCHITECTURE = {
    "llama": {},
    "mistral": {"sliding_window": 192},
    "qwen3": {},
    "gemma3_text": GEMMA,
}


@dataclass(frozen=True)
class Case:
    """A run. model: a model_type, or kinds of layers. sizes, engine: what differs from the usual.

    prompts: lengths; params: of each request. logits: arrays of a row's that its sampling holds.
    alternatives: reported of each token of the prompts, where these are read.
    """

    model: str | tuple[Kind, ...]
    sizes: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    prompts: tuple[int, ...] = (400, 200)
    params: dict[str, Any] = field(default_factory=dict)
    logits: int = PLAIN_LOGITS
    alternatives: int | None = None


FULL, WINDOW, LATENT, STATE = Kind("full"), Kind("window", 200), Kind("latent"), Kind("state")
MANY = {"max_batch": 8, "max_batched_tokens": 128}
LONG = (700,) * 8
SHORT = (8,) * 16
LARGE = {"vocab_size": 32_000, "num_hidden_layers": 4}
WIDE = {"hidden_size": 512, "num_hidden_layers": 4, "intermediate_size": 512}
CASES = {
    "llama": Case("llama"),
    "llama, 64 tokens a step": Case("llama", engine={"max_batched_tokens": 64}),
    "llama, 512 tokens a step": Case("llama", engine={"max_batched_tokens": 512}),
    "llama, 16 rows": Case("llama", engine={"max_batch": 16}, prompts=(100,) * 16),
    "llama, one short prompt": Case("llama", prompts=(130,)),
    "llama, two layers": Case("llama", sizes={"num_hidden_layers": 2}),
    "llama, sixteen layers": Case("llama", sizes={"num_hidden_layers": 16}),
    "llama, wide": Case("llama", sizes=WIDE),
    "llama, as many key heads as query heads": Case("llama", sizes={"num_key_value_heads": 8}),
    "llama, queries wider than the stream": Case("llama", sizes={"head_dim": 64}),
    "llama, kv_bits 16": Case("llama", engine={"kv_bits": 16}),
    "llama, kv_bits 8": Case("llama", engine={"kv_bits": 8}, prompts=(600, 300)),
    "llama, kv_bits 8/4": Case("llama", engine={"kv_bits": "8/4"}, prompts=(600, 300)),
    "llama, max_kv_size": Case("llama", engine={"max_kv_size": 512, "keep": 4}),
    "llama, large vocabulary": Case("llama", LARGE, {"max_batch": 16}, SHORT),
    "llama, penalties": Case(
        "llama", LARGE, {"max_batch": 16}, SHORT, {"repetition_penalty": 1.2}, logits=MOST_LOGITS
    ),
    "llama, a prompt's log-probabilities": Case("llama", LARGE, alternatives=0),
    "llama, and five alternatives": Case("llama", LARGE, alternatives=5),
    "mistral": Case("mistral"),
    "qwen3": Case("qwen3"),
    "qwen3, 512 tokens a step": Case("qwen3", engine={"max_batched_tokens": 512}),
    "gemma3": Case("gemma3_text"),
    "gemma3, 256 tokens a step, kv_bits 8/4": Case(
        "gemma3_text", engine={"max_batched_tokens": 256, "kv_bits": "8/4"}
    ),
    "full layers": Case((FULL,) * 8, engine=MANY, prompts=LONG),
    "full layers, kv_bits 4": Case((FULL,) * 16, engine=MANY | {"kv_bits": 4}, prompts=LONG),
    "full and window layers": Case((FULL, WINDOW) * 4, engine=MANY, prompts=LONG),
    "latent layers": Case((LATENT,) * 12, engine=MANY, prompts=LONG),
    "full and state layers": Case((FULL,) * 15 + (STATE,), engine=MANY, prompts=(300,) * 8),
}  # fmt: skip


def config_of(case):
    return SIZES | {"model_type": case.model} | OF_ARCHITECTURE[case.model] | case.sizes


def load(case):
    """The model with random weights, and the bytes that its weights are said to take."""
    if not isinstance(case.model, str):
        before = mx.get_active_memory()
        model = ComposedModel(case.model)
        mx.eval([array for _, array in tree_flatten(model.parameters())])
        return model, mx.get_active_memory() - before
    config = config_of(case)
    random = np.random.default_rng(0)
    shapes = tree_flatten(registry.build(config).parameters())
    drawn = {
        name: mx.array(random.standard_normal(a.shape, np.float32) * a.shape[-1] ** -0.5)
        for name, a in shapes
    }
    told = loaded_bytes(config, sum(a.nbytes for a in drawn.values()), form=matmul.form())
    return load_model(config, drawn), told


def run(core, case):
    random = np.random.default_rng(1)
    out = queue.SimpleQueue()
    params = SamplingParams(max_tokens=3, **{"temperature": 0, **case.params})
    requests = [
        Request(
            id=str(index),
            prompt_ids=tuple(random.integers(0, core.info.vocab_size, n).tolist()),
            params=params,
            prompt_logprobs=case.alternatives,
        )
        for index, n in enumerate(case.prompts)
    ]
    core.admit(requests, out, 0.0)
    while core.busy:
        core.advance()
    answered = [out.get() for _ in range(out.qsize())]
    assert [delivery.error for delivery in answered if delivery.error] == []
    assert len({d.request_id for d in answered if d.last}) == len(requests)


def measure(case):
    """Predicted and measured bytes: of the weights, and of the peak."""
    gc.collect()
    before = mx.get_active_memory()
    model, weights = load(case)
    gc.collect()
    loaded = mx.get_active_memory()
    config = EngineConfig(
        **{"max_batch": 4, "max_batched_tokens": 128, "memory_limit_bytes": 4 << 30} | case.engine
    )
    mx.reset_peak_memory()
    core = Core(model, config)
    run(core, case)
    measured = mx.get_peak_memory() - before
    tokens = min(cache_plan.step_tokens(config), sum(case.prompts))
    rows = min(len(case.prompts), config.max_batch)
    step = step_shape(model, model.dtype)
    shape = cache_plan.cache_shape(
        cache_plan.cache_groups(model.layer_specs(), config),
        step,
        itemsize=cache_plan.cache_dtype(model.dtype, config).size,
        tokens=tokens,
    )
    hot, *pools, slots = core.storage.capacity
    sizes = CachePlan(hot, tuple(pools), slots)
    assert shape.nbytes(sizes) == core.storage.nbytes
    work = step.nbytes(tokens, rows, case.logits)
    if case.alternatives is not None:
        work = max(work, step.read_bytes(tokens, case.alternatives))
    peak = weights + shape.peak_bytes(sizes, work)
    return (weights, peak), (loaded - before, measured)


@pytest.mark.parametrize("name", CASES)
def test_the_peak_is_as_predicted(name):
    (weights, peak), (loaded, measured) = measure(CASES[name])
    assert weights == pytest.approx(loaded, rel=0.02)
    assert measured > 10e6
    assert peak == pytest.approx(measured, rel=0.1)


def test_growing_holds_one_array_twice():
    model, _ = load(Case("llama", {"num_hidden_layers": 2, "head_dim": 64}))
    core = Core(model, EngineConfig(max_batch=8, memory_limit_bytes=4 << 30))
    shape = cache_plan.cache_shape(
        cache_plan.cache_groups(model.layer_specs(), EngineConfig()),
        step_shape(model, model.dtype),
        itemsize=4,
        tokens=1,
    )
    beside = mx.get_active_memory() - core.storage.nbytes
    for pages in (64, 128):
        mx.reset_peak_memory()
        core.storage.grow(8, pages, 1)
        told = shape.peak_bytes(CachePlan(8, (pages,), 1), 0)
        assert mx.get_peak_memory() - beside == pytest.approx(told, rel=0.1)


def test_taking_up_part_of_a_page_copies_no_pool():
    """A prompt that begins as another did, up to the middle of a page: its tokens are copied."""
    core = Core(ComposedModel((FULL,) * 8), EngineConfig(max_batch=2, memory_limit_bytes=4 << 30))
    core.storage.grow(core.manager.hot.pages, 256, 1)
    pools = 256 * core.storage.pool[0][0][0].nbytes * 2 * 8
    before, peaks = mx.get_active_memory(), []
    first = np.arange(200) % 61
    for name, ids in (("a", first), ("b", np.where(np.arange(200) < 100, first, 7))):
        mx.reset_peak_memory()
        request = Request(
            id=name, prompt_ids=tuple(ids.tolist()), params=SamplingParams(max_tokens=3)
        )
        core.admit([request], queue.SimpleQueue(), 0.0)
        while core.busy:
            core.advance()
        peaks.append(mx.get_peak_memory() - before)
    assert core.stats.cached_tokens == 100
    assert peaks[1] < peaks[0] + pools / 20


# With MiB beside the weights that hold less than two whole contexts.
BINDING = {
    "full": (40, Case("llama")),
    "two layers": (16, Case("llama", {"num_hidden_layers": 2})),
    "packed": (24, Case("qwen3", engine={"kv_bits": 8})),
    "windowed": (42, Case("gemma3_text", {"num_hidden_layers": 12})),
}


@pytest.mark.full
@pytest.mark.parametrize("name", BINDING)
def test_an_engine_that_fills_its_memory_stays_within_it(name):
    room, case = BINDING[name]
    before = mx.get_active_memory()
    model, weights = load(case)
    limit = weights + (room << 20)
    config = EngineConfig(
        max_batch=2, max_batched_tokens=64, memory_limit_bytes=before + limit, **case.engine
    )
    core = Core(model, config)
    assert sum(core.storage.limits[1:-1]) < 2 * 2048 // 64 * len(core.storage.groups)
    longest = core.info.context_tokens - 8
    mx.reset_peak_memory()
    run(core, Case(case.model, prompts=(longest, longest), alternatives=MAX_TOP_LOGPROBS))
    assert 0.8 * limit < mx.get_peak_memory() - before <= limit


def test_too_little_memory_is_refused_with_the_numbers():
    model, _ = load(Case("llama"))
    limit = mx.get_active_memory() + (4 << 20)
    words = (
        r"0\.00 GiB are free beside the weights: 0\.00 GiB for the cache, after 0\.0. GiB for a "
        r"step's results; .* lower max_batch \(32\) or max_batched_tokens \(128\)"
    )
    with pytest.raises(CapacityError, match=words):
        Core(model, EngineConfig(memory_limit_bytes=limit, max_batched_tokens=128))


def test_a_bounded_cache_needs_no_room_for_all_rows_at_once():
    """A few rows of 512 tokens fit, 32 don't: the others wait, and get what is theirs."""
    model, _ = load(Case("llama"))
    prompts = np.random.default_rng(0).integers(0, 2000, (5, 700)).tolist()
    answers = []
    for room in (90, 600):
        config = EngineConfig(
            max_kv_size=512,
            keep=4,
            max_batched_tokens=128,
            memory_limit_bytes=mx.get_active_memory() + (room << 20),
        )
        core = Core(model, config)
        answers.append([])
        out = queue.SimpleQueue()
        params = SamplingParams(max_tokens=6, ignore_eos=True)
        requests = [
            Request(id=f"r{i}", prompt_ids=tuple(ids), params=params)
            for i, ids in enumerate(prompts)
        ]
        core.admit(requests, out, 0.0)
        while core.busy:
            core.advance()
        got = [out.get() for _ in range(out.qsize())]
        assert not any(o.error for o in got)
        answers[-1] = [[o.token_id for o in got if o.request_id == r.id] for r in requests]
        pages = core.storage.limits[1]
        assert (pages < 32 * 8) == (room == 90)
    assert answers[0] == answers[1]
