"""What the endpoints share: the model, how a body becomes answers, and how they are written."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from mlxserve.config import ServerConfig
from mlxserve.llm import LLM
from mlxserve.server.delivery import Mailbox
from mlxserve.server.formats import Formats
from mlxserve.server.metrics import Metrics
from mlxserve.server.problems import RETRY_AFTER_S, SHUTTING_DOWN, Problem, invalid
from mlxserve.server.tenants import Tenants

T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)

PREPARE_THREADS = 2
IGNORED_HEADER = "x-mlxserve-ignored"
MAX_NAMED = 20


@dataclass(slots=True)
class Service:
    """One model behind HTTP. Belongs to the event loop's thread."""

    llm: LLM
    config: ServerConfig
    mailbox: Mailbox
    metrics: Metrics
    tenants: Tenants
    openapi: dict[str, Any]
    formats: Formats
    created: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False
    pool: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(PREPARE_THREADS, "mlxserve-prepare")
    )

    async def prepare(self, work: Callable[[], T]) -> T:
        """Run what takes long (templates, tokenizing) beside the loop."""
        return await asyncio.get_running_loop().run_in_executor(self.pool, work)

    def name_of(self, asked: str | None) -> str:
        """Of the model, in the answer to a request that `check_model` has let pass."""
        return asked or self.config.names[0]

    def check_model(self, name: str | None) -> None:
        """Raise Problem for a model that isn't served."""
        if name is not None and name not in self.config.names:
            raise Problem(
                404,
                f"model {name!r} isn't served here; this is {self.config.names[0]!r}",
                code="model_not_found",
                param="model",
            )

    def check_open(self) -> None:
        """Raise Problem once the server is on its way out."""
        if self.draining:
            raise Problem(503, SHUTTING_DOWN, retry_after_s=RETRY_AFTER_S)


def service(request: Request) -> Service:
    """The one that answers this request."""
    return request.app.state.service


def now() -> int:
    """Seconds since 1970, as the replies have it."""
    return int(time.time())


def new_id(prefix: str) -> str:
    """A name for a reply that no other has."""
    return f"{prefix}{uuid.uuid4().hex}"


async def read(request: Request) -> bytes:
    """The body. Raises Problem if it is too large, or doesn't come."""
    config = service(request).config
    limit = config.max_body_bytes
    problem = Problem(413, f"the body is larger than {limit} bytes; send less")
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length) > limit:
        raise problem
    parts, size = [], 0
    try:
        async with asyncio.timeout(config.body_timeout_s):
            async for part in request.stream():
                parts.append(part)
                size += len(part)
                if size > limit:
                    raise problem
    except TimeoutError:
        raise Problem(
            408, f"the body didn't come in {config.body_timeout_s:g} s; send it faster"
        ) from None
    except ClientDisconnect:
        raise Problem(499, "the client went away") from None
    return b"".join(parts)


@dataclass(frozen=True, slots=True)
class Dialect:
    """What is known of a dialect's fields beside those that are in a struct.

    refused: those that can't be honoured, and what to do instead. harmless: values with which one
    of them, or one that no struct has, asks for what is done anyway.
    """

    refused: Mapping[str, str]
    harmless: Mapping[str, Sequence[Any]]


def parse(data: bytes, kind: type[S], dialect: Dialect, *, strict: bool) -> tuple[S, list[str]]:
    """A body as a struct, and the fields that nobody here knows.

    Raises Problem for what isn't JSON, values of the wrong type, fields that can't be honoured,
    and, if strict, unknown fields.
    """
    try:
        given = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Problem(400, f"the body isn't valid JSON: {error}") from None
    except RecursionError:
        raise Problem(400, "the body is nested too deeply; flatten it") from None
    if not isinstance(given, dict):
        raise Problem(400, f"the body is a {type(given).__name__}; it must be an object")
    known = set(kind.__struct_fields__)
    unknown = []
    for name in [name for name in given if name not in known]:
        value = given.pop(name)
        if value is None or value in dialect.harmless.get(name, ()):
            continue
        if name in dialect.refused:
            raise Problem(400, f"{name} can't be honoured: {dialect.refused[name]}", param=name)
        unknown.append(name)
    if unknown and strict:
        raise Problem(400, f"unknown field {unknown[0]!r}; leave it out", param=unknown[0])
    try:
        return msgspec.convert(given, kind), unknown
    except msgspec.ValidationError as error:
        raise invalid(error) from None


def ignored_header(unknown: list[str]) -> dict[str, str]:
    """Tells the client which of its fields had no effect."""
    if not unknown:
        return {}
    names = [name.encode("ascii", "replace").decode()[:40] for name in unknown[:MAX_NAMED]]
    text = ", ".join("".join(c if c.isprintable() else "?" for c in name) for name in names)
    return {IGNORED_HEADER: text}


def reply(struct: msgspec.Struct, headers: Mapping[str, str] | None = None) -> Response:
    """A struct as JSON."""
    data = msgspec.json.encode(struct)
    return Response(data, headers=dict(headers or {}), media_type="application/json")
