"""What the endpoints share: the model, how a body becomes answers, and how they are written."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from mlxserve.config import ServerConfig
from mlxserve.llm import LLM
from mlxserve.report import show_json
from mlxserve.server.delivery import Mailbox
from mlxserve.server.formats import Formats
from mlxserve.server.journal import Journal
from mlxserve.server.metrics import Metrics
from mlxserve.server.problems import RETRY_AFTER_S, SHUTTING_DOWN, Problem
from mlxserve.server.tenants import Tenants

T = TypeVar("T")

PREPARE_THREADS = 2


@dataclass(slots=True)
class Service:
    """One model behind HTTP. Belongs to the event loop's thread."""

    llm: LLM
    config: ServerConfig
    mailbox: Mailbox
    metrics: Metrics
    journal: Journal
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
            served = show_json(self.config.names[0])
            raise Problem(
                404,
                f"model {show_json(name)} isn't served here; this is {served}",
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


def reply(struct: msgspec.Struct, headers: Mapping[str, str] | None = None) -> Response:
    """A struct as JSON."""
    data = msgspec.json.encode(struct)
    return Response(data, headers=dict(headers or {}), media_type="application/json")
