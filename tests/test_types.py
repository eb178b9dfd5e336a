"""Sampling values and requests are checked before work starts; the message names the value."""

import math

import numpy as np
import pytest

from mlxserve import config
from mlxserve.config import EngineConfig
from mlxserve.errors import RequestError
from mlxserve.types import Request, SamplingParams


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": -0.1}, "temperature is -0.1; it must be between 0 and 100"),
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"temperature": True}, "temperature is True"),
        ({"top_p": math.inf}, "top_p is inf"),
        ({"top_p": 0.0}, "top_p is 0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"min_p": -1}, "min_p is -1"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_k": 2.5}, "top_k is 2.5"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0"),
        ({"presence_penalty": math.nan}, "presence_penalty is nan"),
        ({"frequency_penalty": "a"}, "frequency_penalty is 'a'"),
        ({"logit_bias": {3: math.nan}}, r"logit_bias\[3\] is nan"),
        ({"logit_bias": {-3: 1.0}}, "a logit_bias token id is -3"),
        ({"max_tokens": 0}, "max_tokens is 0; it must be at least 1"),
        ({"max_tokens": 3, "min_tokens": 4}, r"min_tokens \(4\) is more than max_tokens \(3\)"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**64}, "seed is 18446744073709551616"),
        ({"stop": ["", "a"]}, "stop string ''"),
        ({"stop": [5]}, "stop string 5"),
        ({"stop": ["x"] * 17}, "17 stop strings; at most 16"),
        ({"stop_token_ids": [-1]}, "a stop token id is -1"),
        ({"stop_token_ids": 7}, "stop_token_ids is 7; it must be a list"),
        ({"stop": 5}, "stop is 5; it must be a list"),
        ({"logit_bias": [1]}, r"logit_bias is \[1\]; it must map"),
        ({"logit_bias": "ab"}, "logit_bias is 'ab'"),
        ({"temperature": 10**400}, "temperature is inf; it must be between"),
        ({"logprobs": "no"}, "logprobs is 'no'; it must be True or False"),
        ({"ignore_eos": 1}, "ignore_eos is 1"),
        ({"top_logprobs": 21}, "top_logprobs is 21; it must be between 0 and 20"),
        ({"n": 0}, "n is 0; it must be between 1 and 128"),
        ({"n": 129, "temperature": 1}, "n is 129; it must be between 1 and 128"),
        ({"n": None}, "n is None; it must be a whole number"),
        ({"best_of": 1.5}, "best_of is 1.5; it must be a whole number"),
        ({"n": 3, "best_of": 2, "temperature": 1}, "best_of is 2 and n is 3; .* at least n"),
        ({"stop": "x" * 1025}, "a stop string has 1025 characters; use at most 1024"),
        ({"stop_token_ids": [*range(257)]}, "257 stop_token_ids; at most 256"),
    ],
)
def test_bad_sampling_values_are_named(params, message):
    with pytest.raises(RequestError, match=message) as caught:
        SamplingParams(**params)
    assert "\n" not in str(caught.value)


def test_a_single_stop_string_and_none_are_taken_as_meant():
    assert SamplingParams(stop="END").stop == ("END",)
    assert SamplingParams(stop=None, stop_token_ids=None, logit_bias=None).stop == ()
    assert SamplingParams(top_logprobs=2).logprobs is True


def test_numpy_numbers_are_numbers():
    params = SamplingParams(temperature=np.float32(0.5), max_tokens=np.int64(3))
    assert (params.temperature, params.max_tokens) == (0.5, 3)


def test_each_sample_has_a_seed_of_its_own():
    params = SamplingParams(temperature=1.0, n=2, best_of=4, seed=2**64 - 2)
    assert params.drawn == 4
    samples = [params.sample(i) for i in range(4)]
    assert [sample.seed for sample in samples] == [2**64 - 2, 2**64 - 1, 0, 1]
    assert all((s.n, s.best_of, s.logprobs, s.temperature) == (1, None, True, 1) for s in samples)
    assert SamplingParams(temperature=1.0, n=2).sample(1).seed is None
    assert SamplingParams(temperature=1.0, n=2).sample(1).logprobs is False


def test_the_engine_takes_one_answer_per_request():
    with pytest.raises(RequestError, match="n is 2, and a request takes one answer"):
        Request(id="r", prompt_ids=(1,), params=SamplingParams(n=2, temperature=1.0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_batch": 0}, "max_batch is 0"),
        ({"max_batch": "8"}, "max_batch is '8'"),
        ({"max_batch": None}, "max_batch is None"),
        ({"max_batched_tokens": 2.5}, "max_batched_tokens is 2.5"),
        ({"max_batched_tokens": 8}, r"max_batched_tokens \(8\) is smaller than max_batch \(32\)"),
        ({"memory_limit_bytes": 0}, "memory_limit_bytes is 0"),
        ({"memory_limit_bytes": "1GB"}, "memory_limit_bytes is '1GB'"),
    ],
)
def test_bad_engine_options_are_named(options, message):
    with pytest.raises(RequestError, match=message):
        EngineConfig(**options)


@pytest.mark.parametrize(
    ("request_values", "message"),
    [
        ({"prompt_ids": ()}, "the prompt is empty"),
        ({"prompt_ids": (1, 100)}, "prompt token id 100 is out of range; .* 0 to 99"),
        ({"prompt_ids": (-1,)}, "prompt token id -1 is out of range"),
        (
            {"prompt_ids": (1,) * 20},
            "the prompt is too long: it has 20 tokens, and this model can take 19",
        ),
        ({"params": SamplingParams(top_k=101)}, "top_k is 101, over the vocabulary of 100"),
        ({"params": SamplingParams(logit_bias={100: 1.0})}, "logit_bias token id 100"),
        ({"params": SamplingParams(stop_token_ids=(200,))}, "stop token id 200"),
    ],
)
def test_what_only_the_model_can_know_is_checked(request_values, message):
    values = {"prompt_ids": (1, 2), "params": SamplingParams()} | request_values
    with pytest.raises(RequestError, match=message):
        Request(id="r", **values).validate(vocab_size=100, context_tokens=20)


def test_the_limits_themselves_are_allowed():
    fits = Request(id="r", prompt_ids=(0, 99) + (1,) * 17, params=SamplingParams(top_k=100))
    fits.validate(vocab_size=100, context_tokens=20)
    scored = Request(id="r", prompt_ids=(1,) * 20, params=SamplingParams(), score=True)
    scored.validate(vocab_size=100, context_tokens=20)


def test_a_text_may_be_longer_than_the_context_by_a_token_that_is_only_predicted():
    def validate(n, **read):
        request = Request(id="r", prompt_ids=(1,) * n, params=SamplingParams(), **read)
        request.validate(vocab_size=100, context_tokens=20)

    validate(21, score=True, prompt_logprobs=0)
    with pytest.raises(RequestError, match="22 tokens, and this model can take 21"):
        validate(22, score=True, prompt_logprobs=0)
    with pytest.raises(RequestError, match="21 tokens, and this model can take 20"):
        validate(21, score=True)
    with pytest.raises(RequestError, match="20 tokens, and this model can take 19"):
        validate(20, prompt_logprobs=0)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"priority": 101}, "priority is 101; it must be between -100 and 100"),
        ({"priority": -101}, "priority is -101; it must be between -100 and 100"),
        ({"priority": 0.5}, "priority is 0.5; it must be a whole number"),
        ({"priority": True}, "priority is True; it must be a whole number"),
        ({"tenant": None}, "tenant is None; it must be a string"),
        ({"adapter": 3}, "adapter is 3; it must be a string"),
        ({"prompt_logprobs": -1}, "prompt_logprobs is -1; it must be between 0 and 20"),
        ({"prompt_logprobs": 21}, "prompt_logprobs is 21; it must be between 0 and 20"),
        ({"prompt_logprobs": True}, "prompt_logprobs is True; it must be a whole number"),
        ({"prompt_logprobs": 1.0}, "prompt_logprobs is 1.0; it must be a whole number"),
        ({"ttft_budget_s": 0}, "ttft_budget_s is 0, in which no token comes; leave it out"),
        ({"ttft_budget_s": -1.5}, "ttft_budget_s is -1.5"),
        ({"ttft_budget_s": math.nan}, "ttft_budget_s is nan"),
        ({"ttft_budget_s": math.inf}, "ttft_budget_s is inf"),
        ({"ttft_budget_s": "1"}, "ttft_budget_s is '1'"),
        ({"ttft_budget_s": True}, "ttft_budget_s is True"),
    ],
)
def test_what_else_a_request_asks_for_is_checked(values, message):
    with pytest.raises(RequestError, match=message):
        Request(id="r", prompt_ids=(1,), params=SamplingParams(), **values)


def test_a_request_is_scheduled_like_all_others_unless_told():
    plain = Request(id="r", prompt_ids=(1,), params=SamplingParams())
    assert (plain.priority, plain.tenant, plain.adapter, plain.ttft_budget_s) == (0, "", "", None)
    values = {"priority": np.int64(-100), "tenant": "a", "adapter": "b", "ttft_budget_s": 2}
    told = Request(id="r", prompt_ids=(1,), params=SamplingParams(), **values)
    assert {name: getattr(told, name) for name in values} == values
    assert type(told.priority) is int


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch):
    def unknown(path):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("MLXSERVE_HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(config.Path, "expanduser", unknown)
    with pytest.raises(RequestError, match=r"~/.cache/mlxserve .* set MLXSERVE_HOME"):
        config.home()
