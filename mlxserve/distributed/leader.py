"""Rank 0: it meets the other ranks, and tells them what to do. See `engine.peers`."""

import contextlib
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import mlx.core as mx
import msgspec

from mlxserve.cache.groups import LayerGroup
from mlxserve.cache.storage import Storage
from mlxserve.cache.transfer import Pages
from mlxserve.config import Placement
from mlxserve.config import placement as placement_here
from mlxserve.device import Pressure
from mlxserve.distributed.group import Pipe, Ranks, divided
from mlxserve.distributed.link import LOST_EXIT, Link, end_with_launcher, read, write
from mlxserve.distributed.messages import (
    Finish,
    Hello,
    Message,
    Refusal,
    Resize,
    Sizes,
    Step,
    Welcome,
)
from mlxserve.distributed.placement import alike_on_one_host, place_stages, power
from mlxserve.distributed.saved import WholeCache
from mlxserve.distributed.watchdog import Watchdog
from mlxserve.errors import ModelError, PeerLost, RequestError
from mlxserve.memory import CachePlan
from mlxserve.models.tensor_parallel import Shard
from mlxserve.opening import Opened
from mlxserve.sequence import StepPlan

logger = logging.getLogger(__name__)

CAUSE_S = 0.5  # for a link to show what made a collective fail
LAST_WORDS_S = 4.0  # for the engine to end by itself, where it isn't stuck in a collective


class Leader:
    """See `engine.peers.Peers`. Made by `lead`.

    links: to rank 1, 2 and so on. shard: what this rank has of the model; None: all of it.
    """

    def __init__(self, placement: Placement) -> None:
        self.count = placement.size - 1
        self.stages = placement.stages
        self.stage: Pipe | None = None
        self.on_lost: Callable[[str], None] = lambda reason: None
        self.shard: Shard | None = None
        self._placement = placement
        self._layers: list[range | None] = [None] * placement.size
        self._links: list[Link] = []
        self._over = threading.Event()
        self._loss: str | None = None
        self._losing = threading.Lock()
        self._watchdog = Watchdog(placement.timeout_s, self._on_stuck)

    def meet(self, opened: Opened) -> Shard | None:
        """Wait for all other ranks, and compare with them what must be the same everywhere.

        Returns what this rank loads. Raises ModelError, here and there, for a rank that is missing,
        comes twice or differs, and RequestError where layers can't be placed on them.
        """
        arrived = _arrivals(self._placement, opened.facts())
        self._layers = _layers(self._placement, opened, arrived)
        for rank, (connection, _) in arrived.items():
            some = self._layers[rank]
            write(connection, Welcome(None if some is None else (some.start, len(some))))
        self._ranks = Ranks(self._placement.backend)
        for rank, (connection, hello) in sorted(arrived.items()):
            peer = f"rank {rank} ({hello.host})"
            link = Link(connection, peer, self._placement.timeout_s, self._on_loss)
            self._links.append(link)
        self._group, self.stage = divided(self._ranks, self._placement.tensor)
        return opened.part(self._group, self._layers[0])

    def agree(self, plan: CachePlan, dtype: str) -> CachePlan:
        plans = [plan]
        for link in self._links:
            match self._next(link):
                case Sizes(dtype=other) if other != dtype:
                    raise ModelError(
                        f"{link.peer} computes in {other}, and rank 0 in {dtype}; use machines of "
                        "one kind, and a file whose layers are all of one type"
                    )
                case Sizes() as sizes:
                    plans.append(sizes.plan())
                case Refusal(reason):
                    raise ModelError(f"{link.peer}: {reason}")
                case message:
                    raise PeerLost(f"{link.peer} said {type(message).__name__} out of turn")
        least = CachePlan(
            min(p.hot_pages for p in plans),
            tuple(map(min, zip(*(p.pool_pages for p in plans), strict=True))),
            min(p.slots for p in plans),
        )
        self._tell(Sizes.of(least, dtype))
        return least

    def step(
        self, plan: StepPlan, ids: list[int] | None = None, reads: Sequence[tuple[int, int]] = ()
    ) -> None:
        self._tell(Step.of(plan, ids, reads))
        if plan.chunks:
            self._watchdog.begin(plan.tokens)

    def done(self) -> None:
        self._watchdog.end()

    def finish(self) -> None:
        for link in self._links[: self._placement.tensor - 1]:
            link.send(Finish())

    def share(self, ids: mx.array) -> mx.array:
        return self._group.sum(ids)  # the others have zeros

    def resize(self, needed: Sequence[int], *, shrink: bool = False) -> None:
        self._tell(Resize(list(needed), shrink))

    def whole(self, storage: Storage, groups: Sequence[LayerGroup]) -> Pages:
        if self.shard is None:
            return storage
        heads, tensor = self.shard.all_kv_heads, self._placement.tensor

        def kept(rank: int, layer: int) -> range:
            here = self._layers[rank]
            return heads[rank % tensor] if here is None or layer in here else range(0)

        return WholeCache(storage, groups, self.count + 1, kept, self._ask, self.resize)

    def signal(self, own: Callable[[], Pressure] | None) -> Callable[[], Pressure]:
        def worst() -> Pressure:
            here = Pressure.NORMAL if own is None else own()
            return max(here, *(link.pressure for link in self._links))

        return worst

    def cause(self, error: Exception) -> Exception:
        # The collective may fail before the link does.
        end_s = time.monotonic() + CAUSE_S
        while self._loss is None and time.monotonic() < end_s:
            time.sleep(0.01)
        if self._ranks.failed(error):
            self._declare(f"{self._unheard()}: {error}")
        return error if self._loss is None else PeerLost(self._loss)

    def close(self) -> None:
        self._over.set()
        self._watchdog.close()
        for link in self._links:
            link.close(self._loss or "")

    def _tell(self, message: Message) -> None:
        if self._loss is not None:
            raise PeerLost(self._loss)
        for link in self._links:
            link.send(message)

    def _ask(self, rank: int, message: Message) -> Message:
        """Have one rank do something, and wait for its answer."""
        link = self._links[rank - 1]
        link.send(message)
        return self._next(link)

    def _next(self, link: Link) -> Message:
        """What a rank says next; it may be loading its model. Raises PeerLost."""
        while self._loss is None:
            with contextlib.suppress(queue.Empty):
                return link.received.get(timeout=0.2)
        raise PeerLost(self._loss)

    def _unheard(self) -> str:
        """That tensors don't arrive; a ring doesn't say from whom."""
        peers = " or ".join(link.peer for link in self._links)
        return f"{peers} can't be reached over {self._placement.backend}"

    def _on_stuck(self, what: str) -> None:
        self._on_loss(f"{self._unheard()}: {what}")

    def _on_loss(self, reason: str) -> None:
        """On another thread: the engine may be stuck in a collective, which never ends."""
        if self._declare(reason):
            self.on_lost(reason)

    def _declare(self, reason: str) -> bool:
        """Have all ranks end, this one too in a while. Returns whether nothing was lost before."""
        with self._losing:
            if self._loss is not None:
                return False
            self._loss = reason
        logger.error("%s; this rank ends too", reason)
        threading.Thread(target=self._end, name="mlxserve-end", daemon=True).start()
        for link in self._links:
            link.close(reason)
        return True

    def _end(self) -> None:
        if not self._over.wait(LAST_WORDS_S):
            os._exit(LOST_EXIT)


def lead(opened: Opened) -> tuple[Leader | None, Shard | None]:
    """Meet the other ranks, if `mlxserve launch` started this process as the first of some.

    Returns what tells them what to do, None where there are none, and the part to load. Raises
    ModelError, RequestError and CapacityError, as the other ranks do.
    """
    end_with_launcher()
    if (placement := placement_here()) is None:
        return None, opened.part()
    if placement.rank:
        raise RequestError(
            f"this is rank {placement.rank} of {placement.size}, which only computes for rank 0; "
            "run `mlxserve generate` or `serve` with `mlxserve launch`"
        )
    leader = Leader(placement)
    try:
        leader.shard = leader.meet(opened)
        return leader, leader.shard
    except BaseException:
        leader.close()
        raise


def _arrivals(
    placement: Placement, facts: Mapping[str, str]
) -> dict[int, tuple[socket.socket, Hello]]:
    """The other ranks, by number, with their first words."""
    host, port = placement.control
    arrived: dict[int, tuple[socket.socket, Hello]] = {}
    waiting: list[socket.socket] = []
    end_s = time.monotonic() + placement.start_timeout_s
    try:
        with socket.create_server((host, port)) as door:
            while len(arrived) < placement.size - 1:
                connection, hello = _arrival(door, placement, end_s, arrived)
                waiting.append(connection)
                if problem := _problem(hello, placement, facts, arrived):
                    raise ModelError(problem)
                arrived[hello.rank] = connection, hello
    except (ModelError, OSError) as error:
        _refuse(waiting, error)
        if isinstance(error, OSError):
            raise ModelError(f"{host}:{port} can't be listened at: {error}") from None
        raise
    return arrived


def _refuse(connections: Iterable[socket.socket], error: Exception) -> None:
    for connection in connections:
        with contextlib.suppress(OSError):
            write(connection, Refusal(str(error)))
        connection.close()


def _layers(
    placement: Placement, opened: Opened, arrived: Mapping[int, tuple[socket.socket, Hello]]
) -> list[range | None]:
    """Those of each rank, None for all. Raises RequestError, here and there."""
    if placement.stages == 1:
        return [None] * placement.size
    own = power(opened)
    powers = {0: own} | {rank: hello.power or own for rank, (_, hello) in arrived.items()}
    hosts = {0: socket.gethostname()} | {rank: hello.host for rank, (_, hello) in arrived.items()}
    try:
        stages = place_stages(opened, alike_on_one_host(powers, hosts), placement.tensor)
    except RequestError as error:
        _refuse((connection for connection, _ in arrived.values()), error)
        raise
    return [layers for layers in stages for _ in range(placement.tensor)]


def _arrival(
    door: socket.socket, placement: Placement, end_s: float, arrived: Mapping[int, object]
) -> tuple[socket.socket, Hello]:
    """The next one who knows the key; others are hung up on."""
    while True:
        left_s = end_s - time.monotonic()
        if left_s <= 0:
            missing = sorted(set(range(1, placement.size)) - arrived.keys())
            raise ModelError(
                f"rank {', '.join(map(str, missing))} of {placement.size} did not come within "
                f"{placement.start_timeout_s:g} s; see what it printed"
            )
        door.settimeout(left_s)
        try:
            connection, _ = door.accept()
        except TimeoutError:
            continue
        connection.settimeout(placement.timeout_s)
        try:
            hello = read(connection)
        except (OSError, msgspec.DecodeError):
            connection.close()
            continue
        if isinstance(hello, Hello) and hello.key == placement.key:
            return connection, hello
        connection.close()


def _problem(
    hello: Hello, placement: Placement, facts: Mapping[str, str], arrived: Mapping[int, object]
) -> str:
    """Why a rank can't take part, or ""."""
    name = f"rank {hello.rank} ({hello.host})"
    if not 1 <= hello.rank < placement.size:
        return f"{name} is none of 1 to {placement.size - 1}"
    if hello.rank in arrived:
        return f"{name} came twice; is it named twice among the hosts?"
    for fact, value in facts.items():
        if (theirs := hello.facts.get(fact)) != value:
            return f"{name} has {fact} {theirs}, and rank 0 has {value}; make them the same"
    return ""
