"""One of the processes of `distributed`, told what to time by lines of JSON. Run by it alone.

    python -m benchmarks.distributed_rank ROLE MODEL

alone     the whole model, in an engine without others
part      a rank's part of it, in an engine that has others who say nothing
rank      a rank of a group; only rank 0 is told what to time
link      a rank that only adds up and gathers, together with the others

Then one list a line on stdin, and one of seconds a line on stdout: `["decode", rows]`,
`["prefill", tokens]`, `["sum", bytes, matmuls]`, `["gather", bytes, matmuls]`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np

from benchmarks.cache import Run, request
from mlxserve.config import EngineConfig, placement
from mlxserve.distributed.follower import follow
from mlxserve.distributed.group import Ranks
from mlxserve.distributed.leader import lead
from mlxserve.distributed.messages import Step, encode
from mlxserve.engine.core import Core
from mlxserve.engine.peers import NoPeers
from mlxserve.opening import open_model
from mlxserve.sequence import StepPlan

WARM_STEPS, STEPS = 4, 10
CONTEXT_TOKENS = 32  # of each row that decodes
CALLS_BYTES = 4 << 20  # of collectives in a row, each of which needs the one before
CONFIG = EngineConfig(prefix_cache=False)


class Pretended:
    """See `models.base.Group`. As if others had sent what they have, and at once."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def sum(self, x: mx.array) -> mx.array:
        return x

    def gather(self, x: mx.array, widths: Sequence[int]) -> mx.array:
        return mx.concatenate([x] * self.size, -1)[..., : sum(widths)]


class Silent(NoPeers):
    """Another rank that is told all, and has nothing to say."""

    count = 1

    def step(
        self, plan: StepPlan, ids: list[int] | None = None, reads: Sequence[tuple[int, int]] = ()
    ) -> None:
        encode(Step.of(plan, ids, reads))


class Steps:
    """Times steps of a core."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._random = np.random.default_rng(0)

    def _ids(self, count: int) -> list[int]:
        return self._random.integers(100, self._core.info.vocab_size - 100, count).tolist()

    def decode(self, rows: int) -> list[float]:
        """Of each step that gives so many rows a token."""
        run = Run(self._core)
        new = WARM_STEPS + STEPS
        run.add(*(request(f"r{i}", self._ids(CONTEXT_TOKENS), new) for i in range(rows)))
        run.finish()
        return np.diff(run.at_s["r0"][WARM_STEPS:]).tolist()

    def prefill(self, tokens: int) -> list[float]:
        """From a prompt of so many tokens to the first of its answer."""
        run = Run(self._core)
        run.add(request("p", self._ids(tokens), 1))
        run.finish()
        return [run.ttft_s("p")]


class Calls:
    """Times collectives of float32 with work between them, as a step has it.

    What a collective of `count` bytes adds to so many matmuls, and what these take by themselves.
    Ranks wait for each other, so that is more than with nothing between.
    """

    def __init__(self, group: Ranks) -> None:
        self._group = group
        self._weight = mx.eye(256)
        mx.eval(self._weight)

    def sum(self, count: int, work: int) -> list[float]:
        """As of hidden states."""
        return self._time(mx.zeros((1, count // 4)), work, self._group.sum)

    def gather(self, count: int, work: int) -> list[float]:
        """As of logits: each rank has a part of so many bytes."""
        width = count // 4

        def part(x: mx.array) -> mx.array:
            return self._group.gather(x, [width] * self._group.size)[:, :width]

        return self._time(mx.zeros((1, width)), work, part)

    def _time(
        self, x: mx.array, work: int, collective: Callable[[mx.array], mx.array]
    ) -> list[float]:
        calls = min(20, max(2, CALLS_BYTES // x.nbytes))
        took = []
        for call in (None, collective):
            mx.eval(self._group.sum(mx.zeros((1,))))  # the others are there
            begin_s = time.perf_counter()
            mx.eval(self._chain(x, calls, work, call))
            took.append((time.perf_counter() - begin_s) / calls)
        alone_s, with_calls_s = took
        return [with_calls_s - alone_s, alone_s]

    def _chain(
        self,
        x: mx.array,
        calls: int,
        work: int,
        call: Callable[[mx.array], mx.array] | None,
    ) -> mx.array:
        for _ in range(calls):
            h = mx.zeros((8, 256)) + x[0, 0]
            for _ in range(work):
                h = h @ self._weight
            x = x + h[0, 0]
            if call is not None:
                x = call(x)
        return x


def main() -> None:
    """Begin, and answer until there are no more lines."""
    role, name = sys.argv[1:]
    rank, size = int(os.environ["MLX_RANK"]), int(os.environ["MLXSERVE_RANKS"])
    if hasattr(os, "sched_setaffinity"):  # a rank that waits would take the other one's core
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    if role == "link":
        _answer(Calls(Ranks("ring")))
        return
    opened = open_model(name, CONFIG)
    if role == "alone":
        _answer(Steps(Core(opened.load(), CONFIG)))
    elif role == "part":
        part = opened.load(opened.part(Pretended(rank, size)))
        _answer(Steps(Core(part, CONFIG, peers=Silent())))
    elif rank:
        here = placement()
        assert here is not None, "MLXSERVE_RANK isn't set"
        follow(here, lambda: opened)
    else:
        leader, shard = lead(opened)
        _answer(Steps(Core(opened.load(shard), CONFIG, peers=leader)))
        if leader is not None:
            leader.close()


def _answer(timed: Steps | Calls) -> None:
    print("[]", flush=True)  # ready
    for line in sys.stdin:
        what, *numbers = json.loads(line)
        print(json.dumps(getattr(timed, what)(*numbers)), flush=True)


if __name__ == "__main__":
    main()
