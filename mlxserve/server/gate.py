"""What every request passes on its way in: host, key, limits; and how errors go out."""

from __future__ import annotations

import asyncio
import time
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlxserve.config import ServerConfig
from mlxserve.server.journal import Journal
from mlxserve.server.problems import RETRY_AFTER_S, Problem, problem_of, response
from mlxserve.server.protocol import EXCESS
from mlxserve.server.tenants import Tenants

OPEN_PATHS = ("/health", "/ready", "/metrics", "/openapi.json")
"""Those that need no key: probes and scrapers have none."""

LOOPBACK = ("localhost", "127.0.0.1", "::1")
"""This machine's names for itself."""


class Gate:
    """ASGI middleware around the routes. Puts `tenant` into the scope.

    Written as plain ASGI: Starlette's BaseHTTPMiddleware would put a task and a queue between an
    answer's chunks and the socket.
    """

    def __init__(
        self, app: ASGIApp, config: ServerConfig, tenants: Tenants, journal: Journal
    ) -> None:
        self._app = app
        self._tenants = tenants
        self._journal = journal
        self._max_connections = config.max_connections
        self._hosts = None if "*" in config.allowed_hosts else _hosts(config)
        any_page = config.api_keys or "*" in config.cors_origins  # keys are what no page has
        self._origins = None if any_page else frozenset(config.cors_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, started_s = 0, time.perf_counter()
        excess = scope["state"].get(EXCESS, False)

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if excess:
                    message["headers"] = [*message["headers"], (b"connection", b"close")]
            await send(message)

        try:
            self._check(scope)
            await self._app(scope, receive, noted)
        except (Exception, asyncio.CancelledError) as error:
            problem = problem_of(error)
            if not status and problem.status != 499:  # there is nobody to tell
                await response(problem, scope["path"])(scope, receive, noted)
            status = status or problem.status
        finally:
            self._journal.note(scope, status or 499, started_s)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if self._hosts is not None and _name(host) not in self._hosts:
            raise Problem(
                403, f"the Host header is {host[:100]!r}; start the server with --allowed-host"
            )
        origin = headers.get("origin")
        if origin and not self._may_ask(origin, host):
            raise Problem(
                403, f"the page is of {origin[:100]!r}; start the server with --cors-origin"
            )
        if scope["path"] in OPEN_PATHS:
            return
        if scope["state"].get(EXCESS):
            raise Problem(
                503,
                f"{self._max_connections} connections are open, the most that may; close some, or "
                "try again later",
                retry_after_s=RETRY_AFTER_S,
            )
        tenant = self._tenants.of(headers.get("authorization"), headers.get("x-api-key"))
        if scope["method"] == "POST":
            self._tenants.admit(tenant)
        scope["tenant"] = tenant

    def _may_ask(self, origin: str, host: str) -> bool:
        """Whether a web page may: browsers send simple requests without asking, and only hide the
        answer, so any page could make the model work."""
        if self._origins is None or origin in self._origins:
            return True
        return origin.partition("://")[2] == host


def _hosts(config: ServerConfig) -> frozenset[str] | None:
    """The names to let in, or None for all: a web page must not reach a server on this machine by
    a name that its owner has pointed here (DNS rebinding)."""
    if not config.local and not config.allowed_hosts:
        return None
    return frozenset({*LOOPBACK, config.host, *(name.lower() for name in config.allowed_hosts)})


def _name(host: str) -> str:
    try:
        return (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:
        return ""
