"""Streams from an OpenAI-style server, as cheap for the machine as can be; used by `serve`.

    python benchmarks/serve_client.py URL < requests.json > times.json

stdin: a list of bodies for /v1/completions, sent at once, one connection each. stdout: for each the
seconds from sending to every event of its stream. Nothing but the standard library, and no JSON is
parsed meanwhile: on a machine of few cores the client would slow the server down.
"""

import asyncio
import json
import sys
import time
from typing import cast
from urllib.parse import urlsplit

EVENT = b"data: {"


class Stream(asyncio.Protocol):
    """One connection; counts the events of what comes, and parses nothing else."""

    def __init__(self, request: bytes) -> None:
        self.request = request
        self.first = b""
        self.at_s: list[float] = []
        self.sent_s = 0.0
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def start(self) -> None:
        self.sent_s = time.perf_counter()
        self.transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        self.first = self.first or data
        text = self._tail + data
        if events := text.count(EVENT):
            self.at_s += [time.perf_counter() - self.sent_s] * events
        self._tail = text[1 - len(EVENT) :]  # too short to be counted twice

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended.set_result(None)


async def main() -> None:
    url = urlsplit(sys.argv[1])
    host, port = url.hostname or "", url.port or 80
    streams = []
    for given in json.load(sys.stdin):
        body = json.dumps(given).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        stream = Stream(head.encode() + body)
        await asyncio.get_running_loop().create_connection(lambda s=stream: s, host, port)
        streams.append(stream)
    for stream in streams:
        stream.start()
    for stream in streams:
        await stream.ended
        if b" 200 " not in stream.first.partition(b"\r\n")[0]:
            raise SystemExit(f"the server answered {stream.first!r}")
    json.dump([stream.at_s for stream in streams], sys.stdout)


if __name__ == "__main__":
    asyncio.run(main())
