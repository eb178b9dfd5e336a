"""A package index on the loopback interface that can stop in the middle of a wheel."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class WheelServer(ThreadingHTTPServer):
    """Serves wheels to `pip --find-links`. `go` cleared: half of the last, the rest when it is set.

    wheels: how often a wheel was asked for; gone: set once a client has left in the middle.
    """

    daemon_threads = True

    def __init__(self, *files: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files = {file.name: file for file in files}
        self.last = files[-1].name
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
        name = self.path.removeprefix("/")
        if name not in self.server.files:
            links = [f'<a href="{file}">wheel</a>' for file in self.server.files]
            page = f"<!DOCTYPE html>{''.join(links)}".encode()
            self.answer("text/html", len(page))
            self.wfile.write(page)
            return
        self.server.wheels += 1
        data = self.server.files[name].read_bytes()
        self.answer("application/octet-stream", len(data))
        self.wfile.write(data[: len(data) // 2])
        if name == self.server.last:
            self.server.half.set()
        while name == self.server.last and not self.server.go.wait(0.05):
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
def serving(*files: Path) -> Iterator[WheelServer]:
    with WheelServer(*files) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server
        finally:
            server.go.set()
            server.shutdown()
            thread.join()
