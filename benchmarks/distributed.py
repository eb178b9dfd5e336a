"""Steps of two ranks over a link, against what the cost model of `plan --hosts` says of them.

    python -m benchmarks.distributed [--model gemma3-270m] [--rounds 5] [--json distributed.json]

Each rank is bound to a core of this machine; what connects them is loopback, or a proxy that delays
each message and limits the bandwidth. Linux only: a Mac binds nothing to a core.

A prediction is made by `distributed.cost` from

- what each rank takes for its part of the model without the other: measured while the other one
  computes its own part, since they share this machine's memory;
- the link's latency, bandwidth and time of a call, and how long ranks wait for each other: fitted
  to times of sums of several sizes with matmuls between them;
- the model's config.

No step of two ranks goes into it. Parts, sums and steps are timed in turn, several rounds, and
medians are compared. Run it on an idle machine: a round waits for others to be quiet.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from benchmarks.distributed_rank import CONFIG
from mlxserve.distributed import cost
from mlxserve.distributed.addresses import LOOPBACK, free_ports
from mlxserve.engine import cache_plan
from mlxserve.sources.checkpoint import open_checkpoint
from mlxserve.sources.resolve import resolve
from tests.support.proxy import Proxy

RANKS = 2
NO_LINK = cost.Link("none", 0.0, math.inf)
HALVED_BYTES = 512 << 10  # of a message that MLX's ring sends in halves, both ways round
SUMS = [
    *itertools.product((1024, 2560, 20_480, 65_536, 262_144, 491_520), (1, 4, 16)),
    *itertools.product((1 << 20, 4 << 20), (4,)),
]  # bytes, and matmuls before each
TINY = 1e-15
QUIET_S, QUIET_SHARE, PATIENCE_S = 0.25, 0.1, 20.0


class Wire(NamedTuple):
    """What is between the ranks; None for the delay: nothing but loopback."""

    name: str
    delay_s: float | None = None
    bytes_per_s: float | None = None


WIRES = (
    Wire("loopback"),
    Wire("0.2ms", 0.2e-3),
    Wire("1ms", 1e-3),
    Wire("5ms", 5e-3),
    Wire("1ms-20MB/s", 1e-3, 20e6),
)


class Task(NamedTuple):
    """A step. do: as `distributed_rank` takes it; tokens: of as many rows, or of a prompt."""

    do: str
    tokens: int

    @property
    def name(self) -> str:
        return f"{self.do} {self.tokens}"


TASKS = (Task("decode", 1), Task("decode", 8), Task("prefill", 128), Task("prefill", 471))


class Rank:
    """A process of `distributed_rank`."""

    def __init__(self, role: str, rank: int, model: str, env: dict[str, str]) -> None:
        own = {"MLX_RANK": str(rank), "MLXSERVE_RANK": str(rank), "MLXSERVE_CPU_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.distributed_rank", role, model],
            env=os.environ | {"MLXSERVE_RANKS": str(RANKS)} | own | env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def say(self, *words: str | int) -> None:
        assert self._process.stdin is not None
        print(json.dumps(words), file=self._process.stdin, flush=True)

    def hear(self) -> list[float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("a rank has ended; see what it printed")
        return json.loads(line)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        self._process.kill()
        self._process.wait()


@contextlib.contextmanager
def ranks(role: str, model: str, wire: Wire) -> Iterator[list[Rank]]:
    """All ranks of a group, each with a hostfile of its own: its neighbour's port is a proxy's."""
    control, *own = free_ports([LOOPBACK] * (RANKS + 1))
    seen = [control, *own]
    with contextlib.ExitStack() as stack:
        if wire.delay_s is not None:
            to_0 = Proxy(own[0], delay_s=wire.delay_s, bytes_per_s=wire.bytes_per_s)
            to_1 = Proxy(own[1], opposite=to_0)
            plans = Proxy(control, opposite=to_1)
            for proxy in (to_0, to_1, plans):
                stack.enter_context(proxy)
            seen = [plans.port, to_0.port, to_1.port]
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        key = secrets.token_hex(16)
        started = []
        for rank in range(RANKS):
            ports = [own[i] if i == rank else seen[i + 1] for i in range(RANKS)]
            hosts = folder / f"{rank}.json"
            hosts.write_text(json.dumps([[f"{LOOPBACK}:{port}"] for port in ports]))
            reached = control if rank == 0 else seen[0]
            env = {
                "MLX_HOSTFILE": str(hosts),
                "MLXSERVE_CONTROL": f"{LOOPBACK}:{reached}",
                "MLXSERVE_CONTROL_KEY": key,
            }
            started.append(Rank(role, rank, model, env))
            stack.callback(started[-1].close)
        stack.callback(started[0].close)  # first of all: it tells the others
        for rank in started if role != "rank" else started[:1]:
            rank.hear()  # ready
        yield started


@dataclass(frozen=True)
class Measured(cost.Link):
    """As fitted. large: of messages that MLX sends in halves; four threads that poll share a core
    here, so that takes longer than in one piece. wait_share: of what ranks compute, how much they
    wait for each other beside."""

    large: cost.Link = NO_LINK
    wait_share: float = 0.0

    def message_s(self, count: float) -> float:
        if count < HALVED_BYTES:
            return super().message_s(count)
        return self.large.message_s(count)


def fit(name: str, times: Times) -> Measured:
    """The link that explains times of sums best, by least squares of relative errors."""
    took = {(n, w): (times.of((n, w, "sum")), times.of((n, w, "work"))) for n, w in SUMS}
    small = [(1.0, n, took[n, w][1]) for n, w in SUMS if n < HALVED_BYTES]
    sums_s = [took[n, w][0] for n, w in SUMS if n < HALVED_BYTES]
    latency_s, byte_s, wait = _solve(small, sums_s)
    large = [(1.0, n) for n, _ in SUMS if n >= HALVED_BYTES]
    sums_s = [s - wait * w for (n, _), (s, w) in took.items() if n >= HALVED_BYTES]
    large_latency_s, large_byte_s = _solve(large, sums_s)
    halves = cost.Link(name, large_latency_s, 1 / (large_byte_s or TINY))
    return Measured(name, latency_s, 1 / (byte_s or TINY), large=halves, wait_share=wait)


def _solve(rows: Sequence[Sequence[float]], took: Sequence[float]) -> list[float]:
    """Coefficients of rows that make up times. One that would be below 0 is 0."""
    table = np.array(rows) / np.array(took)[:, None]
    kept = list(range(table.shape[1]))
    while True:
        found = np.linalg.lstsq(table[:, kept], np.ones(len(took)), rcond=None)[0]
        if (found >= 0).all():
            break
        del kept[int(np.argmin(found * table[:, kept].mean(0)))]
    values = dict(zip(kept, found.tolist(), strict=True))
    return [values.get(i, 0.0) for i in range(table.shape[1])]


class Times:
    """Seconds by what was timed, of several rounds."""

    def __init__(self) -> None:
        self._all: dict[Any, list[float]] = {}

    def add(self, what: Any, seconds: float) -> None:
        self._all.setdefault(what, []).append(seconds)

    def of(self, what: Any) -> float:
        return median(self._all[what])


def measure(
    model: str, wire: Wire, parts: Sequence[Rank], rounds: int
) -> tuple[Times, Measured, float]:
    """Parts, sums and steps in turn. Returns also how much of the CPU others had meanwhile."""
    times, busy = Times(), []
    with ranks("rank", model, wire) as group, ranks("link", model, wire) as link:
        for turn in range(rounds + 1):
            busy.append(wait_for_quiet())
            kept = times if turn else Times()  # the first one also makes buffers
            for task in TASKS:
                for rank, seconds in enumerate(ask(parts, *task)):
                    kept.add((task, rank), median(seconds))
                kept.add(task, median(ask(group[:1], *task)[0]))
            for count, work in SUMS:
                what = "sum" if count < HALVED_BYTES else "gather"  # logits are what is so large
                sum_s, work_s = ask(link, what, count, work)[0]
                kept.add((count, work, "sum"), sum_s)
                kept.add((count, work, "work"), work_s)
    return times, fit(wire.name, times), median(busy)


def ask(some: Sequence[Rank], *words: str | int) -> list[list[float]]:
    """The same of several ranks at once; what each one answers."""
    for rank in some:
        rank.say(*words)
    return [rank.hear() for rank in some]


def wait_for_quiet() -> float:
    """Wait for other processes, some time. Returns the share of the CPU that they take now."""
    until = time.monotonic() + PATIENCE_S
    while True:
        before = _cpu()
        time.sleep(QUIET_S)
        after = _cpu()
        idle, total = (b - a for a, b in zip(before, after, strict=True))
        share = 1 - idle / total if total else 0.0
        if share < QUIET_SHARE or time.monotonic() > until:
            return share


def _cpu() -> tuple[int, int]:
    """Ticks of all cores so far: idle or of niced processes, and all. (0, 0) where it isn't told"""
    try:
        ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    except OSError:
        return 0, 0
    return ticks[1] + ticks[3] + ticks[4], sum(ticks)


def report(model: str, wire: Wire, times: Times, link: Measured, busy: float) -> list[Any]:
    """Print a link and its steps; returns them for scripts."""
    rates = [f"{rate / 1e6:,.0f}" for rate in (link.bytes_per_s, link.large.bytes_per_s)]
    print(
        f"\n{wire.name}: latency {link.latency_s * 1e6:,.0f} us, {rates[0]} MB/s ({rates[1]} in "
        f"halves), waits {link.wait_share:.1%}; others took "
        f"{busy:.0%} of the CPU"
    )
    for count, each in itertools.groupby(SUMS, lambda pair: pair[0]):
        print(f"  sum of {count / 1024:,.1f} KB: " + ", ".join(_sum(link, times, *s) for s in each))
    found = []
    for task in TASKS:
        alone = [times.of((task, rank)) for rank in range(RANKS)]
        waiting = [part * (1 + link.wait_share) for part in alone]
        sent_s = sum(cost.tensor_sent_s(link, RANKS, step) for step in steps(model, task))
        predicted, measured = max(waiting) + sent_s, times.of(task)
        error = predicted / measured - 1
        print(
            f"  {task.name:12} part {max(alone) * 1e3:8.2f} ms, predicted {predicted * 1e3:8.2f}, "
            f"measured {measured * 1e3:8.2f}: {error:+.1%}"
        )
        found.append({"step": task.name, "alone_s": alone, "predicted_s": predicted,
                      "measured_s": measured, "error": error})  # fmt: skip
    return [{"link": asdict(link), "others_share": busy, "steps": found}]


def _sum(link: Measured, times: Times, count: int, work: int) -> str:
    took, work_s = times.of((count, work, "sum")), times.of((count, work, "work"))
    off = (cost.gather_s(link, RANKS, count) + link.wait_share * work_s) / took - 1
    return f"{took * 1e6:,.0f} us after {work_s * 1e3:.2f} ms ({off:+.0%})"


def steps(model: str, task: Task) -> list[cost.Sent]:
    """What is sent, as far as the config says: a prompt is cut to the engine's steps."""
    config = open_checkpoint(resolve(model)).config
    most = cache_plan.step_tokens(CONFIG)
    cuts = [min(most, task.tokens - start) for start in range(0, task.tokens, most)]
    return [
        cost.Sent(
            layers=config["num_hidden_layers"],
            width=config["hidden_size"],
            vocabulary=config["vocab_size"],
            itemsize=4,
            tokens=tokens,
            rows=tokens if task.do == "decode" else int(i == len(cuts) - 1),
        )
        for i, tokens in enumerate(cuts)
    ]


def main() -> None:
    """Measure over all links, and report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="gemma3-270m")
    parser.add_argument("--rounds", type=int, default=5)
    names = [wire.name for wire in WIRES]
    parser.add_argument("--links", nargs="+", choices=names, default=names)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found: list[Any] = []
    with ranks("part", args.model, WIRES[0]) as parts:
        for wire in (wire for wire in WIRES if wire.name in args.links):
            found += report(args.model, wire, *measure(args.model, wire, parts, args.rounds))
    if args.json:
        args.json.write_text(json.dumps({"model": args.model, "links": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
