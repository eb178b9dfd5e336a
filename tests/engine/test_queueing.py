"""Which waiting sequence starts next: priorities, shares of tenants, age, and the cache."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxserve.engine.queueing import REMEMBERED_TENANTS, WaitingQueue
from mlxserve.errors import RequestError
from mlxserve.sequence import Sequence
from mlxserve.types import Request, SamplingParams


def sequence(name, tenant="", priority=0, at_s=0.0, prompt=4):
    request = Request(
        id=str(name),
        prompt_ids=(1,) * prompt,
        params=SamplingParams(),
        priority=priority,
        tenant=tenant,
    )
    return Sequence.start(request, 1 << 20, at_s)


def nothing_cached(seq):
    return 0


def start(queue, now_s=0.0, cached=nothing_cached):
    """Start the next one, as the scheduler does."""
    seq = queue.head(now_s, cached)
    assert seq in queue
    queue.start(seq, now_s)
    assert seq not in queue
    return seq


def start_all(queue, now_s=0.0, cached=nothing_cached):
    return [start(queue, now_s, cached).request.id for _ in range(len(queue))]


def test_alike_requests_start_in_order_of_arrival():
    queue = WaitingQueue()
    for name in "abc":
        queue.add(sequence(name))
    assert [seq.request.id for seq in queue] == list("abc")
    assert len(queue) == 3
    assert start_all(queue) == list("abc")
    assert queue.head(0.0, nothing_cached) is None


def test_looking_at_the_next_changes_nothing():
    queue = WaitingQueue()
    for name in "ab":
        queue.add(sequence(name, tenant=name))
    assert queue.head(0.0, nothing_cached) is queue.head(0.0, nothing_cached)
    assert len(queue) == 2


def test_a_smaller_priority_number_starts_first_whatever_its_tenant_had():
    queue = WaitingQueue()
    queue.add(sequence("batch", "idle", priority=1))
    queue.add(sequence("urgent", "busy", priority=-1))
    queue.add(sequence("usual", "busy"))
    queue.served("busy", 1_000_000)
    assert start_all(queue) == ["urgent", "usual", "batch"]


def test_preempted_ones_come_before_all_others_oldest_first():
    queue = WaitingQueue()
    queue.add(sequence("urgent", priority=-100))
    old, middle, young = (sequence(at, at_s=at) for at in (1.0, 2.0, 3.0))
    for seq in (middle, young, old):
        queue.add_front(seq)
    assert start_all(queue, now_s=100.0) == ["1.0", "2.0", "3.0", "urgent"]


def test_of_preempted_ones_submitted_together_the_one_preempted_last_comes_first():
    """The scheduler preempts the newest of its running sequences first."""
    queue = WaitingQueue()
    for name in "cba":
        queue.add_front(sequence(name))
    assert start_all(queue) == list("abc")


def test_under_prefix_most_cached_tokens_come_first_within_a_tenant():
    queue = WaitingQueue("prefix")
    cached = {"a": 0, "b": 64, "c": 128, "d": 64, "other": 1000}
    for name in "abcd":
        queue.add(sequence(name, "one"))
    queue.add(sequence("other", "two"))
    queue.served("two", 1)
    order = start_all(queue, cached=lambda seq: cached[seq.request.id])
    assert order == ["c", "b", "d", "a", "other"]


def test_under_fcfs_the_cache_is_not_asked():
    queue = WaitingQueue("fcfs")
    queue.add(sequence("a"))
    queue.add(sequence("b"))

    def never(seq):
        raise AssertionError("asked")

    assert start_all(queue, cached=never) == ["a", "b"]


def test_an_aborted_one_is_gone_and_may_not_be_taken_twice():
    queue = WaitingQueue()
    waiting, preempted = sequence("a"), sequence("b")
    queue.add(waiting)
    queue.add_front(preempted)
    for seq in (waiting, preempted):
        queue.remove(seq)
        assert seq not in queue
        with pytest.raises(KeyError):
            queue.remove(seq)
        with pytest.raises(KeyError):
            queue.start(seq, 0.0)
    assert len(queue) == 0
    assert list(queue) == []


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"policy": "lifo"}, "policy is 'lifo'; it must be 'fcfs' or 'prefix'"),
        ({"ageing_s": -1.0}, r"ageing_s is -1.0; it must be at least 0"),
        ({"ageing_s": math.nan}, "ageing_s is nan"),
    ],
)
def test_bad_settings_are_named(values, message):
    with pytest.raises(RequestError, match=message):
        WaitingQueue(**values)


# Nobody starves.


@settings(max_examples=60, deadline=None)
@given(
    policy=st.sampled_from(["fcfs", "prefix"]),
    older=st.lists(st.tuples(st.sampled_from("xyz"), st.integers(0, 2)), max_size=6),
    seed=st.integers(0, 2**32),
)
def test_a_waiting_one_starts_once_it_has_aged_whatever_comes_later(policy, older, seed):
    """One starts per second; later ones have better priorities, more in the cache, no tokens."""
    rng, ageing_s = random.Random(seed), 5.0
    queue = WaitingQueue(policy, ageing_s)
    for number, (tenant, priority) in enumerate(older):
        queue.add(sequence(number, tenant, priority))
    target = sequence("target", "poor", priority=50)
    queue.add(target)
    queue.served("poor", 10**9)
    cached = {id(target): 0}
    for now in range(1, 30):
        for number in range(3):
            better = sequence(f"{now}-{number}", rng.choice("abcxyz"), -5, at_s=now)
            cached[id(better)] = rng.randint(1, 100)
            queue.add(better)
        begun = start(queue, now, lambda seq: cached.get(id(seq), 0))
        queue.served(begun.request.tenant, 10)
        if begun is target:
            break
    # At once, but for the lines that waited as long.
    assert ageing_s < now <= ageing_s + 1 + len({*older})


@settings(max_examples=60, deadline=None)
@given(number=st.integers(1, 8), seed=st.integers(0, 2**32))
def test_every_one_of_a_line_starts_though_better_ones_of_its_own_line_keep_coming(number, seed):
    rng = random.Random(seed)
    queue = WaitingQueue("prefix", ageing_s=5.0)
    targets = [sequence(f"target {n}") for n in range(number)]
    for seq in targets:
        queue.add(seq)
    cached, begun = dict.fromkeys(targets, 0), []
    for now in range(1, 6 + number):
        for _ in range(2):
            better = sequence("better", at_s=now)
            cached[better] = rng.randint(1, 100)
            queue.add(better)
        begun.append(start(queue, now, cached.__getitem__))
    assert begun[-number:] == targets
    assert not set(begun[:-number]) & set(targets)


def test_a_flood_does_not_hold_up_others_by_its_age():
    """A thousand old requests of one tenant, or of a lower priority: a new one need not wait."""
    for flood, new in (
        ({"tenant": "flood"}, {"tenant": "light"}),
        ({"priority": 1}, {"priority": 0}),
    ):
        queue = WaitingQueue(ageing_s=10.0)
        for number in range(1000):
            queue.add(sequence(number, **flood))
        for now in range(100):
            queue.served(start(queue, now).request.tenant, 100)
        light = sequence("light", at_s=100.0, **new)
        queue.add(light)
        begun = []
        for n in range(2):
            begun.append(start(queue, 100.0 + n / 10))
            queue.served(begun[-1].request.tenant, 100)
        assert light in begun


# Fairness.


@pytest.mark.full
@settings(max_examples=60, deadline=None)
@given(
    longest=st.tuples(st.integers(1, 50), st.integers(1, 5000)),
    slots=st.integers(1, 6),
    seed=st.integers(0, 2**32),
)
def test_tenants_with_full_queues_get_equal_tokens(longest, slots, seed):
    """Within what their running requests, one per slot, still had to get when they started."""
    rng = random.Random(seed)
    queue = WaitingQueue(ageing_s=math.inf)
    most, served, running = dict(zip("ab", longest, strict=True)), {"a": 0, "b": 0}, []
    for tenant in "aaabbb":
        queue.add(sequence("first", tenant))
    for _ in range(300):
        while len(running) < slots:
            tenant = start(queue).request.tenant
            running.append([tenant, rng.randint(1, most[tenant])])
            queue.add(sequence("next", tenant))
        for row in running:
            tokens = min(row[1], rng.choice([1, 1, 100]))
            queue.served(row[0], tokens)
            served[row[0]] += tokens
            row[1] -= tokens
        running = [row for row in running if row[1]]
        assert abs(served["a"] - served["b"]) <= slots * max(longest)


def test_idle_time_is_no_credit():
    queue = WaitingQueue()
    for number in range(100):
        queue.add(sequence(number, "busy"))
        queue.add(sequence(number, "also busy"))
    for _ in range(50):
        queue.served(start(queue).request.tenant, 1000)
    for number in range(30):
        queue.add(sequence(number, "idle"))
    begun = []
    for _ in range(30):
        begun.append(start(queue).request.tenant)
        queue.served(begun[-1], 1000)
    assert {tenant: begun.count(tenant) for tenant in begun} == {
        "idle": 10,
        "busy": 10,
        "also busy": 10,
    }


def test_a_tenant_with_one_long_request_at_a_time_gets_no_more_than_its_share():
    """It waits for nothing while it runs; what it got meanwhile is not forgotten."""
    queue = WaitingQueue(ageing_s=math.inf)
    served = {"single": 0, "many": 0}
    queue.add(sequence("long", "single"))
    for number in range(3000):
        queue.add(sequence(number, "many"))
    while served["many"] < 20_000:
        seq = start(queue)
        tenant = seq.request.tenant
        tokens = 1000 if tenant == "single" else 10
        queue.served(tenant, tokens)
        served[tenant] += tokens
        if tenant == "single":
            queue.add(sequence("long", "single"))
    assert abs(served["single"] - served["many"]) <= 1000


@pytest.mark.parametrize("contended", [False, True])
def test_shares_start_afresh_when_nobody_waits(contended):
    queue = WaitingQueue()
    if contended:
        queue.add(sequence("before", "other"))
    queue.served("early", 1_000_000)
    if contended:
        start(queue)
    for number in range(2):
        queue.add(sequence(f"late {number}", "late"))
        queue.add(sequence(f"early {number}", "early"))
    begun = []
    for _ in range(4):
        seq = start(queue)
        begun.append(seq.request.id)
        queue.served(seq.request.tenant, 10)
    assert begun == ["late 0", "early 0", "late 1", "early 1"]


def test_tenants_long_gone_are_forgotten():
    """Names come from outside: what is kept of them is bounded."""

    def debt_is_known(others):
        queue = WaitingQueue()
        queue.add(sequence("waits", "waits", priority=1))
        for tenant in ["old", *(f"tenant {n}" for n in range(others))]:
            queue.served(tenant, 100)
        queue.add(sequence("fresh", "fresh"))
        queue.add(sequence("old", "old"))
        queue.served("fresh", 50)
        return start(queue).request.id == "fresh"

    assert debt_is_known(REMEMBERED_TENANTS - 1)
    assert not debt_is_known(REMEMBERED_TENANTS)


@settings(max_examples=60, deadline=None)
@given(
    policy=st.sampled_from(["fcfs", "prefix"]),
    ageing_s=st.sampled_from([0.0, 3.0, math.inf]),
    seed=st.integers(0, 2**32),
)
def test_whatever_happens_each_one_leaves_once(policy, ageing_s, seed):
    """Against a plain set: random arrivals, starts, preemptions and aborts."""
    rng = random.Random(seed)
    queue, waiting, running = WaitingQueue(policy, ageing_s), set(), []
    for now in range(200):
        match rng.randrange(5):
            case 0 | 1:
                seq = sequence(now, rng.choice("abc"), rng.randint(-1, 1), float(now))
                queue.add(seq)
                waiting.add(seq)
            case 2 if waiting:
                seq = start(queue, now, lambda seq: len(seq.request.id))
                waiting.remove(seq)
                running.append(seq)
            case 3 if running:
                seq = running.pop(rng.randrange(len(running)))
                queue.add_front(seq)
                waiting.add(seq)
            case 4 if waiting:
                seq = rng.choice(sorted(waiting, key=lambda seq: seq.submitted_s))
                queue.remove(seq)
                waiting.remove(seq)
        queue.served(rng.choice("abcd"), rng.randint(1, 100))
        assert set(queue) == waiting
        assert len(queue) == len(waiting)
        assert all(seq in queue for seq in waiting)
        assert not any(seq in queue for seq in running)
        assert (queue.head(now, nothing_cached) is None) == (not waiting)
