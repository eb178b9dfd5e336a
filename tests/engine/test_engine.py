"""The engine on tiny models in float32: chunked = whole = transformers, batched = solo, bounded."""

import queue

import mlx.core as mx
import numpy as np
import pytest
import torch

from mlxserve import memory
from mlxserve.config import EngineConfig
from mlxserve.engine.core import Core
from mlxserve.engine.engine import Engine
from mlxserve.errors import EngineDead, InvariantError, ModelError, RequestError
from mlxserve.kernels import registry
from mlxserve.models.load import load_model
from mlxserve.types import Request, SamplingParams
from tests.support.caches import KINDS, Asked, Run
from tests.support.tiny import (
    VOCAB_SIZE,
    prompt,
    reference_logits,
    tiny_gemma3,
    tiny_llama,
    tiny_mistral,
)

LONG = {"max_position_embeddings": 2048}
MODELS = {
    "llama": lambda: tiny_llama(**LONG),
    "mistral": lambda: tiny_mistral(**LONG),
    "gemma3": lambda: tiny_gemma3(**LONG),
    "wide window": lambda: tiny_mistral(sliding_window=100, **LONG),
}
CHUNKS = [7, 64, 100, 1000]


@pytest.fixture(scope="module", params=MODELS, name="tiny")
def tiny_model(request):
    return MODELS[request.param]()


def start(tiny, **config):
    return Engine(
        lambda: load_model(tiny.config, dict(tiny.weights)),
        EngineConfig(**{"max_batch": 4, **config}),
    )


def request(ids, name="r", score=False, prompt_logprobs=None, stop_ids=(), **params):
    return Request(
        id=name,
        prompt_ids=tuple(int(i) for i in ids),
        params=SamplingParams(**params),
        stop_ids=frozenset(stop_ids),
        score=score,
        prompt_logprobs=prompt_logprobs,
    )


def collect(engine, requests):
    """Run requests together; all deliveries by request id."""
    out, got, left = queue.SimpleQueue(), {r.id: [] for r in requests}, len(requests)
    engine.submit(requests, out)
    while left:
        delivery = out.get(timeout=120)
        got[delivery.request_id].append(delivery)
        left -= delivery.last
    return got


def tokens(deliveries):
    return [d.token_id for d in deliveries if d.token_id is not None]


def run(tiny, requests, **config):
    engine = start(tiny, **config)
    try:
        return collect(engine, requests)
    finally:
        engine.close()


def score(tiny, ids, **config):
    got = run(tiny, [request(ids, score=True)], **config)["r"]
    return np.concatenate([d.prompt_logits for d in got])


def echoed(deliveries):
    return [found for d in deliveries for found in d.prompt_logprobs]


def log_softmax(logits):
    x = logits.astype(np.float64)
    x -= x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def continue_by_reference(tiny, ids, n):
    """Greedy continuation by transformers, recomputing the whole text for each token."""
    ids = torch.tensor([[int(i) for i in ids]])
    with torch.no_grad():
        for _ in range(n):
            best = tiny.reference(ids, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)
            ids = torch.cat([ids, best], dim=1)
    return ids[0, -n:].tolist()


@pytest.mark.full
def test_logits_equal_transformers_at_every_position(tiny):
    ids = prompt(200)
    difference = np.abs(score(tiny, ids) - reference_logits(tiny.reference, ids))
    assert difference.max() < 2e-3


@pytest.mark.full
def test_greedy_continuation_equals_transformers_across_pages_and_windows(tiny):
    ids = prompt(60)
    got = run(tiny, [request(ids, max_tokens=80)])["r"]
    assert tokens(got) == continue_by_reference(tiny, ids, 80)


@pytest.mark.full
def test_chunk_size_changes_no_bit(tiny):
    """Prompt of 300, 40 new tokens; the likeliest 20 logprobs of each are compared bit for bit."""
    ids, runs = prompt(300), []
    for chunk in CHUNKS:
        asked = request(ids, max_tokens=40, top_logprobs=20)
        got = run(tiny, [asked], max_batched_tokens=chunk)["r"]
        runs.append([(d.token_id, d.logprob) for d in got])
    assert all(r == runs[0] for r in runs[1:])


@pytest.mark.full
def test_token_by_token_equals_the_whole_prompt_bit_for_bit(tiny):
    ids = prompt(150)
    whole = score(tiny, ids, max_batched_tokens=1000)
    single = score(tiny, ids, max_batched_tokens=1, max_batch=1)
    assert np.array_equal(whole, single)


@pytest.mark.full
def test_sixteen_together_give_what_each_gives_alone(tiny):
    rng = np.random.default_rng(0)
    prompts = [prompt(int(rng.integers(1, 200)), seed=i) for i in range(16)]
    requests = [request(p, f"r{i}", max_tokens=30) for i, p in enumerate(prompts)]
    together = run(tiny, requests, max_batch=16, max_batched_tokens=50)
    engine = start(tiny)
    alone = {r.id: collect(engine, [r])[r.id] for r in requests}
    engine.close()
    assert {k: tokens(v) for k, v in together.items()} == {k: tokens(v) for k, v in alone.items()}


@pytest.mark.full
def test_a_seeded_row_draws_the_same_alone_and_in_any_batch():
    tiny = tiny_llama(**LONG)
    params = {"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.1, "max_tokens": 30}
    rows = [request(prompt(20 + i, seed=i), f"r{i}", seed=i, **params) for i in range(6)]
    others = [request(prompt(9, seed=50), "other", temperature=1.0), request([1], "greedy")]
    engine = start(tiny, max_batch=8)
    together = collect(engine, rows + others)
    for row in rows:
        assert tokens(collect(engine, [row])[row.id]) == tokens(together[row.id])
    engine.close()


@pytest.mark.full
def test_unseeded_rows_differ_from_one_another():
    rows = [request([1, 2, 3], f"r{i}", temperature=1.5, max_tokens=20) for i in range(4)]
    got = run(tiny_llama(**LONG), rows)
    assert len({tuple(tokens(d)) for d in got.values()}) == 4


@pytest.mark.full
def test_preempted_and_computed_again_gives_the_same_tokens(monkeypatch):
    """A cache too small for all: with little memory the newest start over, and no token changes."""
    tiny = tiny_llama(**LONG)
    rows = [request(prompt(100, seed=i), f"r{i}", max_tokens=150) for i in range(4)]
    expected = run(tiny, rows)
    model = load_model(tiny.config, dict(tiny.weights))
    core = Core(model, EngineConfig(max_batch=4), pool_pages=8)
    out = queue.SimpleQueue()
    core.admit(rows, out, 0.0)
    while core.busy:
        core.advance()
        core.check_integrity()
    assert core.stats.preemptions > 0
    got = {r.id: [] for r in rows}
    while not out.empty():
        delivery = out.get()
        got[delivery.request_id].append(delivery.token_id)
    assert got == {name: tokens(deliveries) for name, deliveries in expected.items()}


def test_requests_join_and_leave_at_any_step():
    tiny = tiny_llama(**LONG)
    engine = start(tiny, max_batch=3, max_batched_tokens=40)
    out = queue.SimpleQueue()
    rows = [request(prompt(50, seed=i), f"r{i}", max_tokens=10 + i) for i in range(8)]
    got, ended = {r.id: [] for r in rows}, 0
    engine.submit(rows[:1], out)
    submitted = 1
    while ended < len(rows):
        delivery = out.get(timeout=60)
        got[delivery.request_id].append(delivery.token_id)
        ended += delivery.last
        if submitted < len(rows):
            engine.submit([rows[submitted]], out)
            submitted += 1
    engine.close()
    expected = run(tiny, rows)
    assert got == {name: tokens(deliveries) for name, deliveries in expected.items()}


def test_a_cancelled_request_ends_and_frees_its_pages():
    engine = start(tiny_llama(**LONG))
    out = queue.SimpleQueue()
    engine.submit([request(prompt(100), max_tokens=None)], out)
    out.get(timeout=60)
    engine.abort(["r", "unknown"])
    while not (last := out.get(timeout=60)).last:
        pass
    assert last.finish_reason == "cancelled"
    collect(engine, [request([1], "next", max_tokens=2)])
    engine.close()
    assert (engine.stats.pages_used, engine.stats.running) == (0, 0)


def test_an_end_token_stops_and_is_delivered():
    tiny = tiny_llama(**LONG)
    free = tokens(run(tiny, [request([5, 6], max_tokens=20)])["r"])
    end = free[7]
    got = run(tiny, [request([5, 6], max_tokens=20, stop_ids=[end])])["r"]
    assert tokens(got) == free[: free.index(end) + 1]
    assert got[-1].finish_reason == "stop"


@pytest.mark.full
def test_logprobs_equal_transformers():
    tiny, ids = tiny_llama(**LONG), prompt(50)
    got = run(tiny, [request(ids, max_tokens=5, top_logprobs=3)])["r"]
    text = np.concatenate([ids, tokens(got)])
    exact = torch.log_softmax(torch.from_numpy(reference_logits(tiny.reference, text)), -1)
    for i, delivery in enumerate(got):
        row = exact[49 + i].numpy()
        assert abs(delivery.logprob.logprob - row[delivery.token_id]) < 1e-3
        assert [t for t, _ in delivery.logprob.top] == np.argsort(-row)[:3].tolist()


@pytest.mark.full
def test_prompt_logprobs_are_the_log_softmax_of_the_logits(tiny):
    ids = prompt(200)
    got = echoed(run(tiny, [request(ids, score=True, prompt_logprobs=4)])["r"])
    exact = log_softmax(score(tiny, ids))[:-1]
    reference = log_softmax(reference_logits(tiny.reference, ids))[:-1]
    order = np.argsort(-exact, axis=-1, kind="stable")[:, :4]
    assert [found.token_id for found in got] == ids[1:].tolist()
    values = np.array([found.logprob for found in got])
    np.testing.assert_allclose(values, exact[range(199), ids[1:]], atol=5e-6)
    np.testing.assert_allclose(values, reference[range(199), ids[1:]], atol=2e-3)
    assert [[token for token, _ in found.top] for found in got] == order.tolist()
    top = np.array([[value for _, value in found.top] for found in got])
    np.testing.assert_allclose(top, np.take_along_axis(exact, order, -1), atol=5e-6)


@pytest.mark.full
def test_an_echo_precedes_the_answer_and_changes_neither():
    """Chunks and blocks of any size, alone and with others, give the same bits."""
    tiny, ids = tiny_llama(**LONG), prompt(150)
    plain = run(tiny, [request(ids, max_tokens=9, top_logprobs=2)])["r"]
    read = echoed(run(tiny, [request(ids, score=True, prompt_logprobs=3)])["r"])
    both = request(ids, prompt_logprobs=3, max_tokens=9, top_logprobs=2)
    others = [request(prompt(60), "a", max_tokens=40), request(prompt(90), "b", score=True)]
    for rows, chunk in (([both], 7), ([both], 64), ([both, *others], 50), ([both], 1000)):
        got = run(tiny, rows, max_batched_tokens=chunk)["r"]
        assert echoed(got) == read
        answer = [(d.token_id, d.logprob) for d in got if d.token_id is not None]
        assert answer == [(d.token_id, d.logprob) for d in plain]
        assert got[-1].usage.completion_tokens == 9


@pytest.mark.full
@pytest.mark.parametrize("block_rows", [1, 7, 64])
def test_the_size_of_a_block_changes_no_bit(monkeypatch, block_rows):
    tiny, ids = tiny_llama(**LONG), prompt(150)
    asked = request(ids, score=True, prompt_logprobs=3)
    whole = echoed(run(tiny, [asked])["r"])
    monkeypatch.setattr(memory, "READ_BYTES", 4 * VOCAB_SIZE * 5 * block_rows)
    assert echoed(run(tiny, [asked])["r"]) == whole


@pytest.mark.full
def test_an_echo_that_starts_over_gives_each_position_once():
    tiny = tiny_llama(**LONG)
    rows = [
        request(prompt(100, seed=i), f"r{i}", prompt_logprobs=2, max_tokens=150) for i in range(4)
    ]
    expected = run(tiny, rows)
    core = Core(
        load_model(tiny.config, dict(tiny.weights)), EngineConfig(max_batch=4), pool_pages=8
    )
    out, got = queue.SimpleQueue(), {r.id: [] for r in rows}
    core.admit(rows, out, 0.0)
    while core.busy:
        core.advance()
    assert core.stats.preemptions > 0
    while not out.empty():
        delivery = out.get()
        got[delivery.request_id].append(delivery)
    for name in got:
        assert echoed(got[name]) == echoed(expected[name])
        assert tokens(got[name]) == tokens(expected[name])


@pytest.mark.full
def test_reading_a_text_holds_no_logits_of_a_large_vocabulary(monkeypatch):
    """Of 600 tokens over 50,000 they would take 120 MB; those of a block, all in all, take 16."""
    tiny = tiny_llama(vocab_size=50_000, hidden_size=16, **LONG)
    block = 16 << 20
    monkeypatch.setattr(memory, "READ_BYTES", block)
    core = Core(load_model(tiny.config, dict(tiny.weights)), EngineConfig(max_batch=4))
    core.storage.grow(core.manager.hot.pages, 16, 1)
    out = queue.SimpleQueue()
    core.admit([request(prompt(600), score=True, prompt_logprobs=2)], out, 0.0)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    while core.busy:
        core.advance()
    assert len(echoed([out.get() for _ in range(out.qsize())])) == 599
    assert mx.get_peak_memory() - before < 1.25 * block


@pytest.mark.full
def test_decoding_writes_the_cache_in_place():
    """A large cache and a short text: if a step held on to a layer's pages, a copy would show."""
    tiny = tiny_llama(num_key_value_heads=4, head_dim=64, **LONG)
    core = Core(load_model(tiny.config, dict(tiny.weights)), EngineConfig(max_batch=4))
    core.storage.grow(core.manager.hot.pages, 128, 1)
    core.admit([request(prompt(40), max_tokens=None)], queue.SimpleQueue(), 0.0)
    core.advance()
    layer = core.storage.pool[0][0].nbytes
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    for _ in range(200):
        core.advance()
    assert core.stats.pages_used == 3
    assert mx.get_peak_memory() - before < 0.5 * layer


@pytest.mark.full
@pytest.mark.skipif(
    registry.native("attention") is None,
    reason="only on machines with native kernels: the reference gathers the pages",
)
def test_a_long_prompt_writes_the_cache_in_place():
    """Its steps sample nothing. One that begins before the last is done would copy the pages."""
    tiny = tiny_llama(num_key_value_heads=4, head_dim=64, **LONG)
    model = load_model(tiny.config, dict(tiny.weights))
    core = Core(model, EngineConfig(max_batch=4, max_batched_tokens=32))
    core.storage.grow(core.manager.hot.pages, 128, 1)
    core.admit([request(prompt(1500), max_tokens=1)], queue.SimpleQueue(), 0.0)
    core.advance()
    layer = core.storage.pool[0][0].nbytes
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    while core.busy:
        core.advance()
    assert mx.get_peak_memory() - before < 0.5 * layer


@pytest.mark.full
def test_storage_may_grow_in_the_very_step_that_ends_the_last_request():
    tiny = tiny_llama(**LONG)
    for tokens_of_prompt, new in ((500, 13), (449, 64), (1000, 25)):
        core = Core(load_model(tiny.config, dict(tiny.weights)), EngineConfig())
        out = queue.SimpleQueue()
        core.admit([request(prompt(tokens_of_prompt), max_tokens=new)], out, 0.0)
        while core.busy:
            core.advance()
        assert out.qsize() == new


@pytest.mark.full
def test_logits_that_are_not_numbers_end_the_answer_with_a_reason():
    tiny = tiny_llama(**LONG)
    tiny.weights["model.norm.weight"] = mx.array(np.full(64, np.nan, np.float32))
    got = run(tiny, [request([1, 2], max_tokens=5), request([3], "s", temperature=1.0)])
    got |= run(tiny, [request([1, 2, 3], "scored", score=True)])
    got |= run(tiny, [request([1, 2, 3], "read", score=True, prompt_logprobs=0)])
    got |= run(tiny, [request([1, 2, 3], "echoed", prompt_logprobs=2)], max_batched_tokens=4)
    for deliveries in got.values():
        assert isinstance(deliveries[-1].error, ModelError)
        assert "aren't finite numbers" in str(deliveries[-1].error)


@pytest.mark.full
def test_storage_grows_with_the_text_and_no_token_changes():
    """A long answer doubles the arrays on its way; with room from the start it is the same."""
    tiny = tiny_llama(**LONG)
    asked = request(prompt(30), max_tokens=700, stop_ids=[])
    answers, sizes = [], []
    for roomy in (False, True):
        core = Core(load_model(tiny.config, dict(tiny.weights)), EngineConfig(max_batch=4))
        if roomy:
            core.storage.grow(core.manager.hot.pages, core.manager.pools[0].pages, 1)
        sizes.append(core.storage.nbytes)
        out = queue.SimpleQueue()
        core.admit([asked], out, 0.0)
        while core.busy:
            core.advance()
        sizes.append(core.storage.nbytes)
        answers.append([out.get().token_id for _ in range(out.qsize())])
    assert answers[0] == answers[1]
    assert sizes[0] < sizes[1] < sizes[2] == sizes[3]


class Failing:
    """A model that fails in its nth call; the 0th, of the engine as it starts, computes nothing."""

    def __init__(self, model, error, call):
        self._model, self._error, self._call, self.calls = model, error, call, -1
        self.named_modules = model.named_modules
        self.vocab_size, self.dtype = model.vocab_size, model.dtype
        self.context_tokens = model.context_tokens
        self.layer_specs, self.logits = model.layer_specs, model.logits
        self.own_layers = model.own_layers

    def __call__(self, ids, view):
        self.calls += 1
        if self.calls == self._call:
            raise self._error
        return self._model(ids, view)


def start_failing(error, call):
    tiny = tiny_llama(**LONG)
    model = load_model(tiny.config, dict(tiny.weights))
    return Engine(lambda: Failing(model, error, call), EngineConfig(max_batch=2)), tiny


def test_a_failed_step_ends_its_requests_and_the_next_are_served():
    engine, tiny = start_failing(RuntimeError("out of device memory"), call=3)
    failed = collect(engine, [request([1, 2], "a"), request([3], "b")])
    for name in "ab":
        error = failed[name][-1].error
        assert isinstance(error, ModelError)
        assert "out of device memory" in str(error)
    after = collect(engine, [request([5, 6], "c", max_tokens=10)])["c"]
    engine.close()
    assert tokens(after) == tokens(run(tiny, [request([5, 6], max_tokens=10)])["r"])


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_after_a_failed_step_a_step_of_nobodys_shows_whether_any_works(kind, monkeypatch):
    asked = Asked((3, 1, 4, 1, 5, 9, 2, 6), 3, "greedy")
    run, broken = Run(kind, 8), []
    build = run.core.runner.build

    def failing(plan, last):
        broken.append(plan)
        if len(broken) in (2, 4, 5):
            raise RuntimeError("the device is gone")
        return build(plan, last)

    monkeypatch.setattr(run.core.runner, "build", failing)
    run.submit(asked)
    with pytest.raises(ModelError, match="the step failed"):
        run.step(3)
    assert len(broken) == 3  # the last was nobody's
    run.core.check_integrity()
    assert not run.core.busy
    run.submit(asked)
    with pytest.raises(RuntimeError, match="the device is gone"):  # and so was this one
        run.step(3)
    assert len(broken) == 5


@pytest.mark.full
def test_a_failed_step_leaves_those_it_had_just_preempted_unharmed():
    """One of them waits with a token in flight that is lost; it is drawn again."""
    tiny = tiny_llama(**LONG)
    rows = [request(prompt(100, seed=i), f"r{i}", max_tokens=60) for i in range(4)]
    expected = run(tiny, rows)
    model = load_model(tiny.config, dict(tiny.weights))
    preempting = None
    for attempt in range(2):  # first to find the step that preempts, then to fail in it
        failing = Failing(model, RuntimeError("boom"), call=preempting)
        core = Core(failing, EngineConfig(max_batch=4), pool_pages=8)
        out = queue.SimpleQueue()
        core.admit(rows, out, 0.0)
        while core.busy and not (attempt == 0 and core.scheduler.counts.preemptions):
            core.advance()
        preempting = failing.calls
    got = {r.id: [] for r in rows}
    while not out.empty():
        delivery = out.get()
        got[delivery.request_id].append(delivery)
    failed = {name for name, deliveries in got.items() if deliveries[-1].error}
    assert 0 < len(failed) < 4
    for name in got.keys() - failed:
        assert tokens(got[name]) == tokens(expected[name])
    assert all("boom" in str(got[name][-1].error) for name in failed)


@pytest.mark.full
def test_an_id_that_is_in_use_is_refused():
    engine = start(tiny_llama(**LONG))
    first, second = queue.SimpleQueue(), queue.SimpleQueue()
    engine.submit([request([1], "same", max_tokens=None)], first)
    engine.submit([request([2], "same")], second)
    assert "'same' is in use" in str(second.get(timeout=60).error)
    assert first.get(timeout=60).error is None
    engine.close()


@pytest.mark.full
def test_an_error_that_is_kept_keeps_no_arrays():
    before = mx.get_active_memory()
    engine, _ = start_failing(InvariantError("broken"), call=2)
    kept = collect(engine, [request([1])])["r"][-1].error
    engine.close()
    assert "broken" in str(kept)
    assert mx.get_active_memory() - before < 1_000_000


def test_a_dead_engine_says_so_to_everyone():
    engine, _ = start_failing(InvariantError("page 3 was freed twice"), call=3)
    got = collect(engine, [request([1], "running"), request([2], "waiting")])
    for deliveries in got.values():
        assert isinstance(deliveries[-1].error, EngineDead)
        assert "page 3 was freed twice" in str(deliveries[-1].error)
    with pytest.raises(EngineDead, match=r"page 3 was freed twice.*load the model again"):
        engine.submit([request([1])], queue.SimpleQueue())
    engine.close()


@pytest.mark.full
def test_closing_ends_what_runs():
    engine = start(tiny_llama(**LONG))
    out = queue.SimpleQueue()
    engine.submit([request([1], max_tokens=None)], out)
    out.get(timeout=60)
    engine.close()
    while not (last := out.get(timeout=60)).last:
        pass
    assert isinstance(last.error, EngineDead)
    with pytest.raises(EngineDead, match="it was closed"):
        engine.submit([request([1])], queue.SimpleQueue())


@pytest.mark.full
def test_what_loading_raises_is_raised_here():
    def load():
        raise ModelError("no such model")

    with pytest.raises(ModelError, match="no such model"):
        Engine(load, EngineConfig())


def test_a_bad_request_among_good_ones_queues_none():
    engine = start(tiny_llama(**LONG))
    out = queue.SimpleQueue()
    with pytest.raises(RequestError, match=f"{VOCAB_SIZE} is out of range"):
        engine.submit([request([1], "good"), request([VOCAB_SIZE], "bad")], out)
    with pytest.raises(RequestError, match="2048 tokens, and this model can take 2047"):
        engine.submit([request([1] * 2048)], out)
    collect(engine, [request([1], "next", max_tokens=1)])
    engine.close()
    assert out.empty()
