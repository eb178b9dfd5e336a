"""What an operator sees: probes, metrics, logs, and the description of it all."""

import json
import logging
import re
import time
from datetime import datetime
from http import HTTPStatus
from pathlib import Path

import anthropic as anthropic_client
import openai as openai_client
import pytest
from openapi_spec_validator import validate
from prometheus_client.parser import text_string_to_metric_families

import mlxserve
from mlxserve.engine.runner import Runner
from mlxserve.server import openai
from mlxserve.server.endpoints import health
from tests.support.serving import serving, wait_until

TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00"
LONG = {"max_tokens": 20, "temperature": 0.0, "ignore_eos": True}


def metrics_of(server) -> dict[str, float]:
    """Samples by name and labels."""
    got = server.http.get("/metrics")
    assert got.headers["content-type"].startswith("text/plain; version=0.0.4")
    return {
        sample.name
        + "".join(f" {key}={value}" for key, value in sample.labels.items()): sample.value
        for family in text_string_to_metric_families(got.text)
        for sample in family.samples
    }


def test_health_and_readiness(server):
    assert server.http.get("/health").json() == {"status": "ok"}
    assert server.http.get("/ready").json() == {"status": "ready"}


def test_an_engine_that_makes_no_progress_is_unwell(llm, monkeypatch):
    with serving(llm) as server:
        with server.open_socket() as sock:
            body = b'{"prompt": "x", "max_tokens": 1900, "ignore_eos": true}'
            sock.sendall(server.post("/v1/completions", body))
            wait_until(lambda: len(server.service.mailbox) == 1, "somebody waits")
            assert server.http.get("/health").status_code == 200
            monkeypatch.setattr(health, "STALLED_S", -1.0)
            got = server.http.get("/health")
            assert (got.status_code, got.json()["status"]) == (503, "stalled")
        wait_until(server.idle, "nobody waits")
        assert server.http.get("/health").status_code == 200  # however long ago the last step was


def test_a_dead_engine_is_said_to_be_dead(tiny_model_dir):
    with mlxserve.load(tiny_model_dir) as llm, serving(llm) as server:
        llm.close()
        got = server.http.get("/health")
        assert (got.status_code, got.json()) == (503, {"status": "dead"})
        assert server.http.get("/ready").status_code == 503
        got = server.complete(prompt="x")
        assert got.status_code == 503
        message = got.json()["error"]["message"]
        assert "the engine has stopped" in message
        assert "load the model" not in message  # which nobody can do over HTTP
        assert int(got.headers["retry-after"]) >= 1
        assert metrics_of(server)["mlxserve_requests_running"] == 0


def test_running_streams_hear_that_the_engine_died(tiny_model_dir):
    with mlxserve.load(tiny_model_dir) as llm, serving(llm) as server:
        with server.open_socket() as sock:
            sock.sendall(
                server.post(
                    "/v1/completions",
                    b'{"prompt":"x","max_tokens":1900,"ignore_eos":true,"stream":true}',
                )
            )
            got = sock.recv(1000)
            llm.close()
            while data := sock.recv(65536):
                got += data
        assert got.startswith(b"HTTP/1.1 200 ")
        assert b"[DONE]" not in got
        last = [line for line in got.split(b"\n") if line.startswith(b"data: ")][-1]
        assert "the engine has stopped" in json.loads(last[6:])["error"]["message"]


def test_metrics_move(server):
    before = metrics_of(server)
    server.complete(prompt="q" * 100, **LONG)
    server.complete(prompt="q" * 100, **LONG)
    server.complete(prompt="")
    server.http.get("/nowhere/at/all")
    server.http.get("/v1/models/tiny")
    after = metrics_of(server)
    moved = {key: after[key] - before.get(key, 0.0) for key in after}
    assert moved["mlxserve_prompt_tokens_total"] == 200
    assert moved["mlxserve_cached_prompt_tokens_total"] == 99
    assert moved["mlxserve_prefix_hits_total"] == 1
    assert moved["mlxserve_completion_tokens_total"] == 40
    assert moved["mlxserve_steps_total"] >= 40
    assert moved["mlxserve_answers_total finish_reason=length"] == 2
    assert moved["mlxserve_requests_total path=/v1/completions status=200"] == 2
    assert moved["mlxserve_requests_total path=/v1/completions status=400"] == 1
    assert moved["mlxserve_requests_total path=other status=404"] == 1
    assert moved["mlxserve_requests_total path=/v1/models/{name} status=200"] == 1
    assert moved["mlxserve_time_to_first_token_seconds_count"] == 2
    assert moved["mlxserve_inter_token_seconds_count"] == 2 * 19
    assert moved["mlxserve_step_seconds_count"] == moved["mlxserve_steps_total"]
    assert 0 < moved["mlxserve_step_gap_seconds_sum"] < moved["mlxserve_step_seconds_sum"]
    assert moved["mlxserve_request_seconds_count"] >= 4
    assert after["mlxserve_kv_pages_cached"] > 0


def test_metrics_tell_what_is_under_way(llm, server):
    with server.open_socket() as sock:
        sock.sendall(
            server.post(
                "/v1/completions", b'{"prompt":"x","max_tokens":1900,"ignore_eos":true,"n":3}'
            )
        )
        wait_until(lambda: llm.stats().pages_used > 3, "pages are held")
        now = metrics_of(server)
    assert now["mlxserve_requests_running"] == 3
    assert 0 < now["mlxserve_kv_cache_utilization"] < 1
    # Three names by which the Gateway API inference extension finds the same.
    assert now["vllm:num_requests_running"] == 3
    assert now["vllm:num_requests_waiting"] == 0
    assert 0 < now["vllm:kv_cache_usage_perc"] < 1
    wait_until(server.idle, "it is over")
    now = metrics_of(server)
    assert now["vllm:num_requests_running"] == now["vllm:kv_cache_usage_perc"] == 0


def test_a_stall_between_two_tokens_is_seen(llm, server, caplog):
    """One gap of 0.3 s among hundreds that are far smaller: a mean would hide it."""
    caplog.set_level(logging.INFO, "mlxserve.access")
    name = "mlxserve_inter_token_seconds_bucket"
    before = metrics_of(server)
    with server.open_socket() as sock:
        ask = b'{"prompt":"x","max_tokens":900,"ignore_eos":true,"stream":true}'
        sock.sendall(server.post("/v1/completions", ask))
        sock.recv(1000)
        llm._engine.call(lambda core: time.sleep(0.3))
        while sock.recv(65536):
            pass
    wait_until(lambda: caplog.messages, "a line")
    after = metrics_of(server)
    over = {at: after[f"{name} le={at}"] - before[f"{name} le={at}"] for at in ("+Inf", "0.2")}
    assert over["+Inf"] == 899
    assert over["+Inf"] - over["0.2"] >= 1
    (line,) = caplog.messages
    mean_s, most_s = (
        float(re.search(rf" {key} ([\d.]+)", line)[1]) for key in ("itl_s", "max_itl_s")
    )
    assert most_s >= 0.3 > mean_s


def test_pages_that_are_only_kept_are_not_held(tiny_model_dir):
    block = {"type": "text", "text": "Keep all of this. " * 40}
    block["cache_control"] = {"type": "ephemeral"}
    asked = {"role": "user", "content": "Hi"}
    body = {"model": "tiny", "max_tokens": 2, "system": [block], "messages": [asked]}
    with mlxserve.load(tiny_model_dir) as llm, serving(llm) as server:
        assert server.http.post("/v1/messages", json=body).status_code == 200
        now = metrics_of(server)
        assert now["mlxserve_kv_pages_used"] == now["mlxserve_kv_cache_utilization"] == 0
        assert now["mlxserve_kv_pages_cached"] >= 11
        assert llm._engine.call(lambda core: len(core.manager.shared.pins)) == 1


def test_only_answers_that_were_called_off_count_as_cancelled(server, monkeypatch):
    before = metrics_of(server)
    scheduler = server.llm._engine.call(lambda core: core.scheduler)
    with monkeypatch.context() as patched:
        patched.setattr(scheduler, "max_queue", 0)
        for stream in (False, True):
            assert server.complete(prompt="x", stream=stream).status_code == 429
    with monkeypatch.context() as patched:
        patched.setattr(Runner, "build", failing(Runner.build))
        assert server.complete(prompt="x", n=2, temperature=1).status_code == 500
    after = metrics_of(server)
    name = "mlxserve_answers_total finish_reason="
    moved = {
        key.removeprefix(name): after[key] - before.get(key, 0)
        for key in after
        if key.startswith(name) and after[key] != before.get(key, 0)
    }
    assert moved.pop("error") == 2
    assert not moved


@pytest.mark.full
def test_asking_for_what_is_not_there_makes_no_new_series(server):
    for i in range(20):
        server.http.get(f"/v1/models/{i}")
        server.http.get(f"/{i}")
        server.http.request(f"M{i}", "/v1/models")
    paths = {re.search(r"path=(\S+)", key)[1] for key in metrics_of(server) if "path=" in key}
    assert not any(re.search(r"\d$", path) for path in paths)
    assert len(paths) <= 13


def test_every_metric_is_documented(server):
    documented = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    families = text_string_to_metric_families(server.http.get("/metrics").text)
    names = {family.name.removesuffix("_created") for family in families}
    assert len(names) > 15
    assert not [name for name in names if f"`{name}" not in documented]


def test_the_description_is_valid(server):
    described = server.http.get("/openapi.json").json()
    validate(described)
    request = described["components"]["schemas"]["CompletionRequest"]
    assert request["required"] == ["prompt"]
    assert "logit_bias" in request["properties"]
    assert described["info"]["version"]


def test_each_request_is_a_line(server, caplog):
    caplog.set_level(logging.INFO, "mlxserve.access")
    server.complete(prompt="my secret prompt", max_tokens=3, seed=1, ignore_eos=True)
    server.complete(prompt="")
    server.http.get("/a%0Ab")
    server.http.get("/health")
    wait_until(lambda: len(caplog.messages) == 3, "three lines")
    ok, bad, odd = caplog.messages
    assert re.fullmatch(
        rf"{TIME} POST '/v1/completions' 200 [\d.]+ s, id req_\w+, model tiny, answers 1, "
        r"prompt_tokens 16, cached_tokens \d+, completion_tokens 3, finish_reason length, "
        r"ttft_s [\d.]+, itl_s [\d.]+, max_itl_s [\d.]+",
        ok,
    )
    assert re.fullmatch(
        rf"{TIME} POST '/v1/completions' 400 [\d.]+ s, id req_\w+, model tiny, "
        r"error the prompt is empty; .*",
        bad,
    )
    assert re.fullmatch(
        rf"{TIME} GET '/a\\nb' 404 [\d.]+ s, id req_\w+, model tiny, error /a\\nb .*", odd
    )
    assert "secret" not in caplog.text


@pytest.mark.parametrize("prompts", [False, True])
def test_lines_of_json(llm, caplog, prompts):
    caplog.set_level(logging.INFO, "mlxserve.access")
    with serving(llm, log_format="json", log_prompts=prompts) as server:
        server.chat("Hi", n=2, temperature=1, max_tokens=3, ignore_eos=True)
        server.complete(prompt="x", stream=True, **LONG)
    first, second = map(json.loads, caplog.messages)
    assert (first["method"], first["path"], first["status"]) == (
        "POST",
        "/v1/chat/completions",
        200,
    )
    assert (first["answers"], first["prompt_tokens"], first["completion_tokens"]) == (2, 5, 6)
    assert second["finish_reason"] == "length"
    assert first["seconds"] > 0
    assert datetime.fromisoformat(first["time"]).tzinfo is not None
    assert ("prompt_ids" in first) == prompts
    if prompts:
        assert first["prompt_ids"][0] == llm.encode([{"role": "user", "content": "Hi"}])


NO_HTTP = "this isn't valid HTTP/1.1; send a request as RFC 9112 has it"
HALF = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: mine\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
REFUSED = {
    "no HTTP": (b"hello\r\n\r\n", 400, "-", NO_HTTP),
    "no head in time": (b"GET /", 408, "-", "the request's head didn't come in 0.3 s"),
    "a long head": (b"GET /" + b"x" * (1 << 20), 431, "-", "over 65536 bytes"),
    "an encoding": (HALF + b"Transfer-Encoding: gzip\r\n\r\n", 501, "-", "transfer encoding"),
    "a broken body": (HALF + CHUNKED + b"nope\r\n", 400, "/v1/completions", NO_HTTP),
}


@pytest.mark.parametrize("log_format", ["text", "json"])
@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_before_it_is_a_request_is_a_line_and_counts(llm, caplog, case, log_format):
    caplog.set_level(logging.INFO, "mlxserve.access")
    data, status, path, words = REFUSED[case]
    with serving(llm, header_timeout_s=0.3, log_format=log_format) as server:
        got = server.raw(data)
        assert got.startswith(b"HTTP/1.1 %d %s\r\n" % (status, HTTPStatus(status).phrase.encode()))
        request_id = re.search(rb"\r\nx-request-id: (.*?)\r\n", got)[1].decode()
        assert (request_id == "mine") == (path != "-")
        wait_until(lambda: lines_of(caplog), "a line")
        counted = "other" if path == "-" else path
        assert metrics_of(server)[f"mlxserve_requests_total path={counted} status={status}"] == 1
    (line,) = lines_of(caplog)
    if log_format == "json":
        told = json.loads(line)
        assert (told["path"], told["status"], told["id"]) == (path, status, request_id)
        assert words in told["error"]
    else:
        method = "-" if path == "-" else "POST"
        head = rf"{TIME} {method} '{path}' {status} [\d.]+ s, id {request_id}, "
        assert re.match(head, line)
        assert words in line


def lines_of(caplog):
    return [record.message for record in caplog.records if record.name == "mlxserve.access"]


def test_a_broken_body_is_refused_in_the_paths_own_dialect(server):
    got = server.raw(HALF.replace(b"completions", b"messages") + CHUNKED + b"nope\r\n")
    head, _, body = got.partition(b"\r\n\r\n")
    assert b"\r\nrequest-id: mine" in head
    assert json.loads(body)["type"] == "error"


def test_the_logs_id_is_the_one_that_the_client_sees(server, client, caplog):
    caplog.set_level(logging.INFO, "mlxserve.access")
    done = client.chat.completions.create(
        model="alias", messages=[{"role": "user", "content": "x"}], max_tokens=1
    )
    with pytest.raises(openai_client.BadRequestError) as bad:
        client.completions.create(model="tiny", prompt="")
    with anthropic_client.Anthropic(base_url=server.url, api_key="none") as other:
        message = other.messages.create(
            model="alias", messages=[{"role": "user", "content": "x"}], max_tokens=1
        )
    mine = server.http.get("/v1/models", headers={"X-Request-Id": "trace/1:a"})
    odd = server.http.get("/v1/models", headers={"X-Request-Id": "two, words"})
    assert mine.headers["x-request-id"] == "trace/1:a"
    ids = [done._request_id, bad.value.request_id, message._request_id, "trace/1:a"]
    ids.append(odd.headers["x-request-id"])
    wait_until(lambda: len(caplog.messages) == len(ids), "a line each")
    assert [re.search(r" id ([^,]+),", line)[1] for line in caplog.messages] == ids
    assert len(set(ids)) == len(ids)
    assert done.model == message.model == "alias"
    assert " model alias," in caplog.messages[0]


def test_a_line_of_several_prompts_says_what_the_usage_says(llm, caplog):
    caplog.set_level(logging.INFO, "mlxserve.access")
    prompts = [letter * 200 for letter in "abc"]
    with serving(llm, log_format="json") as server:
        for _ in range(2):
            got = server.complete(prompt=prompts, n=2, temperature=1, max_tokens=2, ignore_eos=True)
    usage, line = got.json()["usage"], json.loads(caplog.messages[-1])
    assert usage["prompt_tokens_details"]["cached_tokens"] > 3 * 128
    assert line["cached_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]
    assert line["prompt_tokens"] == usage["prompt_tokens"] == 600
    assert line["completion_tokens"] == usage["completion_tokens"] == 12


def test_a_line_of_a_call_has_the_reason_that_the_reply_has(server, caplog):
    caplog.set_level(logging.INFO, "mlxserve.access")
    tool = {"type": "function", "function": {"name": "clock"}}
    got = server.chat(tools=[tool], tool_choice="required", max_tokens=600, seed=1)
    assert got.json()["choices"][0]["finish_reason"] == "tool_calls"
    wait_until(lambda: caplog.messages, "a line")
    assert "finish_reason tool_calls" in caplog.messages[-1]


def test_a_refusal_by_rate_is_the_tenants(llm, caplog):
    caplog.set_level(logging.INFO, "mlxserve.access")
    with serving(llm, api_keys=("one-of-the-keys",), requests_per_minute=1) as server:
        for _ in range(2):
            headers = {"X-Api-Key": "one-of-the-keys"}
            got = server.http.post("/v1/completions", json={"prompt": "x"}, headers=headers)
    assert got.status_code == 429
    assert re.search(r" 429 .*, tenant key-\w{8}, .*error over 1 requests", caplog.messages[-1])


def test_a_client_that_hangs_up_is_noted(server, caplog):
    caplog.set_level(logging.INFO, "mlxserve.access")
    with server.open_socket() as sock:
        sock.sendall(
            server.post("/v1/completions", b'{"prompt":"x","max_tokens":1900,"ignore_eos":true}')
        )
        wait_until(lambda: server.llm.stats().running == 1, "it runs")
    wait_until(lambda: caplog.messages, "a line")
    assert " 499 " in caplog.messages[0]
    assert "finish_reason cancelled" in caplog.messages[0]


def test_a_step_that_fails_is_a_500_and_the_next_one_is_served(server, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(Runner, "build", failing(Runner.build))
        for stream in (False, True):
            got = server.complete(prompt="x", stream=stream)
            assert got.status_code == 500
            assert "the step failed" in got.json()["error"]["message"]
    assert server.complete(prompt="x", max_tokens=1).status_code == 200


def test_a_bug_of_ours_is_logged_and_its_details_are_not_told(server, monkeypatch, caplog):
    with monkeypatch.context() as patched:
        patched.setattr(openai, "usage", raising(ZeroDivisionError("inner workings")))
        got = server.complete(prompt="x", max_tokens=1)
        assert got.status_code == 500
        assert got.json()["error"]["type"] == "server_error"
        asked = {"stream": True, "stream_options": {"include_usage": True}}
        streamed = server.complete(prompt="x", max_tokens=1, **asked)
    assert "inner" not in got.text + streamed.text
    assert '"error"' in streamed.text
    assert caplog.text.count("ZeroDivisionError: inner workings") == 2
    assert server.complete(prompt="x", max_tokens=1).status_code == 200


def failing(build):
    """Steps of requests fail, and the one works by which the engine finds out if any do."""

    def fail(runner, plan, last):
        if any(chunk.seq.request.id != "probe" for chunk in plan.chunks):
            raise MemoryError("no room")
        return build(runner, plan, last)

    return fail


def raising(error):
    def fail(*args, **kwargs):
        raise error

    return fail
