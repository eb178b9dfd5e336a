"""Turns a plan into lazy arrays, and their values back into plain results. Engine thread only."""

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq

import mlx.core as mx
import numpy as np

from mlxserve.cache.storage import Storage
from mlxserve.engine.forward import Forward
from mlxserve.engine.masks import Masks
from mlxserve.engine.peers import Peers
from mlxserve.engine.sampling import logprobs, sample
from mlxserve.engine.scheduler import ChunkResult
from mlxserve.errors import MlxserveError, ModelError
from mlxserve.kernels import select
from mlxserve.memory import rows_read_at_once
from mlxserve.models.base import Model
from mlxserve.sequence import Chunk, StepPlan
from mlxserve.types import Logprob

NOT_FINITE = (
    "the model's logits aren't finite numbers: its weights are damaged, or overflow in 16 bits; "
    "fetch them again, or try another checkpoint"
)


class InFlight:
    """A step that is built, and after `submit` under way. `read` waits for it.

    constrained: rows whose tokens depend on a mask; they are drawn by `constrain`, in a submission
    of their own, so that masks are made while the model runs. In a pipeline `submit` starts what
    this process does before others go on, and `finish` the rest.
    """

    def __init__(
        self, plan: StepPlan, forward: Forward, storage: Storage, ids: mx.array, *, read: bool
    ) -> None:
        self.plan = plan
        self.submitted_s = 0.0
        self._forward = forward
        self._storage = storage
        self.constrained: list[int] = []
        self.ids: mx.array | None = None
        self._to_read: dict[int, mx.array] = {}  # hidden states, by chunk
        # Until the constrained rows are drawn: logits, their likeliest, tokens of the other rows.
        self._undrawn: tuple[mx.array, ...] = ()
        self._finite: mx.array | None = None
        self._failures: dict[int, MlxserveError] = {}
        self._logprob_rows: list[int] = []
        self._logprobs: tuple[mx.array, ...] = ()
        self._hidden: mx.array | None = None
        passed = forward.run(ids, plan, read=read)
        self._ahead = passed.ahead
        self.in_place = passed.in_place  # the cache is written where it lies, by what makes logits
        self.sampled = [chunk for chunk in plan.chunks if chunk.samples]
        # Logits of what is read come later, block by block: here, all would exist at once.
        if passed.hidden is not None:
            for chunk, first, rows in _to_read(plan):
                self._to_read[id(chunk)] = passed.hidden[first : first + rows]
        if passed.logits is not None:
            self._sample(passed.logits)
        elif not self._to_read:
            self._hidden = passed.hidden

    def _sample(self, logits: mx.array) -> None:
        best, self._finite = select.greedy(logits)
        self.constrained = [row for row, chunk in enumerate(self.sampled) if chunk.seq.constrained]
        free = self._free_rows()
        drawn = [self._draw(logits, best, free)] if free else []
        if self.constrained:
            self._undrawn = (logits, best, *drawn)
        else:
            self._report(logits, best, *drawn)

    def _free_rows(self) -> list[int]:
        return sorted(set(range(len(self.sampled))).difference(self.constrained))

    def _draw(
        self, logits: mx.array, best: mx.array, rows: list[int], mask: mx.array | None = None
    ) -> mx.array:
        """int32 `[len(rows)]`: tokens of these rows."""
        if len(rows) < len(self.sampled):
            logits, best = logits[mx.array(rows)], best[mx.array(rows)]
        return sample(logits, [self.sampled[row].seq for row in rows], best, mask)

    def _report(self, logits: mx.array, best: mx.array, ids: mx.array) -> None:
        """Have all tokens, and what is told of them."""
        self.ids = ids
        params = [chunk.seq.request.params for chunk in self.sampled]
        self._logprob_rows = [row for row, p in enumerate(params) if p.logprobs]
        if self._logprob_rows:
            rows = mx.array(self._logprob_rows)
            top = max(p.top_logprobs for p in params)
            self._logprobs = logprobs(logits[rows], best[rows], ids[rows], top)

    def submit(self) -> None:
        """Start computing: the tokens together with everything the step wrote."""
        outputs = [*(self._ahead or self._outputs())]
        if not self.in_place:
            outputs += self._storage.written()
        mx.async_eval(*outputs)

    def finish(self) -> None:
        """Of a pipeline: start what follows once the last stage is done."""
        mx.async_eval(*self._outputs())

    def wait(self) -> None:
        """Of a pipeline: until this process's layers are computed, and the cache is free."""
        mx.eval(self._ahead[0])

    def _outputs(self) -> list[mx.array]:
        first = (self.ids, self._hidden, self._finite)
        outputs = [array for array in first if array is not None]
        return [*outputs, *self._undrawn, *self._logprobs, *self._to_read.values()]

    def constrain(self, mask: mx.array, failures: Mapping[int, MlxserveError]) -> None:
        """Draw the tokens of the constrained rows, and start computing that.

        mask: of these rows, see `kernels.select.allowed`; failures: why rows have to end, by row.
        """
        logits, best, *drawn = self._undrawn
        self._undrawn, self._failures = (), dict(failures)
        ids = self._draw(logits, best, self.constrained, mask)
        if drawn:
            order = np.argsort([*self._free_rows(), *self.constrained])
            ids = mx.concatenate([*drawn, ids])[mx.array(order)]
        self._report(logits, best, ids)
        mx.async_eval(ids, *self._logprobs)

    def read(self) -> list[ChunkResult]:
        """Wait for the step; one result per chunk of the plan."""
        if self._hidden is not None:  # nothing to read, but until it's done it holds the cache
            mx.eval(self._hidden)
        ids: list[int] = [] if self.ids is None else self.ids.tolist()  # type: ignore[assignment]
        finite = [] if self._finite is None else np.array(self._finite)
        reported = self._read_logprobs(ids)
        results, row = [], 0
        for chunk in self.plan.chunks:
            read = self._read_prompt(chunk) if id(chunk) in self._to_read else ChunkResult()
            if not chunk.samples:
                results.append(read)
                continue
            failure = read.failure or self._failures.get(row)
            if not finite[row]:
                failure = ModelError(NOT_FINITE)
            prompt = read.prompt_logprobs
            results.append(
                ChunkResult(ids[row], reported.get(row), prompt_logprobs=prompt, failure=failure)
            )
            row += 1
        return results

    def _read_logprobs(self, ids: list[int]) -> dict[int, Logprob]:
        if not self._logprobs:
            return {}
        rows = self._logprob_rows
        tops = [self.sampled[row].seq.request.params.top_logprobs for row in rows]
        found = _to_logprobs([ids[row] for row in rows], self._logprobs, tops)
        return dict(zip(rows, found, strict=True))

    def _read_prompt(self, chunk: Chunk) -> ChunkResult:
        """What is asked of a prompt, block by block: logits over a large vocabulary are large."""
        hidden, request = self._to_read[id(chunk)], chunk.seq.request
        cuts = _blocks(chunk, hidden.shape[0], self._forward.vocab_size)
        blocks = (self._forward.logits(hidden[i : i + rows]) for i, rows in cuts)
        top = request.prompt_logprobs
        if top is None:
            logits = np.concatenate([np.array(block) for block in blocks])
            failure = None if np.isfinite(logits).all() else ModelError(NOT_FINITE)
            return ChunkResult(prompt_logits=logits, failure=failure)
        found: list[Logprob] = []
        sound = True
        for (first, _), block in zip(cuts, blocks, strict=True):  # all of them, as other ranks do
            at = chunk.start + 1 + first  # the token that the block's first row predicts
            ids = request.prompt_ids[at : at + block.shape[0]]
            best, finite = select.greedy(block)
            values = logprobs(block, best, mx.array(ids, mx.int32), top)
            mx.eval(finite, *values)
            sound = sound and bool(np.array(finite).all())
            if sound:
                found += _to_logprobs(ids, values, [top] * len(ids))
        if not sound:
            return ChunkResult(failure=ModelError(NOT_FINITE))
        return ChunkResult(prompt_logprobs=tuple(found))


class Runner:
    """The model and its storage."""

    def __init__(self, model: Model, storage: Storage, peers: Peers) -> None:
        self.storage = storage
        self._peers = peers
        self._forward = Forward(model, storage, stage=peers.stage, record=not peers.count)
        self._masks = Masks(model.vocab_size)

    def build(self, plan: StepPlan, previous: InFlight | None) -> InFlight:
        """Build one step lazily on top of `previous`, whose tokens are not read yet."""
        known, reads = _known_ids(plan), self._reads(plan)
        self._peers.step(plan, known, reads)
        self.storage.prepare(plan)
        ids = _input_ids(plan, previous) if known is None else mx.array(known, mx.int32)
        if known is None:
            ids = self._peers.share(ids)
        return InFlight(plan, self._forward, self.storage, ids, read=bool(reads))

    def _reads(self, plan: StepPlan) -> list[tuple[int, int]]:
        """(first, n) of a step's hidden states whose logits will be made, in that order."""
        return [
            (first + i, n)
            for chunk, first, rows in _to_read(plan)
            for i, n in _blocks(chunk, rows, self._forward.vocab_size)
        ]

    def constrain(self, step: InFlight) -> None:
        """Draw what depends on grammars in a step under way, once all before it are committed."""
        seqs = [step.sampled[row].seq for row in step.constrained]
        mask, failures = self._masks.mask(seqs)
        step.constrain(mask, {step.constrained[i]: error for i, error in failures.items()})


def _to_read(plan: StepPlan) -> Iterator[tuple[Chunk, int, int]]:
    """Chunks of which something is read, each with its first row of the step, and how many."""
    first = 0
    for chunk in plan.chunks:
        if rows := _rows_to_read(chunk):
            yield chunk, first, rows
        first += chunk.n


def _blocks(chunk: Chunk, rows: int, vocab_size: int) -> list[tuple[int, int]]:
    """(first, n) of so many rows whose logits are made at once."""
    most = rows_read_at_once(vocab_size, chunk.seq.request.prompt_logprobs or 0)
    return [(i, min(most, rows - i)) for i in range(0, rows, most)]


def _rows_to_read(chunk: Chunk) -> int:
    """Rows from a chunk's first on of which something is reported."""
    request = chunk.seq.request
    if request.prompt_logprobs is not None:  # of rows that predict a token of the prompt
        return max(0, min(chunk.n, len(request.prompt_ids) - 1 - chunk.start))
    return chunk.n if request.score else 0


def _to_logprobs(ids: Seq[int], arrays: Seq[mx.array], tops: Seq[int]) -> list[Logprob]:
    """What `sampling.logprobs` found for some ids; tops: alternatives wanted of each."""
    chosen, top_ids, top_values = (np.array(array).tolist() for array in arrays)
    return [
        Logprob(token, value, tuple(zip(best[:top], values[:top], strict=True)))
        for token, value, best, values, top in zip(
            ids, chosen, top_ids, top_values, tops, strict=True
        )
    ]


def _known_ids(plan: StepPlan) -> list[int] | None:
    """The tokens of a step, or None where some aren't read yet."""
    ids: list[int] = []
    for chunk in plan.chunks:
        known = chunk.seq.ids[chunk.start : chunk.start + chunk.n]
        if len(known) < chunk.n:
            return None
        ids += known
    return ids


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
