"""The scheduler against a cache of dictionaries: every query finds exactly its own tokens."""

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxserve.cache.manager import CacheManager, group_layers
from mlxserve.cache.spec import FullKV, WindowKV
from mlxserve.engine.scheduler import ChunkResult, Scheduler
from mlxserve.types import Request, SamplingParams, Sequence
from tests.support.paging import PaperCache

EOS = 7


def make(pages=100, hot=80, window=None, max_batch=32, max_batched_tokens=512):
    specs = [FullKV(1, 4)] + ([WindowKV(1, 4, window)] if window else [])
    groups = group_layers(specs)
    manager = CacheManager(groups, hot_pages=hot, pool_pages=[pages] * len(groups))
    return Scheduler(manager, max_batch, max_batched_tokens)


def sequence(name, prompt, max_tokens=10, score=False, context=100_000):
    request = Request(
        id=name,
        prompt_ids=tuple(range(10, 10 + prompt)),
        params=SamplingParams(max_tokens=max_tokens),
        stop_ids=frozenset({EOS}),
        score=score,
    )
    return Sequence.start(request, context, time.perf_counter())


def drive(scheduler, *, ahead=True, draw=lambda seq: 5, after_step=lambda n: None):
    """Run to the end as the engine does, one step built ahead. Returns outputs by request."""
    cache, outputs, flight, steps = PaperCache(scheduler.manager), {}, None, 0

    def finish(plan):
        results = [
            ChunkResult(token_id=draw(c.seq))
            if c.samples
            else ChunkResult(
                prompt_logits=list(range(c.start, c.start + c.n)) if c.seq.request.score else None
            )
            for c in plan.chunks
        ]
        for out in scheduler.commit(plan, results):
            outputs.setdefault(out.request_id, []).append(out)

    while scheduler.busy or flight:
        if not ahead and flight:
            finish(flight)
            flight = None
        plan = scheduler.schedule()
        assert plan or flight or not scheduler.busy, "nothing to do, and yet busy"
        if plan:
            assert plan.tokens <= scheduler.max_batched_tokens
            assert len(plan.chunks) <= scheduler.max_batch
            cache.apply(plan)
        scheduler.check_integrity()
        if flight:
            finish(flight)
        flight = plan
        steps += 1
        after_step(steps)
        scheduler.check_integrity()
    return outputs


def test_a_prompt_is_cut_to_the_budget_and_then_decoded():
    scheduler = make(max_batched_tokens=100)
    scheduler.add(sequence("a", 250, max_tokens=3))
    sizes = []
    while plan := scheduler.schedule():
        sizes.append([(c.start, c.n, c.samples) for c in plan.chunks])
        scheduler.commit(plan, [ChunkResult(5 if c.samples else None) for c in plan.chunks])
    assert sizes == [
        [(0, 100, False)],
        [(100, 100, False)],
        [(200, 50, True)],
        [(250, 1, True)],
        [(251, 1, True)],
    ]


def test_running_answers_come_before_a_long_prompt():
    scheduler = make(max_batched_tokens=64)
    scheduler.add(sequence("short", 10))
    plan = scheduler.schedule()
    scheduler.commit(plan, [ChunkResult(5)])
    scheduler.add(sequence("long", 1000))
    plan = scheduler.schedule()
    assert [(c.seq.request.id, c.n) for c in plan.chunks] == [("short", 1), ("long", 63)]


@pytest.mark.parametrize("ahead", [True, False])
def test_an_end_token_ends_the_answer_and_its_pages_are_free(ahead):
    scheduler = make()
    scheduler.add(sequence("a", 130, max_tokens=50))
    count = iter([1, 2, 3, EOS, 9, 9, 9])
    outputs = drive(scheduler, ahead=ahead, draw=lambda seq: next(count))["a"]
    assert [out.token_id for out in outputs] == [1, 2, 3, EOS]
    assert outputs[-1].finish_reason == "stop"
    assert scheduler.manager.hot.used == scheduler.manager.pools[0].used == 0


def test_an_answer_ends_at_max_tokens_or_where_the_context_does():
    scheduler = make()
    scheduler.add(sequence("few", 10, max_tokens=4))
    scheduler.add(sequence("context", 10, max_tokens=None, context=16))
    outputs = drive(scheduler)
    assert [len(outputs[name]) for name in ("few", "context")] == [4, 6]
    assert {outputs[name][-1].finish_reason for name in outputs} == {"length"}


def test_out_of_pages_the_newest_is_preempted_and_the_oldest_never():
    scheduler = make(pages=10, max_batched_tokens=128)
    for name in "abc":
        scheduler.add(sequence(name, 120, max_tokens=300))
    finished = []

    def note(_):
        for name in "abc":
            if name not in finished and all(
                name != s.request.id for s in (*scheduler.running, *scheduler.waiting)
            ):
                finished.append(name)

    outputs = drive(scheduler, after_step=note)
    assert finished == ["a", "b", "c"]
    assert scheduler.preemptions > 0
    assert all(len(outputs[name]) == 300 for name in "abc")


def test_a_lone_request_that_fits_completes():
    scheduler = make(pages=4, max_batched_tokens=512)
    longest = scheduler.manager.tokens_at_most()
    scheduler.add(sequence("a", longest - 30, max_tokens=None, context=longest))
    assert len(drive(scheduler)["a"]) == 30
    assert scheduler.preemptions == 0


def test_a_scored_request_delivers_every_position_and_draws_nothing():
    scheduler = make(max_batched_tokens=100)
    scheduler.add(sequence("s", 230, score=True))
    scheduler.add(sequence("a", 5))
    outputs = drive(scheduler)["s"]
    assert [p for out in outputs for p in out.prompt_logits] == list(range(230))
    assert outputs[-1].finish_reason == "stop"
    assert all(out.token_id is None for out in outputs)


def test_scored_requests_that_start_over_deliver_each_position_once():
    scheduler = make(pages=12, max_batched_tokens=512)
    for name, prompt in (("s1", 700), ("s2", 500)):
        scheduler.add(sequence(name, prompt, score=True))
    outputs = drive(scheduler)
    assert scheduler.preemptions > 0
    for name, prompt in (("s1", 700), ("s2", 500)):
        assert [p for out in outputs[name] for p in out.prompt_logits] == list(range(prompt))


@pytest.mark.parametrize("step", [1, 2, 3, 5])
def test_aborting_at_any_step_frees_everything(step):
    scheduler = make(max_batched_tokens=64)
    seqs = [sequence(name, 100, max_tokens=20) for name in "ab"]
    for seq in seqs:
        scheduler.add(seq)
    drive(scheduler, after_step=lambda n: n == step and scheduler.abort(seqs[0]))
    assert scheduler.manager.hot.used == scheduler.manager.pools[0].used == 0


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    window=st.sampled_from([None, 1, 8, 63, 64, 65, 130]),
    pages=st.integers(9, 60),
    budget=st.sampled_from([8, 64, 100, 500]),
    ahead=st.booleans(),
)
def test_every_query_finds_its_own_tokens_whatever_happens(seed, window, pages, budget, ahead):
    """Random prompts, ends, joins and aborts, with pages running out."""
    rng = random.Random(seed)
    scheduler = make(pages, 40, window, max_batch=6, max_batched_tokens=budget)
    limit = scheduler.manager.tokens_at_most()
    seqs = []

    def join(step):
        while len(seqs) < 12 and (step == 0 or rng.random() < 0.3):
            prompt = rng.randint(1, min(300, limit - 1))
            seqs.append(
                sequence(f"r{len(seqs)}", prompt, rng.choice([1, 2, 70, 200]), context=limit)
            )
            scheduler.add(seqs[-1])
            if step == 0 and len(seqs) == 3:
                break
        open_seqs = [*scheduler.running, *scheduler.waiting]
        if open_seqs and rng.random() < 0.05:
            scheduler.abort(rng.choice(open_seqs))

    join(0)
    drive(
        scheduler,
        ahead=ahead,
        draw=lambda seq: EOS if rng.random() < 0.02 else rng.randint(10, 99),
        after_step=join,
    )
    assert all(seq.finished for seq in seqs)
    assert scheduler.manager.hot.used == 0
    assert all(pool.used == 0 for pool in scheduler.manager.pools)
