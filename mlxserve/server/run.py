"""Run the server until it is told to stop, or until its engine has died."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable
from functools import partial

import uvicorn
from starlette.types import ASGIApp

from mlxserve.config import ServerConfig
from mlxserve.errors import RequestError
from mlxserve.llm import LLM
from mlxserve.server.app import make_app
from mlxserve.server.protocol import MAX_EXCESS, Protocol

logger = logging.getLogger(__name__)

SWITCH_INTERVAL_S = 0.0005
"""Of Python's threads: beside a busy one a step took 10 ms with the usual 5 ms, and 4 with this."""

BACKLOG = 2048

SPARE_FILES = 2 * MAX_EXCESS
"""That the process may open beside its clients' connections."""

LAST_WORDS_S = 2
"""After the engine's death, for telling clients of it."""


def listen(config: ServerConfig) -> socket.socket:
    """A socket at the server's address. Raises RequestError: before a model is loaded for it."""
    _allow_files(config.max_connections + SPARE_FILES)
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        return socket.create_server((config.host, config.port), family=family, backlog=BACKLOG)
    except (OSError, UnicodeError) as error:  # a name that can't be one is a UnicodeError
        reason = getattr(error, "strerror", None) or error
        raise RequestError(
            f"can't listen at {config.host}:{config.port}: {reason}; choose another --port or "
            "--host"
        ) from None


def _allow_files(wanted: int) -> None:
    """Let this process open so many, since each connection is one, and a shell allows 256 or 1024.

    Raises RequestError where the system doesn't.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):
        raise RequestError(
            f"max_connections is {wanted - SPARE_FILES}, and this process may open {hard} files; "
            "allow fewer with --max-connections, or more files with `ulimit -Hn`"
        ) from None


def serve(
    llm: LLM,
    config: ServerConfig,
    at: socket.socket,
    on_ready: Callable[[str], None] = lambda url: None,
) -> int:
    """Serve until SIGTERM or Ctrl-C, then finish what runs. Returns the exit code.

    0: stopped as asked; 1: the engine has died, and a line in the log says of what.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    # uvicorn has its own handlers while it serves, and raises what it got once more at its end.
    handlers = {sig: signal.signal(sig, lambda *_: None) for sig in (signal.SIGINT, signal.SIGTERM)}
    try:
        return asyncio.run(_serve(llm, config, at, on_ready))
    finally:
        sys.setswitchinterval(before)
        for sig, handler in handlers.items():
            signal.signal(sig, handler)


class Server(uvicorn.Server):
    """uvicorn, which tells the app when it begins to shut down: then new requests are refused."""

    on_shutdown: Callable[[], None] = staticmethod(lambda: None)

    def handle_exit(self, sig: int, frame: object) -> None:
        self.on_shutdown()
        super().handle_exit(sig, frame)  # type: ignore[arg-type]


def make_server(app: ASGIApp, config: ServerConfig) -> Server:
    """uvicorn, as this server needs it."""
    return Server(
        uvicorn.Config(
            app,
            access_log=False,
            log_config=None,
            lifespan="off",
            server_header=False,
            http=partial(Protocol, limits=config),  # type: ignore[arg-type]
            ws="none",
            timeout_keep_alive=config.header_timeout_s,  # type: ignore[arg-type]
            timeout_graceful_shutdown=config.grace_s,  # type: ignore[arg-type]
        )
    )


async def _serve(
    llm: LLM, config: ServerConfig, at: socket.socket, on_ready: Callable[[str], None]
) -> int:
    app = make_app(llm, config)
    served = app.state.service
    server = make_server(app, config)
    loop, reasons = asyncio.get_running_loop(), []

    def drain() -> None:
        served.draining = True

    def watch() -> None:
        failure = llm.wait()
        if failure is None and server.should_exit:
            return
        reasons.append(failure or "it was closed")
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server ends anyway
            loop.call_soon_threadsafe(stop)

    def stop() -> None:
        served.draining = server.should_exit = True
        server.config.timeout_graceful_shutdown = LAST_WORDS_S

    server.on_shutdown = drain
    threading.Thread(target=watch, name="mlxserve-watch", daemon=True).start()
    on_ready(_url(at))
    await server.serve(sockets=[at])
    for reason in reasons:
        logger.error("the engine has stopped: %s; the server ends", reason)
    return int(bool(reasons))


def _url(at: socket.socket) -> str:
    host, port, *_ = at.getsockname()
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
