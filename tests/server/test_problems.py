"""What can't be answered: OpenAI's statuses and shape, as its client raises them."""

import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

import mlxserve
from mlxserve.server.problems import Problem
from mlxserve.server.tenants import Tenants
from tests.support.serving import NAME, serving, wait_until

LONG = {"max_tokens": 1500, "temperature": 0.0, "ignore_eos": True}


def error_of(response, status):
    """The error of a response, which must have all its fields."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "\n" not in error["message"]
    return error


@pytest.mark.parametrize(
    ("body", "words", "param"),
    [
        ({"prompt": ""}, ["the prompt is empty"], "prompt"),
        ({"prompt": []}, ["the prompt is empty"], "prompt"),
        ({"prompt": [[]]}, ["the prompt is empty"], "prompt"),
        ({}, ["prompt is missing"], "prompt"),
        ({"prompt": None}, ["prompt is null; it must be a string or a list"], "prompt"),
        ({"prompt": 5}, ["prompt is 5; it must be a string or a list"], "prompt"),
        ({"prompt": ["a", 1]}, ["prompt mixes"], "prompt"),
        ({"prompt": [1, "a"]}, ["prompt mixes"], "prompt"),
        ({"prompt": [1.5]}, ["1.5 among token ids"], "prompt"),
        ({"prompt": [True]}, ["true among token ids"], "prompt"),
        ({"prompt": [1, None]}, ["null among token ids"], "prompt"),
        ({"prompt": [-1]}, ["prompt token id -1 is out of range"], "prompt"),
        ({"prompt": [10**30]}, ["out of range"], "prompt"),
        ({"prompt": [{"role": "user", "content": "x"}]}, ["/v1/chat/completions"], "prompt"),
        ({"prompt": [[{"role": "user"}]]}, ["/v1/chat/completions"], "prompt"),
        ({"prompt": ["x"] * 129}, ["129 prompts", "over 128"], "prompt"),
        ({"prompt": ["x"] * 65, "n": 2, "temperature": 1}, ["over 128"], "prompt"),
        ({"prompt": "x", "stop": 5}, ["stop is 5; it must be a string or a list"], "stop"),
        ({"prompt": "x", "stop": ["a"] * 17}, ["17 stop strings"], "stop"),
        ({"prompt": "x", "stop": [""]}, ["stop string ''"], "stop"),
        ({"prompt": "x", "stop": ["a", 5]}, ["stop[1] is 5; it must be a string"], "stop[1]"),
        ({"prompt": "x", "stop": "s" * 1025}, ["1025 characters", "at most 1024"], "stop"),
        ({"prompt": "x", "logit_bias": {"99999": 1}}, ["logit_bias token id 99999"], "logit_bias"),
        ({"prompt": "x", "logit_bias": {"9" * 4000: 1}}, ["ids are 0 to 259"], "logit_bias"),
        (
            {"prompt": "x", "logit_bias": {str(i): 1 for i in range(301)}},
            ["logit_bias has 301 tokens", "at most 300"],
            "logit_bias",
        ),
        ({"prompt": "x", "logit_bias": {"a": 1}}, ['logit_bias has "a"'], "logit_bias"),
        (
            {"prompt": "x", "logit_bias": {"1": "a"}},
            ['logit_bias.1 is "a"; it must be a number'],
            "logit_bias.1",
        ),
        ({"prompt": "x", "top_k": 100_000}, ["top_k is 100000", "vocabulary"], "top_k"),
        ({"prompt": "x", "top_k": 1.5}, ["top_k is 1.5; it must be a whole number"], "top_k"),
        ({"prompt": "x", "temperature": -1}, ["temperature is -1"], "temperature"),
        (
            {"prompt": "x", "temperature": "hot"},
            ['temperature is "hot"; it must be a number'],
            "temperature",
        ),
        ({"prompt": "x", "max_tokens": 0}, ["max_tokens is 0"], "max_tokens"),
        (
            {"prompt": "x", "max_tokens": True},
            ["max_tokens is true; it must be a whole number"],
            "max_tokens",
        ),
        ({"prompt": "x", "n": 0}, ["n is 0"], "n"),
        ({"prompt": "x", "n": 129}, ["n is 129"], "n"),
        ({"prompt": "x", "n": 3, "best_of": 2}, ["best_of is 2"], "best_of"),
        ({"prompt": "x", "seed": -(2**63) - 1}, ["seed is -9223372036854775809"], "seed"),
        ({"prompt": "x", "seed": 2**70}, ["seed is"], "seed"),
        ({"prompt": "x", "logprobs": 21}, ["logprobs is 21"], "logprobs"),
        ({"prompt": "x", "stream": "yes"}, ['stream is "yes"; it must be true or false'], "stream"),
        ({"prompt": "x", "stream_options": {}}, ["stream: true"], "stream_options"),
        ({"prompt": "x", "priority": 101}, ["priority is 101"], "priority"),
        (
            {"prompt": "x", "ttft_budget_s": 0},
            ["ttft_budget_s is 0", "leave it out"],
            "ttft_budget_s",
        ),
        ({"prompt": "x", "ttft_budget_s": 1e99}, ["between 0 and 86400"], "ttft_budget_s"),
        ({"prompt": "x", "cache_salt": "s" * 257}, ["cache_salt"], "cache_salt"),
        ({"prompt": "x", "stop_token_ids": [-1]}, ["stop token id is -1"], "stop_token_ids"),
        ({"prompt": "x", "stop_token_ids": [99999]}, ["id 99999"], "stop_token_ids"),
        (
            {"prompt": "x", "stop_token_ids": [*range(257)] * 2},
            ["257 stop_token_ids", "at most 256"],
            "stop_token_ids",
        ),
        (
            {"prompt": "x", "metadata": {"ok": "yes", "a": {"b": 1}}},
            ['metadata.a is {"b": 1}; it must be'],
            "metadata.a",
        ),
        ({"prompt": "x", "service_tier": "flex"}, ["there is one tier"], "service_tier"),
        ({"prompt": "x", "suffix": "y"}, ["suffix"], "suffix"),
        ({"prompt": "x", "model": 5}, ["model is 5; it must be a string"], "model"),
    ],
)
def test_a_wrong_value_is_named(server, body, words, param):
    error = error_of(server.complete(**body), 400)
    assert error["type"] == "invalid_request_error"
    assert all(word in error["message"] for word in words), error
    assert error["param"] == param


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, ["messages is missing"]),
        ({"messages": []}, ["messages is empty"]),
        ({"messages": "Hi"}, ['messages is "Hi"; it must be a list']),
        ({"messages": [5]}, ["messages[0] is 5; it must be an object"]),
        ({"messages": [{"content": "x"}]}, ["messages[0].role is null"]),
        ({"messages": [{"role": "zzz", "content": "x"}]}, ['messages[0].role is "zzz"', "or tool"]),
        ({"messages": [{"role": "tool", "content": "x"}]}, ["messages[0] has no tool_call_id"]),
        ({"messages": [{"role": "user"}]}, ["no content"]),
        ({"messages": [{"role": "user", "content": 5}]}, ["messages[0].content is 5"]),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, ["image_url"]),
        ({"messages": [{"role": "user", "content": "x"}], "top_logprobs": 2}, ["logprobs: true"]),
        ({"messages": [{"role": "user", "content": "x"}], "prompt": "x"}, []),
    ],
)
def test_a_wrong_chat_is_named(server, body, words):
    response = server.http.post("/v1/chat/completions", json={"max_tokens": 1, **body})
    if not words:  # a field of the other endpoint is one that nobody knows here
        assert response.headers["x-mlxserve-ignored"] == "prompt"
        return
    error = error_of(response, 400)
    assert all(word in error["message"] for word in words), error
    assert error["param"].startswith(("messages", "top_logprobs"))


@pytest.mark.parametrize(
    ("name", "value", "harmless"),
    [
        ("functions", [{"name": "f"}], [None]),
        ("function_call", "auto", [None, "none"]),
        ("modalities", ["text", "audio"], [None, ["text"]]),
        ("store", True, [None, False]),
        ("audio", {"voice": "a"}, [None]),
        ("prediction", {"type": "content", "content": "x"}, [None]),
        ("web_search_options", {}, [None]),
        ("best_of", 2, [None, 1]),
        ("echo", True, [None, False]),
        ("service_tier", "priority", [None, "auto", "default"]),
        ("guided_json", {}, [None]),
        ("guided_regex", "a", [None]),
        ("structured_outputs", {"regex": "a"}, [None]),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(server, name, value, harmless):
    error = error_of(server.chat(max_tokens=1, **{name: value}), 400)
    assert error["message"].startswith(f"{name} can't be honoured")
    assert error["param"] == name
    for asks_for_nothing in harmless:
        got = server.chat(max_tokens=1, **{name: asks_for_nothing})
        assert got.status_code == 200
        assert "x-mlxserve-ignored" not in got.headers


def test_an_unknown_field_is_named_in_a_header(llm, server):
    got = server.complete(prompt="x", max_tokens=1, chunk_size=4, **{"ünknown\n": 1})
    assert got.status_code == 200
    assert got.headers["x-mlxserve-ignored"] == "chunk_size, ?nknown?"
    with serving(llm, strict=True) as strict:
        error = error_of(strict.complete(prompt="x", max_tokens=1, chunk_size=4), 400)
        assert error["message"] == "chunk_size has no effect here; leave it out"
        assert error["param"] == "chunk_size"
        assert strict.complete(prompt="x", max_tokens=1, chunk_size=None).status_code == 200


def test_the_clients_exceptions(server, client):
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model=NAME, prompt="x", temperature=-1)
    assert bad.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt-4", prompt="x")
    assert missing.value.param == "model"
    assert 'model "gpt-4" isn\'t served here' in missing.value.body["message"]
    assert f'"{NAME}"' in missing.value.body["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_too_long_hears_how_long_it_may_be(llm, client, stream):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=NAME, prompt="x" * 3000, stream=stream)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")
    assert "3000" in str(caught.value)
    assert str(llm.context_tokens - 1) in str(caught.value)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/messages"])
def test_a_text_that_is_far_too_long_is_refused_before_it_is_made_into_tokens(llm, server, path):
    text = "x" * 4_000_000
    body = {"model": NAME, "max_tokens": 1}
    body |= (
        {"prompt": text}
        if path == "/v1/completions"
        else {"messages": [{"role": "user", "content": text}]}
    )
    got = server.http.post(path, json=body)
    assert got.status_code == 400
    if path == "/v1/chat/completions":
        assert got.json()["error"]["param"] == "messages"
    message = got.json()["error"]["message"]
    assert re.search(r"at least \d+ tokens", message)  # so they weren't counted
    assert f"this model can take {llm.context_tokens - 1} here" in message


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/v1", 404),
        ("POST", "/chat/completions", 404),
        ("POST", "/v1/completions/", 404),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/v1/models/", 404),
        ("GET", "/v1/models/../../etc/passwd", 404),
        ("GET", "/v1/models/%00%ff", 404),
        ("GET", "/v1/completions", 405),
        ("PUT", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("OPTIONS", "/v1/completions", 405),
        ("POST", "/health", 405),
        ("BREW", "/v1/models", 405),
    ],
)
def test_wrong_paths_and_methods(server, method, path, status):
    response = server.http.request(method, path)
    error = error_of(response, status)
    assert error["param"] in (None, "model")
    if status == 405:
        assert f"takes {response.headers['allow']}, not {method}" in error["message"]


def test_head_is_get_without_a_body(server):
    got = server.http.head("/v1/models")
    assert (got.status_code, got.content) == (200, b"")
    assert server.http.head("/nowhere").status_code == 404


@pytest.mark.full
@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue_says_when_to_come_again(tiny_model_dir, stream):
    with mlxserve.load(tiny_model_dir, max_batch=1, max_queue=1) as llm, serving(llm) as server:
        url = f"{server.url}/v1"
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
            held = client.completions.create(
                model=NAME,
                prompt="x",
                max_tokens=1900,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            wait_until(lambda: llm.stats().running == 1, "the first runs")
            waiting = threading.Thread(target=lambda: server.complete(prompt="x", max_tokens=1))
            waiting.start()
            wait_until(lambda: len(server.service.mailbox) == 2, "the second waits")
            with pytest.raises(openai.RateLimitError) as caught:
                client.completions.create(model=NAME, prompt="x", stream=stream)
            assert caught.value.code == "overloaded"
            assert int(caught.value.response.headers["retry-after"]) >= 1
            held.close()
            waiting.join()
            assert server.complete(prompt="x", max_tokens=1).status_code == 200
            wait_until(server.idle, "everything is over")


def test_a_budget_that_cannot_be_kept_is_refused_at_once(server):
    for i in range(8):  # from which the engine learns how long prompts take
        assert server.complete(prompt=chr(65 + i) * (60 + 100 * i), max_tokens=2).status_code == 200
    got = server.complete(prompt="x" * 1800, ttft_budget_s=1e-6)
    error = error_of(got, 429)
    assert int(got.headers["retry-after"]) >= 1
    assert "the request allows 1e-06 s" in error["message"]
    assert server.complete(prompt="x", max_tokens=1, ttft_budget_s=600).status_code == 200


@pytest.mark.full
@pytest.mark.parametrize("stream", [False, True])
def test_a_budget_that_passes_while_waiting_is_refused_then(tiny_model_dir, stream):
    with mlxserve.load(tiny_model_dir, max_batch=1) as llm, serving(llm) as server:
        with server.open_socket() as held:
            body = json.dumps({"prompt": "x", "stream": True, **LONG, "max_tokens": 1900})
            held.sendall(server.post("/v1/completions", body.encode()))
            wait_until(lambda: llm.stats().running == 1, "the first runs")
            got = server.complete(prompt="x", ttft_budget_s=0.05, stream=stream)
            error = error_of(got, 429)
            assert "the request allows 0.05 s for its first token" in error["message"]
            assert int(got.headers["retry-after"]) >= 1
            assert llm.stats().running == 1
        wait_until(server.idle, "nothing is held")


def test_rates_are_per_tenant_and_refill():
    now = 1000.0
    tenants = Tenants(("key-one-1", "key-two-2"), 2, 100, clock=lambda: now)
    one, two = tenants.of("Bearer key-one-1", None), tenants.of(None, "key-two-2")
    tenants.admit(one)
    tenants.admit(one)
    with pytest.raises(Problem, match="over 2 requests per minute; wait 30 s") as caught:
        tenants.admit(one)
    assert caught.value.headers["Retry-After"] == "30"
    tenants.admit(two)
    now += 29.0
    with pytest.raises(Problem) as caught:
        tenants.admit(one)
    assert caught.value.headers["Retry-After"] == "1"
    now += 1.0
    tenants.admit(one)


def test_tokens_that_answers_may_take_are_set_aside():
    now = 1000.0
    tenants = Tenants(("key-one-1", "key-two-2"), None, 100, clock=lambda: now)
    one, two = tenants.of("Bearer key-one-1", None), tenants.of(None, "key-two-2")
    first = tenants.reserve(one, 60)
    with pytest.raises(Problem, match=r"minute: 40 are left, .* may take 61") as full:
        tenants.reserve(one, 61)
    assert full.value.headers["Retry-After"] == "13"
    with pytest.raises(Problem) as never:
        tenants.reserve(one, 1000)
    assert never.value.headers["Retry-After"] == "60"  # until those under way are over
    second = tenants.reserve(one, 40)
    assert tenants.reserve(two, 60) == 60
    tenants.settle(one, first, 10)
    third = tenants.reserve(one, 50)
    for reserved in (second, third):
        tenants.settle(one, reserved, reserved)
    with pytest.raises(Problem, match="0 are left"):
        tenants.reserve(one, 1)


def test_a_request_over_the_minutes_tokens_runs_alone_and_is_paid_for_afterwards():
    now = 1000.0
    tenants = Tenants((), None, 100, clock=lambda: now)
    anyone = tenants.of(None, None)
    tenants.settle(anyone, tenants.reserve(anyone, 5000), 250)
    with pytest.raises(Problem, match="over 100 tokens per minute") as caught:
        tenants.reserve(anyone, 1)
    assert 60 < int(caught.value.headers["Retry-After"]) <= 120
    now += 120.0
    tenants.reserve(anyone, 5000)


def test_rates_over_http(llm):
    with serving(llm, requests_per_minute=2) as server:
        assert [server.complete(prompt="x", max_tokens=1).status_code for _ in range(2)] == [
            200
        ] * 2
        got = server.complete(prompt="x", max_tokens=1)
        error = error_of(got, 429)
        assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        assert 1 <= int(got.headers["retry-after"]) <= 30
        assert server.http.get("/v1/models").status_code == 200
    with serving(llm, tokens_per_minute=20) as server:
        assert server.complete(prompt="x" * 30, max_tokens=10).status_code == 200
        error_of(server.complete(prompt="x", max_tokens=1), 429)
        assert server.http.post("/tokenize", json={"prompt": "x"}).status_code == 200


def test_the_rate_of_tokens_holds_for_requests_at_once(llm):
    ask = {"prompt": "x" * 11, "max_tokens": 50, "ignore_eos": True}
    with serving(llm, tokens_per_minute=100) as server:
        held = server.open_socket()
        held.sendall(server.post("/v1/completions", json.dumps({**ask, "stream": True}).encode()))
        assert held.recv(10) == b"HTTP/1.1 2"
        with ThreadPoolExecutor(10) as pool:
            got = list(pool.map(lambda _: server.complete(**ask).status_code, range(10)))
        held.close()
        assert got.count(200) <= 1  # after the first was over, with what that has left
        assert set(got) <= {200, 429}


def test_what_an_answer_did_not_take_is_given_back(llm):
    with serving(llm, tokens_per_minute=3000) as server:
        for _ in range(3):  # each may fill the context of 2,048
            assert server.chat(stop=["a", "e"], temperature=1).status_code == 200


def test_a_server_on_its_way_out_refuses(llm):
    with serving(llm) as server:
        server.service.draining = True
        got = server.chat(max_tokens=1)
        error = error_of(got, 503)
        assert error["type"] == "server_error"
        assert int(got.headers["retry-after"]) >= 1
        assert server.http.get("/ready").status_code == 503
        assert server.http.get("/health").status_code == 200


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_over_the_limit(llm, chunked):
    with serving(llm, max_body_bytes=1000) as server:
        data = b'{"prompt": "' + b"x" * 200_000 + b'"}'
        body = iter([data[:500], data[500:]]) if chunked else data
        error_of(server.http.post("/v1/completions", content=body), 413)
        assert server.complete(prompt="x", max_tokens=1).status_code == 200


def test_a_body_that_does_not_come(llm):
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n"
    with serving(llm, body_timeout_s=0.3) as server:
        got = server.raw(head + b"{")  # until the server closes
        assert got.startswith(b"HTTP/1.1 408 ")
        assert b"0.3 s" in got
