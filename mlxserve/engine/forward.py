"""A step's forward pass: from tokens to logits, built anew or run from a recorded graph.

For a small model, building and evaluating the graph takes Python and MLX as long as computing it
takes the CPU. Steps that only decode look alike, so theirs is recorded once per shape (rows, pages,
cache capacity) and run with new arrays, as one operation (kernels/cpu/program.h).
"""

import logging
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from mlxserve.cache.batch import BatchView
from mlxserve.cache.storage import Storage
from mlxserve.engine.peers import Stage
from mlxserve.kernels import registry
from mlxserve.models.base import Model
from mlxserve.sequence import StepPlan

logger = logging.getLogger(__name__)

MAX_PROGRAMS = 64  # shapes kept at most; each takes the memory of one step's intermediate results


class Passed(NamedTuple):
    """What `Forward.run` made.

    hidden: of all tokens, `[T, D]`, if they are to be read, else of those that sample, or of the
    last; None where other processes have them, and without a pipeline where a step only decodes.
    logits: float32 `[B, V]`, of the rows that sample; None where none does. in_place: see
    `Forward.decode`. ahead: in a pipeline, what this process makes of the step before others do,
    for them to go on.
    """

    hidden: mx.array | None
    logits: mx.array | None
    in_place: bool = False
    ahead: tuple[mx.array, ...] = ()


class Forward:
    """The model over a cache. Engine thread only.

    stage: of a pipeline, if the model has some of the layers only. record: whether steps may be
    recorded; those of a part of a model can't be, since what goes between ranks isn't computed by
    kernels of ours.
    """

    def __init__(
        self, model: Model, storage: Storage, *, stage: Stage | None = None, record: bool = True
    ) -> None:
        self._model = model
        self._storage = storage
        self._stage = stage
        self.vocab_size = model.vocab_size
        self._native: Any = registry.recorder() if record else None
        # By shape: recorded once, then twice alike and so trusted.
        self._recorded: dict[tuple, Any] = {}
        self._trusted: dict[tuple, Any] = {}

    def logits(self, hidden: mx.array) -> mx.array:
        """float32 `[.., V]`."""
        return self._model.logits(hidden).astype(mx.float32)

    def run(self, ids: mx.array, plan: StepPlan, *, read: bool) -> Passed:
        """The model on a step's tokens, lazily; logits after each chunk that samples.

        ids: int32 `[T]`. read: whether all hidden states are wanted.
        """
        view = BatchView(self._storage, plan)
        decodes = all(chunk.samples and chunk.n == 1 for chunk in plan.chunks)
        if self._stage is None and decodes:
            return Passed(None, *self.decode(ids, view))
        ends = np.cumsum([chunk.n for chunk in plan.chunks]) - 1
        sampled = [int(end) for end, c in zip(ends, plan.chunks, strict=True) if c.samples]
        rows = None if read or decodes else mx.array(sampled or [plan.tokens - 1])
        hidden, ahead = self._hidden(ids, view, rows)
        logits = None
        if hidden is not None and sampled:
            logits = self.logits(hidden[mx.array(sampled)] if read else hidden)
        return Passed(hidden, logits, False, ahead)

    def _hidden(
        self, ids: mx.array, view: BatchView, rows: mx.array | None
    ) -> tuple[mx.array | None, tuple[mx.array, ...]]:
        """Hidden states of these rows, None for all; and see `Passed.ahead`."""
        model, stage = self._model, self._stage
        if stage is None:
            hidden = model(ids, view)
            return (hidden if rows is None else hidden[rows]), ()
        width = model.config.width
        x = ids if stage.first else stage.receive((ids.size, width), model.dtype)
        out = model(x, view)
        if stage.last and rows is not None:
            out = out[rows]
        ahead = out, stage.send(out)
        if not stage.first:
            return None, ahead
        wanted = ids.size if rows is None else rows.size
        return stage.receive((wanted, width), model.dtype), ahead

    def decode(self, ids: mx.array, view: BatchView) -> tuple[mx.array, bool]:
        """Rows of one token each. ids: int32 `[B]`.

        Returns their logits, float32 `[B, V]`, and whether the operation that makes them writes the
        cache where it lies. Then its arrays needn't be evaluated by name, and the step may be
        submitted while the one before is under way.
        """
        storage = self._storage
        if self._native is None:
            return self.logits(self._model(ids, view)), False
        own = [ids, *view.arrays, *storage.moves]
        shape = (*(array.size for array in own), *storage.capacity)
        if program := self._trusted.get(shape):
            (logits,) = program.run(own, storage.state(self._native))
            return logits, True
        before = storage.arrays()
        logits = self.logits(self._model(ids, view))
        self._record(shape, own, before, [logits], storage.arrays())
        return logits, False

    def _record(self, shape: tuple, *graph: list[mx.array]) -> None:
        """A program is trusted once a second recording has found the same constants in it.

        Else it might hold on to an array that belonged to the first step alone.
        """
        try:
            program = self._native.record(*graph)
        except ValueError as error:
            logger.info("decoding steps are built one by one: %s", error)
            self._native = None
            return
        first = self._recorded.pop(shape, None)
        if first is None or not program.agrees_with(first):
            if len(self._recorded) >= MAX_PROGRAMS:
                self._recorded.clear()
            self._recorded[shape] = program
            return
        if len(self._trusted) >= MAX_PROGRAMS:
            self._trusted.clear()
        self._trusted[shape] = program
