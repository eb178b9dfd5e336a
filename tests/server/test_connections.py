"""Clients that leave, dawdle or don't read: what they held is free at once, and for others."""

import contextlib
import http.client
import json
import logging
import os
import resource
import threading
import time

import pytest

import mlxserve
from mlxserve.errors import RequestError
from mlxserve.server import delivery, protocol
from tests.support.serving import NAME, serving, wait_until

pytestmark = pytest.mark.full

ENDLESS = {"max_tokens": 1900, "temperature": 0.0, "ignore_eos": True}


def body(**more) -> bytes:
    return json.dumps({"prompt": "x", **ENDLESS, **more}).encode()


def open_files() -> int:
    return len(os.listdir("/dev/fd"))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_hanging_up_ends_the_answer(llm, server, path, stream):
    before = llm.stats().completion_tokens
    messages = {"messages": [{"role": "user", "content": "x"}]}
    with server.open_socket() as sock:
        sock.sendall(server.post(path, body(stream=stream, n=3, temperature=1, **messages)))
        wait_until(lambda: llm.stats().running == 3, "it runs")
        if stream:
            assert sock.recv(100).startswith(b"HTTP/1.1 200")
    wait_until(server.idle, "its pages are free")
    assert llm.stats().completion_tokens - before < 3 * 1900


def test_hanging_up_while_waiting_ends_that_too(tiny_model_dir):
    with mlxserve.load(tiny_model_dir, max_batch=1) as llm, serving(llm) as server:
        first, second = server.open_socket(), server.open_socket()
        first.sendall(server.post("/v1/completions", body()))
        wait_until(lambda: llm.stats().running == 1, "the first runs")
        second.sendall(server.post("/v1/completions", body(stream=True)))
        wait_until(lambda: llm.stats().waiting == 1, "the second waits")
        second.close()
        wait_until(lambda: llm.stats().waiting == 0, "nobody waits")
        first.close()
        wait_until(server.idle, "nothing is held")


def test_closing_the_clients_stream_ends_the_answer(client, server):
    stream = client.completions.create(
        model=NAME, prompt="x", max_tokens=1900, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    wait_until(server.idle, "its pages are free")


def test_hanging_up_within_a_body_is_no_fault_of_ours(server, caplog):
    caplog.set_level(logging.INFO, "mlxserve.access")
    with server.open_socket() as sock:
        sock.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{"
        )
        wait_until(lambda: server.tasks() > 1, "the request is taken in")
    wait_until(lambda: any(" 499 " in line for line in caplog.messages), "it is noted")
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_does_not_read_is_dropped(llm, stream):
    with serving(llm, send_timeout_s=0.3, send_bytes=4096) as server:
        with server.open_socket(receive_bytes=4096) as sock:
            asked = body(stream=stream, logprobs=20, n=4, temperature=1, max_tokens=500)
            sock.sendall(server.post("/v1/completions", asked))
            wait_until(lambda: llm.stats().running > 0, "it runs")
            wait_until(lambda: server.idle() and server.tasks() == 2, "it is over")
            time.sleep(1)  # a whole answer is written at once, and then nobody reads it
            got = b""
            with contextlib.suppress(ConnectionResetError):
                while data := sock.recv(65536):
                    got += data
        assert b"[DONE]" not in got
        assert not got.endswith(b"}")
        assert server.complete(prompt="x", max_tokens=1).status_code == 200


def test_a_slow_reader_is_not_dropped(llm):
    with serving(llm, send_timeout_s=2, send_bytes=4096) as server:
        with server.open_socket(receive_bytes=4096) as sock:
            sock.sendall(server.post("/v1/completions", body(stream=True, max_tokens=500)))
            got = b""
            while data := sock.recv(1000):
                got += data
                time.sleep(0.001)
        assert got.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


def ask(server, path, data=b"{}"):
    """The answer to a POST on a connection of its own, and whether the server closed that."""
    with server.open_socket() as sock:
        sock.sendall(server.post(path, data).replace(b"Connection: close\r\n", b""))
        response = http.client.HTTPResponse(sock)
        response.begin()
        return response, json.loads(response.read())


def test_a_connection_too_many_is_told_so_and_closed(llm):
    with serving(llm, max_connections=2) as server:
        held = [server.open_socket() for _ in range(2)]
        wait_until(lambda: server.connections() == 2, "both are open")
        for path, kind in (
            ("/v1/completions", "server_error"),
            ("/v1/messages", "overloaded_error"),
        ):
            response, told = ask(server, path)
            assert (response.status, response.headers["connection"]) == (503, "close")
            assert int(response.headers["retry-after"]) >= 1
            assert told["error"]["type"] == kind
            assert "2 connections are open" in told["error"]["message"]
        with server.open_socket() as probe:  # who looks after the server still hears of it
            probe.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            response = http.client.HTTPResponse(probe)
            response.begin()
            assert (response.status, response.headers["connection"]) == (200, "close")
        held[0].sendall(server.post("/v1/completions", body(max_tokens=1)))
        assert held[0].recv(100).startswith(b"HTTP/1.1 200")  # those that are open aren't touched
        held[0].close()
        wait_until(lambda: server.connections() == 1, "there is room again")
        assert ask(server, "/v1/completions", body(max_tokens=1))[0].status == 200
        held[1].close()


def test_a_connection_too_many_may_not_be_silent(llm, monkeypatch):
    monkeypatch.setattr(protocol, "EXCESS_HEAD_S", 0.05)
    with serving(llm, max_connections=1) as server, server.open_socket():
        wait_until(lambda: server.connections() == 1, "it is open")
        with server.open_socket() as silent:
            assert silent.recv(100) == b""


def test_a_crowd_is_closed_at_once(llm, monkeypatch):
    monkeypatch.setattr(protocol, "MAX_EXCESS", 1)
    with serving(llm, max_connections=1) as server, server.open_socket(), server.open_socket():
        wait_until(lambda: server.connections() == 2, "both are open")
        with server.open_socket() as third, contextlib.suppress(ConnectionResetError):
            assert third.recv(100) == b""


def test_as_many_files_as_connections_may_be_open(llm):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))  # as a shell may have it
        with serving(llm, max_connections=600):
            assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 600
        if hard != resource.RLIM_INFINITY:
            with (
                pytest.raises(RequestError, match="--max-connections"),
                serving(llm, max_connections=hard),
            ):
                pass
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("begun", [b"POST /v1/comp", b"GET /health HTTP/1.1\r\nHost: loc"])
def test_a_head_that_does_not_come(llm, begun):
    with serving(llm, header_timeout_s=0.3) as server:
        got = server.raw(begun)
        assert got.startswith(b"HTTP/1.1 408 ")
        assert b"the request's head didn't come in 0.3 s" in got


def test_a_connection_without_a_request_is_closed(llm):
    with serving(llm, header_timeout_s=0.3) as server:
        assert server.raw(b"") == b""


def test_a_head_that_comes_byte_by_byte(llm):
    head = b"GET /health HTTP/1.1\r\nX: " + b"y" * 1000
    with serving(llm, header_timeout_s=0.5) as server, server.open_socket() as sock:
        sent = 0
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            for byte in head:
                sent += sock.send(bytes([byte]))
                time.sleep(0.01)
        assert sent < len(head)


def test_a_connection_that_is_kept_is_closed_when_idle(llm):
    with serving(llm, header_timeout_s=0.5) as server, server.open_socket() as sock:
        for _ in range(3):
            sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            response = http.client.HTTPResponse(sock)
            response.begin()
            assert (response.status, response.read()) == (200, b'{"status":"ok"}')
            time.sleep(0.1)
        wait_until(lambda: sock.recv(65536) == b"", "it is closed")


def test_an_answer_may_take_longer_than_a_head(llm):
    with serving(llm, header_timeout_s=0.05, body_timeout_s=0.05) as server:
        got = server.complete(prompt="x", max_tokens=300, ignore_eos=True)
        assert got.json()["usage"]["completion_tokens"] == 300


def test_silence_is_filled_with_comments(llm, monkeypatch):
    monkeypatch.setattr(delivery, "PING_S", 0.05)
    monkeypatch.setattr(delivery, "BEGIN_S", 0.05)
    with serving(llm) as server:
        held = threading.Event()
        llm_thread = threading.Thread(target=lambda: llm._engine.call(lambda core: held.wait()))
        llm_thread.start()  # the engine does nothing meanwhile
        with server.open_socket() as sock:
            sock.sendall(server.post("/v1/completions", body(stream=True, max_tokens=2)))
            got = b""
            while got.count(b": still here\n\n") < 2:
                got += sock.recv(65536)
            held.set()
            while data := sock.recv(65536):
                got += data
        llm_thread.join()
    assert got.startswith(b"HTTP/1.1 200 ")
    assert b"data: [DONE]" in got


def test_nothing_is_left_behind(server):
    for round_ in range(3):
        socks = [server.open_socket() for _ in range(12)]
        for i, sock in enumerate(socks):
            sock.sendall(server.post("/v1/completions", body(stream=i % 2 == 0, max_tokens=100)))
        for sock in socks[::3]:
            sock.close()
        for sock in socks:
            if sock.fileno() >= 0:
                while sock.recv(65536):
                    pass
                sock.close()
        wait_until(server.idle, "the engine is idle")
        wait_until(lambda: server.tasks() == 2, "no tasks are left")
        if round_ == 0:
            files = open_files()
    wait_until(lambda: open_files() <= files, "no files are left")
