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
from urllib.parse import urlsplit


async def stream(host: str, port: int, body: bytes, start: asyncio.Event) -> list[float]:
    """Send one request; returns when each of its events came."""
    reader, writer = await asyncio.open_connection(host, port)
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    await start.wait()
    sent_s = time.perf_counter()
    writer.write(head.encode() + body)
    at_s, first = [], b""
    async for line in reader:
        first = first or line
        if line.startswith(b"data: {"):
            at_s.append(time.perf_counter() - sent_s)
    writer.close()
    if b" 200 " not in first:
        raise SystemExit(f"the server answered {first!r}")
    return at_s


async def main() -> None:
    url = urlsplit(sys.argv[1])
    bodies = [json.dumps(body).encode() for body in json.load(sys.stdin)]
    start = asyncio.Event()
    tasks = [
        asyncio.create_task(stream(url.hostname or "", url.port or 80, body, start))
        for body in bodies
    ]
    await asyncio.sleep(0.2)  # all are connected
    start.set()
    json.dump(await asyncio.gather(*tasks), sys.stdout)


if __name__ == "__main__":
    asyncio.run(main())
