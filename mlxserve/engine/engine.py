"""The engine thread: it owns the model and every array, and turns requests into tokens step by
step.

    submit, abort -> inbox -> [ seal -> build N+1 -> read N -> submit N+1 ] -> each request's queue

Step N+1 is built while the device computes step N, on top of tokens not read yet. It is submitted
only after N has been read: then no unfinished step holds the cache's arrays, and they are written
in place. A step that is run from a recording writes them anyway, and is submitted at once. In a
pipeline of several processes several steps are under way: see `Core.step`.
"""

import atexit
import gc
import logging
import os
import queue
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import mlx.core as mx

from mlxserve import device
from mlxserve.config import EngineConfig
from mlxserve.engine.core import Core, EngineInfo, EngineStats, TokenSink
from mlxserve.engine.peers import NoPeers, Peers
from mlxserve.engine.relief import Relief
from mlxserve.errors import EngineDead, InvariantError, PeerLost, RequestError
from mlxserve.models.base import Model
from mlxserve.sequence import Sequence as Seq
from mlxserve.text.matcher import Grammars, Matcher
from mlxserve.text.tokenizer import Tokenizer
from mlxserve.types import Request, TokenOut

logger = logging.getLogger(__name__)

T = TypeVar("T")

STUCK_S = 0.5
"""Once a peer is lost, for a step to fail. One that doesn't may wait for the peer for ever."""


@dataclass(frozen=True, slots=True)
class _Submit:
    requests: tuple[Request, ...]
    out: TokenSink
    at_s: float
    matchers: dict[str, Matcher]


@dataclass(frozen=True, slots=True)
class _Abort:
    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Call:
    """Something to do between two steps, and where its outcome goes."""

    work: Callable[[Core], Any]
    out: "queue.SimpleQueue[tuple[Any, BaseException | None]]"


@dataclass(frozen=True, slots=True)
class _Lost:
    reason: str


@dataclass(frozen=True, slots=True)
class _Stop:
    pass


_Message = _Submit | _Abort | _Call | _Lost | _Stop


class Engine:
    """Runs requests on a thread of its own until closed.

    load_model runs on that thread, and what it raises is raised here. tokenizer: the model's, which
    requests with a grammar need. cancelled is set once the caller no longer wants the model, for
    load_model to look at. peers: other processes that compute the model with this one; the engine
    closes them. Methods may be called from any thread.
    """

    def __init__(
        self,
        load_model: Callable[[], Model],
        config: EngineConfig,
        *,
        tokenizer: Tokenizer | None = None,
        cancelled: threading.Event | None = None,
        peers: Peers | None = None,
    ) -> None:
        self.config = config
        self.peers = peers or NoPeers()
        self.peers.on_lost = self._lose
        self.stats = EngineStats()
        self._inbox: queue.SimpleQueue[_Message] = queue.SimpleQueue()
        self._door = threading.Lock()
        self._closed = False
        self._failure: BaseException | None = None
        self._ended = threading.Event()
        self._open: dict[str, tuple[Seq, TokenSink]] = {}  # the core's
        self._progress_s = time.monotonic()
        self._pid = os.getpid()
        started: queue.SimpleQueue[EngineInfo | BaseException] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._main, args=(load_model, started), name="mlxserve-engine", daemon=True
        )
        atexit.register(self.close)  # a process that exits while the thread computes would abort
        try:
            self._thread.start()
            outcome = started.get()
        except BaseException:  # Ctrl-C while loading
            if cancelled is not None:
                cancelled.set()
            self.close()
            raise
        if isinstance(outcome, BaseException):
            self.close()
            raise outcome
        self.info = outcome
        self._grammars = tokenizer and Grammars(tokenizer, outcome.vocab_size)

    def check(self, requests: Sequence[Request]) -> None:
        """Raise RequestError for the first request that this model can't run."""
        self._checked(requests)

    def _checked(self, requests: Sequence[Request]) -> dict[str, Matcher]:
        """Check requests. Returns the matchers of those with a grammar, by id.

        Grammars are compiled here, on the caller's thread.
        """
        limits = {"vocab_size": self.info.vocab_size, "context_tokens": self.info.context_tokens}
        matchers = {}
        for request in requests:
            request.validate(**limits)
            if (grammar := request.params.grammar) is None:
                continue
            if self._grammars is None:
                raise RequestError("this engine has no tokenizer, and a grammar needs one")
            if missing := self._grammars.end_ids - request.stop_ids:
                raise RequestError(
                    f"stop_ids lacks {min(missing)}, an end id of the model, and a grammar needs "
                    "them all to end with"
                )
            try:
                matchers[request.id] = self._grammars.matcher(grammar, request.prompt_ids)
            except RequestError as error:
                error.param = "grammar"
                raise
        return matchers

    def submit(self, requests: Sequence[Request], out: TokenSink) -> None:
        """Queue requests; their tokens and their ends go to `out`.

        Raises RequestError if this model can't run one of them, and then none is queued; EngineDead
        if the engine has stopped.
        """
        if os.getpid() != self._pid:
            raise EngineDead(
                "this process was forked after the model was loaded, and the engine's thread is "
                "not in it; load the model here, or start processes with the spawn method"
            )
        matchers = self._checked(requests)
        with self._door:  # so that nothing is queued behind the end, to wait for ever
            if self._closed:
                raise self._dead()
            self._inbox.put(_Submit(tuple(requests), out, time.perf_counter(), matchers))

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests at the next step and free their pages; those already over are left alone."""
        self._inbox.put(_Abort(tuple(request_ids)))

    @property
    def idle_s(self) -> float | None:
        """Seconds since the engine last did something; None once it has stopped."""
        return None if self._closed else time.monotonic() - self._progress_s

    def wait(self) -> BaseException | None:
        """Wait until the engine has stopped. Returns why, or None if it was closed."""
        self._ended.wait()
        return self._failure

    def call(self, work: Callable[[Core], T]) -> T:
        """Do something on the engine's thread, with no step under way, and wait for it.

        Raises what it raises, and EngineDead if the engine has stopped.
        """
        out: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        with self._door:
            if self._closed:
                raise self._dead()
            self._inbox.put(_Call(work, out))
        result, error = out.get()
        if error is not None:
            raise error
        return result

    def close(self) -> None:
        """Stop the thread and give its memory back. Running requests end with EngineDead."""
        self._inbox.put(_Stop())
        atexit.unregister(self.close)
        # The garbage collector may drop the last reference on any thread, the engine's own too.
        if threading.current_thread() is not self._thread:
            self._join()

    def _join(self) -> None:
        """Wait for the thread; a Ctrl-C meanwhile is raised afterwards, lest the exit aborts."""
        interrupt = None
        while self._thread.is_alive():
            try:
                self._thread.join()
            except KeyboardInterrupt as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def _dead(self) -> EngineDead:
        reason = f"it failed: {self._failure}" if self._failure else "it was closed"
        return EngineDead(f"the engine has stopped ({reason}); load the model again")

    def _main(self, load_model: Callable[[], Model], started: queue.SimpleQueue) -> None:
        core = None
        limits = ExitStack()
        try:
            limits.enter_context(device.wired_memory())
            core = Core(load_model(), self.config, peers=self.peers)
            self._open = core.open
            started.put(core.info)
            self._loop(core)
        except BaseException as error:
            self._failure = error
            if isinstance(error, PeerLost):
                logger.error("the engine stops: %s", error)
            elif core is not None:
                logger.exception("the engine stops")
            traceback.clear_frames(error.__traceback__)  # they hold the model
        self._shut()
        del core
        try:
            with limits:  # they end once nothing is held any more
                release_thread()
        finally:
            self.peers.close()
            self._ended.set()
            if self._failure is not None:
                started.put(self._failure)

    def _loop(self, core: Core) -> None:
        relief = Relief(core, self.peers.signal(device.pressure_signal()))
        while True:
            if not core.busy:
                core.settle()
                core.check_integrity()
                self.stats = core.stats
            while not core.busy or not self._inbox.empty():
                message, self._progress_s = self._receive(relief), time.monotonic()
                match message:
                    case _Submit(requests, out, at_s, matchers):
                        core.admit(requests, out, at_s, matchers)
                    case _Abort(request_ids):
                        core.abort(request_ids)
                    case _Call(work, out):
                        _do(core, work, out)
                    case _Lost(reason):
                        raise PeerLost(reason)
                    case _Stop():
                        core.meter.close()
                        return
            core.advance()
            relief.give()
            self.stats, self._progress_s = core.stats, time.monotonic()

    def _receive(self, relief: Relief) -> _Message:
        """Wait for a message, and heed the system's need for memory meanwhile."""
        while True:
            try:
                return self._inbox.get(timeout=relief.every_s)
            except queue.Empty:
                relief.give()
                self.stats = relief.core.stats

    def _lose(self, reason: str) -> None:
        """A peer is gone. On a thread of the peers', which end the process where this one's engine
        is stuck in a step; whoever waits for its tokens is told before."""
        self._inbox.put(_Lost(reason))
        if not self._ended.wait(STUCK_S):
            self._failure = self._failure or PeerLost(reason)
            self._shut()
            self._ended.set()

    def _shut(self) -> None:
        """Tell everyone who waits, and everyone who comes later, that it is over."""
        with self._door:
            self._closed = True
        self.stats = replace(self.stats, running=0, waiting=0, pages_used=0)
        waiting = {request_id: out for request_id, (_, out) in list(self._open.items())}
        while not self._inbox.empty():
            match self._inbox.get():
                case _Submit(requests, out):
                    waiting |= {request.id: out for request in requests}
                case _Call(_, out):
                    out.put((None, self._dead()))
        for request_id, out in waiting.items():
            out.put(TokenOut(request_id=request_id, error=self._dead()))


def _do(core: Core, work: Callable[[Core], Any], out: queue.SimpleQueue) -> None:
    """Do a caller's work and tell him the outcome; a bug of ours also ends the engine.

    So does a step under way that fails, where others take part in it.
    """
    settled = False
    try:
        core.settle()
        settled = True
        out.put((work(core), None))
    except BaseException as error:
        out.put((None, error))
        if isinstance(error, InvariantError):
            raise
        if core.peers.count and not settled and isinstance(error, Exception):
            raise core.peers.cause(error) from error


def release_thread() -> None:
    """Give the thread's memory and streams back; without it a process may abort at exit."""
    gc.collect()
    with suppress(RuntimeError):  # of a collective that failed, once more
        mx.synchronize()
    mx.clear_cache()
    mx.clear_streams()
