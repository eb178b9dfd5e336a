"""What a plan's copies, and pages from a file, become in each group's arrays."""

from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest

from mlxserve.cache.groups import group_layers
from mlxserve.cache.spec import FullKV, WindowKV
from mlxserve.cache.storage import Storage
from mlxserve.kernels import registry
from mlxserve.sequence import NO_PAGE, Load, Seal, StepPlan

PAGES = 8


def test_only_pages_that_are_written_are_moved():
    """What the tree has already isn't sealed again, in that group."""
    groups = group_layers([FullKV(1, 4), WindowKV(1, 4, 9)], page_tokens=4)
    storage = Storage(groups, mx.float32, hot_pages=8, pool_pages=(8, 8))
    storage.prepare(StepPlan((), (Seal(2, (5, NO_PAGE)), Seal(3, (NO_PAGE, NO_PAGE)))))
    assert [moves.tolist() for moves in storage.moves] == [[[2, 5]], []]


def test_of_a_files_pages_each_goes_to_its_own_place_or_nowhere():
    """Those that follow each other are copied together; the tree has the second and fourth."""
    storage = Storage(
        group_layers([FullKV(1, 4)], page_tokens=4), mx.float32, hot_pages=1, pool_pages=(PAGES,)
    )
    keys = np.broadcast_to(np.arange(1, 7, dtype=np.float32)[:, None, None, None], (6, 1, 4, 4))
    for name, times in (("k", 1), ("v", 10)):
        storage.put(0, name, [3, NO_PAGE, 4, NO_PAGE, 0, 1], keys * times)
        found = storage.get(0, name, range(PAGES))
        assert found[:, 0, 0, 0].tolist() == [5 * times, 6 * times, 0, times, 3 * times, 0, 0, 0]


@pytest.mark.parametrize("given", [
    np.zeros((1, 1, 4, 4), np.float32), np.zeros((2, 1, 4, 1), np.float32),
    np.zeros((2, 1, 4, 4), np.uint16), np.zeros((2, 1, 4, 4), np.float16),
], ids=lambda given: f"{given.dtype} {given.shape}")  # fmt: skip
def test_pages_of_another_form_are_refused(given):
    """MLX would cast them, or write one number everywhere."""
    storage = Storage(
        group_layers([FullKV(1, 4)], page_tokens=4), mx.float32, hot_pages=1, pool_pages=(PAGES,)
    )
    with pytest.raises(ValueError, match="k of layer 0 is given as "):
        storage.put(0, "k", [3, 4], given)
    assert not storage.get(0, "k", [3, 4]).any()


def write(storage: Storage) -> None:
    token = mx.ones((1, 8, 64))
    storage.write(0, mx.array([3], mx.int32), token, token)


def load(storage: Storage) -> None:
    storage.prepare(StepPlan((), loads=(Load((2,), 1),)))


def put(storage: Storage) -> None:
    page = np.ones((1, 8, 64, 64), np.float32)
    storage.put(0, "k", [2], page)
    storage.put(0, "v", [2], page)


def grow(storage: Storage) -> None:
    storage.grow(2 * PAGES, 2 * PAGES, 1)


CHANGES: list[Callable[[Storage], None]] = [write, load, put, grow]
recorded = pytest.mark.skipif(
    registry.recorder() is None, reason="only on machines with native kernels: nothing is recorded"
)


@recorded
@pytest.mark.parametrize("change", CHANGES)
def test_no_array_is_kept_that_another_took_the_place_of(change):
    """A recorded step was given them all; the next one is given those that are there then."""
    storage = Storage(
        group_layers([FullKV(8, 64)]), mx.float32, hot_pages=2 * PAGES, pool_pages=(2 * PAGES,)
    )
    others = mx.get_active_memory() - storage.nbytes
    storage.state(registry.recorder())
    change(storage)
    mx.eval(storage.arrays())
    smallest = min(array.nbytes for array in storage.arrays())
    assert mx.get_active_memory() - storage.nbytes - others < smallest // 2


def every_rule() -> None:
    """All of these tests, for those that ask whether a mutant would be seen."""
    test_only_pages_that_are_written_are_moved()
    test_of_a_files_pages_each_goes_to_its_own_place_or_nowhere()
    for change in CHANGES:
        test_no_array_is_kept_that_another_took_the_place_of(change)
