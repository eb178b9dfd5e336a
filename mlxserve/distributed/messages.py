"""What ranks tell each other beside a step's tensors: integers, words and pages, as msgpack."""

from collections.abc import Sequence

import msgspec
import numpy as np

from mlxserve.device import Pressure
from mlxserve.distributed.placement import Power
from mlxserve.memory import CachePlan
from mlxserve.sequence import Chunk, Load, Seal, StepPlan
from mlxserve.sequence import Sequence as Seq
from mlxserve.types import Request, SamplingParams

_NOBODY = Request(id="", prompt_ids=(0,), params=SamplingParams())


class Hello(msgspec.Struct, tag=True, frozen=True):
    """A rank's first words. facts: what must be alike everywhere, by name; key: the launcher's.

    power: what it has, where layers are placed by that.
    """

    key: str
    rank: int
    host: str
    facts: dict[str, str]
    power: Power | None = None


class Refusal(msgspec.Struct, tag=True, frozen=True):
    """Why a rank can't take part."""

    reason: str


class Welcome(msgspec.Struct, tag=True, frozen=True):
    """All ranks are there and alike. layers: (first, n) of this one's; None: all."""

    layers: tuple[int, int] | None = None


class Sizes(msgspec.Struct, tag=True, frozen=True):
    """Pages that a rank's memory allows; or, from rank 0, those that all have. See `CachePlan`.

    dtype: that the rank computes in.
    """

    hot_pages: int
    pool_pages: tuple[int, ...]
    slots: int
    dtype: str

    @classmethod
    def of(cls, plan: CachePlan, dtype: str) -> "Sizes":
        return cls(plan.hot_pages, tuple(plan.pool_pages), plan.slots, dtype)

    def plan(self) -> CachePlan:
        return CachePlan(self.hot_pages, self.pool_pages, self.slots)


class Row(msgspec.Struct, array_like=True, frozen=True):
    """A `Chunk`, and what its sequence has in the cache."""

    start: int
    n: int
    samples: bool
    hot: tuple[int, ...]
    held: list[int]
    sealed: int
    tables: list[list[int]]
    dropped: list[int]
    slot: int


class Step(msgspec.Struct, tag=True, frozen=True):
    """A `StepPlan`. ids: of its tokens; None: rank 0 has them on its device, and shares them.

    reads: hidden states of which rank 0 will ask for logits after the step, (first, n) each.
    """

    rows: list[Row]
    seals: list[tuple[int, tuple[int, ...]]]
    loads: list[tuple[tuple[int, ...], int]]
    states: list[tuple[int, int]]
    ids: list[int] | None
    reads: list[tuple[int, int]]

    @classmethod
    def of(
        cls, plan: StepPlan, ids: list[int] | None = None, reads: Sequence[tuple[int, int]] = ()
    ) -> "Step":
        return cls(
            rows=[_row(chunk) for chunk in plan.chunks],
            seals=[(seal.hot, seal.pages) for seal in plan.seals],
            loads=[(load.pages, load.hot) for load in plan.loads],
            states=list(plan.states),
            ids=ids,
            reads=list(reads),
        )

    def plan(self) -> StepPlan:
        return StepPlan(
            chunks=tuple(_chunk(row) for row in self.rows),
            seals=tuple(Seal(hot, pages) for hot, pages in self.seals),
            loads=tuple(Load(pages, hot) for pages, hot in self.loads),
            states=tuple(self.states),
        )


class Finish(msgspec.Struct, tag=True, frozen=True):
    """In a pipeline, for those that have the head: the rest of the oldest unfinished step."""


class Resize(msgspec.Struct, tag=True, frozen=True):
    """`Storage.grow`, or `shrink`, to so many pages."""

    needed: list[int]
    shrink: bool = False


class Rows(msgspec.Struct, tag=True, frozen=True):
    """Pages of one of a layer's arrays. dtype: NumPy's name; data: row by row, low bytes first."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, array: np.ndarray) -> "Rows":
        return cls(array.dtype.name, array.shape, array.tobytes())

    def array(self) -> np.ndarray:
        """Read-only. Raises ValueError where its parts don't fit together."""
        return np.frombuffer(self.data, self.dtype).reshape(self.shape)


class Get(msgspec.Struct, tag=True, frozen=True):
    """`Storage.get`; `Rows` are the answer."""

    layer: int
    name: str
    rows: list[int]


class Put(msgspec.Struct, tag=True, frozen=True):
    """`Storage.put`; `Done` is the answer."""

    layer: int
    name: str
    rows: list[int]
    given: Rows


class Done(msgspec.Struct, tag=True, frozen=True):
    """What was asked is done."""


class Ping(msgspec.Struct, tag=True, frozen=True):
    """A sign of life. pressure: how short of memory the sender's machine is."""

    pressure: Pressure = Pressure.NORMAL


class Stop(msgspec.Struct, tag=True, frozen=True):
    """The group is closed. reason: what went wrong, or ""."""

    reason: str = ""


Told = Step | Finish | Resize | Get | Put | Stop  # by rank 0, while it computes
Message = Hello | Refusal | Welcome | Sizes | Told | Rows | Done | Ping
encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Message).decode


def _row(chunk: Chunk) -> Row:
    seq = chunk.seq
    held = seq.hot, seq.sealed, seq.tables, seq.dropped, seq.slot
    return Row(chunk.start, chunk.n, chunk.samples, chunk.hot, *held)


def _chunk(row: Row) -> Chunk:
    seq = Seq(
        request=_NOBODY,
        ids=[],
        seed=0,
        max_tokens=0,
        hot=row.held,
        sealed=row.sealed,
        tables=row.tables,
        dropped=row.dropped,
        slot=row.slot,
    )
    return Chunk(seq, row.start, row.n, row.samples, row.hot)
