"""How much of a prompt is found in the cache, and what is kept for it. Pages of 4 tokens."""

import pytest

from mlxserve.cache.groups import group_layers
from mlxserve.cache.manager import CacheManager
from mlxserve.cache.prefix import PrefixTree
from mlxserve.cache.spec import FullKV, KVBits, WindowKV
from mlxserve.engine.scheduler import Scheduler
from mlxserve.sequence import Sequence
from mlxserve.types import Request, SamplingParams
from tests.support.schedules import PaperEngine

P = 4
TEXT = tuple(range(10, 40))


class Cache:
    """An engine that computes one request after another."""

    def __init__(self, pages=40, specs=None, *, packed=False, step_tokens=100):
        groups = group_layers(
            specs or (FullKV(1, 4),), KVBits(8, 8) if packed else KVBits(), page_tokens=P
        )
        manager = CacheManager(groups, hot_pages=20, pool_pages=[pages] * len(groups))
        self.engine = PaperEngine(Scheduler(manager, 4, step_tokens), lambda ids: 5)
        self.pool = manager.pools[0]

    def start(self, ids, new=1, tenant=""):
        params = SamplingParams(max_tokens=new)
        request = Request(id="r", prompt_ids=tuple(ids), params=params, tenant=tenant)
        seq = Sequence.start(request, 100, 0.0)
        self.engine.scheduler.add(seq)
        return seq

    def ask(self, ids, new=1, tenant=""):
        """Compute it to the end. Returns how many of its tokens were found."""
        seq = self.start(ids, new, tenant)
        self.engine.drain()
        return seq.cached


@pytest.mark.parametrize("n", [1, 3, 4, 5, 8, 9, 15])
def test_all_but_the_last_token_of_a_prompt_is_found_again(n):
    cache = Cache()
    assert cache.ask(TEXT[:n]) == 0
    assert cache.ask(TEXT[:n]) == n - 1


@pytest.mark.parametrize("step_tokens", [4, 8, 100])
def test_where_a_prompt_diverges_is_told_whatever_the_steps_it_is_computed_in(step_tokens):
    cache = Cache(step_tokens=step_tokens)

    def diverged_at(ids):
        seq = cache.start(ids)
        cache.engine.drain()
        return seq.usage().diverged_at

    assert diverged_at(TEXT[:20]) == 0
    assert diverged_at(TEXT[:20]) is None
    assert diverged_at((*TEXT[:6], *range(50, 65))) == 6
    assert diverged_at(range(70, 90)) == 0


@pytest.mark.parametrize("new", [1, 2, 3, 4, 5])
def test_an_answer_is_found_but_for_its_last_token_wherever_it_ends(new):
    cache = Cache()
    cache.ask(TEXT[:9], new)
    assert cache.ask((*TEXT[:9], *[5] * new, 6, 7)) == 9 + new - 1


@pytest.mark.parametrize("steps", range(1, 7))
def test_who_is_aborted_leaves_its_complete_pages(steps):
    cache = Cache(packed=True)
    seq = cache.start(TEXT[:7], new=20)
    for _ in range(steps):
        cache.engine.step()
    complete = seq.accepted // P * P
    cache.engine.scheduler.abort(seq)
    cache.engine.drain()
    assert cache.ask((*seq.ids, 6)) == complete


def test_of_several_tails_the_one_with_most_in_common_is_taken():
    cache = Cache()
    for tail in ((1, 1), (1, 2, 9), (3, 0)):
        cache.ask((*TEXT[:8], *tail))
    assert cache.ask((*TEXT[:8], 1, 2, 8, 8)) == 10
    assert cache.ask((*TEXT[:8], 1, 0, 1)) == 9


def test_a_tail_that_goes_on_is_kept_once_and_others_stay():
    cache = Cache()
    cache.ask(TEXT[:9])
    cache.ask((*TEXT[:8], 1, 2))
    assert cache.pool.used == 4
    cache.ask(TEXT[:13])  # a whole page in place of the first tail, and one more tail
    assert cache.pool.used == 5
    assert cache.ask((*TEXT[:8], 1, 2, 3)) == 10


def test_equal_prompts_at_once_keep_their_pages_once():
    cache = Cache()
    for _ in range(3):
        cache.start(TEXT[:8])
    cache.engine.drain()
    assert cache.pool.used == 2


def test_another_tenant_finds_nothing_and_needs_all_the_room():
    cache = Cache()
    cache.ask(TEXT[:9], tenant="a")
    manager = cache.engine.manager
    assert manager.cached_tokens(cache.start(TEXT[:9], tenant="a")) == 8
    assert manager.cached_tokens(cache.start(TEXT[:9], tenant="b")) == 0
    cache.engine.drain()
    assert cache.ask(TEXT[:9], tenant="c") == 0


def test_the_page_that_was_of_no_use_for_longest_goes_first():
    cache = Cache(pages=5)
    for first in (1, 2, 3, 4, 6):
        cache.ask((first, 8, 8))
    assert cache.ask((1, 8, 9)) == 2  # of use: the second is the oldest now
    cache.ask((7, 8, 8))
    assert cache.ask((1, 8, 7)) == 2
    assert cache.ask((2, 8, 7)) == 0


def test_a_page_whose_first_tokens_were_of_use_stays():
    cache = Cache(pages=3)
    for first in (1, 2, 3):
        cache.ask((first, 8, 8))
    # It leaves no tail of its own: there is nothing new in it.
    assert cache.ask((1, 8)) == 1
    cache.ask((7, 8, 8))
    assert cache.ask((1, 8, 8)) == 2


def test_what_is_used_no_more_goes_from_the_end():
    cache = Cache(pages=6)
    cache.ask(TEXT[:16])
    cache.ask((1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 9, 9))  # three pages, of which two are free
    assert cache.ask(TEXT[:16]) == 12


def test_a_window_resumes_from_its_own_pages_alone():
    """The window sees five tokens: of four pages the first two may go."""
    cache = Cache(pages=8, specs=(WindowKV(1, 4, 5),))
    cache.ask(TEXT[:16])
    cache.ask((1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 9, 9, 8, 8, 8, 8, 7, 7, 7, 7, 7, 7, 7, 7))
    assert cache.ask(TEXT[:17]) == 16
    assert cache.ask(TEXT[:7]) == 0


def test_the_longest_of_a_node_is_a_neighbour_in_the_order_of_tokens():
    manager = CacheManager(group_layers([FullKV(1, 4)]), hot_pages=1, pool_pages=[9])
    tree = PrefixTree(manager.groups, manager.pools, manager.states)
    root = tree.root("")
    nodes = {key: tree.insert(root, key) for key in [(5, 1), (1, 2), (9,), (5, 3, 3), (2, 2)]}
    assert tree.longest(root, (5, 3, 4)) == (nodes[5, 3, 3], 2)
    assert tree.longest(root, (5, 1, 7)) == (nodes[5, 1], 2)
    assert tree.longest(root, (5, 0)) == (nodes[5, 1], 1)
    assert tree.longest(root, (7, 7)) is None


def every_rule() -> None:
    """All of these tests, for those that ask whether a mutant would be seen."""
    for n in (1, 3, 4, 5, 8, 9, 15):
        test_all_but_the_last_token_of_a_prompt_is_found_again(n)
    for new in (1, 2, 3, 4, 5):
        test_an_answer_is_found_but_for_its_last_token_wherever_it_ends(new)
    for steps in range(1, 7):
        test_who_is_aborted_leaves_its_complete_pages(steps)
    test_a_page_whose_first_tokens_were_of_use_stays()
    test_of_several_tails_the_one_with_most_in_common_is_taken()
    test_a_tail_that_goes_on_is_kept_once_and_others_stay()
    test_equal_prompts_at_once_keep_their_pages_once()
    test_another_tenant_finds_nothing_and_needs_all_the_room()
    test_the_page_that_was_of_no_use_for_longest_goes_first()
    test_what_is_used_no_more_goes_from_the_end()
    test_a_window_resumes_from_its_own_pages_alone()
    test_the_longest_of_a_node_is_a_neighbour_in_the_order_of_tokens()
