"""What cache and scheduler promise, as ratios within one run on a real model.

    python -m benchmarks.cache [--model smollm2-135m] [--only prefix,queue] [--json cache.json]

Every figure compares two of our own runs, alternately, and gives medians: a prompt found in the
cache against the same prompt cold, 16 requests against one, packed pages against plain ones. Run it
on an idle machine; it says how many seconds each part took.
"""

from __future__ import annotations

import argparse
import json
import queue
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from mlxserve.cache import file, transfer
from mlxserve.config import EngineConfig
from mlxserve.engine.core import Core
from mlxserve.models.load import load_model
from mlxserve.sources.checkpoint import open_checkpoint
from mlxserve.sources.resolve import resolve
from mlxserve.text.matcher import Matcher
from mlxserve.types import Request, SamplingParams, TokenOut

NO_MATCHERS: Mapping[str, Matcher] = MappingProxyType({})
LONG = 7900
PREFIX = 2000


@dataclass
class Bench:
    """A model, and random prompts for it. results: name -> figures."""

    name: str
    rounds: int
    results: dict[str, dict[str, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.checkpoint = open_checkpoint(resolve(self.name))
        self.model = load_model(self.checkpoint.config, self.checkpoint.weights())
        self._random = np.random.default_rng(0)

    def ids(self, n: int) -> list[int]:
        return self._random.integers(100, self.model.vocab_size - 100, n).tolist()

    def core(self, **config: Any) -> Core:
        return Core(self.model, EngineConfig(**config))


def request(name: str, ids: list[int], new: int) -> Request:
    params = SamplingParams(max_tokens=new, ignore_eos=True)
    return Request(id=name, prompt_ids=tuple(ids), params=params)


class Run:
    """Drives a core by hand, and notes when each token came."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.out: queue.SimpleQueue[TokenOut] = queue.SimpleQueue()
        self.at_s: dict[str, list[float]] = {}
        self.asked_s: dict[str, float] = {}

    def add(self, *requests: Request, matchers: Mapping[str, Matcher] = NO_MATCHERS) -> None:
        now = time.perf_counter()
        for r in requests:
            self.asked_s[r.id], self.at_s[r.id] = now, []
        self.core.admit(requests, self.out, now, matchers)

    def step(self) -> None:
        self.core.advance()
        now = time.perf_counter()
        while not self.out.empty():
            got = self.out.get()
            if got.error is not None:
                raise got.error
            if got.token_id is not None:
                self.at_s[got.request_id].append(now)

    def until(self, done: Callable[[], bool]) -> None:
        while self.core.busy and not done():
            self.step()

    def finish(self) -> None:
        self.until(lambda: False)
        self.core.settle()

    def ttft_s(self, name: str) -> float:
        return self.at_s[name][0] - self.asked_s[name]


def prefix(bench: Bench) -> dict[str, float]:
    """Time to first token with 2,000 tokens in the cache, against cold."""
    core, cold, warm = bench.core(), [], []
    for i in range(bench.rounds):
        ids = bench.ids(PREFIX)
        for name, times in (("cold", cold), ("warm", warm)):
            run = Run(core)
            run.add(request(f"{name}{i}", ids + bench.ids(8), 1))
            run.finish()
            times.append(run.ttft_s(f"{name}{i}"))
    ratio = statistics.median(warm) / statistics.median(cold)
    return {"cold_s": statistics.median(cold), "warm_s": statistics.median(warm), "ratio": ratio}


def sharing(bench: Bench) -> dict[str, float]:
    """Sealed pages after the prompts of 16 requests over one prefix, against one request's."""
    ids, used = bench.ids(PREFIX), []
    for n in (1, 16):
        run = Run(core := bench.core(max_batch=16))
        run.add(*(request(f"r{i}", ids + [i + 5] * 8, 4) for i in range(n)))
        run.until(lambda at=run.at_s: all(at.values()))
        used.append(core.stats.pages_used)
    return {"pages_one": used[0], "pages_sixteen": used[1], "ratio": used[1] / used[0]}


def contention(bench: Bench) -> dict[str, float]:
    """A short request behind a prompt of 7,000 tokens, and what two answers under way notice."""
    short = bench.ids(64)
    _alone_s(bench, short)  # the first one also makes buffers
    alone_s = _alone_s(bench, short)
    run = Run(core := bench.core(prefix_cache=False))
    run.add(*(request(f"s{i}", bench.ids(64), 400) for i in range(2)))
    run.until(lambda: len(run.at_s["s1"]) > 20)
    quiet = np.diff(run.at_s["s0"][5:])
    run.add(request("long", bench.ids(7000), 1))
    run.until(lambda: core.scheduler.running[-1].computed > 500)
    chunk: list[float] = []
    run.add(request("short", short, 1))
    while not run.at_s["short"]:
        start = time.perf_counter()
        run.step()
        chunk.append(time.perf_counter() - start)
    run.until(lambda: bool(run.at_s["long"]))
    gaps = np.diff(run.at_s["s0"][21:])
    return {
        "ttft_alone_s": alone_s,
        "ttft_behind_s": run.ttft_s("short"),
        "chunk_s": statistics.median(chunk),
        "gap_quiet_s": float(np.median(quiet)),
        "gap_median_s": float(np.median(gaps)),
        "gap_worst_s": float(gaps.max()),
    }


def _alone_s(bench: Bench, ids: list[int]) -> float:
    """Time to first token where nobody else is there, and nothing is cached."""
    run = Run(bench.core())
    run.add(request("alone", ids, 1))
    run.finish()
    return run.ttft_s("alone")


def overhead(bench: Bench) -> dict[str, float]:
    """Gaps between steps at 16 rows, and scheduler and manager in a step of 64 rows."""
    figures: dict[str, float] = {}
    for rows in (16, 64):
        run = Run(core := bench.core(max_batch=rows))
        run.add(*(request(f"r{i}", bench.ids(100), 120) for i in range(rows)))
        run.until(lambda times=run.at_s: all(len(at) > 3 for at in times.values()))
        busy, gap, planning = core.meter.steps.sum, core.meter.gaps.sum, 0.0
        schedule = core.scheduler.schedule

        def timed(now_s: float, schedule: Any = schedule) -> Any:
            nonlocal planning
            start = time.perf_counter()
            plan = schedule(now_s)
            planning += time.perf_counter() - start
            return plan

        core.scheduler.schedule = timed  # type: ignore[method-assign]
        run.until(lambda times=run.at_s: any(len(at) > 110 for at in times.values()))
        busy, gap = core.meter.steps.sum - busy, core.meter.gaps.sum - gap
        figures |= {f"gap_{rows}": gap / busy, f"planning_{rows}": planning / busy}
    return figures


def utilisation(bench: Bench) -> dict[str, float]:
    """Pages in use when the first request is preempted."""
    core = Core(bench.model, EngineConfig(max_batch=8), pool_pages=48)
    run = Run(core)
    run.add(*(request(f"r{i}", bench.ids(200), 400) for i in range(8)))
    used = 0
    while core.busy and not core.scheduler.counts.preemptions:
        used = core.stats.pages_used
        run.step()
    return {"pages": core.stats.pages, "used": used, "ratio": used / core.stats.pages}


def packed(bench: Bench) -> dict[str, float]:
    """Decoding after 7,900 tokens with pages of 8 and 4 bits, against 16; and their memory."""
    ids, times, sizes = bench.ids(LONG), {}, {}
    runs = {}
    for bits in ("16", "8", "4"):
        runs[bits] = Run(core := bench.core(kv_bits=bits, max_batch=1))
        runs[bits].add(request("r", ids, 8192 - LONG - 1))
        runs[bits].until(lambda bits=bits: len(runs[bits].at_s["r"]) > 8)
        sizes[bits] = _page_bytes(core)
        times[bits] = []
    for _ in range(bench.rounds):
        for bits, run in runs.items():
            n = len(run.at_s["r"])
            start = time.perf_counter()
            run.until(lambda run=run, n=n: len(run.at_s["r"]) >= n + 30)
            times[bits].append((time.perf_counter() - start) / 30)
    step = {bits: statistics.median(t) for bits, t in times.items()}
    return {
        **{f"step_{bits}_s": s for bits, s in step.items()},
        "speed_8_to_16": step["16"] / step["8"],
        "speed_4_to_16": step["16"] / step["4"],
        "memory_8_to_16": sizes["8"] / sizes["16"],
        "memory_4_to_16": sizes["4"] / sizes["16"],
    }


def _page_bytes(core: Core) -> float:
    from mlxserve.kernels.pages import arrays_of

    pools = [side for sides in core.storage.pool.values() for side in sides]
    return sum(a.nbytes / a.shape[0] for side in pools for a in arrays_of(side))


def saved(bench: Bench) -> dict[str, float]:
    """A cache of 7,900 tokens from a file, against computing it."""
    ids, salt = bench.ids(LONG), ("", "", "")
    run = Run(core := bench.core())
    run.add(request("r", ids, 1))
    run.finish()
    made = core.info.fingerprint
    load_s = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "c.safetensors"
        source = transfer.source(core.manager, core.storage, "k", salt, ids, made)
        start = time.perf_counter()
        file.write(path, source.header, lambda n: transfer.tensor(core.storage, source, ids, n))
        save_s = time.perf_counter() - start
        for _ in range(bench.rounds):
            fresh = bench.core()
            start = time.perf_counter()
            cache = file.read(path)
            file.check_fingerprint(cache, made)
            file.verify(cache)
            transfer.restore(fresh.manager, fresh.storage, "f", salt, cache)
            load_s.append(time.perf_counter() - start)
            del fresh
        size = path.stat().st_size
    compute_s, load = run.ttft_s("r"), statistics.median(load_s)
    return {
        "compute_s": compute_s,
        "save_s": save_s,
        "load_s": load,
        "file_mb": size / 1e6,
        "ratio": load / compute_s,
    }


PARTS: dict[str, Callable[[Bench], dict[str, float]]] = {
    "prefix": prefix,
    "sharing": sharing,
    "contention": contention,
    "overhead": overhead,
    "utilisation": utilisation,
    "packed": packed,
    "saved": saved,
}


@contextmanager
def _timed(name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    print(f"  ({name} took {time.perf_counter() - start:.0f} s)")


def main() -> None:
    """Run the parts asked for and print their figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, separated by commas")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    names = args.only.split(",")
    if unknown := [name for name in names if name not in PARTS]:
        parser.error(f"no part is named {', '.join(unknown)}; there are {', '.join(PARTS)}")
    bench = Bench(args.model, max(1, args.rounds))
    for name in names:
        with _timed(name):
            bench.results[name] = PARTS[name](bench)
        for figure, value in bench.results[name].items():
            print(f"{name}.{figure}: {value:.4g}")
    if args.json is not None:
        args.json.write_text(json.dumps(bench.results, indent=1))


if __name__ == "__main__":
    main()
