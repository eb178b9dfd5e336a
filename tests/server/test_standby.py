"""What clients of a server are told while it starts, by the launcher that keeps its address."""

import socket
import time

import httpx
import pytest

from mlxserve.server.standby import CLIENT_S, RETRY_AFTER_S, Standby

WAIT_S = 20


@pytest.fixture
def at():
    with socket.create_server(("127.0.0.1", 0)) as door:
        yield door


@pytest.fixture
def standby(at):
    one = Standby(at)
    one.start()
    yield one
    one.stop()


def url(at):
    return f"http://127.0.0.1:{at.getsockname()[1]}/v1/completions"


def test_every_request_is_told_when_to_try_again(at, standby):
    for body in (b"", b"{}", b"x" * 60_000):
        answer = httpx.post(url(at), content=body, timeout=WAIT_S)
        assert answer.status_code == 503
        assert answer.headers["Retry-After"] == str(RETRY_AFTER_S)
        assert f"try again in {RETRY_AFTER_S} s" in answer.json()["error"]["message"]
    assert httpx.get(url(at), timeout=WAIT_S).status_code == 503


def test_clients_that_say_nothing_or_hang_up_keep_nobody_waiting(at, standby):
    silent = [socket.create_connection(at.getsockname()) for _ in range(3)]
    socket.create_connection(at.getsockname()).close()
    begin_s = time.monotonic()
    assert httpx.get(url(at), timeout=WAIT_S).status_code == 503
    assert time.monotonic() - begin_s < 4 * len(silent) * CLIENT_S
    for one in silent:
        one.close()


def test_once_stopped_it_leaves_clients_to_the_server(at, standby):
    standby.stop()
    with socket.create_connection(at.getsockname()) as client:
        time.sleep(0.3)
        connection, _ = at.accept()
        with connection:
            connection.sendall(b"served")
        assert client.recv(10) == b"served"
    standby.start()
    assert httpx.get(url(at), timeout=WAIT_S).status_code == 503
