"""A package index on the loopback interface that can stop in the middle of a wheel."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class WheelServer(ThreadingHTTPServer):
    """Serves one wheel to `pip --find-links`. `go` cleared: half of it, the rest when it is set.

    wheels: how often the wheel was asked for; gone: set once a client has left in the middle.
    """

    daemon_threads = True

    def __init__(self, wheel: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.wheel = wheel
        self.wheels = 0
        self.go = threading.Event()
        self.half = threading.Event()
        self.gone = threading.Event()
        self.go.set()

    @property
    def env(self) -> dict[str, str]:
        """pip's own settings, so that it looks here and nowhere else."""
        return {
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": f"http://127.0.0.1:{self.server_port}/",
            "PIP_CONFIG_FILE": "/dev/null",
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        }


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if not self.path.endswith(".whl"):
            page = f'<!DOCTYPE html><a href="{self.server.wheel.name}">wheel</a>'.encode()
            self.answer("text/html", len(page))
            self.wfile.write(page)
            return
        self.server.wheels += 1
        data = self.server.wheel.read_bytes()
        self.answer("application/octet-stream", len(data))
        self.wfile.write(data[: len(data) // 2])
        self.server.half.set()
        while not self.server.go.wait(0.05):
            self.connection.settimeout(0.01)
            try:
                if not self.connection.recv(1):  # the client has closed its end
                    self.server.gone.set()
                    return
            except TimeoutError:
                pass
            except OSError:
                self.server.gone.set()
                return
        self.connection.settimeout(None)
        self.wfile.write(data[len(data) // 2 :])

    def answer(self, kind: str, length: int) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(length))
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


@contextmanager
def serving(wheel: Path) -> Iterator[WheelServer]:
    with WheelServer(wheel) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server
        finally:
            server.go.set()
            server.shutdown()
            thread.join()
