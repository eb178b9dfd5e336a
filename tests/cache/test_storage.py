"""What a plan's copies become for each group's arrays."""

import mlx.core as mx

from mlxserve.cache.groups import group_layers
from mlxserve.cache.spec import FullKV, WindowKV
from mlxserve.cache.storage import Storage
from mlxserve.sequence import NO_PAGE, Seal, StepPlan


def test_only_pages_that_are_written_are_moved():
    """What the tree has already isn't sealed again, in that group."""
    groups = group_layers([FullKV(1, 4), WindowKV(1, 4, 9)], page_tokens=4)
    storage = Storage(groups, mx.float32, hot_pages=8, pool_pages=(8, 8))
    storage.prepare(StepPlan((), (Seal(2, (5, NO_PAGE)), Seal(3, (NO_PAGE, NO_PAGE)))))
    assert [moves.tolist() for moves in storage.moves] == [[[2, 5]], []]
