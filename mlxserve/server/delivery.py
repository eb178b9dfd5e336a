"""From the engine's thread to the event loop: what a step made wakes it once, for all requests."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace

from mlxserve.answers import Answer
from mlxserve.llm import LLM
from mlxserve.server.metrics import Metrics
from mlxserve.types import TokenOut

BEGIN_S = 2.0
"""How long a refusal may take and still be a status; then the head of a stream is written."""

PING_S = 10.0
"""Of silence, once or twice, after which proxies and clients are told that the answer is coming."""


@dataclass(slots=True)
class Pace:
    """How an answer's tokens came, in seconds. gaps_s: between them, all together."""

    ttft_s: float | None = None
    gaps: int = 0
    gaps_s: float = 0.0
    longest_gap_s: float = 0.0
    last_s: float = 0.0


class Mailbox:
    """Where the engine puts every request's tokens, and where `Delivery` takes its own from.

    `put` is called on the engine's thread, `register` on any, all else on the loop's.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, metrics: Metrics) -> None:
        self.metrics = metrics
        self._loop = loop
        self._arrived: deque[TokenOut] = deque()
        self._woken = False
        self._deliveries: dict[str, Delivery] = {}

    def put(self, item: TokenOut, /) -> None:
        self._arrived.append(item)
        if not self._woken:
            self._woken = True
            try:
                self._loop.call_soon_threadsafe(self._hand_out)
            except RuntimeError:  # the loop is closed: nobody waits any more
                self._arrived.clear()

    def _hand_out(self) -> None:
        self._woken = False  # first: what arrives from here on wakes the loop again
        now_s = time.perf_counter()
        while self._arrived:
            out = self._arrived.popleft()
            if (delivery := self._deliveries.get(out.request_id)) is not None:
                delivery.take_in(out, now_s)

    def register(self, request_id: str, delivery: Delivery) -> None:
        self._deliveries[request_id] = delivery

    def forget(self, request_id: str) -> None:
        self._deliveries.pop(request_id, None)

    def __len__(self) -> int:
        """Requests that somebody waits for."""
        return len(self._deliveries)


class Delivery:
    """The answers to one HTTP request, as they come, between `start` and `close`.

    Iterating gives (index of the answer, the text that is new, what the engine delivered), or None
    after PING_S of silence. Raises what the engine reports, and what `fail` was given.
    """

    def __init__(self, llm: LLM, mailbox: Mailbox, answers: Sequence[Answer]) -> None:
        self.answers = answers
        self.paces = {answer.request.id: Pace() for answer in answers}
        self._started_s = 0.0
        self._llm = llm
        self._mailbox = mailbox
        self._open = {answer.request.id: index for index, answer in enumerate(answers)}
        self._arrived: deque[TokenOut] = deque()
        self._event = asyncio.Event()
        self._quiet = False
        self._failure: Exception | None = None

    def start(self) -> None:
        """Hand the requests to the engine. Raises EngineDead."""
        self._started_s = time.perf_counter()
        for request_id in self._open:
            self._mailbox.register(request_id, self)
        try:
            self._llm.submit(self.answers, self._mailbox)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End what is still open; its pages are free after the step that is under way."""
        if self._open:
            self._llm.abort([self.answers[index] for index in self._open.values()])
            self._open = {}
        for answer in self.answers:
            self._mailbox.forget(answer.request.id)

    def stop(self, index: int) -> None:
        """One answer is complete as it stands: what was drawn since is none of it."""
        answer = self.answers[index]
        answer.stopped, answer.finish_reason = True, "stop"
        self._llm.abort([answer])

    def take_in(self, out: TokenOut, now_s: float) -> None:
        """Something came. now_s: of `time.perf_counter`."""
        if out.token_id is not None:
            self._time(self.paces[out.request_id], now_s)
        self._arrived.append(out)
        self._quiet = False
        self._event.set()

    def _time(self, pace: Pace, now_s: float) -> None:
        metrics = self._mailbox.metrics
        if pace.ttft_s is None:
            pace.ttft_s = now_s - self._started_s
            metrics.ttft.observe(pace.ttft_s)
        else:
            gap_s = now_s - pace.last_s
            metrics.gaps.observe(gap_s)
            pace.gaps += 1
            pace.gaps_s += gap_s
            pace.longest_gap_s = max(pace.longest_gap_s, gap_s)
        pace.last_s = now_s

    def fail(self, error: Exception) -> None:
        """End the answers, and the iteration with this error."""
        self._failure = self._failure or error
        self.close()
        self._arrived.clear()
        self._event.set()

    async def begun(self, timeout_s: float = BEGIN_S) -> None:
        """Wait for a first delivery, at most so long. Raises the error that it may be.

        While no byte of the answer is written, a refusal can still be a status.
        """
        try:
            await asyncio.wait_for(self._event.wait(), timeout_s)
        except TimeoutError:
            return
        except BaseException:
            self.close()
            raise
        if self._arrived and self._arrived[0].error is not None:
            self.close()
            raise self._arrived[0].error

    async def __aiter__(self) -> AsyncIterator[tuple[int, str, TokenOut] | None]:
        listening = asyncio.create_task(self._listen())
        try:
            while self._open or self._failure:
                await self._event.wait()
                self._event.clear()
                if self._failure is not None:
                    raise self._failure
                if self._quiet and not self._arrived:
                    yield None
                while self._arrived:
                    yield self._feed(self._arrived.popleft())
        finally:
            listening.cancel()

    async def _listen(self) -> None:
        """Wake the iteration where nothing comes. A timer for each token would cost a fifth of what
        a token costs the loop."""
        while True:
            self._quiet = True
            await asyncio.sleep(PING_S)
            if self._quiet:
                self._event.set()

    def _feed(self, out: TokenOut) -> tuple[int, str, TokenOut]:
        if out.error is not None:
            raise out.error
        index = self._open[out.request_id]
        answer = self.answers[index]
        was_stopped = answer.stopped
        piece = answer.feed(out)
        if was_stopped:  # drawn before the engine knew; it is no part of the answer
            out = replace(out, token_id=None, logprob=None)
        if answer.stopped and not was_stopped:
            self._llm.abort([answer])
        if out.last:
            del self._open[out.request_id]
        return index, piece, out
