"""Answers at a server's address while there is no server: for `mlxserve launch`, which keeps it."""

import contextlib
import json
import select
import socket
import threading

RETRY_AFTER_S = 5
CLIENT_S = 0.5  # for a client to send its request, and to take the answer
POLL_S = 0.1
READ_BYTES = 1 << 16  # of a request, at most, before the answer and after it

_MESSAGE = f"the processes that compute the model are starting; try again in {RETRY_AFTER_S} s"
_ERROR = {"message": _MESSAGE, "type": "server_error", "param": None, "code": "starting"}
_BODY = json.dumps({"error": _ERROR}).encode()
ANSWER = (
    f"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\n"
    f"Content-Length: {len(_BODY)}\r\nRetry-After: {RETRY_AFTER_S}\r\nConnection: close\r\n\r\n"
).encode() + _BODY


class Standby:
    """Between `start` and `stop` every request gets a 503 that says when to try again.

    at: listens; a server that another process runs may accept from it too, at other times.
    """

    def __init__(self, at: socket.socket) -> None:
        self._at = at
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()

    def start(self) -> None:
        self.stop()
        self._stopped.clear()
        self._thread = threading.Thread(target=self._run, name="mlxserve-standby", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while not self._stopped.is_set():
            ready, _, _ = select.select([self._at], [], [], POLL_S)
            if ready and not self._stopped.is_set():
                with contextlib.suppress(OSError):  # whoever hangs up, or is accepted elsewhere
                    _answer(self._at.accept()[0])


def _answer(connection: socket.socket) -> None:
    with connection:
        connection.settimeout(CLIENT_S)
        connection.recv(READ_BYTES)
        connection.sendall(ANSWER)
        connection.shutdown(socket.SHUT_WR)
        # Closed with something unread, it would be reset, and the answer lost.
        left = READ_BYTES
        while left > 0 and (part := connection.recv(left)):
            left -= len(part)
