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
from mlxserve.kernels import registry
from mlxserve.models.base import Model
from mlxserve.sequence import StepPlan

logger = logging.getLogger(__name__)

MAX_PROGRAMS = 64  # shapes kept at most; each takes the memory of one step's intermediate results


class Passed(NamedTuple):
    """What `Forward.run` made.

    hidden: of all tokens, `[T, D]`; None where all rows sample. logits: float32 `[B, V]`, of the
    rows that do; None where none does. in_place: see `Forward.decode`.
    """

    hidden: mx.array | None
    logits: mx.array | None
    in_place: bool


class Forward:
    """The model over a cache. Engine thread only.

    record: whether steps may be recorded; those of a part of a model can't be, since what goes
    between ranks isn't computed by kernels of ours.
    """

    def __init__(self, model: Model, storage: Storage, *, record: bool = True) -> None:
        self._model = model
        self._storage = storage
        self.vocab_size = model.vocab_size
        self._native: Any = registry.recorder() if record else None
        # By shape: recorded once, then twice alike and so trusted.
        self._recorded: dict[tuple, Any] = {}
        self._trusted: dict[tuple, Any] = {}

    def hidden(self, ids: mx.array, view: BatchView) -> mx.array:
        """Hidden states of a step's tokens. ids: int32 `[T]`. Returns `[T, D]`."""
        return self._model(ids, view)

    def logits(self, hidden: mx.array) -> mx.array:
        """float32 `[.., V]`."""
        return self._model.logits(hidden).astype(mx.float32)

    def run(self, ids: mx.array, plan: StepPlan) -> "Passed":
        """The model on a step's tokens, lazily; logits after each chunk that samples.

        ids: int32 `[T]`.
        """
        view = BatchView(self._storage, plan)
        if all(chunk.samples and chunk.n == 1 for chunk in plan.chunks):
            logits, in_place = self.decode(ids, view)
            return Passed(None, logits, in_place)
        hidden = self.hidden(ids, view)
        ends = np.cumsum([chunk.n for chunk in plan.chunks]) - 1
        last = [int(end) for end, chunk in zip(ends, plan.chunks, strict=True) if chunk.samples]
        logits = self.logits(hidden[mx.array(last)]) if last else None
        return Passed(hidden, logits, False)

    def decode(self, ids: mx.array, view: BatchView) -> tuple[mx.array, bool]:
        """Rows of one token each. ids: int32 `[B]`.

        Returns their logits, float32 `[B, V]`, and whether the operation that makes them writes the
        cache where it lies. Then its arrays needn't be evaluated by name, and the step may be
        submitted while the one before is under way.
        """
        storage = self._storage
        if self._native is None:
            return self.logits(self.hidden(ids, view)), False
        own = [ids, *view.arrays, *storage.moves]
        shape = (*(array.size for array in own), *storage.capacity)
        if program := self._trusted.get(shape):
            (logits,) = program.run(own, storage.state(self._native))
            return logits, True
        before = storage.arrays()
        logits = self.logits(self.hidden(ids, view))
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
