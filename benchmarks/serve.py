"""What the HTTP server adds to the engine, as ratios within one run on a real model.

    python -m benchmarks.serve [--model smollm2-135m] [--streams 16] [--tokens 128] [--rounds 5]
    python -m benchmarks.serve --url http://localhost:9000 --name MODEL    # another server's times

The same requests go to the engine directly and through HTTP, alternately, to one loaded model. The
client runs in a process of its own. Figures are medians over the rounds; run it on an idle machine.
With --url it only measures that server: time to first token and between tokens at 1 to 32 streams,
for a table beside ours (llama-server, mlx_lm.server).
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import queue
import random
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlxserve
from mlxserve.config import ServerConfig
from mlxserve.server.app import make_app
from mlxserve.server.run import Server, make_server
from mlxserve.types import SamplingParams, TokenOut

CLIENT = Path(__file__).with_name("serve_client.py")
STREAMS = (1, 4, 16, 32)
PROMPT_WORDS = 64


@contextmanager
def server(llm: mlxserve.LLM, name: str) -> Iterator[str]:
    """Ours, on a thread; gives its URL."""
    at = socket.create_server(("127.0.0.1", 0))
    started: queue.SimpleQueue[Server] = queue.SimpleQueue()

    async def run() -> None:
        config = ServerConfig(names=(name,))
        started.put(running := make_server(make_app(llm, config), config))
        await running.serve(sockets=[at])

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    running = started.get()
    try:
        yield f"http://127.0.0.1:{at.getsockname()[1]}"
    finally:
        running.should_exit = True
        thread.join()


def prompt(rng: random.Random) -> str:
    """Words that no other prompt begins with, so that nothing of it is cached."""
    return " ".join(f"{rng.randrange(10**6)}" for _ in range(PROMPT_WORDS // 4))


def through_http(url: str, name: str, prompts: list[str], tokens: int) -> list[list[float]]:
    """When each token of each stream came, in seconds."""
    bodies = [
        {
            "model": name,
            "prompt": text,
            "max_tokens": tokens,
            "stream": True,
            "temperature": 0,
            "ignore_eos": True,
        }
        for text in prompts
    ]
    done = subprocess.run(
        [sys.executable, CLIENT, url], input=json.dumps(bodies).encode(), stdout=subprocess.PIPE,
        check=True,
    )  # fmt: skip
    return json.loads(done.stdout)


def direct(llm: mlxserve.LLM, prompts: list[str], tokens: int) -> list[list[float]]:
    """The same from the engine, with no server between."""
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    answers = [llm.prepare(llm.encode(text), params)[0] for text in prompts]
    out: queue.SimpleQueue[TokenOut] = queue.SimpleQueue()
    at_s: dict[str, list[float]] = {answer.request.id: [] for answer in answers}
    sent_s = time.perf_counter()
    llm.submit(answers, out)
    left = len(answers)
    while left:
        got = out.get()
        at_s[got.request_id].append(time.perf_counter() - sent_s)
        left -= got.last
    return list(at_s.values())


def rate(times: list[list[float]]) -> float:
    """Tokens per second, all streams together."""
    return sum(map(len, times)) / max(at_s[-1] for at_s in times)


def first_s(times: list[list[float]]) -> float:
    return statistics.median(at_s[0] for at_s in times)


def overhead(args: argparse.Namespace) -> dict[str, float]:
    """Rates at so many streams, and times to the first token of one."""
    rng = random.Random(0)
    rates: dict[str, list[float]] = {"http": [], "direct": []}
    firsts: dict[str, list[float]] = {"http": [], "direct": []}
    with mlxserve.load(args.model) as llm, server(llm, "m") as url:

        def measure(kind: str, texts: list[str], tokens: int) -> list[list[float]]:
            if kind == "http":
                return through_http(url, "m", texts, tokens)
            return direct(llm, texts, tokens)

        for _ in range(args.rounds + 1):
            for kind in ("http", "direct"):
                many = [prompt(rng) for _ in range(args.streams)]
                rates[kind].append(rate(measure(kind, many, args.tokens)))
                for _ in range(5):
                    firsts[kind].append(first_s(measure(kind, [prompt(rng)], 2)))
    ratios = [h / d for h, d in zip(rates["http"][1:], rates["direct"][1:], strict=True)]
    return {
        "http_tokens_per_s": statistics.median(rates["http"][1:]),
        "direct_tokens_per_s": statistics.median(rates["direct"][1:]),
        "ratio": statistics.median(ratios),
        "http_first_ms": 1e3 * statistics.median(firsts["http"][5:]),
        "direct_first_ms": 1e3 * statistics.median(firsts["direct"][5:]),
    }


def times_of(url: str, name: str, tokens: int) -> dict[str, float]:
    """A server's own times at several numbers of streams."""
    rng = random.Random(0)
    through_http(url, name, [prompt(rng)], 4)
    found: dict[str, float] = {}
    for streams in STREAMS:
        times = through_http(url, name, [prompt(rng) for _ in range(streams)], tokens)
        gaps = sorted(b - a for at_s in times for a, b in itertools.pairwise(at_s))
        first = sorted(at_s[0] for at_s in times)
        found[f"tokens_per_s_{streams}"] = rate(times)
        for p in (50, 95, 99):
            found[f"first_p{p}_s_{streams}"] = first[(len(first) - 1) * p // 100]
            found[f"gap_p{p}_s_{streams}"] = gaps[(len(gaps) - 1) * p // 100]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--url", help="of a server that is running")
    parser.add_argument("--name", default="smollm2-135m", help="of its model")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    figures: Any = times_of(args.url, args.name, args.tokens) if args.url else overhead(args)
    for name, value in figures.items():
        print(f"{name}: {value:.4g}")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
