"""Random schedules of requests against a cache of dictionaries, step by step as the engine does.

Integers only: scheduler and manager are the real ones, the model is a function of the tokens, and
the arrays are PaperCache's.
"""

import math
import random
from collections import deque
from dataclasses import dataclass

from mlxserve.cache.groups import group_layers
from mlxserve.cache.manager import CacheManager
from mlxserve.cache.spec import FullKV, KVBits, Latent, LayerSpec, State, WindowKV
from mlxserve.engine.scheduler import ChunkResult, Scheduler
from mlxserve.sequence import SPARE_HOT_PAGES, Sequence, StepPlan
from mlxserve.types import Request, SamplingParams, TokenOut
from tests.support.paging import Draw, PaperCache

END = 7
WORDS = (10, 11, 12)  # few, so that prompts agree by chance too
STEPS_AT_MOST = 5000  # of one schedule: it must end


class PaperEngine:
    """Scheduler, manager and paper cache in the order in which `Core.step` has them.

    ahead: whether a step is built before the last one was read. outputs: by request id. Each step
    takes a second.
    """

    def __init__(self, scheduler: Scheduler, draw: Draw, *, ahead: bool = True) -> None:
        self.scheduler = scheduler
        self.manager = scheduler.manager
        self.cache = PaperCache(scheduler.manager, draw)
        self.draw = draw
        self.ahead = ahead
        self.flights: deque[StepPlan] = deque()  # the oldest first
        self.outputs: dict[str, list[TokenOut]] = {}
        self.steps = 0
        self._capacity = [1 for _ in self._used()]

    @property
    def busy(self) -> bool:
        return self.scheduler.busy or bool(self.flights)

    def step(self) -> None:
        """One step; every rule that holds whatever the schedule is checked."""
        if not self.ahead:
            self.finish()
        self._grow()
        scheduler, preempted = self.scheduler, self.scheduler.counts.preemptions
        oldest, alone = scheduler.running[:1], len(scheduler.running) + len(scheduler.waiting) == 1
        plan = scheduler.schedule(self.steps)
        assert plan or self.flights or not scheduler.busy, "nothing to do, and yet busy"
        assert scheduler.running[:1] == oldest or not oldest, "the oldest was preempted"
        assert scheduler.counts.preemptions == preempted or not alone, (
            "preempted, and nobody else is there"
        )
        if plan:
            assert plan.tokens <= scheduler.max_batched_tokens
            assert len(plan.chunks) <= scheduler.max_batch
            if scheduler.stages > 1:
                self._check_apart(plan)
            self._apply(plan)
            self.flights.append(plan)
        scheduler.check_integrity()
        if self.flights and (not plan or len(self.flights) > scheduler.stages):
            self._commit(self.flights.popleft())
        scheduler.check_integrity()
        self.steps += 1
        assert self.steps < STEPS_AT_MOST * scheduler.stages, "it doesn't end"

    def finish(self) -> None:
        """Read the steps under way."""
        while self.flights:
            self._commit(self.flights.popleft())

    def settle(self) -> None:
        """Seal what the last requests left. With nothing to compute."""
        self.finish()
        if self.manager.unsettled:
            self._grow()
            self._apply(self.manager.end_plan(()))
        self.manager.begin_plan(())
        self.scheduler.check_integrity()

    def drain(self) -> None:
        """Run until all have ended; then nobody holds anything."""
        while self.busy:
            self.step()
        self.settle()
        self.manager.shared.end_pins(math.inf)
        self.manager.check_integrity([])
        assert self.manager.hot.used == 0
        assert all(pool.used == len(pool.idle) for pool in self.manager.pools)

    def _apply(self, plan: StepPlan) -> None:
        self.cache.apply(plan)
        self.cache.check_tree()
        for used, capacity in zip(self._ids(plan), self._capacity, strict=True):
            assert max(used, default=0) < capacity, "storage isn't grown as far as this page"

    def _check_apart(self, plan: StepPlan) -> None:
        """Of a pipeline: no step is of a token that a step under way will draw."""
        drawing = {id(c.seq) for flight in self.flights for c in flight.chunks if c.samples}
        assert not any(id(chunk.seq) in drawing for chunk in plan.chunks)

    def _commit(self, plan: StepPlan) -> None:
        for out in self.scheduler.commit(plan, [self._result(chunk) for chunk in plan.chunks]):
            self.outputs.setdefault(out.request_id, []).append(out)

    def _result(self, chunk) -> ChunkResult:
        """What a device would report: positions, in place of what is told of them."""
        request, positions, read = chunk.seq.request, range(chunk.start, chunk.start + chunk.n), {}
        if request.prompt_logprobs is not None:
            last = len(request.prompt_ids) - 1
            read["prompt_logprobs"] = tuple(p + 1 for p in positions if p < last)
        elif request.score:
            read["prompt_logits"] = list(positions)
        token = self.draw(tuple(chunk.seq.ids)) if chunk.samples else None
        return ChunkResult(token_id=token, **read)

    def _grow(self) -> None:
        """As `Core._grow`, which must foresee how far the next step reaches."""
        pages, rows = self.scheduler.pages_at_most()
        extra = [pages for _ in (self.manager.hot, *self.manager.pools)] + [2 * rows]
        limits = [p.pages for p in (self.manager.hot, *self.manager.pools, self.manager.states)]
        needed = [
            min(used + n, limit) for used, n, limit in zip(self._used(), extra, limits, strict=True)
        ]
        if any(n > have for n, have in zip(needed, self._capacity, strict=True)):
            self.finish()
            self._capacity = [max(pair) for pair in zip(needed, self._capacity, strict=True)]

    def _used(self) -> list[int]:
        return [p.used for p in (self.manager.hot, *self.manager.pools, self.manager.states)]

    def _ids(self, plan: StepPlan) -> list[list[int]]:
        """All that a plan writes."""
        hot = [page for chunk in plan.chunks for page in chunk.hot]
        pools = zip(*(seal.pages for seal in plan.seals), strict=True) if plan.seals else ()
        sealed = [list(pages) for pages in pools] or [[] for _ in self.manager.pools]
        slots = [to for _, to in plan.states]
        return [hot + [load.hot for load in plan.loads], *sealed, slots]


LAYERS = {
    "full": lambda window: (FullKV(1, 4),),
    "window": lambda window: (WindowKV(1, 4, window),),
    "full, window": lambda window: (FullKV(1, 4), WindowKV(1, 4, window)),
    "two windows": lambda window: (WindowKV(1, 4, window), WindowKV(1, 4, 2 * window + 3)),
    "keep": lambda window: (WindowKV(1, 4, window, 1 + window // 2),),
    "full, keep": lambda window: (FullKV(1, 4), WindowKV(1, 4, window, 2 * window)),
    "latent": lambda window: (Latent(4, 2),),
    "state": lambda window: (State(((2,),)),),
    "full, state": lambda window: (FullKV(1, 4), State(((2,),))),
    "full, window, state": lambda window: (FullKV(1, 4), WindowKV(1, 4, window), State(((2,),))),
    "window, latent, state": lambda window: (WindowKV(1, 4, window), Latent(4, 2), State(((2,),))),
}


@dataclass(frozen=True)
class Setup:
    """A cache and a scheduler over it.

    window: so many pages, and so many tokens more. pages: of a pool that no window bounds. tokens:
    of a step, over `max_batch`; stages: of the pipeline that computes steps; snapshots: slots over
    those of running sequences; ends: of a hundred tokens, those after which an answer ends.
    """

    layers: str
    window: tuple[int, int]
    page_tokens: int
    packed: bool
    max_batch: int
    tokens: int
    pages: int
    snapshots: int
    sharing: bool
    ahead: bool
    stages: int
    ends: int
    seed: int

    def start(self) -> PaperEngine:
        whole, more = self.window
        window = max(1, whole * self.page_tokens + more)
        specs: tuple[LayerSpec, ...] = LAYERS[self.layers](window)
        packed = self.packed and not any(isinstance(spec, Latent) for spec in specs)
        groups = group_layers(specs, KVBits(8, 4) if packed else KVBits(), self.page_tokens)
        budget = self.max_batch + self.tokens
        chunk_pages = budget // self.page_tokens
        paged = [group for group in groups if group.paged]
        pools = [
            self.pages
            if group.pages_at_most is None  # else as memory.plan_cache has it
            else 2 * self.max_batch * (group.pages_at_most + 2) + chunk_pages
            for group in paged
        ]
        manager = CacheManager(
            groups,
            hot_pages=2 * self.max_batch + chunk_pages + SPARE_HOT_PAGES,
            pool_pages=pools,
            slots=1 + self.max_batch + self.snapshots,
            sharing=self.sharing,
        )
        scheduler = Scheduler(manager, self.max_batch, budget, stages=self.stages)
        return PaperEngine(scheduler, self.draw, ahead=self.ahead)

    def draw(self, ids: tuple[int, ...]) -> int:
        drawn = random.Random(hash((self.seed, ids[-6:], len(ids) // 3)))
        return END if drawn.randrange(100) < self.ends else drawn.choice(WORDS)


CHOICES = {
    "layers": list(LAYERS),
    "window": [(0, 1), (0, 2), (1, -1), (1, 0), (1, 1), (2, 1), (4, 3)],
    "page_tokens": [4, 4, 4, 8, 64],
    "packed": [False, False, True],
    "max_batch": [1, 2, 4, 6],
    "tokens": [0, 3, 13, 40],
    "pages": [5, 7, 9, 12, 40],
    "snapshots": [0, 1, 3, 8],
    "sharing": [True] * 9 + [False],
    "ahead": [True] * 4 + [False],
    "stages": [1, 1, 1, 2, 3],
    "ends": [0, 5],
}


class Schedule:
    """What callers may do to an engine, in any order."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.engine = setup.start()
        self.limit = min(self.engine.manager.tokens_at_most(), 12 * setup.page_tokens)
        self.seqs: list[Sequence] = []

    def add(
        self,
        prompt: list[int],
        new: int,
        *,
        score: bool = False,
        tenant: str = "",
        pin_s: float | None = None,
    ) -> None:
        """A request; a prompt that is too long is cut."""
        request = Request(
            id=f"r{len(self.seqs)}",
            prompt_ids=tuple(prompt[: self.limit - 1]) or (WORDS[0],),
            params=SamplingParams(max_tokens=new),
            stop_ids=frozenset({END}),
            score=score,
            tenant=tenant,
            pin_s=pin_s,
        )
        self.seqs.append(Sequence.start(request, self.limit, 0.0))
        self.engine.scheduler.add(self.seqs[-1])

    def like(self, which: int, cut: int, more: list[int]) -> list[int]:
        """The beginning of an earlier text, or all of it, and something after that."""
        text = self.seqs[which % len(self.seqs)].ids if self.seqs else []
        return text[: cut % (len(text) + 1)] + more

    def abort(self, which: int) -> None:
        scheduler = self.engine.scheduler
        if open_seqs := [*scheduler.running, *scheduler.waiting]:
            scheduler.abort(open_seqs[which % len(open_seqs)])

    def end(self) -> None:
        """All requests end, with as many tokens as they should have."""
        self.engine.drain()
        for seq in self.seqs:
            assert seq.finished
            assert seq.cached <= (seq.matched or 0) <= len(seq.request.prompt_ids)
            if seq.request.score or not self.setup.sharing:
                assert seq.cached == 0


def walk(seed: int, actions: int = 60) -> Schedule:
    """A schedule by chance alone, the same for the same seed."""
    rng = random.Random(seed)
    setup = Setup(seed=seed, **{name: rng.choice(values) for name, values in CHOICES.items()})
    schedule = Schedule(setup)
    P = setup.page_tokens
    for _ in range(actions):
        match rng.choice(
            ["add", "like", "like", "step", "step", "step", "step", "abort", "settle"]
        ):
            case "add":
                prompt = rng.choices(WORDS, k=rng.randint(1, 6 * P))
                schedule.add(prompt, rng.choice([1, 2, P, 5 * P]), score=rng.random() < 0.1)
            case "like":
                more = rng.choices(WORDS, k=rng.choice([0, 0, 1, P // 2, P]))
                prompt = schedule.like(
                    rng.randrange(99), rng.choice([-1, rng.randrange(999)]), more
                )
                tenant, pin_s = rng.choice(["", "", "a"]), rng.choice([None, None, 1, 50])
                schedule.add(prompt, rng.choice([1, 2, P, 5 * P]), tenant=tenant, pin_s=pin_s)
            case "step":
                for _ in range(rng.randint(1, 8)):
                    if schedule.engine.busy:
                        schedule.engine.step()
            case "abort":
                if rng.random() < 0.4:
                    schedule.abort(rng.randrange(9))
            case "settle":
                if not schedule.engine.scheduler.busy:
                    schedule.engine.settle()
    schedule.end()
    return schedule
