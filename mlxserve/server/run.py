"""Run the server until it is told to stop, or until its engine has died."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import uvicorn
from starlette.applications import Starlette

from mlxserve import config as settings
from mlxserve.config import ServerConfig
from mlxserve.errors import RequestError
from mlxserve.llm import LLM
from mlxserve.server.app import make_app
from mlxserve.server.protocol import MAX_EXCESS, MAX_HEAD_BYTES, Protocol

logger = logging.getLogger(__name__)

SWITCH_INTERVAL_S = 0.0005
"""Of Python's threads: beside a busy one a step took 10 ms with the usual 5 ms, and 4 with this."""

BACKLOG = 2048

SPARE_FILES = 2 * MAX_EXCESS
"""That the process may open beside its clients' connections."""

LAST_WORDS_S = 2.0
"""For telling clients why their answers end, after the grace or the engine's death."""

WARM_UP_TOKENS = 4
"""Steps that only decode are recorded once and trusted after a second recording."""


def bind(config: ServerConfig) -> socket.socket:
    """A socket with the server's address, before a model is loaded for it. Raises RequestError.

    Nobody can connect to it yet: a probe that is refused knows more than one that waits. Where
    `mlxserve launch` keeps the address, its socket.
    """
    _allow_files(config.max_connections + SPARE_FILES)
    if (descriptor := settings.listen_fd()) is not None:
        return socket.socket(fileno=descriptor)
    at = socket.socket(socket.AF_INET6 if ":" in config.host else socket.AF_INET)
    try:
        with _address(config):
            at.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if at.family == socket.AF_INET6:
                at.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            at.bind((config.host, config.port))
    except BaseException:
        at.close()
        raise
    return at


@contextlib.contextmanager
def _address(config: ServerConfig) -> Iterator[None]:
    """Says of an address that can't be had which one it was. Raises RequestError."""
    try:
        yield
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

    0: stopped as asked; 1: the engine has died, and a line in the log says of what. at: of `bind`.
    Raises RequestError if another process listens there now, and what a first answer raises.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    came: list[int] = []  # signals, while there is no server to take them
    # uvicorn has its own handlers while it serves, and raises what it got once more at its end.
    handlers = {
        number: signal.signal(number, lambda number, _: came.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        llm.generate([0], max_tokens=WARM_UP_TOKENS, ignore_eos=True)  # also checks the kernels
        with _address(config):
            at.listen(BACKLOG)
        return asyncio.run(_serve(llm, config, at, came, on_ready))
    finally:
        sys.setswitchinterval(before)
        for number, handler in handlers.items():
            signal.signal(number, handler)


class Server(uvicorn.Server):
    """uvicorn, with an end of its own: running answers have grace_s, and are told why they end.

    on_started: called when it listens and takes signals; on_shutdown: when one has come, and new
    requests are to be refused.
    """

    on_started: Callable[[], None] = staticmethod(lambda: None)
    on_shutdown: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self, config: uvicorn.Config, grace_s: float) -> None:
        super().__init__(config)
        self.grace_s = grace_s

    def handle_exit(self, sig: int, frame: object) -> None:
        self.on_shutdown()
        super().handle_exit(sig, frame)  # type: ignore[arg-type]

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.on_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        cutting = asyncio.create_task(self._cut())
        try:
            await super().shutdown(sockets)
        finally:
            cutting.cancel()

    async def _cut(self) -> None:
        """End what still runs after the grace, or at a second Ctrl-C."""
        end_s = time.monotonic() + self.grace_s
        while time.monotonic() < end_s and not self.force_exit:
            await asyncio.sleep(0.05)
        if tasks := list(self.server_state.tasks):
            logger.warning("requests that are cut off: %d", len(tasks))
        for task in tasks:
            task.cancel()
        await asyncio.sleep(LAST_WORDS_S)
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def make_server(app: Starlette, config: ServerConfig) -> Server:
    """uvicorn, as this server needs it. app: of `make_app`."""
    journal = app.state.service.journal
    return Server(
        uvicorn.Config(
            app,
            access_log=False,
            log_config=None,
            lifespan="off",
            server_header=False,
            http=partial(Protocol, limits=config, journal=journal),  # type: ignore[arg-type]
            ws="none",
            h11_max_incomplete_event_size=MAX_HEAD_BYTES,
            timeout_keep_alive=config.header_timeout_s,  # type: ignore[arg-type]
        ),
        config.grace_s,
    )


async def _serve(
    llm: LLM,
    config: ServerConfig,
    at: socket.socket,
    came: list[int],
    on_ready: Callable[[str], None],
) -> int:
    app = make_app(llm, config)
    served = app.state.service
    server = make_server(app, config)
    loop, reasons = asyncio.get_running_loop(), []

    def started() -> None:
        if came:
            server.handle_exit(came[0], None)
        if not server.should_exit:
            on_ready(_url(at))
            _tell_launcher()

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
        server.grace_s = LAST_WORDS_S

    server.on_started, server.on_shutdown = started, drain
    threading.Thread(target=watch, name="mlxserve-watch", daemon=True).start()
    await server.serve(sockets=[at])
    for reason in reasons:
        logger.error("the engine has stopped: %s; the server ends", reason)
    return int(bool(reasons))


def _tell_launcher() -> None:
    if (descriptor := settings.ready_fd()) is not None:
        with contextlib.suppress(OSError):  # it is gone
            os.write(descriptor, b"!")


def _url(at: socket.socket) -> str:
    host, port, *_ = at.getsockname()
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
