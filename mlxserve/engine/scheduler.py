"""Which tokens each step computes. Integers and lists only: no arrays, no clock, no threads.

There is no prefill or decode phase. Every sequence has a count of tokens it wants computed and a
count already computed, and a step moves the second towards the first, within a budget of tokens:
first the rows that need one token, so that running answers never wait, then prompts in chunks,
oldest first.
"""

from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from mlxserve.cache.manager import CacheManager
from mlxserve.cache.spec import PAGE_TOKENS
from mlxserve.errors import ModelError
from mlxserve.types import Chunk, FinishReason, Logprob, Sequence, StepPlan, TokenOut

if TYPE_CHECKING:
    import numpy as np

SCORE_CHUNK_TOKENS = 128


@dataclass(frozen=True, slots=True)
class ChunkResult:
    """What a step found for a chunk: a sampled token, the logits of a scored one, or neither.

    failure: why nothing of it can be used.
    """

    token_id: int | None = None
    logprob: Logprob | None = None
    prompt_logits: "np.ndarray | None" = None
    failure: str | None = None


class Scheduler:
    """Waiting and running sequences. Engine thread only.

    max_batch: sequences that run at once; max_batched_tokens: tokens of one step, over all of them.
    """

    def __init__(self, manager: CacheManager, max_batch: int, max_batched_tokens: int) -> None:
        self.manager = manager
        self.max_batch = max_batch
        self.max_batched_tokens = max_batched_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preemptions = 0
        self.prompt_tokens = 0

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, seq: Sequence) -> None:
        """Queue a sequence behind those already waiting."""
        self.waiting.append(seq)
        self.prompt_tokens += len(seq.request.prompt_ids)

    def abort(self, seq: Sequence) -> None:
        """Forget a sequence that runs or waits, and free its pages."""
        self._retire(seq)

    def schedule(self) -> StepPlan | None:
        """Choose the next step and take its pages. None if there is nothing to compute."""
        seals = self.manager.seal(self.running)
        planned: dict[int, Chunk] = {}
        budget = self.max_batched_tokens
        # sorted() is stable: decode rows first, each kind oldest first.
        for seq in sorted(self.running, key=lambda seq: self._wanted(seq) != 1):
            budget -= self._plan(seq, budget, planned)
        while budget > 0 and self._may_admit():
            seq = self.waiting.popleft()
            self.running.append(seq)
            budget -= self._plan(seq, budget, planned)
            if seq not in self.running:  # there was no room for it after all
                break
        chunks = tuple(planned.values())
        for chunk in chunks:
            chunk.seq.computed += chunk.n
            chunk.seq.pending += chunk.samples
        return StepPlan(chunks, seals) if chunks else None

    def commit(self, plan: StepPlan, results: Seq[ChunkResult]) -> list[TokenOut]:
        """Take a finished step's tokens in; end the requests that are complete."""
        outs = []
        for chunk, result in zip(plan.chunks, results, strict=True):
            chunk.seq.pending -= chunk.samples
            if chunk.seq.finished:  # it ended, or was cancelled, while this step was under way
                continue
            if out := self._take(chunk, result):
                outs.append(out)
                if out.last:
                    self._retire(chunk.seq)
        return outs

    def _take(self, chunk: Chunk, result: ChunkResult) -> TokenOut | None:
        """One chunk's result as a delivery, None if there is nothing to deliver yet."""
        seq = chunk.seq
        if result.failure is not None:
            return TokenOut(request_id=seq.request.id, error=ModelError(result.failure))
        if result.token_id is not None:
            seq.ids.append(result.token_id)
            return TokenOut(
                request_id=seq.request.id,
                token_id=result.token_id,
                logprob=result.logprob,
                finish_reason=self._finish_reason(seq),
            )
        end = chunk.start + chunk.n
        if result.prompt_logits is None or end <= seq.scored:
            return None
        fresh = result.prompt_logits[max(0, seq.scored - chunk.start) :]
        seq.scored = end
        return TokenOut(
            request_id=seq.request.id,
            prompt_logits=fresh,
            finish_reason="stop" if end == len(seq.ids) else None,
        )

    def _finish_reason(self, seq: Sequence) -> FinishReason | None:
        if seq.ids[-1] in seq.request.stop_ids:
            return "stop"
        new = len(seq.ids) - len(seq.request.prompt_ids)
        return "length" if new >= seq.max_tokens else None

    def forget_pending(self) -> None:
        """The step under way is lost: what it would have drawn is drawn again."""
        for seq in (*self.running, *self.waiting):
            seq.pending = 0
            seq.counts = None

    def check_integrity(self) -> None:
        """Raise InvariantError if pages or counts do not add up."""
        self.manager.check_integrity([*self.running, *self.waiting])

    def pages_at_most(self) -> int:
        """Pages of any one kind that the next step may take, so that storage can grow before it."""
        seqs = min(len(self.running) + len(self.waiting), self.max_batch)
        queue = [*self.running, *islice(self.waiting, seqs)]
        tokens = min(sum(map(self._wanted, queue)), self.max_batched_tokens)
        return seqs + tokens // PAGE_TOKENS

    def _may_admit(self) -> bool:
        """Whether the first in the queue has room for all its tokens, lest it start in vain."""
        if not self.waiting or len(self.running) >= self.max_batch:
            return False
        return not self.running or self.manager.has_room(self.waiting[0].total)

    def _wanted(self, seq: Sequence) -> int:
        """Tokens left to compute; the last new token of an answer is never computed."""
        if not seq.request.score and seq.outputs >= seq.max_tokens:
            return 0
        return seq.total - seq.computed

    def _plan(self, seq: Sequence, budget: int, planned: dict[int, Chunk]) -> int:
        """Plan what fits of one sequence. Returns the change to the tokens planned."""
        if seq not in self.running:  # preempted for an older one, a moment ago
            return 0
        wanted = self._wanted(seq)
        n = min(wanted, budget)
        if seq.request.score:
            n = min(n, SCORE_CHUNK_TOKENS)
        if n <= 0:
            return 0
        spent = n
        while not self.manager.reserve(seq, n):
            victim = self.running[-1]
            dropped = planned.pop(id(victim), None)
            spent -= dropped.n if dropped else 0
            self._preempt(victim)
            if victim is seq:
                return spent - n
        samples = n == wanted and not seq.request.score
        planned[id(seq)] = Chunk(seq, seq.computed, n, samples)
        return spent

    def _preempt(self, seq: Sequence) -> None:
        """Take a sequence's pages; it starts again from its known tokens when there is room."""
        self.preemptions += 1
        self.running.remove(seq)
        self.manager.release(seq)
        self.waiting.appendleft(seq)

    def _retire(self, seq: Sequence) -> None:
        seq.finished = True
        self.manager.release(seq)
        if seq in self.running:
            self.running.remove(seq)
        else:
            self.waiting.remove(seq)
