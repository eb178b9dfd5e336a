"""The HTTP server beside its own engine, beside other servers, and while long prompts come in.

    python -m benchmarks.serve [--model smollm2-135m] [--streams 16] [--tokens 128] [--rounds 5]
    python -m benchmarks.serve --peer llama-server=http://localhost:9000 ...    # beside it
    python -m benchmarks.serve --long    # 64 streams, while prompts of 7,000 tokens are tokenised

Alone: the same requests go to the engine directly and through HTTP, alternately, to one loaded
model. With peers, which must be running with the same model: the same requests go to ours and to
them in turns, at 1, 4, 16 and 32 streams. The client runs in a process of its own. Run it on an
idle machine. A peer that was made ready for this:

    llama-server -m MODEL.gguf --port 9000 -np 32 -c 32768 -t CORES
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import queue
import random
import resource
import socket
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
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
PROMPT_NUMBERS = 16  # about 100 tokens


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


def prompt(rng: random.Random, numbers: int = PROMPT_NUMBERS) -> str:
    """Numbers that no other prompt begins with, so that nothing of it is cached."""
    return " ".join(f"{rng.randrange(10**6)}" for _ in range(numbers))


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


def _children_s() -> float:
    """CPU time of the clients that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def first_s(times: list[list[float]]) -> float:
    return statistics.median(at_s[0] for at_s in times)


def overhead(args: argparse.Namespace) -> dict[str, float]:
    """Rates at so many streams, and times to the first token of one."""
    rng = random.Random(0)
    rates: dict[str, list[float]] = {"http": [], "direct": []}
    cpu_s: dict[str, list[float]] = {"http": [], "direct": [], "client": []}
    firsts: dict[str, list[float]] = {"http": [], "direct": []}
    with mlxserve.load(args.model) as llm, server(llm, "m") as url:

        def measure(kind: str, texts: list[str], tokens: int) -> list[list[float]]:
            if kind == "http":
                return through_http(url, "m", texts, tokens)
            return direct(llm, texts, tokens)

        for _ in range(args.rounds + 1):
            for kind in ("http", "direct"):
                many = [prompt(rng) for _ in range(args.streams)]
                own_s, client_s = time.process_time(), _children_s()
                rates[kind].append(rate(measure(kind, many, args.tokens)))
                cpu_s[kind].append(time.process_time() - own_s)
                if kind == "http":
                    cpu_s["client"].append(_children_s() - client_s)
                for _ in range(5):
                    firsts[kind].append(first_s(measure(kind, [prompt(rng)], 2)))
    ratios = [h / d for h, d in zip(rates["http"][1:], rates["direct"][1:], strict=True)]
    tokens = args.streams * args.tokens
    return {
        **{f"{k}_cpu_us_per_token": 1e6 * statistics.median(s) / tokens for k, s in cpu_s.items()},
        "http_tokens_per_s": statistics.median(rates["http"][1:]),
        "direct_tokens_per_s": statistics.median(rates["direct"][1:]),
        "ratio": statistics.median(ratios),
        "ratio_low": min(ratios),
        "ratio_high": max(ratios),
        "http_first_ms": 1e3 * statistics.median(firsts["http"][5:]),
        "direct_first_ms": 1e3 * statistics.median(firsts["direct"][5:]),
    }


def beside(args: argparse.Namespace) -> dict[str, float]:
    """Ours and the peers in turns: rates, and times to the first token and between tokens."""
    rng = random.Random(0)
    found: dict[str, float] = {}
    with mlxserve.load(args.model) as llm, server(llm, args.name) as ours:
        urls = {"mlxserve": ours, **dict(args.peer)}
        for url in urls.values():
            through_http(url, args.name, [prompt(rng)], 4)
        for streams in args.at:
            runs: dict[str, list[list[list[float]]]] = {name: [] for name in urls}
            for _ in range(args.rounds):
                for name, url in urls.items():
                    texts = [prompt(rng) for _ in range(streams)]
                    runs[name].append(through_http(url, args.name, texts, args.tokens))
            for name, rounds in runs.items():
                found |= {f"{name}_{key}_{streams}": x for key, x in _times(rounds).items()}
                ratios = [rate(a) / rate(b) for a, b in zip(runs["mlxserve"], rounds, strict=True)]
                if name != "mlxserve":
                    found[f"ratio_to_{name}_{streams}"] = statistics.median(ratios)
    return found


def _times(rounds: list[list[list[float]]]) -> dict[str, float]:
    """Of all rounds together: the median rate, and percentiles of seconds."""
    every = [at_s for times in rounds for at_s in times]
    gaps = sorted(b - a for at_s in every for a, b in itertools.pairwise(at_s))
    first = sorted(at_s[0] for at_s in every)
    found = {"tokens_per_s": statistics.median(map(rate, rounds))}
    for p in (50, 95, 99):
        found[f"first_p{p}_s"] = first[(len(first) - 1) * p // 100]
        found[f"gap_p{p}_s"] = gaps[(len(gaps) - 1) * p // 100]
    return found


def long_prompts(args: argparse.Namespace) -> dict[str, float]:
    """The 99th percentile of steps at 64 streams: alone, and while long chats are tokenised.

    One chat of 7,000 tokens each second, to be counted and not answered, so that the steps are of
    the same rows.
    """
    rng = random.Random(0)
    chat = [{"role": "user", "content": prompt(rng, 1000)}]
    body = json.dumps({"model": "m", "max_tokens": 1, "messages": chat}).encode()
    found: dict[str, list[float]] = {"alone": [], "beside": []}
    counts: list[int] = []

    def ask(url: str, over: threading.Event) -> None:
        while not over.wait(1):
            request = urllib.request.Request(f"{url}/v1/messages/count_tokens", body)
            with urllib.request.urlopen(request) as got:
                counts.append(json.load(got)["input_tokens"])

    with mlxserve.load(args.model, max_batch=64) as llm, server(llm, "m") as url:
        for _ in range(args.rounds):
            for kind, steps in found.items():
                over = threading.Event()
                asking = threading.Thread(target=ask, args=(url, over))
                if kind == "beside":
                    asking.start()
                times = through_http(url, "m", [prompt(rng, 1) for _ in range(64)], args.tokens)
                over.set()
                if kind == "beside":
                    asking.join()
                # What one stream sees, once all of them run.
                begin = max(at_s[0] for at_s in times)
                steps += [b - a for a, b in itertools.pairwise(times[0]) if a >= begin]
    p99 = {kind: sorted(steps)[(len(steps) - 1) * 99 // 100] for kind, steps in found.items()}
    return {
        "prompt_tokens": statistics.median(counts),
        "prompts": len(counts),
        "alone_p99_s": p99["alone"],
        "beside_p99_s": p99["beside"],
        "ratio": p99["beside"] / p99["alone"],
    }


def peer(text: str) -> tuple[str, str]:
    """NAME=URL."""
    name, _, url = text.partition("=")
    if not url:
        raise argparse.ArgumentTypeError(f"{text!r} isn't NAME=URL")
    return name, url


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--streams", type=int, default=16, help="beside the engine")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peer", type=peer, action="append", metavar="NAME=URL")
    parser.add_argument("--at", type=int, nargs="+", default=STREAMS, help="streams beside peers")
    parser.add_argument("--name", default="smollm2-135m", help="what peers call the model")
    parser.add_argument("--long", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    measure = long_prompts if args.long else beside if args.peer else overhead
    figures: Any = measure(args)
    for name, value in figures.items():
        print(f"{name}: {value:.4g}")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
