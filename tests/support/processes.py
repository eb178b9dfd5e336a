"""A server as a process of its own."""

import contextlib
import re
import subprocess
import threading
from collections.abc import Iterator

import httpx

from tests.support.serving import wait_until

TIMEOUT_S = 120
ENDLESS = {"prompt": "x", "max_tokens": 1900, "ignore_eos": True, "stream": True}


class Process:
    """A server that was started; `lines` of its stderr come in as they are written."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        wait_until(lambda: bool(self.url) or process.poll() is not None, "it listens", TIMEOUT_S)
        assert self.url is not None, self.lines

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.decode().rstrip("\n"))

    @property
    def url(self) -> str | None:
        found = [re.search(r" at (http://\S+)/v1;", line) for line in self.lines]
        return next((one[1] for one in found if one), None)

    def stream(self, **body) -> contextlib.AbstractContextManager[httpx.Response]:
        ask = {**ENDLESS, **body}
        return httpx.stream("POST", f"{self.url}/v1/completions", json=ask, timeout=TIMEOUT_S)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self) -> int:
        """Wait for its end; its exit code."""
        code = self.process.wait(TIMEOUT_S)
        self._reader.join(TIMEOUT_S)
        return code

    def refuses(self) -> bool:
        try:
            return httpx.get(f"{self.url}/ready", timeout=TIMEOUT_S).status_code == 503
        except httpx.TransportError:
            return True


@contextlib.contextmanager
def running(command: list[str], env: dict[str, str]) -> Iterator[Process]:
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=env,
    )
    try:
        yield Process(process)
    finally:
        process.kill()
        process.wait()
