"""Run the server until it is told to stop, or until its engine has died."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
import threading
from collections.abc import Callable

import uvicorn

from mlxserve.config import ServerConfig
from mlxserve.errors import RequestError
from mlxserve.llm import LLM
from mlxserve.server.app import make_app

logger = logging.getLogger(__name__)

SWITCH_INTERVAL_S = 0.0005
"""Of Python's threads. A busy one took a step from 3 to 10 ms with the usual 5; to 4 with this."""

BACKLOG = 2048


def listen(config: ServerConfig) -> socket.socket:
    """A socket at the server's address. Raises RequestError: before a model is loaded for it."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        return socket.create_server((config.host, config.port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise RequestError(
            f"can't listen at {config.host}:{config.port}: {error.strerror or error}; choose "
            "another --port or --host"
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


class _Server(uvicorn.Server):
    """uvicorn, which tells the app when it begins to shut down: then new requests are refused."""

    on_shutdown: Callable[[], None] = staticmethod(lambda: None)

    def handle_exit(self, sig: int, frame: object) -> None:
        self.on_shutdown()
        super().handle_exit(sig, frame)  # type: ignore[arg-type]


async def _serve(
    llm: LLM, config: ServerConfig, at: socket.socket, on_ready: Callable[[str], None]
) -> int:
    app = make_app(llm, config)
    served = app.state.service
    server = _Server(
        uvicorn.Config(
            app,
            access_log=False,
            log_config=None,
            lifespan="off",
            server_header=False,
            timeout_keep_alive=int(config.header_timeout_s),
            timeout_graceful_shutdown=int(config.grace_s),
        )
    )

    def drain() -> None:
        served.draining = True

    server.on_shutdown = drain
    loop, died = asyncio.get_running_loop(), False

    def watch() -> None:
        nonlocal died
        failure = llm.wait()
        if failure is None and server.should_exit:
            return
        died = True
        logger.error("the engine has stopped: %s; the server ends", failure or "it was closed")
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(stop)

    def stop() -> None:
        drain()
        server.should_exit = True

    threading.Thread(target=watch, name="mlxserve-watch", daemon=True).start()
    on_ready(_url(at))
    await server.serve(sockets=[at])
    return int(died)


def _url(at: socket.socket) -> str:
    host, port, *_ = at.getsockname()
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
