"""Other processes that compute a part of the model, as rank 0's engine sees them.

Rank 0 alone decides. It tells the others each step before it runs it itself, and all that changes
the cache; they do the same in the same order (`distributed.follower`), or collectives would wait
for ever.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import mlx.core as mx

from mlxserve.cache.groups import LayerGroup
from mlxserve.cache.storage import Storage
from mlxserve.cache.transfer import Pages
from mlxserve.device import Pressure
from mlxserve.memory import CachePlan
from mlxserve.sequence import StepPlan


class Stage(Protocol):
    """The way of what layers make through processes that have some of them each, a pipeline.

    first, last: whether this process has the model's first and last layer. All of it is lazy, and
    every process must come to the same operations in the same order.
    """

    first: bool
    last: bool

    def receive(self, shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
        """What the stage before has sent; to the first, what the last one has."""
        ...

    def send(self, x: mx.array) -> mx.array:
        """x for the next stage, from the last to the first. Returns what has to be evaluated."""
        ...


class Peers(Protocol):
    """count: how many there are. on_lost: set by the engine, told when one is gone, and why.

    stage: of this process, None where it has all layers; stages: how many there are.
    """

    count: int
    stages: int
    on_lost: Callable[[str], None]

    @property
    def stage(self) -> Stage | None: ...

    def agree(self, plan: CachePlan, dtype: str) -> CachePlan:
        """The pages that the memory of all of them allows. Waits until their models are loaded.

        dtype: that this process computes in. Raises ModelError for one that computes in another.
        """
        ...

    def step(
        self, plan: StepPlan, ids: list[int] | None = None, reads: Sequence[tuple[int, int]] = ()
    ) -> None:
        """Run a step, or without chunks do its copies.

        ids: of its tokens, None where they are on the device: `share` follows. reads: (first, n) of
        hidden states whose logits are made once the step was read.
        """
        ...

    def finish(self) -> None:
        """Of a pipeline: have the hidden states of the oldest unfinished step, and its logits."""
        ...

    def share(self, ids: mx.array) -> mx.array:
        """A step's ids, int32 `[T]`, for all ranks."""
        ...

    def done(self) -> None:
        """The oldest step that was told, and had chunks, is over here: it was read."""
        ...

    def resize(self, needed: Sequence[int], *, shrink: bool = False) -> None:
        """`Storage.grow`, or `shrink`."""
        ...

    def whole(self, storage: Storage, groups: Sequence[LayerGroup]) -> Pages:
        """The cache of all of them, for saved prompts.

        storage: this process's part; groups: of all layers of the model.
        """
        ...

    def signal(self, own: Callable[[], Pressure] | None) -> Callable[[], Pressure] | None:
        """What to ask how short of memory any of the machines is. own: of this one."""
        ...

    def cause(self, error: Exception) -> Exception:
        """Of a step that failed with `error`: that a peer is lost, or that error itself."""
        ...

    def close(self) -> None:
        """It is over."""
        ...


class NoPeers:
    """There are none."""

    count, stages, stage = 0, 1, None

    def __init__(self) -> None:
        self.on_lost: Callable[[str], None] = _ignore

    def agree(self, plan: CachePlan, dtype: str) -> CachePlan:
        return plan

    def step(
        self, plan: StepPlan, ids: list[int] | None = None, reads: Sequence[tuple[int, int]] = ()
    ) -> None:
        pass

    def finish(self) -> None:
        pass

    def share(self, ids: mx.array) -> mx.array:
        return ids

    def done(self) -> None:
        pass

    def resize(self, needed: Sequence[int], *, shrink: bool = False) -> None:
        pass

    def whole(self, storage: Storage, groups: Sequence[LayerGroup]) -> Pages:
        return storage

    def signal(self, own: Callable[[], Pressure] | None) -> Callable[[], Pressure] | None:
        return own

    def cause(self, error: Exception) -> Exception:
        return error

    def close(self) -> None:
        pass


def _ignore(reason: str) -> None:
    pass
