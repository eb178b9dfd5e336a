"""A server in a thread of this process, on a free port: real sockets, and a model to look into."""

import asyncio
import http.client
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from uvicorn.server import ServerState

from mlxserve import LLM
from mlxserve.config import ServerConfig
from mlxserve.server import run
from mlxserve.server.app import make_app
from mlxserve.server.service import Service

TIMEOUT_S = 60
NAME = "tiny"


@dataclass
class Served:
    """A running server; `http` asks it."""

    llm: LLM
    service: Service
    state: ServerState
    port: int
    loop: asyncio.AbstractEventLoop
    http: httpx.Client

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def complete(self, **body: Any) -> httpx.Response:
        return self.http.post("/v1/completions", json=body)

    def chat(self, text: str = "Hi", **body: Any) -> httpx.Response:
        messages = [{"role": "user", "content": text}]
        return self.http.post("/v1/chat/completions", json={"messages": messages, **body})

    def open_socket(self, *, receive_bytes: int | None = None) -> socket.socket:
        """A bare connection. receive_bytes: of the kernel's buffer, for clients that don't read."""
        sock = socket.socket()
        if receive_bytes is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        sock.settimeout(TIMEOUT_S)
        sock.connect(("127.0.0.1", self.port))
        return sock

    def raw(self, data: bytes) -> bytes:
        """Send bytes; what comes back until the server closes."""
        with self.open_socket() as sock:
            sock.sendall(data)
            return b"".join(iter(lambda: sock.recv(65536), b""))

    def answer(self, data: bytes) -> tuple[int, bytes]:
        """Send bytes; the status and the body of the answer to them."""
        with self.open_socket() as sock:
            sock.sendall(data)
            response = http.client.HTTPResponse(sock)
            response.begin()
            return response.status, response.read()

    def post(self, path: str, body: bytes, *headers: str) -> bytes:
        """The bytes of a POST that closes the connection."""
        head = [f"POST {path} HTTP/1.1", "Host: localhost", "Connection: close", *headers]
        if not any(line.lower().startswith("transfer-encoding") for line in headers):
            head.append(f"Content-Length: {len(body)}")
        return ("\r\n".join(head) + "\r\n\r\n").encode() + body

    def idle(self) -> bool:
        """Nothing runs or waits, and nobody is waited for."""
        now = self.llm.stats()
        return not (now.running or now.waiting or now.pages_used or self.service.mailbox)

    def tasks(self) -> int:
        """asyncio's, at this moment."""
        return self._on_loop(lambda: len(asyncio.all_tasks()))

    def connections(self) -> int:
        """Those that are open, as the server sees it."""
        return self._on_loop(lambda: len(self.state.connections))

    def _on_loop(self, count: Callable[[], int]) -> int:
        async def work() -> int:
            return count()

        return asyncio.run_coroutine_threadsafe(work(), self.loop).result(TIMEOUT_S)


def wait_until(true: Callable[[], bool], what: str, timeout_s: float = TIMEOUT_S) -> None:
    """Poll; fails the test if it doesn't become true."""
    end_s = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < end_s, f"timed out: {what}"
        time.sleep(0.01)


@contextmanager
def serving(llm: LLM, *, send_bytes: int | None = None, **settings: Any) -> Iterator[Served]:
    """Serve for as long as the block lasts. settings: of ServerConfig.

    send_bytes: of the kernel's buffer of a connection.
    """
    config = ServerConfig(names=(NAME, "alias"), port=0, **settings)
    at = run.bind(config)
    if send_bytes is not None:
        at.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_bytes)
    port = at.getsockname()[1]
    ready: queue.SimpleQueue[Any] = queue.SimpleQueue()

    async def main() -> None:
        app = make_app(llm, config)
        server = run.make_server(app, config)
        found = (app.state.service, server, asyncio.get_running_loop())
        server.on_started = lambda: ready.put(found)
        await server.serve(sockets=[at])

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    service, server, loop = ready.get(timeout=TIMEOUT_S)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=TIMEOUT_S) as http:
            yield Served(llm, service, server.server_state, port, loop, http)
    finally:
        server.should_exit = True
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()
