"""The scheduler against a cache of dictionaries: every query finds exactly its own tokens.

Whatever else callers may do is in tests/cache/test_fuzz.py.
"""

import time

import pytest

from mlxserve.cache.groups import group_layers
from mlxserve.cache.manager import CacheManager
from mlxserve.cache.spec import FullKV, State, WindowKV
from mlxserve.engine.scheduler import ChunkResult, Scheduler
from mlxserve.errors import CapacityError
from mlxserve.sequence import Sequence
from mlxserve.types import Request, SamplingParams
from tests.support.schedules import PaperEngine

EOS = 7


def make(
    pages=100, hot=80, window=None, max_batch=32, max_batched_tokens=512, sharing=False, stages=1
):
    specs = [FullKV(1, 4)] + ([WindowKV(1, 4, window)] if window else [])
    groups = group_layers(specs)
    manager = CacheManager(groups, hot_pages=hot, pool_pages=[pages] * len(groups), sharing=sharing)
    return Scheduler(manager, max_batch, max_batched_tokens, stages=stages)


def sequence(name, prompt, max_tokens=10, score=False, prompt_logprobs=None, context=100_000):
    """A prompt of so many tokens, which no other name's begins like."""
    request = Request(
        id=name,
        prompt_ids=(1000 + ord(name[-1]), *range(10, 9 + prompt)),
        params=SamplingParams(max_tokens=max_tokens),
        stop_ids=frozenset({EOS}),
        score=score,
        prompt_logprobs=prompt_logprobs,
    )
    return Sequence.start(request, context, time.perf_counter())


def drive(scheduler, *, ahead=True, draw=lambda ids: 5, after_step=lambda n: None):
    """Run to the end as the engine does; then everything is free. Returns outputs by request."""
    engine = PaperEngine(scheduler, draw, ahead=ahead)
    while engine.busy:
        engine.step()
        after_step(engine.steps)
    engine.drain()
    return engine.outputs


def hurried(name, at_s, budget_s):
    params = SamplingParams(max_tokens=10)
    request = Request(id=name, prompt_ids=(1, 2), params=params, ttft_budget_s=budget_s)
    return Sequence.start(request, 100, at_s)


def test_who_waited_for_as_long_as_the_first_token_may_take_is_refused():
    scheduler = make(max_batch=1)
    scheduler.add(hurried("runs", at_s=1.0, budget_s=0.5))
    scheduler.schedule(1.0)
    scheduler.add(hurried("long", at_s=1.0, budget_s=9.0))
    scheduler.add(hurried("short", at_s=2.0, budget_s=2.0))
    scheduler.add(sequence("patient", 10))
    assert scheduler.expire(3.9) == []
    (out,) = scheduler.expire(4.5)
    assert out.request_id == "short"
    assert isinstance(out.error, CapacityError)
    assert "it waited for 2.5 s, and the request allows 2 s" in str(out.error)
    assert scheduler.counts.refused == 1
    assert [seq.request.id for seq in scheduler.waiting] == ["long", "patient"]
    assert [out.request_id for out in scheduler.expire(99.0)] == ["long"]  # not the one that runs
    assert [seq.request.id for seq in scheduler.running] == ["runs"]
    scheduler.check_integrity()


def test_who_was_preempted_is_no_longer_in_a_hurry():
    scheduler = make(max_batch=1)
    seq = hurried("a", at_s=1.0, budget_s=0.5)
    scheduler.add(seq)
    scheduler.schedule(1.0)
    scheduler._preempt(seq)
    assert seq in scheduler.waiting
    assert scheduler.expire(99.0) == []


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
    answer = [1, 2, 3, EOS, 9, 9, 9]
    outputs = drive(scheduler, ahead=ahead, draw=lambda ids: answer[len(ids) - 130])["a"]
    assert [out.token_id for out in outputs] == [1, 2, 3, EOS]
    assert outputs[-1].finish_reason == "stop"


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
    assert scheduler.counts.preemptions > 0
    assert all(len(outputs[name]) == 300 for name in "abc")


def test_a_lone_request_that_fits_completes():
    scheduler = make(pages=4, max_batched_tokens=512)
    longest = scheduler.manager.tokens_at_most()
    scheduler.add(sequence("a", longest - 30, max_tokens=None, context=longest))
    assert len(drive(scheduler)["a"]) == 30
    assert scheduler.counts.preemptions == 0


def test_a_scored_request_delivers_every_position_and_draws_nothing():
    scheduler = make(max_batched_tokens=100)
    scheduler.add(sequence("s", 230, score=True))
    scheduler.add(sequence("a", 5))
    outputs = drive(scheduler)["s"]
    assert [p for out in outputs for p in out.prompt_logits] == list(range(230))
    assert outputs[-1].finish_reason == "stop"
    assert all(out.token_id is None for out in outputs)


def test_a_scored_request_that_starts_over_delivers_each_position_once():
    scheduler = make(pages=12, max_batched_tokens=4)
    scheduler.add(sequence("a", 10, max_tokens=300))  # older, and it takes more and more
    scheduler.add(sequence("s", 700, score=True))
    outputs = drive(scheduler)
    assert scheduler.counts.preemptions > 0
    assert [p for out in outputs["s"] for p in out.prompt_logits] == list(range(700))


def predicted(outputs):
    return [p for out in outputs for p in out.prompt_logprobs]


@pytest.mark.parametrize("prompt", [1, 2, 64, 65, 230])
def test_every_prompt_token_but_the_first_is_judged_and_the_last_is_not_computed(prompt):
    scheduler = make(max_batched_tokens=100)
    scheduler.add(sequence("r", prompt, score=True, prompt_logprobs=0))
    scheduler.add(sequence("a", 5))
    outputs = drive(scheduler)["r"]
    assert predicted(outputs) == list(range(1, prompt))
    assert [out.finish_reason for out in outputs] == [None] * (len(outputs) - 1) + ["stop"]
    scheduler.add(seq := sequence("again", prompt, score=True, prompt_logprobs=0))
    most = 0
    while plan := scheduler.schedule():
        most = max(most, seq.computed)
        scheduler.commit(plan, [ChunkResult() for _ in plan.chunks])
    assert most == max(1, prompt - 1)


def test_an_echo_comes_before_the_first_token_or_with_it():
    scheduler = make(max_batched_tokens=100)
    scheduler.add(sequence("e", 230, max_tokens=3, prompt_logprobs=0))
    outputs = drive(scheduler)["e"]
    assert predicted(outputs) == list(range(1, 230))
    assert [(out.token_id, len(out.prompt_logprobs)) for out in outputs] == [
        (None, 100), (None, 100), (5, 29), (5, 0), (5, 0),
    ]  # fmt: skip
    assert outputs[-1].finish_reason == "length"


@pytest.mark.full
@pytest.mark.parametrize("score", [True, False])
@pytest.mark.parametrize("ahead", [True, False])
def test_what_starts_over_judges_each_token_once(score, ahead):
    scheduler = make(pages=12, max_batched_tokens=4)
    scheduler.add(sequence("a", 10, max_tokens=300))  # older, and it takes more and more
    scheduler.add(seq := sequence("r", 650, 40, score=score, prompt_logprobs=0))
    begun_again = []

    def note(_):
        begun_again.append(seq.scored > seq.computed > 0)

    outputs = drive(scheduler, ahead=ahead, after_step=note)["r"]
    assert scheduler.counts.preemptions > 0
    assert any(begun_again), "it lost nothing that had been delivered"
    assert predicted(outputs) == list(range(1, 650))
    assert sum(out.token_id is not None for out in outputs) == (0 if score else 40)
    assert [out.last for out in outputs] == [False] * (len(outputs) - 1) + [True]


def test_an_echo_shares_no_prefix():
    """What the cache has, no step computes, and nothing could be told of it."""
    scheduler = make(sharing=True)
    for i in range(3):
        scheduler.add(sequence(f"e{i}", 200, max_tokens=2, prompt_logprobs=0))
        outputs = drive(scheduler)[f"e{i}"]
        assert predicted(outputs) == list(range(1, 200))
    assert scheduler.counts.prefix_hits == 0


@pytest.mark.parametrize("step", [1, 2, 3, 5])
def test_aborting_at_any_step_frees_everything(step):
    scheduler = make(max_batched_tokens=64)
    seqs = [sequence(name, 100, max_tokens=20) for name in "ab"]
    for seq in seqs:
        scheduler.add(seq)
    drive(scheduler, after_step=lambda n: n == step and scheduler.abort(seqs[0]))
    assert all(seq.finished for seq in seqs)


def test_recurrent_layers_cut_a_prompt_at_page_borders():
    """There a snapshot can be taken; the last chunk ends where the prompt does."""
    groups = group_layers([State(((2,),)), FullKV(1, 4)])
    manager = CacheManager(groups, hot_pages=80, pool_pages=[100], slots=9)
    scheduler = Scheduler(manager, 4, 100)
    scheduler.add(sequence("a", 250, max_tokens=1))
    sizes = []
    while plan := scheduler.schedule():
        sizes += [(c.start, c.n) for c in plan.chunks]
        scheduler.commit(plan, [ChunkResult(5 if c.samples else None) for c in plan.chunks])
    assert sizes == [(0, 64), (64, 64), (128, 64), (192, 58)]


def test_a_step_holds_no_more_than_its_time_allows():
    """On a slow GPU with answers under way: 10 ms a token, and a step may take a second."""
    scheduler = make()
    scheduler.max_step_s = 1.0
    for name in "abc":
        scheduler.add(sequence(name, 2, max_tokens=100))
    scheduler.add(sequence("d", 1000, max_tokens=1))
    sizes = []
    while len(scheduler.waiting) or any(seq.request.id == "d" for seq in scheduler.running):
        plan = scheduler.schedule()
        rows = sum(chunk.n == 1 for chunk in plan.chunks)
        scheduler.pace.observe(plan.tokens, rows, plan.tokens * 0.01)
        scheduler.commit(plan, [ChunkResult(5 if c.samples else None) for c in plan.chunks])
        sizes.append(plan.tokens)
    assert sizes[0] == 64
    assert max(sizes) <= 100
    assert sum(size >= 95 for size in sizes) >= 8
    for seq in list(scheduler.running):
        scheduler.abort(seq)
    scheduler.check_integrity()


def test_stages_of_a_pipeline_have_rows_of_their_own():
    """Each step has part of them, and none whose last token isn't drawn yet."""
    scheduler = make(stages=2)
    for name in "abcde":
        scheduler.add(sequence(name, 1))
    steps = [scheduler.schedule() for _ in range(3)]
    rows = [None if step is None else {c.seq.request.id for c in step.chunks} for step in steps]
    assert rows == [{"a", "b", "c"}, {"d", "e"}, None]
    first = steps[0]
    scheduler.commit(first, [ChunkResult(token_id=5)] * 3)
    following = scheduler.schedule()
    assert {c.seq.request.id for c in following.chunks} == {"a", "b", "c"}


def test_a_pipeline_takes_prompts_in_parts():
    """So that its stages have something to do at once; without one, a step takes all it can."""
    for stages, sizes in ((1, [512, 488]), (2, [125] * 8)):
        scheduler = make(stages=stages)
        scheduler.add(sequence("a", 1000))
        steps = []
        while (plan := scheduler.schedule()) is not None and len(steps) < len(sizes):
            steps.append(plan.tokens)
        assert steps == sizes
