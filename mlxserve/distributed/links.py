"""What all ranks run to measure what connects them: `python -m mlxserve.distributed.links`.

Rank 0 prints the results in JSON. With "meet" they only add up a number, which shows that they can.
"""

import socket
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import msgspec

from mlxserve.config import Placement, placement
from mlxserve.distributed.link import read, write
from mlxserve.distributed.messages import Hello
from mlxserve.errors import MlxserveError, ModelError

MEET = "meet"
PINGS = 100
SMALL_BYTES = 4 << 10  # a token's hidden state
LARGE_BYTES = 8 << 20
LARGE_TIMES = 4
CONNECT_S = 30.0  # for ranks to come, and for one to say something
RETRY_S = 0.1
_GO, _DONE = b"g", b"d"


class Measured(msgspec.Struct):
    """A way between two ranks, or a sum of all.

    by: "tcp", a backend's name, or "sum". latency_s: half of a round trip of a small message, or a
    small sum; bytes_per_s: of large ones.
    """

    ranks: list[int]
    by: str
    latency_s: float
    bytes_per_s: float


def main() -> None:
    """See above. Ends with a line on stderr where the ranks can't reach each other."""
    here = placement()
    assert here is not None  # launch has set it
    try:
        if sys.argv[1:] == [MEET]:
            _group(here)
        elif here.rank == 0:
            print(msgspec.json.encode(_lead(here)).decode(), flush=True)
        else:
            _follow(here)
    except (MlxserveError, OSError, msgspec.DecodeError) as error:
        sys.exit(f"error: {error}")


def _lead(here: Placement) -> list[Measured]:
    with socket.create_server(here.control) as door:
        others = _arrivals(door, here)
    found: list[Measured] = []
    for rank in sorted(others):  # one after the other, since they share this machine's link
        other = others[rank]
        other.sendall(_GO)
        for size in (1,) * PINGS + (LARGE_BYTES,) * LARGE_TIMES:
            _take(other, size)
            other.sendall(_DONE)
    found += _of_tensors(here)
    for other in others.values():
        with other, other.makefile("rb") as lines:
            found += msgspec.json.decode(lines.readline(), type=list[Measured])
    return sorted(found, key=lambda one: (one.by != "tcp", one.by == "sum", one.ranks))


def _follow(here: Placement) -> None:
    with _connection(here) as control:
        write(control, Hello(here.key, here.rank, socket.gethostname(), {}))
        _take(control, 1)

        def answered(data: bytes) -> Callable[[], None]:
            def exchange() -> None:
                control.sendall(data)
                _take(control, 1)

            return exchange

        latency_s = _median_s(PINGS, answered(bytes(1))) / 2
        took_s = _median_s(LARGE_TIMES, answered(bytes(LARGE_BYTES)))
        found = [Measured([0, here.rank], "tcp", latency_s, LARGE_BYTES / took_s)]
        found += _of_tensors(here)
        control.sendall(msgspec.json.encode(found) + b"\n")


def _arrivals(door: socket.socket, here: Placement) -> dict[int, socket.socket]:
    """The others, by rank; strangers are hung up on. Raises ModelError."""
    found: dict[int, socket.socket] = {}
    until_s = time.monotonic() + CONNECT_S
    while missing := sorted(set(range(1, here.size)) - found.keys()):
        door.settimeout(max(0.01, until_s - time.monotonic()))
        try:
            other, _ = door.accept()
        except TimeoutError:
            raise ModelError(
                f"rank {', '.join(map(str, missing))} can't reach rank 0 at {here.control[0]}; let "
                "Python through this machine's firewall"
            ) from None
        other.settimeout(CONNECT_S)
        other.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            hello = read(other)
        except (OSError, msgspec.DecodeError):
            hello = None
        if isinstance(hello, Hello) and hello.key == here.key:
            found[hello.rank] = other
        else:
            other.close()
    return found


def _connection(here: Placement) -> socket.socket:
    until_s = time.monotonic() + CONNECT_S
    while True:
        try:
            found = socket.create_connection(here.control, timeout=CONNECT_S)
        except OSError as error:
            if time.monotonic() > until_s:
                host, port = here.control
                raise ModelError(f"rank 0 can't be reached at {host}:{port}: {error}") from None
            time.sleep(RETRY_S)
        else:
            # The others have their turn first, each in seconds.
            found.settimeout(CONNECT_S * here.size)
            found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return found


def _group(here: Placement) -> Any:
    """MLX's group, whose ranks have added up a number. Raises ModelError."""
    import mlx.core as mx

    try:
        group = mx.distributed.init(strict=True, backend=here.backend)
        mx.eval(mx.distributed.all_sum(mx.ones((1,)), group=group))
    except (RuntimeError, ValueError) as error:
        raise ModelError(f"the ranks can't reach each other over {here.backend}: {error}") from None
    return group


def _of_tensors(here: Placement) -> list[Measured]:
    """Sums over all, by rank 0; and between two neighbours, by the first of them."""
    import mlx.core as mx

    group = _group(here)
    small, large = (mx.zeros((size,), mx.uint8) for size in (SMALL_BYTES, LARGE_BYTES))
    mx.eval(small, large)

    def measured(ranks: list[int], by: str, work: Callable[[Any], None], ways: int) -> Measured:
        latency_s = _median_s(PINGS, lambda: work(small)) / ways
        took_s = _median_s(LARGE_TIMES, lambda: work(large)) / ways
        return Measured(ranks, by, latency_s, LARGE_BYTES / took_s)

    def add(x: mx.array) -> None:
        mx.eval(mx.distributed.all_sum(x, group=group))

    def pass_to(other: int, *, first: bool) -> Callable[[mx.array], None]:
        def exchange(x: mx.array) -> None:
            for turn in (first, not first):
                if turn:
                    mx.eval(mx.distributed.send(x, other, group=group))
                else:
                    mx.eval(mx.distributed.recv_like(x, other, group=group))

        return exchange

    everyone = list(range(here.size))
    total = measured(everyone, "sum", add, 1)
    found = [total] if here.rank == 0 else []
    for first in everyone if here.size > 2 else [0]:
        pair = [first, (first + 1) % here.size]
        if here.rank in pair:
            other = pair[1 - pair.index(here.rank)]
            exchange = pass_to(other, first=here.rank == first)
            one = measured(pair, here.backend, exchange, 2)
            found += [one] if here.rank == first else []
        add(small)  # one pair after the other
    return found


def _take(sender: socket.socket, count: int) -> None:
    """Read so many bytes, for nothing but the time that it takes."""
    while count:
        part = sender.recv(min(count, 1 << 20))
        if not part:
            raise ConnectionError("another rank closed the connection")
        count -= len(part)


def _median_s(times: int, work: Callable[[], None]) -> float:
    took_s = []
    for _ in range(times):
        begin_s = time.perf_counter()
        work()
        took_s.append(time.perf_counter() - begin_s)
    return median(took_s)


if __name__ == "__main__":
    main()
