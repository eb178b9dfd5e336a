"""The link that other tests break: it must do what they take for granted."""

import contextlib
import socket
import time

import pytest

from tests.support.proxy import LOCAL, Proxy

DELAY_S = 0.2
MESSAGES = 20
WAIT_S = 10.0


@pytest.fixture
def server():
    with socket.create_server((LOCAL, 0)) as door:
        door.settimeout(WAIT_S)
        yield door


@contextlib.contextmanager
def ends(proxy, server):
    """Both ends of a connection through it."""
    client = socket.create_connection((LOCAL, proxy.port), WAIT_S)
    accepted, _ = server.accept()
    with client, accepted:
        accepted.settimeout(WAIT_S)
        yield client, accepted


def exactly(end, count):
    data = b""
    while len(data) < count:
        part = end.recv(count - len(data))
        assert part, "the connection is closed"
        data += part
    return data


def target(server):
    return server.getsockname()[1]


def test_bytes_arrive_in_order_both_ways_and_are_counted(server):
    sent = bytes(range(256)) * 1000
    with Proxy(target(server)) as proxy, ends(proxy, server) as (client, accepted):
        client.sendall(sent)
        assert exactly(accepted, len(sent)) == sent
        accepted.sendall(b"back")
        assert exactly(client, 4) == b"back"
        assert proxy.connections == 1
        while proxy.passed_bytes < len(sent) + 4:
            time.sleep(0.01)
        assert proxy.passed_bytes == len(sent) + 4


def test_a_message_takes_the_delay_while_others_are_under_way(server):
    proxy = Proxy(target(server), delay_s=DELAY_S)
    with proxy, ends(proxy, server) as (client, accepted):
        begin_s = time.monotonic()
        for _ in range(MESSAGES):
            client.sendall(b"x")
            time.sleep(0.01)
        exactly(accepted, 1)
        assert time.monotonic() - begin_s >= DELAY_S
        exactly(accepted, MESSAGES - 1)
        took_s = time.monotonic() - begin_s
    assert took_s < MESSAGES * DELAY_S / 2, "they took one delay each"


def test_bytes_take_the_time_that_the_limit_gives_them(server):
    proxy = Proxy(target(server), bytes_per_s=1e6)
    with proxy, ends(proxy, server) as (client, accepted):
        begin_s = time.monotonic()
        client.sendall(bytes(200_000))
        exactly(accepted, 200_000)
        assert time.monotonic() - begin_s >= 0.2


def test_two_over_one_cable_share_its_limit(server):
    there = Proxy(target(server), bytes_per_s=1e6)
    back = Proxy(target(server), opposite=there)
    with there, back, ends(there, server) as (client, _), ends(back, server) as (_, accepted):
        begin_s = time.monotonic()
        accepted.sendall(bytes(100_000))
        client.sendall(bytes(100_000))
        exactly(_, 100_000)
        assert time.monotonic() - begin_s >= 0.1


def test_what_is_frozen_arrives_after_it_thaws(server):
    with Proxy(target(server)) as proxy, ends(proxy, server) as (client, accepted):
        client.sendall(b"a")
        assert exactly(accepted, 1) == b"a"
        proxy.freeze()
        client.sendall(b"b")
        accepted.settimeout(0.2)
        with pytest.raises(TimeoutError):
            accepted.recv(1)
        accepted.settimeout(WAIT_S)
        proxy.thaw()
        assert exactly(accepted, 1) == b"b"


def test_a_cut_hangs_up_both_ends_and_a_new_connection_works(server):
    with Proxy(target(server)) as proxy:
        with ends(proxy, server) as (client, accepted):
            client.sendall(b"a")
            exactly(accepted, 1)
            proxy.cut()
            assert hung_up(client)
            assert hung_up(accepted)
        with ends(proxy, server) as (client, accepted):
            client.sendall(b"b")
            assert exactly(accepted, 1) == b"b"


def test_one_end_that_hangs_up_is_the_other_ends_end(server):
    with Proxy(target(server)) as proxy, ends(proxy, server) as (client, accepted):
        client.close()
        assert hung_up(accepted)


def test_a_closed_one_takes_no_connections(server):
    proxy = Proxy(target(server))
    proxy.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((LOCAL, proxy.port), 1).close()


def hung_up(end):
    try:
        return end.recv(1) == b""
    except ConnectionError:
        return True
