"""A connection between two ranks, over which each tells the other what to do, and that it lives."""

import contextlib
import logging
import os
import queue
import socket
import struct
import threading
from collections.abc import Callable

import msgspec

from mlxserve.config import launcher_fd
from mlxserve.device import Pressure
from mlxserve.distributed.messages import Message, Ping, Stop, decode, encode
from mlxserve.errors import PeerLost

logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 64 << 20
LOST_EXIT = 3  # the exit code of a rank that lost another, or its launcher
BEATS = 4  # signs of life within the time after which one that is silent counts as lost
_LENGTH = struct.Struct("!I")


class Link:
    """Messages in order, both ways. `received` has what came, without signs of life.

    peer: who is at the other end, for messages. timeout_s: how long it may be silent. on_lost:
    called once, on a thread of the link's own, with what went wrong: here, or at the other end,
    which says so before it ends; not after `close`, or where that one has closed. signal: what to
    ask how short of memory this machine is; `pressure` is what the other end last said of its own.
    """

    def __init__(
        self,
        connection: socket.socket,
        peer: str,
        timeout_s: float,
        on_lost: Callable[[str], None],
        signal: Callable[[], Pressure] | None = None,
    ) -> None:
        self.peer = peer
        self.pressure = Pressure.NORMAL
        self._signal = signal
        self.received: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._socket = connection
        self._timeout_s = timeout_s
        self._on_lost = on_lost
        self._sending = threading.Lock()
        self._over = threading.Event()
        connection.settimeout(timeout_s)
        for work in (self._listen, self._beat):
            threading.Thread(target=work, name="mlxserve-link", daemon=True).start()

    def send(self, message: Message) -> None:
        """Raises PeerLost where the other end is gone."""
        try:
            with self._sending:
                write(self._socket, message)
        except OSError as error:
            self._lost(f"is lost: {_reason(error, self._timeout_s)}")
            raise PeerLost(f"{self.peer} is lost") from error

    def close(self, reason: str = "") -> None:
        """Say that it is over, and hang up. reason: what went wrong, if anything."""
        if not self._over.is_set():
            self._over.set()
            with contextlib.suppress(OSError), self._sending:
                write(self._socket, Stop(reason))
        self._socket.close()

    def _listen(self) -> None:
        try:
            while True:
                message = read(self._socket)
                if isinstance(message, Stop):
                    if message.reason:
                        self._lost(f"ends: {message.reason}")
                    self._over.set()
                if isinstance(message, Ping):
                    self.pressure = message.pressure
                else:
                    self.received.put(message)
        except (OSError, msgspec.DecodeError) as error:
            self._lost(f"is lost: {_reason(error, self._timeout_s)}")

    def _beat(self) -> None:
        while not self._over.wait(self._timeout_s / BEATS):
            try:
                self.send(Ping() if self._signal is None else Ping(self._signal()))
            except PeerLost:
                return

    def _lost(self, how: str) -> None:
        if not self._over.is_set():
            self._over.set()
            self._on_lost(f"{self.peer} {how}")


def end_with_launcher() -> None:
    """End this process where the launcher on this machine has gone without ending it."""
    if (fd := launcher_fd()) is not None:
        threading.Thread(target=_wait_for_launcher, args=(fd,), daemon=True).start()


def _wait_for_launcher(fd: int) -> None:
    """On a thread: the main one may be stuck in a collective."""
    os.read(fd, 1)
    logger.error("the launcher is gone; this rank ends too")
    os._exit(LOST_EXIT)


def write(connection: socket.socket, message: Message) -> None:
    """Send one message. Raises OSError."""
    data = encode(message)
    connection.sendall(_LENGTH.pack(len(data)) + data)


def read(connection: socket.socket) -> Message:
    """Wait for one message. Raises OSError, and DecodeError for what is none."""
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    if length > MAX_MESSAGE_BYTES:
        raise OSError(f"a message of {length} bytes; at most {MAX_MESSAGE_BYTES} are taken")
    return decode(_exactly(connection, length))


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        part = connection.recv(min(count - len(data), 1 << 20))
        if not part:
            raise ConnectionError("it closed the connection")
        data += part
    return bytes(data)


def _reason(error: Exception, timeout_s: float) -> str:
    if isinstance(error, TimeoutError):
        return f"no sign of life for {timeout_s:g} s"
    return str(error) or type(error).__name__
