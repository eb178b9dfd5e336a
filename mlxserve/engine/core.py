"""The step, without a thread: cache, scheduler and runner, and the order they work in."""

import logging
import time
import traceback
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import mlx.core as mx

from mlxserve import device
from mlxserve.cache.manager import CacheManager
from mlxserve.cache.spec import PAGE_TOKENS
from mlxserve.cache.storage import Storage
from mlxserve.config import EngineConfig
from mlxserve.engine import cache_plan
from mlxserve.engine.meter import Meter
from mlxserve.engine.peers import NoPeers, Peers
from mlxserve.engine.queueing import WaitingQueue
from mlxserve.engine.runner import InFlight, Runner
from mlxserve.engine.scheduler import ChunkResult, Scheduler
from mlxserve.engine.trace import Trace
from mlxserve.errors import CapacityError, InvariantError, ModelError, RequestError
from mlxserve.histogram import Distribution
from mlxserve.kernels.pages import dtype_name
from mlxserve.models.base import Model
from mlxserve.sequence import Sequence as Seq
from mlxserve.text.matcher import Matcher
from mlxserve.types import Request, SamplingParams, TokenOut

logger = logging.getLogger(__name__)

METAL_STEP_S = 1.0
"""Of a step on a GPU. macOS ends the process of a command buffer that keeps the display waiting:
after five seconds in most reports, after less in some (mlx issue 3267)."""

_PROBE = Request(id="probe", prompt_ids=(0,), params=SamplingParams(max_tokens=1))


class TokenSink(Protocol):
    """Where a caller's tokens go, such as a queue; several requests may share one.

    put is called on the engine's thread, which waits for it.
    """

    def put(self, item: TokenOut, /) -> None: ...


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot: what runs and waits now, and what has been done since the start.

    prefix_hits: ended requests that found something in the cache; cached_tokens: how much of their
    prompts, in all. refused: requests that found no room or no time. pages: sealed pages of the
    cache, over all layer groups, of which sequences hold `pages_used`, and `pages_cached` are kept
    for prompts that begin alike, pinned or not; cache_bytes: what the cache's arrays take now.
    step_s: seconds that steps took; step_gap_s: of these, those in which the device waited.
    """

    running: int = 0
    waiting: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prefix_hits: int = 0
    completion_tokens: int = 0
    preemptions: int = 0
    refused: int = 0
    step_s: Distribution = field(default_factory=Distribution)
    step_gap_s: Distribution = field(default_factory=Distribution)
    pages_used: int = 0
    pages_cached: int = 0
    pages: int = 0
    cache_bytes: int = 0
    peak_memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What callers may know without touching arrays: ids below vocab_size, tokens per sequence.

    fingerprint: what the numbers in the cache depend on, beside the model.
    """

    vocab_size: int
    context_tokens: int
    fingerprint: dict[str, str]


class Core:
    """What the engine thread does, without the thread: used by it alone, and by tests.

    open: requests under way, with their sinks. pool_pages: an upper bound on the pages of each
    layer group, below what memory allows. peers: that compute the model with this process.
    """

    def __init__(
        self,
        model: Model,
        config: EngineConfig,
        *,
        pool_pages: int | None = None,
        page_tokens: int = PAGE_TOKENS,
        peers: Peers | None = None,
    ) -> None:
        self.peers = peers or NoPeers()
        groups, dtype, plan = cache_plan.plan_of(model, config, page_tokens)
        plan = self.peers.agree(plan, dtype_name(model.dtype))
        pools = tuple(min(n, pool_pages or n) for n in plan.pool_pages)
        sizes: Any = {"hot_pages": plan.hot_pages, "pool_pages": pools, "slots": plan.slots}
        self.storage = Storage(groups, dtype, **sizes)
        every = cache_plan.cache_groups(model.layer_specs(), config, page_tokens)
        self.whole = self.peers.whole(self.storage, every)
        self.manager = CacheManager(groups, sharing=config.prefix_cache, **sizes)
        self.scheduler = Scheduler(
            self.manager,
            config.max_batch,
            cache_plan.step_tokens(config),
            queue=WaitingQueue(config.policy, config.ageing_s),
            max_queue=config.max_queue,
            target_itl_s=config.target_itl_ms and config.target_itl_ms / 1000,
            max_step_s=METAL_STEP_S if device.has_metal() else None,
            stages=self.peers.stages,
        )
        trace = None if config.trace is None else Trace(Path(config.trace))
        self.meter = Meter(self.scheduler.pace, trace)
        self.runner = Runner(model, self.storage, self.peers)
        self.in_flight: deque[InFlight] = deque()  # the oldest first
        self.open: dict[str, tuple[Seq, TokenSink]] = {}
        self.stats = EngineStats()
        context = min(model.context_tokens, self.manager.tokens_at_most())
        fingerprint = cache_plan.fingerprint(self.whole, config)
        self.info = EngineInfo(model.vocab_size, context, fingerprint)

    @property
    def busy(self) -> bool:
        return self.scheduler.busy or bool(self.in_flight)

    def admit(
        self,
        requests: Sequence[Request],
        out: TokenSink,
        at_s: float,
        matchers: Mapping[str, Matcher] = MappingProxyType({}),
    ) -> None:
        """Take requests in; `at_s` is when they were submitted.

        matchers: of those with a grammar, by request id.
        """
        for request in requests:
            if request.id in self.open:
                error = RequestError(f"request id {request.id!r} is in use; choose another")
                out.put(TokenOut(request_id=request.id, error=error))
                continue
            seq = Seq.start(request, self.info.context_tokens, at_s)
            if request.params.grammar is not None:
                seq.matcher = matchers[request.id]
            try:
                self.scheduler.add(seq)
            except CapacityError as error:
                out.put(TokenOut(request_id=request.id, error=error))
            else:
                self.open[request.id] = (seq, out)

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests now; their pages are free at once."""
        for request_id in request_ids:
            if request_id in self.open:
                self.scheduler.abort(self.open[request_id][0])
                self._deliver(TokenOut(request_id=request_id, finish_reason="cancelled"))

    def advance(self) -> None:
        """One step; if it fails, the requests in it fail and the engine goes on.

        Raises InvariantError, and whatever fails with no request to blame: also in a step of
        nobody's, which is computed after one that failed. Where no step works any more, the engine
        must not go on as if it did.
        """
        try:
            self.step()
        except InvariantError:
            raise
        except Exception as error:
            if self.peers.count:  # they may be anywhere in the step
                raise self.peers.cause(error) from error
            if not self.scheduler.running and not self.in_flight:
                raise
            logger.exception("a step failed; the requests in it end")
            self._fail_running(error)
            self._probe()

    def step(self) -> None:
        """Build the next step, read the last, start the next, then deliver the last one's tokens.

        A step that makes new arrays of the cache starts after the last was read, or the cache would
        be copied: what is under way holds on to its arrays. One that writes it in place starts at
        once. Tokens are delivered after that, so that the device need not wait for the callers.

        Where answers have grammars, what may come next is known once the last token is committed.
        So the masks are made while the device runs the model, and those rows are drawn after that,
        in a submission of their own.

        One with prompts takes long: the next isn't built before it is over, for whoever asks
        meanwhile would have to wait for that one too.

        In a pipeline there are as many steps under way as it has stages, of different rows, so that
        all stages have something to do; a step starts as soon as this one's layers are free, and
        before what is left to do of older steps, which waits for other stages.
        """
        self.meter.begin()
        stages = self.peers.stages
        if stages == 1 and self.in_flight and self.in_flight[0].plan.prompts:
            self._finish()
            return
        now_s = time.perf_counter()
        for out in self.scheduler.expire(now_s):
            self._deliver(out)
        self._grow()
        plan = self.scheduler.schedule(now_s)
        self.meter.phase("schedule")
        if plan is None and not self.in_flight and self.scheduler.busy:
            raise InvariantError("requests are waiting and none can be scheduled")
        newest = self.in_flight[-1] if self.in_flight else None
        following = self.runner.build(plan, newest) if plan else None
        self.meter.phase("build")
        at_once = following is not None and (following.in_place or stages > 1)
        if following is not None and at_once:
            if stages > 1 and newest is not None:
                newest.wait()
            self._submit(following)
        last = self._oldest_due(following)
        results, read_s = self._read(last) if last is not None else ([], 0.0)
        if following is not None and not at_once:
            self._submit(following)
        if last is not None:
            self._deliver_step(last, results, read_s)
        if following is not None and following.constrained and stages == 1:
            self.runner.constrain(following)
            self.meter.phase("mask")

    def _oldest_due(self, following: InFlight | None) -> InFlight | None:
        """Take in the next step. Returns the oldest under way, if it is to be read now."""
        if following is not None:
            self.in_flight.append(following)
        due = following is None or len(self.in_flight) > self.peers.stages
        return self.in_flight.popleft() if self.in_flight and due else None

    def _read(self, step: InFlight) -> tuple[list[ChunkResult], float]:
        """Wait for a step: its results, and when they were there."""
        if self.peers.stages > 1:
            self.peers.finish()
            step.finish()
            if step.constrained:
                self.runner.constrain(step)
        start_s = time.perf_counter()
        results = step.read()
        self.peers.done()
        read_s = self.meter.phase("wait")
        self.meter.step(step.plan, step.submitted_s, read_s - start_s, read_s)
        return results, read_s

    def _submit(self, step: InFlight) -> None:
        step.submitted_s = time.perf_counter()
        for chunk in step.plan.chunks:
            chunk.seq.started_s = chunk.seq.started_s or step.submitted_s
        step.submit()

    def check_integrity(self) -> None:
        """Raise InvariantError if pages or counts do not add up."""
        self.scheduler.check_integrity()

    def settle(self) -> None:
        """With nothing to compute, seal what the last requests left, so that it can be shared."""
        self._finish()
        self.meter.idle()
        if self.manager.unsettled:
            self._grow()
            plan = self.manager.end_plan(())
            self.peers.step(plan)
            self.storage.prepare(plan)
            mx.eval(self.storage.written())
        self.manager.begin_plan(())  # all that was planned is written

    def give_back(self, share: float) -> tuple[int, int]:
        """Forget so large a share of the prefixes that nobody uses, and return the memory.

        Returns how many pages were forgotten, and how many bytes the cache's arrays lost: those
        below the highest page that is still in use stay.
        """
        self.settle()
        before = self.storage.nbytes
        pages = self.manager.shared.give_back(share)
        stores = (self.manager.hot, *self.manager.pools, self.manager.states)
        needed = [store.reach for store in stores]
        self.peers.resize(needed, shrink=True)
        self.storage.shrink(*needed)
        mx.clear_cache()
        self._count(0, steps=0)
        return pages, before - self.storage.nbytes

    def _grow(self) -> None:
        """Enlarge the storage where the next step may need it, with no step under way."""
        pages, rows = self.scheduler.pages_at_most()
        stores = (self.manager.hot, *self.manager.pools)
        needed = [min(store.used + pages, store.pages) for store in stores]
        needed.append(min(self.manager.states.used + 2 * rows, self.manager.states.pages))
        if self.storage.short(*needed):
            self._finish()
            self.peers.resize(needed)
            self.storage.grow(*needed)
            self.meter.idle()

    def _finish(self) -> None:
        """Read the steps under way and deliver their tokens."""
        while self.in_flight:
            step = self.in_flight.popleft()
            self._deliver_step(step, *self._read(step))

    def _deliver_step(self, step: InFlight, results: list[ChunkResult], now: float) -> None:
        """Commit what was computed and hand out its tokens; `now`: when they were read."""
        for chunk in step.plan.chunks:
            if chunk.samples:
                chunk.seq.first_token_s = chunk.seq.first_token_s or now
                chunk.seq.last_token_s = now
        outs = self.scheduler.commit(step.plan, results)
        for out in outs:
            self._deliver(out)
        self._count(sum(out.token_id is not None for out in outs))
        self.meter.phase("commit")

    def _deliver(self, out: TokenOut) -> None:
        seq, target = self.open[out.request_id]
        if out.last:
            del self.open[out.request_id]
            out = replace(out, timings=seq.timings(), usage=seq.usage())
        target.put(out)

    def _fail_running(self, error: Exception) -> None:
        """The arrays may hold a half-built step: start again from an empty cache."""
        self.in_flight.clear()
        traceback.clear_frames(error.__traceback__)  # they hold the arrays
        self.scheduler.forget_pending()
        for seq in list(self.scheduler.running):
            self.scheduler.abort(seq)
            reason = ModelError(f"the step failed: {type(error).__name__}: {error}")
            reason.__cause__ = error
            self._deliver(TokenOut(request_id=seq.request.id, error=reason))
        self.manager.reset()
        self.storage.reset()
        self._count(0)

    def _probe(self) -> None:
        """Compute a token of nobody's in the cache, which is empty."""
        alone = Scheduler(self.manager, 1, 1)
        alone.add(Seq.start(_PROBE, self.info.context_tokens, time.perf_counter()))
        plan = alone.schedule()
        assert plan is not None
        step = self.runner.build(plan, None)
        step.submit()
        alone.commit(plan, step.read())

    def _count(self, tokens: int, steps: int = 1) -> None:
        counts, pools = self.scheduler.counts, self.manager.pools
        cached = sum(len(pool.idle) + pool.pinned for pool in pools)
        used = sum(pool.used for pool in pools) - cached
        self.meter.load(len(self.scheduler.running), len(self.scheduler.waiting), used)
        self.stats = EngineStats(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            steps=self.stats.steps + steps,
            prompt_tokens=counts.prompt_tokens,
            cached_tokens=counts.cached_tokens,
            prefix_hits=counts.prefix_hits,
            completion_tokens=self.stats.completion_tokens + tokens,
            preemptions=counts.preemptions,
            refused=counts.refused,
            step_s=self.meter.steps.snapshot(),
            step_gap_s=self.meter.gaps.snapshot(),
            pages_used=used,
            pages_cached=cached,
            pages=sum(pool.pages for pool in pools),
            cache_bytes=self.storage.nbytes,
            peak_memory_bytes=mx.get_peak_memory(),
        )
