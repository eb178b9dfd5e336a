"""HTTP/1.1 on one connection, with the limits that uvicorn leaves out."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import h11
import msgspec
from starlette.datastructures import Headers
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from mlxserve.config import ServerConfig
from mlxserve.server.journal import Entry, Journal
from mlxserve.server.problems import Problem, error_form, id_header

EXCESS = "excess"
"""In the state of a request: its connection is one more than may be open."""

BROKEN = "broken"
"""In the state of a request: the `Entry` of what was answered to its body, in the app's place."""

MAX_EXCESS = 128
"""Connections beyond those that may be open, to be told so; any more are closed at once."""

EXCESS_HEAD_S = 1.0
"""For the head on such a connection."""

MAX_HEAD_BYTES = 64 << 10
"""Of a request's line and headers together."""

LINGER_S = 2.0
"""For which a refused client may go on sending: closed at once, it would lose the answer."""

REFUSED = {
    400: "this isn't valid HTTP/1.1; send a request as RFC 9112 has it",
    408: "the request's head didn't come in {seconds:g} s; send it faster",
    431: "the request's head has over {most} bytes; send shorter headers",
    501: "this transfer encoding isn't known here; send chunks, or a Content-Length",
}
"""What is told, by status, of what doesn't become a request."""


def refusal(status: int, head_s: float = 0.0) -> Problem:
    """Why there is no request. head_s: in which its head had to come."""
    text = REFUSED.get(status, REFUSED[400])
    return Problem(status, text.format(seconds=head_s, most=MAX_HEAD_BYTES))


class Protocol(H11Protocol):
    """Closes connections on which no head arrives in time, and those that nobody reads from.

    Without the second, a client that stops reading would hold its answers' pages for ever. What
    comes on a connection that is one too many is marked as `EXCESS`, for the gate to refuse.
    journal: takes down what doesn't come as far as the gate.
    """

    def __init__(self, *args: Any, limits: ServerConfig, journal: Journal, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._journal = journal
        self._head_s = limits.header_timeout_s
        self._head: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if (excess := len(self.connections) - self._limits.max_connections) > 0:
            self.app_state = {**self.app_state, EXCESS: True}
            self._head_s = min(EXCESS_HEAD_S, self._head_s)
            if excess > MAX_EXCESS:
                transport.abort()
        self._await_head()

    def data_received(self, data: bytes) -> None:
        if not self._refused:
            super().data_received(data)

    def handle_events(self) -> None:
        super().handle_events()
        self._await_head()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head, self._unread = _stopped(self._head), _stopped(self._unread)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(self._limits.send_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unread = _stopped(self._unread)

    def send_400_response(self, msg: str) -> None:
        """What isn't HTTP is answered too. Called while h11's error is handled, which says why."""
        self._refuse(getattr(sys.exception(), "error_status_hint", 400))

    def _refuse(self, status: int) -> None:
        """Answer in place of the app, as long as no answer is under way, and end the connection."""
        self._refused = True
        self._head = _stopped(self._head)
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE, h11.ERROR):
            self.transport.abort()
            return
        problem = refusal(status, self._head_s)
        if self.cycle is None or self.cycle.response_complete:
            path, entry = "-", Entry.of({})
            entry.fail(problem)
            self._journal.note({"method": "-", "path": path, "entry": entry}, status)
        else:  # a request whose body turned out to be broken: the gate notes it
            path, entry = self.scope["path"], Entry.of(Headers(raw=self.headers))
            entry.fail(problem)
            self.scope["state"][BROKEN] = entry  # type: ignore[typeddict-item]
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        data = msgspec.json.encode(error_form(path).of(problem))
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(data)).encode()),
            (b"connection", b"close"),
            (id_header(path), entry.id.encode()),
        ]
        head = h11.Response(status_code=status, headers=headers, reason=STATUS_PHRASES[status])
        events = (head, h11.Data(data=data), h11.EndOfMessage())
        self.transport.write(b"".join(self.conn.send(event) or b"" for event in events))
        self.transport.write_eof()
        self._head = self.loop.call_later(LINGER_S, self.transport.close)

    def _await_head(self) -> None:
        """Set the clock for the next request, unless one is being answered."""
        if self._refused:
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self._head = _stopped(self._head)
        elif self._head is None and not self.transport.is_closing():
            self._head = self.loop.call_later(self._head_s, self._no_head)

    def _no_head(self) -> None:
        """A client that has begun a request hears why; one that is idle has nothing to hear."""
        begun, _ = self.conn.trailing_data
        if begun and self.conn.their_state is h11.IDLE:
            self._refuse(408)
        else:
            self.transport.close()


def _stopped(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
