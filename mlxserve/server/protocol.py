"""HTTP/1.1 on one connection, with the limits that uvicorn leaves out."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
import msgspec
from uvicorn.protocols.http.h11_impl import H11Protocol

from mlxserve.config import ServerConfig
from mlxserve.server.problems import ErrorReply, Problem

EXCESS = "excess"
"""In the state of a request: its connection is one more than may be open."""

MAX_EXCESS = 128
"""Connections beyond those that may be open, to be told so; any more are closed at once."""

EXCESS_HEAD_S = 1.0
"""For the head on such a connection."""


class Protocol(H11Protocol):
    """Closes connections on which no head arrives in time, and those that nobody reads from.

    Without the second, a client that stops reading would hold its answers' pages for ever. What
    comes on a connection that is one too many is marked as `EXCESS`, for the gate to refuse.
    """

    def __init__(self, *args: Any, limits: ServerConfig, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._head_s = limits.header_timeout_s
        self._head: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if (excess := len(self.connections) - self._limits.max_connections) > 0:
            self.app_state = {**self.app_state, EXCESS: True}
            self._head_s = min(EXCESS_HEAD_S, self._head_s)
            if excess > MAX_EXCESS:
                transport.abort()
        self._await_head()

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
        """What isn't HTTP is answered too, as long as no answer is under way."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE, h11.ERROR):
            self.transport.abort()
            return
        problem = Problem(400, "this isn't valid HTTP/1.1; send a request as RFC 9112 has it")
        data = msgspec.json.encode(ErrorReply.of(problem))
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(data))),
            ("connection", "close"),
        ]
        head = h11.Response(status_code=400, headers=headers)
        events = (head, h11.Data(data=data), h11.EndOfMessage())
        self.transport.write(b"".join(self.conn.send(event) or b"" for event in events))
        self.transport.close()

    def _await_head(self) -> None:
        """Set the clock for the next request, unless one is being answered."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._head = _stopped(self._head)
        elif self._head is None and not self.transport.is_closing():
            self._head = self.loop.call_later(self._head_s, self.transport.close)


def _stopped(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
