"""What `benchmarks.distributed` makes of times, with made-up ones."""

import pytest

from benchmarks import distributed
from benchmarks.distributed import HALVED_BYTES, SUMS, Measured, Times
from mlxserve.distributed import cost


def test_a_link_is_found_again_in_the_times_of_its_sums():
    halves = cost.Link("made-up", 0.5e-3, 40e6)
    true = Measured("made-up", 0.2e-3, 100e6, large=halves, wait_share=0.1)
    times = Times()
    for count, work in SUMS:
        work_s = work * 0.2e-3
        times.add((count, work, "work"), work_s)
        sum_s = cost.gather_s(true, 2, count) + true.wait_share * work_s
        times.add((count, work, "sum"), sum_s)
    found = distributed.fit("made-up", times)
    for count in (1000, 40_000, HALVED_BYTES, 1 << 22):
        assert cost.gather_s(found, 2, count) == pytest.approx(cost.gather_s(true, 2, count))
    assert found.latency_s == pytest.approx(true.latency_s)
    assert found.wait_share == pytest.approx(true.wait_share)


def test_no_coefficient_is_below_zero():
    """Times that fall with the bytes, which no link's do."""
    times = Times()
    for count, work in SUMS:
        times.add((count, work, "work"), work * 0.2e-3)
        times.add((count, work, "sum"), 1e-3 - 1e-10 * count)
    found = distributed.fit("made-up", times)
    for link in (found, found.large):
        assert link.latency_s >= 0
        assert link.bytes_per_s > 0
    assert found.wait_share >= 0
