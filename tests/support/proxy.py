"""A TCP link that is slow, freezes or breaks: between two processes on loopback.

To put one between ranks, name its port where their hostfile names the port it leads to.
"""

import contextlib
import select
import socket
import threading
import time
from collections import deque
from typing import Self

LOCAL = "127.0.0.1"
PART_BYTES = 1 << 20


class _Wire:
    """One direction of a cable: what it carries is sent one after the other, then under way."""

    def __init__(self, delay_s: float, bytes_per_s: float | None) -> None:
        self._delay_s = delay_s
        self._bytes_per_s = bytes_per_s
        self._free_s = 0.0
        self._lock = threading.Lock()

    def due_s(self, count: int) -> float:
        """When `count` bytes that are there now will have arrived, by `time.monotonic`."""
        with self._lock:
            self._free_s = max(self._free_s, time.monotonic())
            if self._bytes_per_s is not None:
                self._free_s += count / self._bytes_per_s
            return self._free_s + self._delay_s


class _Flow:
    """One direction of a connection. parts: what is under way, and when it is due; b"": the end."""

    def __init__(self, source: socket.socket, wire: _Wire, sink: socket.socket) -> None:
        self.source, self.wire, self.sink = source, wire, sink
        self.parts: deque[tuple[float, bytes]] = deque()
        self.open = True  # at the source
        self.over = False  # at the sink, too

    def read(self) -> None:
        try:
            data = self.source.recv(PART_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self.open = bool(data)
        self.parts.append((self.wire.due_s(len(data)), data))

    def write(self) -> int:
        """Pass on the first part, or as much of it as goes. Returns how many bytes that was."""
        due_s, data = self.parts.popleft()
        sent = 0
        try:
            if data:
                sent = self.sink.send(data)
            else:
                self.sink.shutdown(socket.SHUT_WR)
                self.over = True
        except BlockingIOError:
            pass
        except OSError:
            self.over = True
        if sent < len(data) and not self.over:
            self.parts.appendleft((due_s, data[sent:]))
        return sent


class Proxy:
    """Takes connections at `port`, and passes all that comes on to `target` and back.

    target: a port on loopback, which needn't listen yet: a connection is tried for `connect_s`.
    delay_s: for which data is under way, in either direction; however much may be under way at
    once, so the delay alone limits no throughput. bytes_per_s: of each direction, over all
    connections; None: no limit. opposite: one that leads the other way over the same cable, and so
    shares its delay and its limits. A thread of its own does the work. All methods may be called
    from any thread.
    """

    def __init__(
        self,
        target: int,
        *,
        delay_s: float = 0.0,
        bytes_per_s: float | None = None,
        opposite: "Proxy | None" = None,
        connect_s: float = 30.0,
    ) -> None:
        if opposite is None:
            self._wires = _Wire(delay_s, bytes_per_s), _Wire(delay_s, bytes_per_s)
        else:
            self._wires = opposite._wires[::-1]
        self._target = target
        self._connect_s = connect_s
        self._door = socket.create_server((LOCAL, 0))
        self._door.setblocking(False)
        self.port: int = self._door.getsockname()[1]
        self._bell, self._rung = socket.socketpair()
        self._rung.setblocking(False)
        self._lock = threading.Lock()  # of all below
        self._flows: list[_Flow] = []
        self._frozen = self._closed = False
        self._passed_bytes = 0
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def passed_bytes(self) -> int:
        """What has arrived at either end so far, in both directions and over all connections."""
        with self._lock:
            return self._passed_bytes

    @property
    def connections(self) -> int:
        """That are open now."""
        with self._lock:
            return len(self._flows) // 2

    def freeze(self) -> None:
        """From now on nothing arrives, and nothing is closed either, as if a cable were out."""
        self._set(frozen=True)

    def thaw(self) -> None:
        """What was frozen flows on: nothing is lost."""
        self._set(frozen=False)

    def cut(self) -> None:
        """Hang up all connections at both ends; what was under way is lost. New ones are taken."""
        with self._lock:
            flows, self._flows = self._flows, []
        for flow in flows:
            with contextlib.suppress(OSError):
                flow.sink.shutdown(socket.SHUT_RDWR)
        self._wake()

    def close(self) -> None:
        """Cut, and take no more connections: who tries one is refused."""
        self._set(closed=True)
        self._thread.join()
        self.cut()

    def _set(self, *, frozen: bool = False, closed: bool = False) -> None:
        with self._lock:
            self._frozen, self._closed = frozen, self._closed or closed
        self._wake()

    def _wake(self) -> None:
        self._bell.send(b"!")

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._closed:
                    break
                self._flows = _unfinished(self._flows)
                flows = [] if self._frozen else list(self._flows)
            now_s = time.monotonic()
            firsts = [(flow.parts[0][0] - now_s, flow) for flow in flows if flow.parts]
            reads = [flow.source for flow in flows if flow.open]
            writes = [flow.sink for left_s, flow in firsts if left_s <= 0]
            waits = [left_s for left_s, _ in firsts if left_s > 0]
            try:
                found = select.select(
                    [self._rung, self._door, *reads], writes, [], min(waits, default=None)
                )
            except (OSError, ValueError):  # one was cut meanwhile
                continue
            self._pass(flows, *found[:2])
        self._door.close()

    def _pass(self, flows: list[_Flow], readable: list, writable: list) -> None:
        if self._rung in readable:
            self._rung.recv(1024)
        if self._door in readable:
            with contextlib.suppress(OSError):
                near, _ = self._door.accept()
                threading.Thread(target=self._join, args=(near,), daemon=True).start()
        for flow in flows:
            if flow.source in readable:
                flow.read()
            if flow.sink in writable:
                sent = flow.write()
                with self._lock:
                    self._passed_bytes += sent

    def _join(self, near: socket.socket) -> None:
        """Connect to the target, and pass on in both directions."""
        far = self._connect()
        if far is None:
            near.close()
            return
        for end in near, far:
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            end.setblocking(False)
        there, back = self._wires
        with self._lock:
            self._flows += _Flow(near, there, far), _Flow(far, back, near)
        self._wake()

    def _connect(self) -> socket.socket | None:
        until = time.monotonic() + self._connect_s
        while time.monotonic() < until and not self._closed:
            try:
                return socket.create_connection((LOCAL, self._target))
            except OSError:
                time.sleep(0.02)
        return None


def _unfinished(flows: list[_Flow]) -> list[_Flow]:
    """Without the connections of which both directions are over."""
    pairs = zip(flows[::2], flows[1::2], strict=True)
    return [flow for pair in pairs if not all(f.over for f in pair) for flow in pair]
