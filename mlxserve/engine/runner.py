"""Turns a plan into lazy arrays, and their values back into plain results. Engine thread only."""

from collections.abc import Sequence as Seq

import mlx.core as mx
import numpy as np

from mlxserve.cache.batch import BatchView
from mlxserve.cache.storage import Storage
from mlxserve.engine.forward import Forward
from mlxserve.engine.sampling import logprobs, sample
from mlxserve.engine.scheduler import ChunkResult
from mlxserve.kernels import select
from mlxserve.models.base import Model
from mlxserve.sequence import Chunk, StepPlan
from mlxserve.types import Logprob

LOGITS_BLOCK_BYTES = 64 << 20
NOT_FINITE = (
    "the model's logits aren't finite numbers: its weights are damaged, or overflow in 16 bits; "
    "fetch them again, or try another checkpoint"
)


class InFlight:
    """A step that is built, and after `submit` under way. `read` waits for it."""

    def __init__(self, plan: StepPlan, forward: Forward, storage: Storage, ids: mx.array) -> None:
        self.plan = plan
        self.submitted_s = 0.0
        self._forward = forward
        self._storage = storage
        self.sampled: list[Chunk] = []
        self.ids: mx.array | None = None
        self._scored: dict[int, mx.array] = {}
        self._finite: mx.array | None = None
        self._logprob_rows: list[int] = []
        self._logprobs: tuple[mx.array, ...] = ()
        self._hidden: mx.array | None = None
        self.in_place = False  # the cache is written where it lies, by what makes the logits
        view = BatchView(storage, plan)
        if all(chunk.samples and chunk.n == 1 for chunk in plan.chunks):
            self.sampled = list(plan.chunks)
            logits, self.in_place = forward.decode(ids, view)
            self._sample(logits)
        else:
            self._prompt(forward.hidden(ids, view))

    def _prompt(self, hidden: mx.array) -> None:
        """A step with prompts: samples after the last token of each that is complete."""
        last: list[int] = []
        first = 0
        for chunk in self.plan.chunks:
            if chunk.samples:
                self.sampled.append(chunk)
                last.append(first + chunk.n - 1)
            elif chunk.seq.request.score:
                self._scored[id(chunk)] = hidden[first : first + chunk.n]
            first += chunk.n
        if last:
            self._sample(self._forward.logits(hidden[mx.array(last)]))
        self._hidden = None if last or self._scored else hidden

    def _sample(self, logits: mx.array) -> None:
        seqs = [chunk.seq for chunk in self.sampled]
        best, self._finite = select.greedy(logits)
        self.ids = sample(logits, seqs, best)
        params = [seq.request.params for seq in seqs]
        self._logprob_rows = [row for row, p in enumerate(params) if p.logprobs]
        if self._logprob_rows:
            rows = mx.array(self._logprob_rows)
            top = max(p.top_logprobs for p in params)
            self._logprobs = logprobs(logits[rows], self.ids[rows], top)

    def submit(self) -> None:
        """Start computing: the tokens together with everything the step wrote."""
        finite = [] if self._finite is None else [self._finite]
        outputs = [*finite, *self._logprobs, *self._scored.values()]
        if not self.in_place:
            outputs += self._storage.written()
        first = self.ids if self.ids is not None else self._hidden
        mx.async_eval(*([first] if first is not None else []), *outputs)

    def read(self) -> list[ChunkResult]:
        """Wait for the step; one result per chunk of the plan."""
        if self._hidden is not None:  # nothing to read, but until it's done it holds the cache
            mx.eval(self._hidden)
        ids: list[int] = [] if self.ids is None else self.ids.tolist()  # type: ignore[assignment]
        finite = [] if self._finite is None else np.array(self._finite)
        reported = self._read_logprobs(ids)
        results, row = [], 0
        for chunk in self.plan.chunks:
            if chunk.samples:
                failure = None if finite[row] else NOT_FINITE
                results.append(ChunkResult(ids[row], reported.get(row), failure=failure))
                row += 1
            elif id(chunk) in self._scored:
                logits = self._read_logits(self._scored[id(chunk)])
                failure = None if np.isfinite(logits).all() else NOT_FINITE
                results.append(ChunkResult(prompt_logits=logits, failure=failure))
            else:
                results.append(ChunkResult())
        return results

    def _read_logprobs(self, ids: list[int]) -> dict[int, Logprob]:
        if not self._logprobs:
            return {}
        chosen, top_ids, top_values = (np.array(array) for array in self._logprobs)
        reported = {}
        for i, row in enumerate(self._logprob_rows):
            top = self.sampled[row].seq.request.params.top_logprobs
            best = sorted(
                zip(top_ids[i].tolist(), top_values[i].tolist(), strict=True),
                key=lambda pair: (-pair[1], pair[0]),
            )
            reported[row] = Logprob(ids[row], float(chosen[i]), tuple(best[:top]))
        return reported

    def _read_logits(self, hidden: mx.array) -> np.ndarray:
        """float32 `[n, V]`, block by block: a chunk's logits over a large vocabulary are large."""
        rows = max(1, LOGITS_BLOCK_BYTES // (4 * self._forward.vocab_size))
        blocks = [
            np.array(self._forward.logits(hidden[i : i + rows]))
            for i in range(0, hidden.shape[0], rows)
        ]
        return np.concatenate(blocks)


class Runner:
    """The model and its storage."""

    def __init__(self, model: Model, storage: Storage) -> None:
        self.storage = storage
        self._forward = Forward(model, storage)

    def build(self, plan: StepPlan, previous: InFlight | None) -> InFlight:
        """Build one step lazily on top of `previous`, whose tokens are not read yet."""
        self.storage.prepare(plan)
        return InFlight(plan, self._forward, self.storage, _input_ids(plan, previous))


def _input_ids(plan: StepPlan, previous: InFlight | None) -> mx.array:
    """int32 `[T]`; tokens still on the device are taken from there."""
    rows = {id(c.seq): row for row, c in enumerate(previous.sampled)} if previous else {}
    ids: list[int] = []
    unread: list[tuple[int, int]] = []
    for chunk in plan.chunks:
        known: Seq[int] = chunk.seq.ids[chunk.start : chunk.start + chunk.n]
        ids += known
        if len(known) < chunk.n:
            unread.append((len(ids), rows[id(chunk.seq)]))
            ids.append(0)
    if previous is not None and previous.ids is not None:
        sources = [source for _, source in unread]
        if len(unread) == len(ids) and sources == list(range(previous.ids.size)):
            return previous.ids  # the same rows, all of them
    result = mx.array(ids, mx.int32)
    if unread and previous is not None and previous.ids is not None:
        places, sources = zip(*unread, strict=True)
        result[mx.array(places)] = previous.ids[mx.array(sources)]
    return result
