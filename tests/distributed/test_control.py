"""What ranks say to each other: plans there and back, signs of life, and who may take part."""

import socket
import struct
import threading
import time

import mlx.core as mx
import numpy as np
import pytest

from mlxserve import config
from mlxserve.cache.batch import BatchView
from mlxserve.cache.groups import group_layers
from mlxserve.cache.spec import FullKV, WindowKV
from mlxserve.cache.storage import Storage
from mlxserve.config import EngineConfig, Placement
from mlxserve.device import Pressure
from mlxserve.distributed import follower, leader
from mlxserve.distributed.link import MAX_MESSAGE_BYTES, Link, read, write
from mlxserve.distributed.messages import (
    Get,
    Hello,
    Ping,
    Resize,
    Sizes,
    Step,
    Stop,
    decode,
    encode,
)
from mlxserve.errors import ModelError, PeerLost, RequestError
from mlxserve.memory import CachePlan
from mlxserve.opening import open_model
from mlxserve.sequence import NO_PAGE, Chunk, Load, Seal, StepPlan
from mlxserve.sequence import Sequence as Seq
from mlxserve.types import Request, SamplingParams
from tests.support.model_dir import write_model_dir
from tests.support.proxy import Proxy
from tests.support.serving import wait_until
from tests.support.tiny import tiny_llama

FACTS = {"mlxserve": "1", "model": "abc"}
WAIT_S = 20


def plan():
    """A decode row of 150 tokens whose window forgot a page, and a chunk across a border."""
    request = Request(id="r", prompt_ids=(1, 2), params=SamplingParams())
    old = Seq.start(request, 1000, 0.0)
    old.hot, old.sealed, old.tables, old.dropped = [3], 2, [[4, 1], [NO_PAGE, 2]], [0, 1]
    new = Seq.start(request, 1000, 0.0)
    new.hot, new.tables, new.dropped, new.slot = [5, 0], [[0], [0]], [0, 0], 7
    return StepPlan(
        chunks=(Chunk(old, 150, 1, True, (3,)), Chunk(new, 60, 9, False, (5, 0))),
        seals=(Seal(5, (0, 0)), Seal(1, (2, NO_PAGE))),
        loads=(Load((1, 2), 5),),
        states=((1, 7),),
    )


def test_a_plan_arrives_as_it_was():
    made = plan()
    step = decode(encode(Step.of(made, [1, 2], [(0, 5)])))
    assert (step.ids, step.reads) == ([1, 2], [(0, 5)])
    arrived = step.plan()
    for name in ("seals", "loads", "states"):
        assert getattr(arrived, name) == getattr(made, name)
    groups = group_layers([FullKV(1, 8), WindowKV(1, 8, 70)])
    storage = Storage(groups, mx.float32, hot_pages=8, pool_pages=(8, 8), slots=8)
    for ours, theirs in zip(
        BatchView(storage, made).arrays, BatchView(storage, arrived).arrays, strict=True
    ):
        np.testing.assert_array_equal(np.array(ours), np.array(theirs))
    assert [chunk.samples for chunk in arrived.chunks] == [True, False]
    assert arrived.chunks[1].seq.slot == 7


@pytest.fixture
def sockets():
    a, b = socket.socketpair()
    yield a, b
    a.close()
    b.close()


class Losses:
    """What a link says of its loss."""

    def __init__(self) -> None:
        self.reasons: list[str] = []
        self._heard = threading.Event()

    def __call__(self, reason: str) -> None:
        self.reasons.append(reason)
        self._heard.set()

    def wait(self) -> str:
        assert self._heard.wait(WAIT_S)
        return self.reasons[0]


def test_messages_come_in_order_and_signs_of_life_keep_a_link(sockets):
    lost = Losses()
    links = [Link(end, f"rank {i}", 1.0, lost) for i, end in enumerate(sockets)]
    time.sleep(2.0)
    sent = [Resize([1, 2]), Sizes(8, (16,), 1, "float32"), Step.of(plan(), None)]
    for message in sent:
        links[0].send(message)
    assert [links[1].received.get(timeout=WAIT_S) for _ in sent] == sent
    links[0].close()
    assert isinstance(links[1].received.get(timeout=WAIT_S), Stop)
    assert lost.reasons == []


def test_a_rank_that_would_compute_in_another_type_is_named(sockets):
    """Or what it sends would be read as other numbers."""
    first = leader.Leader(Placement(rank=0, size=2, tensor=1, control=("127.0.0.1", 1), key="k"))
    first._links.append(Link(sockets[0], "rank 1 (mini)", WAIT_S, first._on_loss))
    write(sockets[1], Sizes(20, (90, 200), 5, "float16"))
    expected = r"rank 1 \(mini\) computes in float16, and rank 0 in bfloat16"
    with pytest.raises(ModelError, match=expected):
        first.agree(CachePlan(30, (100, 100), 4), "bfloat16")
    first.close()


def test_rank_0_heeds_the_memory_of_all_machines(sockets):
    """A link's signs of life say how short of it the other end is."""
    lost, level = Losses(), [Pressure.NORMAL]
    first = leader.Leader(Placement(rank=0, size=2, tensor=2, control=("127.0.0.1", 1), key="k"))
    first._links.append(Link(sockets[0], "rank 1", 1.0, lost))
    other = Link(sockets[1], "rank 0", 1.0, lost, lambda: level[0])
    own = [Pressure.NORMAL]
    signal = first.signal(lambda: own[0])
    assert signal() == first.signal(None)() == Pressure.NORMAL
    level[0] = Pressure.WARNING
    wait_until(lambda: signal() == Pressure.WARNING, "it was told")
    own[0] = Pressure.CRITICAL
    assert signal() == Pressure.CRITICAL
    other.close()
    first.close()


def test_one_that_hangs_up_without_a_word_is_lost(sockets):
    lost = Losses()
    link = Link(sockets[0], "rank 1 (mini)", 60, lost)
    sockets[1].close()
    assert lost.wait() == "rank 1 (mini) is lost: it closed the connection"
    with pytest.raises(PeerLost, match=r"rank 1 \(mini\) is lost"):
        list(map(link.send, [Ping()] * 3))  # the system may take one more
    assert len(lost.reasons) == 1


def test_one_that_ends_says_why_to_the_other(sockets):
    lost = Losses()
    links = [Link(end, f"rank {i}", 60, lost) for i, end in enumerate(sockets)]
    links[0].close("rank 2 (mini) is lost")
    assert lost.wait() == "rank 1 ends: rank 2 (mini) is lost"
    assert len(lost.reasons) == 1


def test_one_that_is_silent_is_lost(sockets):
    lost = Losses()
    Link(sockets[0], "rank 1", 0.2, lost)
    assert lost.wait() == "rank 1 is lost: no sign of life for 0.2 s"


@pytest.mark.parametrize(("data", "reason"), [
    (struct.pack("!I", MAX_MESSAGE_BYTES + 1), "a message of 67108865 bytes"),
    (struct.pack("!I", 4) + b"\xc1\xc1\xc1\xc1", "MessagePack data is malformed"),
    (struct.pack("!I", 1) + b"\x01", "Expected `object`, got `int`"),
])  # fmt: skip
def test_what_is_no_message_ends_a_link(sockets, data, reason):
    lost = Losses()
    Link(sockets[0], "rank 1", 60, lost)
    sockets[1].sendall(data)
    assert reason in lost.wait()


@pytest.fixture
def place():
    """Placements of a group of so many ranks."""
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]

    def placements(size, **options):
        shared = {"control": ("127.0.0.1", port), "key": "k" * 32, "start_timeout_s": WAIT_S}
        shared["fetch_timeout_s"] = WAIT_S
        options = {"tensor": size, **options}
        return [Placement(rank=rank, size=size, **shared | options) for rank in range(size)]

    return placements


def meets(placement, facts=FACTS):
    """Another rank's first words, on a thread; what becomes of it is put into the list."""
    outcome = []

    def run():
        try:
            connection = follower._connect(placement)
            outcome.append(follower._meet(placement, connection, facts))
        except ModelError as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, outcome


def test_all_ranks_meet(place):
    first, *others = place(3)
    threads = [meets(other) for other in reversed(others)]
    arrived = leader._arrivals(first, FACTS)
    assert sorted(arrived) == [1, 2]
    assert {hello.rank for _, hello in arrived.values()} == {1, 2}
    for connection, _ in arrived.values():
        write(connection, Stop())  # no welcome, so they go
        connection.close()
    for thread, outcome in threads:
        thread.join(WAIT_S)
        assert isinstance(outcome[0], ModelError)


@pytest.mark.parametrize(("change", "reason"), [
    ({"facts": FACTS | {"mlxserve": "2"}}, "has mlxserve 2, and rank 0 has 1; make them the same"),
    ({"facts": {"mlxserve": "1"}}, "has model None, and rank 0 has abc"),
    ({"rank": 3}, "is none of 1 to 2"),
])  # fmt: skip
def test_a_rank_that_differs_is_refused_by_name_on_both_sides(place, change, reason):
    first, second, _ = place(3)
    changed = Placement(
        rank=change.get("rank", 1), size=3, tensor=3, control=second.control, key=second.key,
        start_timeout_s=WAIT_S,
    )  # fmt: skip
    thread, outcome = meets(changed, change.get("facts", FACTS))
    with pytest.raises(ModelError, match=reason):
        leader._arrivals(first, FACTS)
    thread.join(WAIT_S)
    assert reason in str(outcome[0])


def test_a_rank_that_comes_twice_ends_it_for_all(place):
    first, second, _ = place(3)
    both = [meets(second), meets(second)]
    with pytest.raises(ModelError, match=r"rank 1 \(.*\) came twice; is it named twice"):
        leader._arrivals(first, FACTS)
    for thread, outcome in both:
        thread.join(WAIT_S)
        assert "came twice" in str(outcome[0])


def test_one_that_is_missing_is_named_after_a_while(place):
    first, second, _ = place(3, start_timeout_s=3)
    thread, outcome = meets(second)
    with pytest.raises(ModelError, match="rank 2 of 3 did not come within 3 s"):
        leader._arrivals(first, FACTS)
    thread.join(WAIT_S)
    assert "rank 2 of 3" in str(outcome[0])


def test_strangers_are_hung_up_on(place):
    """One without the key, one that talks of other things, one that says nothing."""
    first, second = place(2, timeout_s=2)
    heard = []

    def strangers():
        for words in (Hello("wrong", 1, "stranger", dict(FACTS)), Ping(), None):
            connection = follower._connect(second)
            if words is not None:
                write(connection, words)
            connection.settimeout(WAIT_S)
            try:
                heard.append(connection.recv(1))
            except ConnectionError:
                heard.append(b"")
        meets(second)

    threading.Thread(target=strangers, daemon=True).start()
    arrived = leader._arrivals(first, FACTS)
    assert list(arrived) == [1]
    assert heard == [b""] * 3
    for connection, _ in arrived.values():
        connection.close()


@pytest.mark.parametrize("settings", [{"kv_bits": 8}, {"max_kv_size": 100}, {"max_batch": 3}])
def test_ranks_with_other_settings_are_told_apart(tiny_model_dir, settings):
    first = open_model(tiny_model_dir, EngineConfig()).facts()
    second = open_model(tiny_model_dir, EngineConfig(**settings)).facts()
    hello = Hello("k", 1, "mini", second)
    placement = Placement(rank=0, size=2, tensor=2, control=("127.0.0.1", 1), key="k")
    assert "rank 1 (mini) has settings" in leader._problem(hello, placement, first, {})


def test_ranks_with_another_model_are_told_apart(tiny_model_dir, tmp_path):
    other = write_model_dir(tmp_path, tiny_llama(seed=1, vocab_size=260, eos_token_id=256))
    first, second = (open_model(path, EngineConfig()).facts() for path in (tiny_model_dir, other))
    assert first["model"] != second["model"]


def test_one_whose_link_is_frozen_is_missed(place):
    """Its connection stands, and nothing comes."""
    first, second = place(2, start_timeout_s=3, timeout_s=1)
    with Proxy(first.control[1]) as proxy:
        proxy.freeze()
        behind = Placement(
            rank=1, size=2, tensor=2, control=("127.0.0.1", proxy.port), key=second.key,
            start_timeout_s=3, timeout_s=1,
        )  # fmt: skip
        thread, outcome = meets(behind)
        with pytest.raises(ModelError, match="rank 1 of 2 did not come within 3 s"):
            leader._arrivals(first, FACTS)
        thread.join(WAIT_S)
        assert "rank 0 doesn't answer" in str(outcome[0])


def test_a_port_in_use_is_named(place):
    first, _ = place(2)
    with socket.create_server(first.control), pytest.raises(ModelError, match="can't be listened"):
        leader._arrivals(first, FACTS)


def test_rank_0_that_is_not_there_is_named(place):
    _, second = place(2, fetch_timeout_s=0.3)
    with pytest.raises(ModelError, match=r"rank 0 can't be reached at 127\.0\.0\.1:"):
        follower._connect(second)


def test_pages_are_those_that_all_have_memory_for(sockets):
    first = leader.Leader(
        Placement(rank=0, size=2, tensor=2, control=("127.0.0.1", 1), key="k", start_timeout_s=1)
    )
    first._links.append(Link(sockets[0], "rank 1", WAIT_S, first._on_loss))
    write(sockets[1], Sizes(20, (90, 200), 5, "float32"))
    assert first.agree(CachePlan(30, (100, 100), 4), "float32") == CachePlan(20, (90, 100), 4)
    while isinstance(told := read(sockets[1]), Ping):
        pass
    assert told == Sizes(20, (90, 100), 4, "float32")
    first.close()


def test_one_that_hangs_up_while_it_is_asked_is_named(sockets):
    first = leader.Leader(
        Placement(rank=0, size=2, tensor=2, control=("127.0.0.1", 1), key="k", start_timeout_s=1)
    )
    first._links.append(Link(sockets[0], "rank 1", WAIT_S, first._on_loss))
    asked = Get(3, "v.codes", [1, 2])

    def hang_up():
        assert read(sockets[1]) == asked
        sockets[1].close()

    threading.Thread(target=hang_up, daemon=True).start()
    try:
        with pytest.raises(PeerLost, match="rank 1 is lost: it closed the connection"):
            first._ask(1, asked)
    finally:
        first.close()  # or it would end this process


@pytest.mark.parametrize("text", ["abc", "nan", "-1", "0", "inf", "3601"])
def test_a_silence_that_is_no_time_is_refused_by_name(monkeypatch, text):
    told = {"RANK": "1", "RANKS": "2", "CONTROL": "127.0.0.1:1", "CONTROL_KEY": "k"}
    for name, value in (told | {"PEER_TIMEOUT_S": text}).items():
        monkeypatch.setenv(f"MLXSERVE_{name}", value)
    with pytest.raises(RequestError, match=f"^MLXSERVE_PEER_TIMEOUT_S is '{text}'; it must be"):
        config.placement()
