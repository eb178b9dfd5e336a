"""Kinds of caches, each with a tiny model, and an engine over one that is driven step by step."""

import queue
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

from mlxserve.cache import file, transfer
from mlxserve.config import EngineConfig
from mlxserve.engine.core import Core
from mlxserve.sequence import Sequence, StepPlan
from mlxserve.types import Logprob, Request, SamplingParams
from tests.support.composed import ComposedModel, Kind

Ids = tuple[int, ...]

FULL, LATENT, STATE = Kind("full"), Kind("latent"), Kind("state")


@dataclass(frozen=True)
class CacheKind:
    """layers: the model's; config: of the engine; both by the tokens of a page.

    small: a page of 4 tokens where that can be packed so, for tests that are quick.
    """

    layers: Callable[[int], tuple[Kind, ...]]
    config: Callable[[int], dict[str, Any]] = field(default=lambda P: {})
    small: int = 4

    @property
    def packed(self) -> bool:
        return "kv_bits" in self.config(64)

    @property
    def recurrent(self) -> bool:
        return STATE in self.layers(64)

    @property
    def cuts(self) -> bool:
        """Whether a prefix may end within a page."""
        return not self.packed and not self.recurrent

    @property
    def records(self) -> bool:
        """Whether its decoding steps are recorded, where there are native kernels for all ops."""
        return all(kind.name in ("full", "window") for kind in self.layers(64))

    def resumes_at(self, agreed: int, page_tokens: int) -> int:
        """How much of a prefix that agrees can be gone on from, where all of it is cached."""
        return agreed if self.cuts else agreed // page_tokens * page_tokens


def _bits(bits: int | str, **more: Callable[[int], int]) -> Callable[[int], dict[str, Any]]:
    return lambda P: {"kv_bits": bits} | {name: of(P) for name, of in more.items()}


def _kept(
    size: Callable[[int], int], keep: Callable[[int], int]
) -> Callable[[int], dict[str, Any]]:
    return lambda P: {"max_kv_size": size(P), "keep": keep(P)}


def _sinks(P: int) -> tuple[Kind, ...]:
    return (Kind("window", P + 3, sinks=True), Kind("full", sinks=True))


KINDS = {
    "full": CacheKind(lambda P: (FULL, FULL)),
    "window, less than a page": CacheKind(lambda P: (Kind("window", P * 3 // 4),) * 2),
    "window, over two pages": CacheKind(lambda P: (Kind("window", 2 * P + 1),) * 2),
    "keep, less than a page": CacheKind(
        lambda P: (FULL, FULL), _kept(lambda P: 2 * P + 2, lambda P: P // 2 + 1)
    ),
    "keep, over a page": CacheKind(
        lambda P: (FULL, FULL), _kept(lambda P: 3 * P - 1, lambda P: P + P // 2)
    ),
    "8 bits": CacheKind(lambda P: (FULL, FULL), _bits(8)),
    "4 bits": CacheKind(lambda P: (FULL, FULL), _bits(4), small=8),
    "8/4 bits": CacheKind(lambda P: (FULL, FULL), _bits("8/4")),
    "window, sinks, 8 bits": CacheKind(_sinks, _bits(8)),
    "keep, 8/4 bits": CacheKind(
        lambda P: (FULL, FULL),
        _bits("8/4", max_kv_size=lambda P: 2 * P + 2, keep=lambda P: P // 2 + 1),
    ),
    "latent": CacheKind(lambda P: (LATENT, LATENT)),
    "state": CacheKind(lambda P: (STATE, STATE)),
    "full, window, state": CacheKind(lambda P: (FULL, Kind("window", P + 2), STATE)),
    "full, window, latent, state": CacheKind(lambda P: (FULL, Kind("window", 3), LATENT, STATE)),
    "full, state, 8 bits": CacheKind(lambda P: (FULL, STATE), _bits(8)),
}

REFUSED = {
    "latent, 8 bits": CacheKind(lambda P: (FULL, LATENT), _bits(8)),
    "latent, max_kv_size": CacheKind(lambda P: (FULL, LATENT), lambda P: {"max_kv_size": 2 * P}),
}

SAMPLING = {
    "greedy": {},
    "seeded": {"temperature": 0.8, "top_p": 0.95, "repetition_penalty": 1.1, "seed": 5},
}


@dataclass(frozen=True)
class Asked:
    """A request as the same one alone would be asked."""

    ids: Ids
    new: int
    sampling: str

    def request(self, name: str) -> Request:
        params = SamplingParams(max_tokens=self.new, top_logprobs=20, **SAMPLING[self.sampling])
        return Request(id=name, prompt_ids=self.ids, params=params)


Answer = list[tuple[int, Logprob]]


class Run:
    """An engine over a kind of cache.

    plans: its steps so far; recorded: how many of them ran from a recording. asked, answers: by
    request id; aborted: ids.
    """

    def __init__(self, kind: str, page_tokens: int, *, pool_pages: int = 64, **config: Any) -> None:
        chosen = KINDS[kind].config(page_tokens)
        settings = {"max_batch": 4, "max_batched_tokens": 1000} | chosen | config
        self.core = Core(
            _model(kind, page_tokens),
            EngineConfig(**settings),
            pool_pages=pool_pages,
            page_tokens=page_tokens,
        )
        self.plans: list[StepPlan] = []
        self.recorded = 0
        self.asked: dict[str, Asked] = {}
        self.answers: dict[str, Answer] = {}
        self.aborted: set[str] = set()
        self._out: queue.SimpleQueue = queue.SimpleQueue()
        schedule = self.core.scheduler.schedule

        def noted(now_s: float = 0.0) -> StepPlan | None:
            plan = schedule(now_s)
            self.plans += [plan] if plan else []
            return plan

        self.core.scheduler.schedule = noted

    def submit(self, asked: Asked) -> Sequence:
        name = f"r{len(self.asked)}"
        self.asked[name], self.answers[name] = asked, []
        self.core.admit([asked.request(name)], self._out, 0.0)
        return self.core.open[name][0]

    def abort(self, name: str) -> None:
        self.aborted.add(name)
        self.core.abort([name])

    def step(self, n: int = 1) -> None:
        for _ in range(n):
            self.core.advance()
            self.core.check_integrity()
            self.recorded += any(step.in_place for step in self.core.in_flight)
        while not self._out.empty():
            out = self._out.get()
            if out.error is not None:
                raise out.error
            if out.token_id is not None:
                self.answers[out.request_id].append((out.token_id, out.logprob))

    def drain(self) -> None:
        """To the end of all, and everything that can be shared is sealed."""
        while self.core.busy:
            self.step()
        self.core.settle()
        self.core.check_integrity()

    def alone(self, asked: Asked) -> Sequence:
        """From its beginning to its end, with nobody else there."""
        seq = self.submit(asked)
        self.drain()
        return seq

    def save(self, path: Path, ids: Ids) -> int:
        """What is cached of a prompt into a file, as LLM.save_cache does. Returns its tokens."""
        core, salt = self.core, _salt()
        source = transfer.source(core.manager, core.whole, path, salt, ids, core.info.fingerprint)
        tensor = partial(transfer.tensor, core.whole, source, ids)
        file.write(path, source.header, tensor)
        core.manager.shared.unpin(path)
        self.core.check_integrity()
        return source.header.tokens

    def load(self, path: Path) -> int:
        """And from there, as LLM.load_cache does. Returns the tokens that are cached now."""
        core, saved = self.core, file.read(path)
        file.check_fingerprint(saved, core.info.fingerprint)
        file.verify(saved)
        tokens = transfer.restore(core.manager, core.whole, path, _salt(), saved)
        core.check_integrity()
        return tokens

    def rows(self) -> list[int]:
        """How many requests each step computed."""
        return [len(plan.chunks) for plan in self.plans]


def _salt() -> Hashable:
    return Asked((0,), 1, "greedy").request("").salt


@cache
def _model(kind: str, page_tokens: int) -> ComposedModel:
    return ComposedModel(KINDS[kind].layers(page_tokens))


@cache
def solo(kind: str, page_tokens: int, asked: Asked) -> Answer:
    """The answer of a request that is alone in an engine: its prompt whole, nothing cached."""
    run = Run(kind, page_tokens, prefix_cache=False)
    run.alone(asked)
    return run.answers["r0"]
