"""A TCP link that is slow, freezes or breaks: between two processes on loopback.

To put one between ranks, name its port where their hostfile names the port it leads to.
"""

import contextlib
import queue
import socket
import threading
import time
from typing import Self

LOCAL = "127.0.0.1"
PART_BYTES = 64 << 10


class Proxy:
    """Takes connections at `port`, and passes all that comes on to `target` and back.

    target: a port on loopback, which needn't listen yet: a connection is tried for `connect_s`.
    delay_s: for which data is under way, in either direction; however much may be under way at
    once, so the delay alone limits no throughput. bytes_per_s: of each direction of each
    connection; None: no limit. Threads of its own do the work. All methods may be called from any
    thread.
    """

    def __init__(
        self,
        target: int,
        *,
        delay_s: float = 0.0,
        bytes_per_s: float | None = None,
        connect_s: float = 30.0,
    ) -> None:
        self.delay_s = delay_s
        self.bytes_per_s = bytes_per_s
        self._target = target
        self._connect_s = connect_s
        self._door = socket.create_server((LOCAL, 0))
        self.port: int = self._door.getsockname()[1]
        self._flows = threading.Event()
        self._flows.set()
        self._lock = threading.Lock()
        self._ends: list[socket.socket] = []
        self._passed_bytes = 0
        self._start(self._take)

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
        """Taken since the start or the last `cut`."""
        with self._lock:
            return len(self._ends) // 2

    def freeze(self) -> None:
        """From now on nothing arrives, and nothing is closed either, as if a cable were out."""
        self._flows.clear()

    def thaw(self) -> None:
        """What was frozen flows on: nothing is lost."""
        self._flows.set()

    def cut(self) -> None:
        """Hang up all connections at both ends; what was under way is lost. New ones are taken."""
        with self._lock:
            ends, self._ends = self._ends, []
        for end in ends:
            _hang_up(end)

    def close(self) -> None:
        """Cut, and take no more connections: who tries one is refused."""
        _hang_up(self._door)
        self.cut()
        self._flows.set()

    def _start(self, work, *args) -> None:
        threading.Thread(target=work, args=args, name="proxy", daemon=True).start()

    def _take(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                near, _ = self._door.accept()
                self._start(self._join, near)

    def _join(self, near: socket.socket) -> None:
        """Connect to the target, and pass on in both directions."""
        far = self._connect()
        if far is None:
            _hang_up(near)
            return
        for end in near, far:
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._lock:
            self._ends += near, far
        for source, sink in (near, far), (far, near):
            parts: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
            self._start(self._read, source, parts)
            self._start(self._write, sink, parts)

    def _connect(self) -> socket.socket | None:
        until = time.monotonic() + self._connect_s
        while time.monotonic() < until:
            try:
                return socket.create_connection((LOCAL, self._target))
            except OSError:
                time.sleep(0.02)
        return None

    def _read(self, source: socket.socket, parts: queue.SimpleQueue) -> None:
        """Note when each part is due: sent one after the other, and then under way."""
        sent_s, data = 0.0, b"-"
        while data:
            self._flows.wait()
            try:
                data = source.recv(PART_BYTES)
            except OSError:
                data = b""
            sent_s = max(sent_s, time.monotonic())
            if self.bytes_per_s is not None:
                sent_s += len(data) / self.bytes_per_s
            parts.put((sent_s + self.delay_s, data))

    def _write(self, sink: socket.socket, parts: queue.SimpleQueue) -> None:
        """Until one end hangs up, which the other is told of."""
        data = b"-"
        while data:
            due_s, data = parts.get()
            time.sleep(max(0.0, due_s - time.monotonic()))
            self._flows.wait()
            try:
                if data:
                    sink.sendall(data)
                    with self._lock:
                        self._passed_bytes += len(data)
                else:
                    sink.shutdown(socket.SHUT_WR)
            except OSError:
                return


def _hang_up(end: socket.socket) -> None:
    """Close it under a thread that waits on it, too."""
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()
