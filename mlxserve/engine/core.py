"""The step, without a thread: cache, scheduler and runner, and the order they work in."""

import logging
import queue
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from mlxserve import device
from mlxserve.cache.manager import CacheManager, LayerGroup, group_layers, pages_in_window
from mlxserve.cache.spec import PAGE_TOKENS
from mlxserve.cache.storage import Storage, page_bytes
from mlxserve.config import EngineConfig
from mlxserve.engine.runner import InFlight, Runner
from mlxserve.engine.scheduler import ChunkResult, Scheduler
from mlxserve.errors import InvariantError, ModelError, RequestError
from mlxserve.kernels import matmul
from mlxserve.memory import CachePlan, GroupShape, device_limit_bytes, plan_cache
from mlxserve.models.base import Model
from mlxserve.types import Request, TokenOut
from mlxserve.types import Sequence as Seq

logger = logging.getLogger(__name__)

TokenQueue = queue.SimpleQueue[TokenOut]
"""Where a caller waits for its tokens; several requests may share one."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot: what runs and waits now, and what has been done since the start.

    pages: sealed pages of the cache, over all layer groups; cache_bytes: what its arrays take now.
    """

    running: int = 0
    waiting: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    preemptions: int = 0
    pages_used: int = 0
    pages: int = 0
    cache_bytes: int = 0
    peak_memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What callers may know without touching arrays: ids below vocab_size, tokens per sequence."""

    vocab_size: int
    context_tokens: int


class Core:
    """What the engine thread does, without the thread: used by it alone, and by tests.

    open: requests under way, with their queues. pool_pages: an upper bound on the pages of each
    layer group, below what memory allows.
    """

    def __init__(
        self, model: Model, config: EngineConfig, *, pool_pages: int | None = None
    ) -> None:
        groups = group_layers(model.layer_specs())
        plan = plan_pages(
            groups,
            config,
            itemsize=model.dtype.size,
            context_tokens=model.context_tokens,
            free_bytes=_free_bytes(config),
        )
        pools = tuple(min(n, pool_pages or n) for n in plan.pool_pages)
        pages: Any = {"hot_pages": plan.hot_pages, "pool_pages": pools}
        self.storage = Storage(groups, model.dtype, **pages)
        self.manager = CacheManager(groups, **pages)
        self.scheduler = Scheduler(self.manager, config.max_batch, step_tokens(config))
        self.runner = Runner(model, self.storage)
        self.in_flight: InFlight | None = None
        self.open: dict[str, tuple[Seq, TokenQueue]] = {}
        self.stats = EngineStats()
        context = min(model.context_tokens, self.manager.tokens_at_most())
        self.info = EngineInfo(model.vocab_size, context)

    @property
    def busy(self) -> bool:
        return self.scheduler.busy or self.in_flight is not None

    def admit(self, requests: Sequence[Request], out: TokenQueue, at_s: float) -> None:
        """Take requests in; `at_s` is when they were submitted."""
        for request in requests:
            if request.id in self.open:
                error = RequestError(f"request id {request.id!r} is in use; choose another")
                out.put(TokenOut(request_id=request.id, error=error))
                continue
            seq = Seq.start(request, self.info.context_tokens, at_s)
            self.open[request.id] = (seq, out)
            self.scheduler.add(seq)

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests now; their pages are free at once."""
        for request_id in request_ids:
            if request_id in self.open:
                self.scheduler.abort(self.open[request_id][0])
                self._deliver(TokenOut(request_id=request_id, finish_reason="cancelled"))

    def advance(self) -> None:
        """One step; if it fails, the requests in it fail and the engine goes on.

        Raises InvariantError, and whatever fails with no request to blame.
        """
        try:
            self.step()
        except InvariantError:
            raise
        except Exception as error:
            if not self.scheduler.running and self.in_flight is None:
                raise
            logger.exception("a step failed; the requests in it end")
            self._fail_running(error)

    def step(self) -> None:
        """Build the next step, read the last, start the next, then deliver the last one's tokens.

        A step that makes new arrays of the cache starts after the last was read, or the cache would
        be copied: what is under way holds on to its arrays. One that writes it in place starts at
        once. Tokens are delivered after that, so that the device need not wait for the callers.
        """
        self._grow()
        plan = self.scheduler.schedule()
        if plan is None and self.in_flight is None and self.scheduler.busy:
            raise InvariantError("requests are waiting and none can be scheduled")
        following = self.runner.build(plan, self.in_flight) if plan else None
        if following is not None and following.in_place:
            self._submit(following)
        results = self.in_flight.read() if self.in_flight is not None else []
        now = time.perf_counter()
        if following is not None and not following.in_place:
            self._submit(following)
        last, self.in_flight = self.in_flight, following
        if last is not None:
            self._deliver_step(last, results, now)

    def _submit(self, step: InFlight) -> None:
        now = time.perf_counter()
        for chunk in step.plan.chunks:
            chunk.seq.started_s = chunk.seq.started_s or now
        step.submit()

    def check_integrity(self) -> None:
        """Raise InvariantError if pages or counts do not add up."""
        self.scheduler.check_integrity()

    def _grow(self) -> None:
        """Enlarge the storage where the next step may need it, with no step under way."""
        extra = self.scheduler.pages_at_most()
        hot = min(self.manager.hot.used + extra, self.manager.hot.pages)
        pools = [min(pool.used + extra, pool.pages) for pool in self.manager.pools]
        if self.storage.short(hot, pools):
            self._finish()
            self.storage.grow(hot, pools)

    def _finish(self) -> None:
        """Read the step under way and deliver its tokens."""
        if self.in_flight is not None:
            results = self.in_flight.read()
            step, self.in_flight = self.in_flight, None
            self._deliver_step(step, results, time.perf_counter())

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

    def _deliver(self, out: TokenOut) -> None:
        seq, target = self.open[out.request_id]
        if out.last:
            del self.open[out.request_id]
            out = replace(out, timings=seq.timings())
        target.put(out)

    def _fail_running(self, error: Exception) -> None:
        """The arrays may hold a half-built step: start again from an empty cache."""
        self.in_flight = None
        traceback.clear_frames(error.__traceback__)  # they hold the arrays
        self.scheduler.forget_pending()
        for seq in list(self.scheduler.running):
            self.scheduler.abort(seq)
            reason = ModelError(f"the step failed: {type(error).__name__}: {error}")
            reason.__cause__ = error
            self._deliver(TokenOut(request_id=seq.request.id, error=reason))
        self.storage.reset()
        self._count(0)

    def _count(self, tokens: int) -> None:
        self.stats = EngineStats(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            steps=self.stats.steps + 1,
            prompt_tokens=self.scheduler.prompt_tokens,
            completion_tokens=self.stats.completion_tokens + tokens,
            preemptions=self.scheduler.preemptions,
            pages_used=sum(pool.used for pool in self.manager.pools),
            pages=sum(pool.pages for pool in self.manager.pools),
            cache_bytes=self.storage.nbytes,
            peak_memory_bytes=mx.get_peak_memory(),
        )


def step_tokens(config: EngineConfig) -> int:
    """Tokens in a step: enough to fill the device, and no more than it does in a few seconds.

    Ctrl-C waits for the step under way. The native CPU kernels reach their full speed at 128 rows;
    MLX's own matmul on CPU computes about ten tokens of a 135M model per second.
    """
    default = {"packed": 512, "panels": 128, "float32": 32}[matmul.form()]
    return config.max_batched_tokens or max(default, config.max_batch)


def plan_pages(
    groups: Sequence[LayerGroup],
    config: EngineConfig,
    *,
    itemsize: int,
    context_tokens: int,
    free_bytes: int,
) -> CachePlan:
    """How many pages the cache may grow to. itemsize: bytes of a key's or value's number.

    context_tokens: the model's own limit. free_bytes: what the weights leave. Raises CapacityError.
    """
    return plan_cache(
        [
            GroupShape(
                page_bytes(group, itemsize),
                pages_in_window(group.spec.window),
                # Keys and values are gathered, then put in order: twice what they take.
                scratch_bytes=2 * page_bytes(group, itemsize) // len(group.layers),
            )
            for group in groups
        ],
        free_bytes=free_bytes,
        max_batch=config.max_batch,
        max_batched_tokens=step_tokens(config),
        context_tokens=context_tokens,
        page_tokens=PAGE_TOKENS,
    )


def _free_bytes(config: EngineConfig) -> int:
    """What the cache may take, once the weights are there."""
    if config.memory_limit_bytes is None and not device.has_metal():
        return device_limit_bytes()  # what is available now: the weights are taken off already
    return (config.memory_limit_bytes or device_limit_bytes()) - mx.get_active_memory()
