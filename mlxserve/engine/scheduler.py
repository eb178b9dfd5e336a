"""Which tokens each step computes. Integers and lists only: no arrays, no clock, no threads.

There is no prefill or decode phase. Every sequence has a count of tokens it wants computed and a
count already computed, and a step moves the second towards the first, within a budget of tokens:
each row that needs one token has it, so that running answers never wait, and what is left goes to
prompts in chunks, the shortest first.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from mlxserve.cache.manager import CacheManager
from mlxserve.engine.pace import Pace
from mlxserve.engine.queueing import WaitingQueue
from mlxserve.errors import CapacityError, MlxserveError
from mlxserve.sequence import Chunk, Sequence, StepPlan
from mlxserve.types import FinishReason, Logprob, TokenOut

if TYPE_CHECKING:
    import numpy as np

SCORE_CHUNK_TOKENS = 128
OLDEST_SHARE = 4  # one part in so many of a step's prompt tokens is the oldest prompt's
PARTS_PER_STAGE, MIN_PART_TOKENS = 4, 64  # of prompts, in a pipeline
MIN_CHUNK_TOKENS = 32  # of prompts in a step, however slow it makes the answers under way


@dataclass(frozen=True, slots=True)
class ChunkResult:
    """What a step found for a chunk: a sampled token, what was read of the prompt, both or neither.

    prompt_logits: float32 `[n, V]`; prompt_logprobs: of the prompt tokens start + 1 .. start + n.
    failure: why nothing of it can be used; its request ends with that.
    """

    token_id: int | None = None
    logprob: Logprob | None = None
    prompt_logits: "np.ndarray | None" = None
    prompt_logprobs: tuple[Logprob, ...] = ()
    failure: MlxserveError | None = None


@dataclass(slots=True)
class Counts:
    """What the scheduler has seen since the start.

    prefix_hits: prompts of which something was found in the cache; cached_tokens: how much, in all.
    """

    prompt_tokens: int = 0
    prefix_hits: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    refused: int = 0


def part_tokens(tokens: int, stages: int) -> int:
    """Of prompts of so many tokens, those of one step in a pipeline.

    Stages are idle until the first part has come to them, and once the last has left them.
    """
    return max(MIN_PART_TOKENS, -(-tokens // (PARTS_PER_STAGE * stages)))


class Scheduler:
    """Waiting and running sequences. Engine thread only.

    max_batch: sequences that run at once; max_batched_tokens: tokens of one step, over all of them;
    max_queue: sequences that may wait; target_itl_s: how long a step with answers under way should
    take at most, None for as long as a full one does; max_step_s: how long any step should, None
    if it may take as long as it does. stages: of the pipeline that computes steps; each takes part
    of the rows and of the prompts, so that so many are under way at once.
    """

    def __init__(
        self,
        manager: CacheManager,
        max_batch: int,
        max_batched_tokens: int,
        *,
        queue: WaitingQueue | None = None,
        max_queue: int = 1024,
        target_itl_s: float | None = None,
        max_step_s: float | None = None,
        stages: int = 1,
    ) -> None:
        self.manager = manager
        self.max_batch = max_batch
        self.max_batched_tokens = max_batched_tokens
        self.max_queue = max_queue
        self.target_itl_s = target_itl_s
        self.max_step_s = max_step_s
        self.stages = stages
        self.waiting = queue or WaitingQueue()
        self.running: list[Sequence] = []
        self.pace = Pace()
        self.counts = Counts()
        self._now_s = 0.0

    @property
    def busy(self) -> bool:
        return bool(len(self.waiting) or self.running)

    def add(self, seq: Sequence) -> None:
        """Queue a sequence behind those already waiting.

        Raises CapacityError, and forgets it, if too many wait, or if its first token can't be there
        in the time that the request gives it.
        """
        if len(self.waiting) >= self.max_queue:
            self.counts.refused += 1
            raise CapacityError(
                f"{len(self.waiting)} requests wait already, the most that may; try again later"
            )
        budget_s = seq.request.ttft_budget_s
        if budget_s is not None:
            self._check_budget(seq, budget_s)
        self.waiting.add(seq)
        self.counts.prompt_tokens += len(seq.request.prompt_ids)

    def _check_budget(self, seq: Sequence, budget_s: float) -> None:
        queued = sum(max(s.total - s.computed, 0) for s in (*self.running, *self.waiting))
        own = seq.total - self.manager.cached_tokens(seq)
        expected_s = self.pace.ttft_s(queued, own)
        if expected_s is not None and expected_s > budget_s:
            self.counts.refused += 1
            raise CapacityError(
                f"the first token would take about {expected_s:.1f} s, and the request allows "
                f"{budget_s:g} s; try again later, or allow more"
            )

    def expire(self, now_s: float) -> list[TokenOut]:
        """End the sequences that have waited for as long as their first token may take."""
        outs = []
        for seq in self.waiting.late(now_s):
            self.counts.refused += 1
            self._retire(seq)
            error = CapacityError(
                f"it waited for {now_s - seq.submitted_s:.1f} s, and the request allows "
                f"{seq.request.ttft_budget_s:g} s for its first token; try again later, or allow "
                "more"
            )
            outs.append(TokenOut(request_id=seq.request.id, error=error))
        return outs

    def abort(self, seq: Sequence) -> None:
        """Forget a sequence that runs or waits, and free its pages."""
        self._retire(seq)

    def schedule(self, now_s: float = 0.0) -> StepPlan | None:
        """Choose the next step and take its pages. None if there is nothing to compute.

        now_s: on the clock of `Sequence.submitted_s`.
        """
        self._now_s = now_s
        self.manager.begin_plan(self.running, now_s)
        self._admit()
        for seq in self.running:
            if seq.computed < len(seq.request.prompt_ids):
                self.manager.match(seq)
        shares = self._shares()
        chunks: list[Chunk] = []
        for seq in list(self.running):  # the oldest first: none that is planned gets preempted
            if chunk := self._plan(seq, shares.get(id(seq), 0)):
                chunks.append(chunk)
        if not chunks:
            return None
        for chunk in chunks:
            chunk.seq.pending += chunk.samples
            self.waiting.served(chunk.seq.request.tenant, chunk.n)
        # Decode rows first, each kind oldest first; a list is sorted stably.
        chunks.sort(key=lambda chunk: chunk.n > 1)
        return self.manager.end_plan(chunks)

    def _admit(self) -> None:
        """Start what waits, in the queue's order, while there is room for all its tokens."""
        while len(self.running) < self.max_batch:
            seq = self.waiting.head(self._now_s, self.manager.cached_tokens)
            if seq is None or (self.running and not self.manager.has_room(seq, self.running)):
                return
            self.waiting.start(seq, self._now_s)
            self.running.append(seq)

    def _shares(self) -> dict[int, int]:
        """How many tokens of the step each running sequence gets, by its id().

        One for each that needs one. Of the rest, the oldest prompt has a part for sure, and then
        the shortest come first: who asks little shouldn't wait for who asks much.
        """
        wanted = {id(seq): self._wanted(seq) for seq in self.running}
        if self.stages > 1:  # rows of a step under way have to wait for it
            wanted |= {id(seq): 0 for seq in self.running if seq.pending}
        rows = [key for key, n in wanted.items() if n == 1]
        shares = dict.fromkeys(rows[: -(-len(self.running) // self.stages)], 1)
        left = self._prompt_budget(len(shares))
        prompts = [seq for seq in self.running if wanted[id(seq)] > 1]
        if self.stages > 1:
            left = min(left, part_tokens(sum(seq.total for seq in prompts), self.stages))
        for seq in prompts[:1]:
            shares[id(seq)] = min(wanted[id(seq)], -(-left // OLDEST_SHARE))
            left -= shares[id(seq)]
        for seq in sorted(prompts, key=lambda seq: (seq.request.priority, wanted[id(seq)])):
            n = min(wanted[id(seq)] - shares.get(id(seq), 0), left)
            shares[id(seq)] = shares.get(id(seq), 0) + n
            left -= n
        return shares

    def _prompt_budget(self, rows: int) -> int:
        most = self.max_batched_tokens - rows
        if self.max_step_s is not None:
            most = min(most, max(1, self.pace.tokens_within(self.max_step_s) - rows))
        if self.target_itl_s is None or not rows:
            return most
        low = min(MIN_CHUNK_TOKENS, most)
        return self.pace.chunk_tokens(self.target_itl_s, rows, low, most) if low > 0 else 0

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
            return TokenOut(request_id=seq.request.id, error=result.failure)
        end, known = chunk.start + chunk.n, max(0, seq.scored - chunk.start)
        logits = None if result.prompt_logits is None else result.prompt_logits[known:]
        logprobs = result.prompt_logprobs[known:]
        finish_reason: FinishReason | None = None
        if result.token_id is not None:
            seq.ids.append(result.token_id)
            finish_reason = self._finish_reason(seq)
        elif not seq.request.reads or end <= seq.scored:
            return None
        elif seq.request.score and end == seq.total:
            finish_reason = "stop"
        seq.scored = max(seq.scored, end)
        return TokenOut(
            request_id=seq.request.id,
            token_id=result.token_id,
            logprob=result.logprob,
            prompt_logits=logits,
            prompt_logprobs=logprobs,
            finish_reason=finish_reason,
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

    def pages_at_most(self) -> tuple[int, int]:
        """Pages of any one kind that the next step may take, and rows that it may have.

        So that storage can grow before it.
        """
        seqs = min(len(self.running) + len(self.waiting), self.max_batch)
        wanted = sum(map(self._wanted, self.running))
        for seq in islice(self.waiting, seqs):
            wanted += self._wanted(seq)
        if len(self.waiting) > seqs:  # whichever of them start
            wanted = self.max_batched_tokens
        return 2 * seqs + min(wanted, self.max_batched_tokens) // self.manager.page_tokens, seqs

    def _wanted(self, seq: Sequence) -> int:
        """Tokens left to compute; the last new token of an answer is never computed."""
        if not seq.request.score and seq.outputs >= seq.max_tokens:
            return 0
        return seq.total - seq.computed

    def _plan(self, seq: Sequence, n: int) -> Chunk | None:
        """The next n tokens of a sequence, with their pages; None if there is no room."""
        if seq not in self.running:  # preempted for an older one, a moment ago
            return None
        wanted = self._wanted(seq)
        if seq.request.score and seq.request.prompt_logprobs is None:
            n = min(n, SCORE_CHUNK_TOKENS)
        if self.manager.recurrent:
            n = self._to_border(seq.computed, n)
        if n <= 0:
            return None
        while not self.manager.reserve(seq, n):
            victim = self.running[-1]
            self._preempt(victim)
            if victim is seq:
                return None
        hot = tuple(seq.hot[seq.computed // self.manager.page_tokens - seq.sealed :])
        samples = n == wanted and not seq.request.score
        chunk = Chunk(seq, seq.computed, n, samples, hot)
        seq.computed += n
        self.manager.seal(seq)
        return chunk

    def _to_border(self, start: int, n: int) -> int:
        """Fewer tokens, if so many cross the end of a page: there, a snapshot can be taken."""
        border = (start + n) // self.manager.page_tokens * self.manager.page_tokens
        return border - start if border > start else n

    def _preempt(self, seq: Sequence) -> None:
        """Take a sequence's pages; it starts again from its known tokens when there is room."""
        self.counts.preemptions += 1
        self.running.remove(seq)
        self.manager.release(seq)
        seq.preempted = True
        self.waiting.add_front(seq)

    def _retire(self, seq: Sequence) -> None:
        seq.finished = True
        self.counts.cached_tokens += seq.cached
        self.counts.prefix_hits += seq.cached > 0
        computed = seq.accepted
        self.manager.release(seq, keep_tail=True)
        if seq in self.running:
            self.running.remove(seq)
        else:
            self.waiting.remove(seq)
        if seq.request.pin_s is not None:
            until_s = self._now_s + seq.request.pin_s
            self.manager.pin(seq.request.id, seq.request.salt, seq.ids[:computed], until_s)
