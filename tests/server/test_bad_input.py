"""Bytes that no client's library would send: an answer every time, and the next one is served."""

import json

import hypothesis
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase
from schemathesis import GenerationMode

from tests.support.serving import serving

DEEP = 100_000


@pytest.fixture(autouse=True)
def still_well(server):
    """Whatever came, the server goes on."""
    yield
    got = server.complete(prompt="x", max_tokens=1)
    assert got.status_code == 200


def error_in(body: bytes) -> dict:
    assert len(body) < 5_000
    return json.loads(body)["error"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b"\xff\xfe{}",
        b'\xef\xbb\xbf{"prompt":"x"}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\\udc00\\ud800"}',
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": Infinity}',
        b'{"prompt": "x", "temperature": 1e999}',
        b'{"prompt": "x", "max_tokens": -1e999}',
        b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}",
        b'{"prompt": "x", "max_tokens": -' + b"9" * 300 + b"}",
        b'{"prompt": [' + b"9" * 300 + b"]}",
        b'{"prompt": "x", "top_p": 1e-400}',
        b'{"prompt": "x"} trailing',
        b"{'prompt': 'x'}",
        b'{"prompt": "x",}',
        b"[" * DEEP,
        b"[" * DEEP + b"]" * DEEP,
        b'{"a":' * DEEP + b"1" + b"}" * DEEP,
        b'{"prompt": ' + b"[" * 500 + b"]" * 500 + b"}",
        b'{"model": "' + b"m" * 1_000_000 + b'", "prompt": "x"}',
        b'{"stop": ["' + b"s" * 1_000_000 + b'", 5], "prompt": "x"}',
        b"\x00" * 1000,
    ],
    ids=range(28),
)
def test_a_body_that_makes_no_sense(server, body):
    status, answer = server.answer(server.post("/v1/completions", body))
    assert status in (400, 404)
    assert error_in(answer)["message"]


@pytest.mark.parametrize("text", ["x\\ud800", "\\\\\\ud83d\\u0041", "\\udbff", "\\ude00"])
def test_half_of_a_surrogate_pair_is_said_to_be_one(server, text):
    status, answer = server.answer(
        server.post("/v1/completions", b'{"prompt":"%s"}' % text.encode())
    )
    assert status == 400
    assert "surrogate pair" in error_in(answer)["message"]
    # It isn't looked for where it is none: as text, or whole.
    body = b'{"prompt":"\\ud83d\\ude00 \\\\ud800","max_tokens":1'
    _, answer = server.answer(server.post("/v1/completions", body))
    assert "surrogate" not in error_in(answer)["message"]
    assert server.answer(server.post("/v1/completions", body + b"}"))[0] == 200


def test_deep_values_where_anything_may_stand(server):
    nested = b"[" * 500 + b"]" * 500
    chat = b'{"messages":[{"role":"user","content":"x"}],"max_tokens":1,'
    for field in (b'"chat_template_kwargs":{"a":%s}', b'"unknown":%s', b'"metadata":{"a":%s}'):
        body = chat + field % nested + b"}"
        assert server.answer(server.post("/v1/chat/completions", body))[0] in (200, 400)
    message = b'{"max_tokens":1,"messages":[{"role":"user","content":"x","extra":%s}]}' % nested
    assert server.answer(server.post("/v1/chat/completions", message))[0] == 400


@pytest.mark.parametrize(
    "prompt", ["\x00", "a\x00b", "\u202e\u0000\ufeff", "\U0010ffff", "\r\n\r\n"]
)
def test_odd_but_valid_text_is_answered(server, prompt):
    assert server.complete(prompt=prompt, max_tokens=2).status_code == 200
    assert server.chat(prompt, max_tokens=2).status_code == 200


def test_of_a_key_that_comes_twice_the_last_counts(server):
    body = b'{"prompt": "x", "max_tokens": 3, "max_tokens": 1, "ignore_eos": true}'
    _, answer = server.answer(server.post("/v1/completions", body))
    assert json.loads(answer)["usage"]["completion_tokens"] == 1


def test_many_unknown_fields_make_a_small_header(server):
    got = server.complete(prompt="x", max_tokens=1, **{f"{'k' * 200}{i}": i for i in range(5000)})
    assert got.status_code == 200
    assert len(got.headers["x-mlxserve-ignored"]) < 1000


def test_ids_out_of_range_are_refused_everywhere(server):
    for tokens in ([-1], [10**6], [2**63], [2**64], [1, "a"], [None], [1.5]):
        got = server.http.post("/detokenize", json={"tokens": tokens})
        assert got.status_code == 400, tokens
    assert server.http.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}
    assert server.http.post("/tokenize", json={"prompt": ""}).json()["tokens"] == []
    for body in ({}, {"prompt": "x", "messages": []}, {"prompt": 5}, {"messages": "x"}):
        assert server.http.post("/tokenize", json=body).status_code == 400


@pytest.mark.parametrize(
    "data",
    [
        b"\r\n\r\n",
        b"hello\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\nHost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nA\x00: b\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nA: b\x00c\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\n : b\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nA: " + b"x" * 100_000 + b"\r\n\r\n",
        b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: x\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\n"
        b"Content-Length: 2\r\n\r\n{}",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: gzip\r\n\r\n{}",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
        b"Transfer-Encoding: chunked\r\n\r\nnope\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # the beginning of TLS
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
    ids=range(19),
)
def test_what_is_not_http_is_told_so(server, data):
    status, answer = server.answer(data + b"\r\n\r\n")
    assert 400 <= status < 500 or status == 501
    assert error_in(answer)["message"]


@pytest.mark.parametrize("kib", [70, 120, 200, 300, 4000])
def test_a_head_that_is_too_long_hears_how_long_it_may_be(server, kib):
    """All of the answer comes, though the server doesn't read on: raw would fail at a reset."""
    head = b"GET /health HTTP/1.1\r\nHost: localhost\r\nA: " + b"x" * (kib << 10) + b"\r\n\r\n"
    status, answer = server.answer(head)
    assert status == 431
    assert "over 65536 bytes" in error_in(answer)["message"]


@pytest.mark.parametrize(
    "headers",
    [
        ["Content-Type: text/plain"],
        ["Content-Type: application/json; charset=utf-16"],
        ["Content-Encoding: gzip"],
        ["Accept: image/png"],
        ["Authorization: Basic \xff\xfe", "X-Api-Key: "],
        ["Expect: 100-continue"],
        ["Upgrade: websocket", "Sec-WebSocket-Key: x"],
        ["Connection: upgrade", "Upgrade: websocket"],
        ["X-Forwarded-For: 1.2.3.4", "Forwarded: for=x"],
        ["Range: bytes=0-1"],
        [f"X-{i}: y" for i in range(500)],
    ],
)
def test_headers_that_mean_nothing_here(server, headers):
    body = b'{"prompt": "x", "max_tokens": 1}'
    status, _ = server.answer(server.post("/v1/completions", body, *headers))
    assert status == 200


def test_requests_in_a_row_on_one_connection(server):
    one = server.post("/v1/completions", b'{"prompt": "x", "max_tokens": 1, "temperature": 0}')
    kept = one.replace(b"Connection: close\r\n", b"")
    answers = server.raw(kept + kept + b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n" + one)
    assert answers.count(b"HTTP/1.1 200 ") == 4


def test_a_chunked_body(server):
    parts = [b'{"pro', b'mpt": "x", "max_tokens": 1}', b""]
    data = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)
    status, _ = server.answer(server.post("/v1/completions", data, "Transfer-Encoding: chunked"))
    assert status == 200


@pytest.mark.full
@pytest.mark.parametrize("mode", list(GenerationMode))
def test_whatever_the_schema_allows_or_forbids_is_answered(llm, mode):
    """Bodies made from /openapi.json, right and wrong ones: never a 5xx, always as described."""
    with serving(llm, sampling={"max_tokens": 4}) as server:
        schema = schemathesis.openapi.from_dict(server.http.get("/openapi.json").json())
        operations = [result.ok() for result in schema.get_all_operations()]
        assert len(operations) == 11
        for operation in operations:
            posts = operation.method == "post"
            if mode is GenerationMode.NEGATIVE and not posts:
                continue  # nothing can be wrong about a GET without parameters

            @hypothesis.seed(1)
            @hypothesis.settings(
                max_examples=10 if posts else 2,
                database=None,
                deadline=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
            def ask(case):
                if isinstance(case.body, dict):
                    case.body = {key: _few(key, value) for key, value in case.body.items()}
                response = case.call(base_url=server.url)
                assert response.status_code < 500, (case.body, response.text)
                if response.status_code >= 400:
                    theirs = set() if "messages" in case.path else {"param", "code"}
                    assert set(response.json()["error"]) == {"message", "type"} | theirs

            ask()


def _few(key: str, value: object) -> object:
    """The value, or less where it would be many tokens: what is tested is not the model's speed."""
    limits = {"max_tokens": 4, "max_completion_tokens": 4, "min_tokens": 4, "n": 2, "best_of": 2}
    return min(value, limits[key]) if key in limits and type(value) is int else value
