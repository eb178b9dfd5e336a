import pytest

from mlxserve.cache.allocator import PageAllocator
from mlxserve.errors import InvariantError


def test_lowest_ids_first_also_after_a_return():
    pages = PageAllocator(5)
    assert pages.take(3) == [0, 1, 2]
    pages.give([1])
    assert pages.take(2) == [1, 3]
    assert (pages.free, pages.used) == (1, 4)


def test_taking_too_many_and_freeing_twice_are_caught():
    pages = PageAllocator(2)
    ids = pages.take(2)
    with pytest.raises(InvariantError, match="1 pages asked for, 0 of 2 are free"):
        pages.take(1)
    pages.give(ids)
    with pytest.raises(InvariantError, match="page 0 was freed twice"):
        pages.give([0])


def test_check_finds_lost_and_shared_pages():
    pages = PageAllocator(4)
    pages.take(2)
    pages.check([0, 1])
    with pytest.raises(InvariantError):
        pages.check([0])
    with pytest.raises(InvariantError, match="two owners"):
        pages.check([0, 1, 1])
