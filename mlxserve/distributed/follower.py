"""Ranks other than 0: they do what rank 0 does, in the same order, and nothing of their own."""

import logging
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping

import mlx.core as mx

from mlxserve import device
from mlxserve.cache.storage import Storage
from mlxserve.config import Placement
from mlxserve.distributed import saved
from mlxserve.distributed.group import Ranks, divided
from mlxserve.distributed.link import LOST_EXIT, Link, end_with_launcher, read, write
from mlxserve.distributed.messages import (
    Finish,
    Get,
    Hello,
    Put,
    Refusal,
    Resize,
    Sizes,
    Step,
    Stop,
    Welcome,
)
from mlxserve.distributed.placement import Power, power
from mlxserve.engine import cache_plan
from mlxserve.engine.forward import Forward, Passed
from mlxserve.engine.peers import Stage
from mlxserve.errors import InvariantError, MlxserveError, ModelError
from mlxserve.kernels.pages import dtype_name
from mlxserve.models.base import Group, Model
from mlxserve.opening import Opened

logger = logging.getLogger(__name__)

RETRY_S = 0.1  # between two tries to reach rank 0


def follow(placement: Placement, open_model: Callable[[], Opened]) -> None:
    """Meet the others, load this rank's part, and compute until rank 0 says that it is over.

    open_model: called once rank 0 has found the model, and fetched it if it wasn't here. Raises
    ModelError, RequestError and CapacityError where that fails at the start; later, where rank 0 is
    lost, the process ends, since collectives would wait for it for ever.
    """
    end_with_launcher()
    _connect(placement).close()  # rank 0 listens once it has found the model
    opened = open_model()
    powers = power(opened) if placement.stages > 1 else None
    facts = opened.facts()
    connection = _connect(placement)  # where a rank has to speak at once
    layers = _meet(placement, connection, facts, powers)
    ranks = Ranks(placement.backend)  # before the link, whose threads can't run meanwhile
    signal = device.pressure_signal()
    link = Link(connection, "rank 0", placement.timeout_s, _end, signal)
    group, stage = divided(ranks, placement.tensor)
    try:
        model = opened.load(opened.part(group, layers))
        groups, dtype, plan = cache_plan.plan_of(model, opened.config)
    except MlxserveError as error:
        link.send(Refusal(str(error)))
        raise
    link.send(Sizes.of(plan, dtype_name(model.dtype)))
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
    try:
        with device.wired_memory():
            _Follower(model, storage, group, stage).run(link)
    except Exception as error:
        link.close(f"{type(error).__name__}: {error}")
        if ranks.failed(error):  # a next collective may wait for ever, also at the exit
            others = [str(rank) for rank in range(ranks.size) if rank != ranks.rank]
            _end(f"rank {' or '.join(others)} can't be reached over {placement.backend}: {error}")
        raise
    link.close()


class _Follower:
    def __init__(self, model: Model, storage: Storage, group: Group, stage: Stage | None) -> None:
        self._forward = Forward(model, storage, stage=stage, record=False)
        self._storage = storage
        self._group = group
        self._under_way: list[mx.array] = []
        self._unfinished: deque[tuple[Step, Passed]] = deque()

    def run(self, link: Link) -> None:
        while True:
            match link.received.get():
                case Step() as step if step.rows:
                    self._step(step)
                case Step() as copies:
                    self._wait()
                    self._storage.prepare(copies.plan())
                    mx.eval(self._storage.written())
                case Finish():
                    self._finish(*self._unfinished.popleft())
                case Resize(needed, shrink):
                    self._wait()
                    resize = self._storage.shrink if shrink else self._storage.grow
                    resize(*needed)
                case Get() | Put() as asked:
                    self._wait()
                    link.send(saved.answer(self._storage, asked))
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
        passed = self._forward.run(ids, plan, read=bool(step.reads))
        self._wait()
        outputs = passed.ahead or _outputs(passed)
        mx.async_eval(*outputs, *self._storage.written())
        self._under_way = [*(passed.ahead[:1] or outputs)]  # not until the next stage has it
        if not passed.ahead:
            self._read(step, passed)
        elif passed.hidden is not None:
            self._unfinished.append((step, passed))

    def _finish(self, step: Step, passed: Passed) -> None:
        """What comes after the last stage, here where the head is."""
        mx.async_eval(*_outputs(passed))
        self._read(step, passed)

    def _read(self, step: Step, passed: Passed) -> None:
        if passed.hidden is not None:
            for first, n in step.reads:
                mx.eval(self._forward.logits(passed.hidden[first : first + n]))

    def _wait(self) -> None:
        """Until nothing is under way, which would hold the cache's arrays."""
        if self._under_way:
            mx.eval(self._under_way)
            self._under_way = []


def _outputs(passed: Passed) -> tuple[mx.array, ...]:
    return tuple(x for x in (passed.logits, passed.hidden) if x is not None)


def _meet(
    placement: Placement,
    connection: socket.socket,
    facts: Mapping[str, str],
    powers: Power | None = None,
) -> range | None:
    """Tell rank 0 who this is, and wait for all others. Raises ModelError.

    Returns the layers that this rank is to have, None for all.
    """
    host = socket.gethostname()
    write(connection, Hello(placement.key, placement.rank, host, dict(facts), powers))
    # Rank 0 waits so long itself, and then says whom it misses.
    connection.settimeout(placement.start_timeout_s + placement.timeout_s)
    try:
        answer = read(connection)
    except OSError as error:
        raise ModelError(f"rank 0 doesn't answer: {error}; see what it printed") from None
    match answer:
        case Welcome(layers):
            return None if layers is None else range(layers[0], sum(layers))
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
