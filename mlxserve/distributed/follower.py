"""Ranks other than 0: they do what rank 0 does, in the same order, and nothing of their own."""

import logging
import os
import queue
import socket
import time
from collections.abc import Callable, Mapping

import mlx.core as mx

from mlxserve import device
from mlxserve.cache.storage import Storage
from mlxserve.config import Placement
from mlxserve.distributed.group import Ranks
from mlxserve.distributed.link import LOST_EXIT, Link, read, write
from mlxserve.distributed.messages import (
    Hello,
    Message,
    Refusal,
    Resize,
    Sizes,
    Step,
    Stop,
    Welcome,
)
from mlxserve.engine import cache_plan
from mlxserve.engine.forward import Forward
from mlxserve.errors import InvariantError, MlxserveError, ModelError
from mlxserve.models.base import Model
from mlxserve.opening import Opened

logger = logging.getLogger(__name__)

RETRY_S = 0.1  # between two tries to reach rank 0


def follow(placement: Placement, open_model: Callable[[], Opened]) -> None:
    """Meet the others, load this rank's part, and compute until rank 0 says that it is over.

    open_model: called once rank 0 has found the model, and fetched it if it wasn't here. Raises
    ModelError, RequestError and CapacityError where that fails at the start; later, where rank 0 is
    lost, the process ends, since collectives would wait for it for ever.
    """
    connection = _connect(placement)
    opened = open_model()
    link = _meet(placement, connection, opened.facts())
    group = Ranks(placement.backend)
    try:
        model = opened.load(opened.part(group))
        groups, dtype, plan = cache_plan.plan_of(model, opened.config)
    except MlxserveError as error:
        link.send(Refusal(str(error)))
        raise
    link.send(Sizes.of(plan))
    match link.received.get():
        case Sizes() as sizes:
            agreed = sizes.plan()
        case _:
            return
    storage = Storage(
        groups,
        dtype,
        hot_pages=agreed.hot_pages,
        pool_pages=agreed.pool_pages,
        slots=agreed.slots,
    )
    with device.wired_memory():
        _Follower(model, storage, group).run(link.received)
    link.close()


class _Follower:
    def __init__(self, model: Model, storage: Storage, group: Ranks) -> None:
        self._forward = Forward(model, storage, record=False)
        self._storage = storage
        self._group = group
        self._under_way: list[mx.array] = []

    def run(self, messages: "queue.SimpleQueue[Message]") -> None:
        while True:
            match messages.get():
                case Step() as step if step.rows:
                    self._step(step)
                case Step() as copies:
                    self._wait()
                    self._storage.prepare(copies.plan())
                    mx.eval(self._storage.written())
                case Resize(needed, shrink):
                    self._wait()
                    resize = self._storage.shrink if shrink else self._storage.grow
                    resize(*needed)
                case Stop():
                    return
                case message:
                    raise InvariantError(f"rank 0 said {type(message).__name__} out of turn")

    def _step(self, step: Step) -> None:
        """As `Core.step`: built while the one before is under way, begun when that is over."""
        plan = step.plan()
        self._storage.prepare(plan)
        if step.ids is None:
            ids = self._group.sum(mx.zeros((plan.tokens,), mx.int32))
        else:
            ids = mx.array(step.ids, mx.int32)
        passed = self._forward.run(ids, plan)
        self._wait()
        self._under_way = [x for x in (passed.logits, passed.hidden) if x is not None]
        written = [] if passed.in_place else self._storage.written()
        mx.async_eval(*self._under_way, *written)
        if step.reads and passed.hidden is not None:
            self._wait()
            for first, n in step.reads:
                mx.eval(self._forward.logits(passed.hidden[first : first + n]))

    def _wait(self) -> None:
        """Until nothing is under way, which would hold the cache's arrays."""
        if self._under_way:
            mx.eval(self._under_way)
            self._under_way = []


def _meet(placement: Placement, connection: socket.socket, facts: Mapping[str, str]) -> Link:
    write(connection, Hello(placement.key, placement.rank, socket.gethostname(), dict(facts)))
    # Rank 0 waits so long itself, and then says whom it misses.
    connection.settimeout(placement.start_timeout_s + placement.timeout_s)
    try:
        answer = read(connection)
    except OSError as error:
        raise ModelError(f"rank 0 doesn't answer: {error}; see what it printed") from None
    match answer:
        case Welcome():
            return Link(connection, "rank 0", placement.timeout_s, _end)
        case Refusal(reason):
            raise ModelError(reason)
        case _:
            raise ModelError(f"what listens at {placement.control} isn't rank 0")


def _connect(placement: Placement) -> socket.socket:
    host, port = placement.control
    end_s = time.monotonic() + placement.fetch_timeout_s
    while True:
        try:
            return socket.create_connection((host, port), timeout=placement.timeout_s)
        except OSError as error:
            if time.monotonic() > end_s:
                raise ModelError(
                    f"rank 0 can't be reached at {host}:{port}: {error}; is it running, and does a "
                    "firewall let it through?"
                ) from None
            time.sleep(RETRY_S)


def _end(reason: str) -> None:
    """On the link's thread: the main one may be stuck in a collective."""
    logger.error("%s; this rank ends too", reason)
    os._exit(LOST_EXIT)
