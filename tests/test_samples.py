"""Several answers to a prompt: `n` and `best_of`."""

import queue

import numpy as np
import pytest

import mlxserve
from mlxserve.config import EngineConfig
from mlxserve.engine.core import Core
from mlxserve.models.load import load_model
from mlxserve.types import Request, SamplingParams
from tests.support.tiny import prompt, tiny_llama

PROMPT = "The quick brown fox jumps over the lazy dog. " * 4  # 180 tokens: two whole pages
DRAW = {"temperature": 1.0, "seed": 7, "max_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def llm(tiny_model_dir):
    with mlxserve.load(tiny_model_dir, max_batch=3) as model:
        yield model


def tokens(completions):
    return [completion.token_ids for completion in completions]


def test_one_prompt_gets_a_list_and_several_a_list_of_lists(llm):
    one = llm.generate(PROMPT, n=2, **DRAW)
    several = llm.generate([PROMPT, "Hello", PROMPT], n=2, **DRAW)
    assert len(one) == 2
    assert [len(answers) for answers in several] == [2, 2, 2]
    assert tokens(several[0]) == tokens(several[2]) == tokens(one)
    assert mlxserve.generate(llm, PROMPT, n=1, **DRAW).token_ids == one[0].token_ids


def test_samples_are_what_their_seeds_give_alone(llm, tiny_model_dir):
    """With more of them than rows, and each from the whole prompt or from the shared pages."""
    got = llm.generate(PROMPT, n=5, **DRAW)
    assert len(set(tokens(got))) == 5
    with mlxserve.load(tiny_model_dir, prefix_cache=False) as apart:
        alone = [apart.generate(PROMPT, **{**DRAW, "seed": 7 + i}) for i in range(5)]
    assert tokens(got) == tokens(alone)
    assert [answer.text for answer in got] == [answer.text for answer in alone]


def test_seeds_go_round(llm):
    end = llm.generate(PROMPT, n=2, **{**DRAW, "seed": 2**64 - 1})
    assert end[1].token_ids == llm.generate(PROMPT, **{**DRAW, "seed": 0}).token_ids


def test_without_a_seed_samples_differ_too(llm):
    assert len(set(tokens(llm.generate(PROMPT, n=3, **{**DRAW, "seed": None})))) == 3


def test_the_prompt_is_computed_once(tiny_model_dir):
    with mlxserve.load(tiny_model_dir) as llm:
        got = llm.generate(PROMPT, n=4, **DRAW)
        cached = [answer.usage.cached_tokens for answer in got]
        assert cached[0] == 0
        assert min(cached[1:]) >= 128
        assert llm.stats().cached_tokens == sum(cached)


def test_the_prompts_pages_are_held_once():
    tiny = tiny_llama(max_position_embeddings=2048)
    core = Core(load_model(tiny.config, dict(tiny.weights)), EngineConfig(max_batch=4))
    params = SamplingParams(temperature=1.0, n=4, seed=1, max_tokens=50)
    ids = tuple(prompt(640).tolist())  # 10 pages
    requests = [Request(id=str(i), prompt_ids=ids, params=params.sample(i)) for i in range(4)]
    core.admit(requests, queue.SimpleQueue(), 0.0)
    most = running = 0
    while core.busy:
        core.advance()
        most, running = max(most, core.stats.pages_used), max(running, core.stats.running)
    assert running == 4
    assert 10 <= most <= 10 + 4  # each may have reserved the one that it writes


@pytest.mark.parametrize("stop", [(), ("e",)])
def test_best_of_keeps_the_likeliest(llm, stop):
    how = {**DRAW, "temperature": 2.0, "ignore_eos": not stop, "stop": stop}
    drawn = llm.generate(PROMPT, n=6, logprobs=True, **how)
    means = [np.mean([token.logprob for token in answer.logprobs]) for answer in drawn]
    best = np.argsort(means)[::-1]
    assert best.tolist() != list(range(6))
    for n in (1, 2, 6):
        got = llm.generate(PROMPT, n=n, best_of=6, **how)
        got = [got] if n == 1 else got
        assert tokens(got) == [drawn[i].token_ids for i in best[:n]]
        assert [answer.text for answer in got] == [drawn[i].text for i in best[:n]]
        assert all(answer.logprobs is None for answer in got)
    (kept,) = llm.generate([PROMPT], best_of=6, logprobs=True, **how)
    assert np.mean([token.logprob for token in kept.logprobs]) == max(means)
