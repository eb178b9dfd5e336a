"""Counts of values by size, against counting them."""

from hypothesis import given
from hypothesis import strategies as st

from mlxserve.histogram import Histogram

BOUNDS = (0.5, 1.0, 4.0)


@given(st.lists(st.sampled_from([0.0, 0.5, 0.6, 1.0, 3.0, 4.0, 4.5, 1e9])))
def test_a_value_is_in_the_first_bucket_that_reaches_it(values):
    histogram = Histogram(BOUNDS)
    for value in values:
        histogram.observe(value)
    found = histogram.snapshot()
    for i, bound in enumerate(BOUNDS):
        assert sum(found.counts[: i + 1]) == sum(value <= bound for value in values)
    assert sum(found.counts) == len(values)
    assert found.sum == sum(values)


def test_a_snapshot_stays_as_it_was():
    histogram = Histogram(BOUNDS)
    before = histogram.snapshot()
    histogram.observe(2.0)
    assert before.counts == (0, 0, 0, 0)
    assert histogram.snapshot().counts == (0, 0, 1, 0)
