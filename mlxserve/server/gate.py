"""What every request passes on its way in: host, key, limits; and how errors go out."""

from __future__ import annotations

import asyncio
from urllib.parse import unquote, urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlxserve.config import ServerConfig
from mlxserve.server.journal import Entry, Journal
from mlxserve.server.problems import RETRY_AFTER_S, Problem, id_header, response
from mlxserve.server.protocol import BROKEN, EXCESS, MAX_HEAD_BYTES, refusal
from mlxserve.server.tenants import Tenants

OPEN_PATHS = ("/health", "/ready", "/metrics", "/openapi.json")
"""Those that need no key: probes and scrapers have none."""

LOOPBACK = ("localhost", "127.0.0.1", "::1")
"""This machine's names for itself."""


class Gate:
    """ASGI middleware around the routes. Puts `entry` into the scope, see `journal`.

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
        scope = _origin_form(scope)
        status, entry = 0, Entry.of(Headers(scope=scope))
        scope["entry"] = entry
        excess = scope["state"].get(EXCESS, False)

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                named = (id_header(scope["path"]), entry.id.encode())
                closing = [(b"connection", b"close")] if excess else []
                message["headers"] = [*message.get("headers", ()), named, *closing]
            await send(message)

        try:
            self._check(scope, entry)
            await self._app(scope, receive, noted)
        except (Exception, asyncio.CancelledError) as error:
            problem = entry.fail(error)
            if not status and problem.status != 499:  # there is nobody to tell
                await response(problem, scope["path"])(scope, receive, noted)
            status = status or problem.status
        finally:
            if (broken := scope["state"].get(BROKEN)) is not None:
                entry.id, status = broken.id, entry.fail(broken.problem).status
            self._tenants.settle(entry.tenant, entry.reserved, entry.tokens)
            self._journal.note(scope, status or 499)

    def _check(self, scope: Scope, entry: Entry) -> None:
        if _head_bytes(scope) > MAX_HEAD_BYTES:
            raise refusal(431)
        headers = Headers(scope=scope)
        host = headers.get("host")  # HTTP/1.0 needs none, and no browser leaves it out
        if self._hosts is not None and host is not None and _name(host) not in self._hosts:
            raise Problem(
                403, f"the Host header is {host[:100]!r}; start the server with --allowed-host"
            )
        origin = headers.get("origin")
        if origin and not self._may_ask(origin, host or ""):
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
        entry.tenant = self._tenants.of(headers.get("authorization"), headers.get("x-api-key"))
        if scope["method"] == "POST":
            self._tenants.admit(entry.tenant)

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


def _origin_form(scope: Scope) -> Scope:
    """A request whose target is a whole URL, as any other: its host stands for the Host header.

    RFC 9112, section 3.2.2: servers must accept these, though clients send them to proxies only.
    """
    target = scope["raw_path"]
    if not target.lower().startswith((b"http://", b"https://")):
        return scope
    _, _, rest = target.partition(b"://")
    host, slash, path = rest.partition(b"/")
    raw = slash + path or b"/"
    headers = [(name, value) for name, value in scope["headers"] if name != b"host"]
    named = {"raw_path": raw, "path": unquote(raw.decode("ascii"))}
    return {**scope, **named, "headers": [(b"host", host), *headers]}


def _head_bytes(scope: Scope) -> int:
    """Of the request's line and headers. h11 counts only those of a head that isn't complete yet,
    and one may come in a single read."""
    line = len(scope["method"]) + len(scope["raw_path"]) + len(scope["query_string"])
    return line + sum(len(name) + len(value) for name, value in scope["headers"])


def _name(host: str) -> str:
    try:
        return (urlsplit(f"//{host}").hostname or "").lower().removesuffix(".")
    except ValueError:
        return ""
