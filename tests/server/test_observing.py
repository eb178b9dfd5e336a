"""What an operator sees: probes, metrics, logs, and the description of it all."""

import json
import logging
import re
from pathlib import Path

import pytest
from openapi_spec_validator import validate
from prometheus_client.parser import text_string_to_metric_families

import mlxserve
from mlxserve.engine.runner import Runner
from mlxserve.server import openai
from mlxserve.server.endpoints import health
from tests.support.serving import serving, wait_until

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
        assert "the engine has stopped" in got.json()["error"]["message"]
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
    assert moved["mlxserve_time_to_first_token_seconds_count"] == 2
    assert moved["mlxserve_inter_token_seconds_count"] == 2
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


@pytest.mark.full
def test_asking_for_what_is_not_there_makes_no_new_series(server):
    for i in range(20):
        server.http.get(f"/v1/models/{i}")
        server.http.get(f"/{i}")
        server.http.request(f"M{i}", "/v1/models")
    paths = {re.search(r"path=(\S+)", key)[1] for key in metrics_of(server) if "path=" in key}
    assert not any(re.search(r"\d$", path) for path in paths)


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
        r"POST '/v1/completions' 200 [\d.]+ s, id r\d+, answers 1, prompt_tokens 16, "
        r"cached_tokens \d+, completion_tokens 3, finish_reason length, ttft_s [\d.]+, "
        r"itl_s [\d.]+",
        ok,
    )
    assert re.fullmatch(r"POST '/v1/completions' 400 [\d.]+ s", bad)
    assert re.fullmatch(r"GET '/a\\nb' 404 [\d.]+ s", odd)
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
    assert ("prompt_ids" in first) == prompts
    if prompts:
        assert first["prompt_ids"][0] == llm.encode([{"role": "user", "content": "Hi"}])


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
        patched.setattr(Runner, "build", raising(MemoryError("no room")))
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


def raising(error):
    def fail(*args, **kwargs):
        raise error

    return fail
