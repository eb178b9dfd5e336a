from collections import Counter

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


def test_a_shared_page_is_free_when_the_last_holder_gives_it_back():
    pages = PageAllocator(1)
    pages.take(1)
    pages.share(0)
    pages.give([0])
    assert pages.free == 0
    pages.give([0])
    assert pages.free == 1
    with pytest.raises(InvariantError, match="page 0 is shared, and nobody has it"):
        pages.share(0)


def test_a_cached_page_is_idle_when_nobody_holds_it_and_held_again_when_shared():
    pages = PageAllocator(3)
    pages.take(2)
    pages.cache(0)
    assert not pages.idle
    pages.give([0, 1])
    assert (list(pages.idle), pages.free, pages.used, pages.available) == ([0], 2, 1, 3)
    pages.share(0)
    assert (list(pages.idle), pages.available) == ([], 2)
    pages.give([0])
    pages.uncache(0)
    assert (list(pages.idle), pages.free) == ([], 3)


def test_a_page_that_the_tree_lets_go_of_stays_with_its_holder():
    pages = PageAllocator(1)
    pages.take(1)
    pages.cache(0)
    pages.uncache(0)
    assert pages.free == 0
    pages.give([0])
    assert pages.free == 1


def test_idle_pages_lie_in_the_order_of_their_return_or_of_their_last_use():
    pages = PageAllocator(4)
    for page in pages.take(4):
        pages.cache(page)
    pages.give([2, 0, 3])
    assert list(pages.idle) == [2, 0, 3]
    pages.touch(2)
    pages.touch(1)  # held: nothing to do
    assert list(pages.idle) == [0, 3, 2]


def test_only_held_pages_are_cached_and_only_once():
    pages = PageAllocator(2)
    with pytest.raises(InvariantError, match="page 0 can't be cached"):
        pages.cache(0)
    pages.take(1)
    pages.cache(0)
    with pytest.raises(InvariantError, match="page 0 can't be cached"):
        pages.cache(0)
    with pytest.raises(InvariantError, match="page 1 isn't cached"):
        pages.uncache(1)


def test_pages_that_pins_alone_hold_are_counted():
    pages = PageAllocator(3)
    pages.take(2)
    pages.pin(0)
    assert pages.pinned == 0  # somebody else holds it too
    pages.give([0])
    assert pages.pinned == 1
    pages.pin(0)
    pages.pin(1)
    assert pages.pinned == 1
    pages.share(0)
    assert pages.pinned == 0
    held, pins = Counter({0: 3, 1: 2}), Counter({0: 2, 1: 1})
    pages.check(held, Counter(), pins)
    with pytest.raises(InvariantError, match="held by pins alone"):
        pages.check(held, Counter(), Counter({0: 2}))
    pages.unpin([1])
    pages.give([0])
    assert pages.pinned == 1
    pages.unpin([0, 0])
    assert (pages.pinned, pages.free) == (0, 2)


def test_check_counts_holders_and_cached_pages():
    pages = PageAllocator(4)
    pages.take(3)
    pages.share(1)
    pages.cache(2)
    pages.give([2])
    held = Counter({0: 1, 1: 2})
    pages.check(held, Counter({2: 1}))
    with pytest.raises(InvariantError, match=r"the holders of pages \[1\] don't add up"):
        pages.check(Counter({0: 1, 1: 1}), Counter({2: 1}))
    with pytest.raises(InvariantError, match=r"the holders of pages \[0\] don't add up"):
        pages.check(Counter({1: 2}), Counter({2: 1}))
    with pytest.raises(InvariantError, match="the tree has 0 pages, not 1"):
        pages.check(held, Counter())
    with pytest.raises(InvariantError, match="the tree has 1 pages, not 1"):
        pages.check(held, Counter({2: 2}))
