"""The cost model, against figures made by hand, and against the bytes that ranks really send."""

import time

import pytest

from mlxserve.distributed import cost
from mlxserve.distributed.addresses import LOOPBACK, free_ports
from mlxserve.distributed.cost import Link, Sent
from tests.distributed import forward
from tests.support import ranks
from tests.support.model_dir import write_weights
from tests.support.proxy import Proxy
from tests.support.tiny import prompt, tiny_llama

MS = 1e-3
RING = Link("ring", latency_s=1 * MS, bytes_per_s=1e6)
MESH = Link("mesh", latency_s=1 * MS, bytes_per_s=1e6, mesh=True)
SLOW_CALLS = Link("calls", latency_s=1 * MS, bytes_per_s=1e6, call_s=10 * MS)
SIZES = {"layers": 2, "width": 100, "vocabulary": 1001, "itemsize": 2}


@pytest.mark.parametrize(
    ("link", "hosts", "count", "ms"),
    [
        (RING, 1, 1000, 0),
        (RING, 2, 1000, 1 + 1),
        (RING, 3, 1000, 2 * (1 + 1)),  # on to the next, and to the one after
        (RING, 4, 1000, 3 * (1 + 1)),
        (MESH, 2, 1000, 1 + 1),
        (MESH, 4, 1000, 1 + 1),  # three cables at once
        (SLOW_CALLS, 2, 1000, 10 + 1 + 1),
        (SLOW_CALLS, 3, 1000, 10 + 2 * (1 + 1)),
    ],
)
def test_a_gather(link, hosts, count, ms):
    assert cost.gather_s(link, hosts, count) == pytest.approx(ms * MS)


def test_a_step_of_tensor_parallel_that_decodes():
    sums = 5 * (1 + 0.2)  # 200 bytes, two layers and the embedding
    ids = 1 + 0.004
    logits = 1 + 1.002  # 501 ids of the vocabulary
    sent = Sent(**SIZES, tokens=1, rows=1)
    assert cost.tensor_sent_s(RING, 2, sent) == pytest.approx((sums + ids + logits) * MS)
    assert cost.tensor_s(RING, sent, [3 * MS, 4 * MS]) == pytest.approx(
        (4 + sums + ids + logits) * MS
    )
    assert cost.tensor_s(RING, sent, [4 * MS]) == pytest.approx(4 * MS)


@pytest.mark.parametrize("rows", [0, 1])
def test_a_step_of_tensor_parallel_that_reads_a_prompt(rows):
    sums = 5 * (1 + 80)  # 80,000 bytes
    plan = 1 + 1.6
    logits = rows * (1 + 1.002)
    sent = Sent(**SIZES, tokens=400, rows=rows)
    assert cost.tensor_sent_s(RING, 2, sent) == pytest.approx((sums + plan + logits) * MS)


def test_a_pipeline():
    sent = Sent(**SIZES, tokens=10, rows=10)  # 2,000 bytes
    assert cost.pipeline_s(RING, sent, [5 * MS]) == pytest.approx(5 * MS)
    way = 5 + 7 + 2 * (1 + 2)
    assert cost.pipeline_s(RING, sent, [5 * MS, 7 * MS]) == pytest.approx(way * MS)
    way = 5 + 7 + 2 * (1 + 1)
    assert cost.pipeline_s(RING, sent, [5 * MS, 7 * MS], 2) == pytest.approx(way * MS)
    # Enough parts keep the slowest host busy all the time.
    assert cost.pipeline_s(RING, sent, [5 * MS, 7 * MS], 4) == pytest.approx(4 * 7 * MS)


def test_links_are_ordered_as_people_know_them():
    took = [cost.gather_s(link, 2, 1 << 20) for link in cost.LINKS.values()]
    assert list(cost.LINKS) == ["ethernet", "10g", "thunderbolt", "rdma"]
    assert took == sorted(took, reverse=True)


@pytest.mark.parametrize("tokens", [8, 200])
def test_two_ranks_send_as_many_bytes_as_it_says(tmp_path, tokens):
    """A byte takes a second here, and each way has the same ones."""
    tiny = tiny_llama(vocab_size=128)
    path = write_weights(tmp_path / "model", tiny)
    sent = Sent(
        layers=tiny.config["num_hidden_layers"],
        width=tiny.config["hidden_size"],
        vocabulary=128,
        itemsize=4,
        tokens=tokens,
        rows=tokens,
    )
    bytes_alone = Link("bytes", latency_s=0.0, bytes_per_s=1.0)
    ids = cost.gather_s(bytes_alone, 2, cost.ID_BYTES * tokens)  # the engine's, which isn't here
    expected = 2 * (cost.tensor_sent_s(bytes_alone, 2, sent) - ids)
    own = free_ports([LOOPBACK] * 2)
    with Proxy(own[0]) as to_0, Proxy(own[1]) as to_1:
        ports = [own[0], to_1.port], [to_0.port, own[1]]
        given = [(str(path), None)], [int(i) for i in prompt(tokens)], str(tmp_path)
        ranks.run(2, forward.logits, *given, timeout_s=120, ports=ports)
        until = time.monotonic() + 5
        while to_0.passed_bytes + to_1.passed_bytes < expected and time.monotonic() < until:
            time.sleep(0.01)
        assert to_0.passed_bytes + to_1.passed_bytes == expected
