"""A request, and what is told of its answers, at once or as a stream: in any dialect."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from mlxserve.server.body import ignored_header
from mlxserve.server.delivery import Delivery
from mlxserve.server.journal import Entry
from mlxserve.server.problems import AnthropicErrorReply, Problem, error_form
from mlxserve.server.service import Service, read, reply, service
from mlxserve.server.turn import Turn
from mlxserve.types import TokenOut

DONE = b"data: [DONE]\n\n"
"""The last event of OpenAI's streams."""

Event = msgspec.Struct | tuple[str, Any] | bytes
"""What is sent of a stream at once: with its name where the dialect names events, or as it is."""


class Body(Protocol):
    """What the bodies of all dialects have."""

    @property
    def model(self) -> str | None: ...

    @property
    def stream(self) -> bool | None: ...


B = TypeVar("B", bound=Body)


@dataclass(eq=False)
class Exchange(ABC, Generic[B]):
    """What an endpoint has made of a request. asked: its body."""

    served: Service
    asked: B
    delivery: Delivery

    @property
    def streams(self) -> bool:
        """Whether the client wants events."""
        return bool(self.asked.stream)

    @property
    def model(self) -> str:
        """The name that the answer goes by."""
        return self.served.name_of(self.asked.model)

    @abstractmethod
    def finish_reason(self, index: int) -> str:
        """Why an answer ended, in OpenAI's words."""

    @abstractmethod
    def take(self, index: int, piece: str, out: TokenOut) -> None:
        """Take in what is new of an answer that will be told as a whole."""

    @abstractmethod
    def reply(self) -> msgspec.Struct:
        """All of it, once it has ended."""

    @abstractmethod
    def events(self) -> AsyncGenerator[Event | None]:
        """What is new, as it comes; None keeps the line open."""


@dataclass(eq=False)
class ChatExchange(Exchange[B]):
    """One whose answers are a model's turn in a chat."""

    turn: Turn

    def finish_reason(self, index: int) -> str:
        """See `Exchange`."""
        return self.turn.finish_reason(index)

    def take(self, index: int, piece: str, out: TokenOut) -> None:
        """See `Exchange`."""
        self.turn.feed(index, piece, out)


Prepare = Callable[[Service, bytes, str], tuple[Exchange[Any], list[str]]]
"""Of a body and a tenant's name: what to do, and the fields that had no effect. Finds everything
that can be wrong with a request; raises RequestError and Problem."""


async def answer(request: Request, prepare: Prepare) -> Response:
    """Read a request, have it computed, and tell what comes of it."""
    served = service(request)
    served.check_open()
    entry: Entry = request.scope["entry"]
    assert entry.tenant is not None
    data, tenant = await read(request), entry.tenant.name
    exchange, ignored = await served.prepare(lambda: prepare(served, data, tenant))
    head = ignored_header(ignored, strict=served.config.strict)
    entry.exchange, delivery = exchange, exchange.delivery
    most = entry.most_tokens(served.llm.context_tokens)
    entry.reserved = served.tenants.reserve(entry.tenant, most)
    await served.prepare(delivery.start)  # which may have to look at a grammar
    if exchange.streams:
        await delivery.begun()
        return EventStream(delivery, exchange.events(), head, request.scope)
    gone = asyncio.create_task(_watch(request.receive, delivery))
    try:
        async for event in delivery:
            if event is not None:
                exchange.take(*event)
    finally:
        gone.cancel()
        delivery.close()
    return reply(exchange.reply(), head)


async def _watch(receive: Receive, delivery: Delivery) -> None:
    """End the answers of a client that hangs up."""
    while (await receive())["type"] != "http.disconnect":
        pass
    delivery.fail(Problem(499, "the client went away"))


class EventStream(StreamingResponse):
    """Server-sent events; None among them becomes a comment.

    Ends the answers with the connection, whatever ended that. scope: of the request.
    """

    def __init__(
        self,
        delivery: Delivery,
        events: AsyncGenerator[Event | None],
        headers: Mapping[str, str],
        scope: Scope,
    ) -> None:
        head = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers}
        super().__init__(_written(events, scope), headers=head, media_type="text/event-stream")
        self._delivery = delivery

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.create_task(_watch(receive, self._delivery))
        try:
            await self.stream_response(send)
        finally:
            gone.cancel()
            self._delivery.close()


async def _written(events: AsyncGenerator[Event | None], scope: Scope) -> AsyncIterator[bytes]:
    try:
        async for event in events:
            match event:
                case None:
                    yield b": still here\n\n"
                case bytes():
                    yield event
                case (name, data):
                    yield _line(data, name)
                case _:
                    yield _line(event)
    except (Exception, asyncio.CancelledError) as error:
        told = error_form(scope["path"]).of(scope["entry"].fail(error))
        yield _line(told, "error" if isinstance(told, AnthropicErrorReply) else None)


def _line(data: Any, name: str | None = None) -> bytes:
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + msgspec.json.encode(data) + b"\n\n"
