"""How much of a prompt is found in the cache, and what is kept for it. Pages of 4 tokens."""

import pytest

from mlxserve.cache.groups import group_layers
from mlxserve.cache.manager import CacheManager
from mlxserve.cache.prefix import PrefixTree
from mlxserve.cache.shared import MAX_PINS
from mlxserve.cache.spec import FullKV, KVBits, State, WindowKV
from mlxserve.engine.scheduler import Scheduler
from mlxserve.sequence import Sequence
from mlxserve.types import Request, SamplingParams
from tests.support.schedules import PaperEngine

P = 4
TEXT = tuple(range(10, 40))


class Cache:
    """An engine that computes one request after another."""

    def __init__(self, pages=40, specs=None, *, packed=False, step_tokens=100, slots=1):
        groups = group_layers(
            specs or (FullKV(1, 4),), KVBits(8, 8) if packed else KVBits(), page_tokens=P
        )
        pools = [pages for group in groups if group.paged]
        manager = CacheManager(groups, hot_pages=20, pool_pages=pools, slots=slots)
        self.engine = PaperEngine(Scheduler(manager, 4, step_tokens), lambda ids: 5)
        self.manager = manager

    def start(self, ids, new=1, **how):
        params = SamplingParams(max_tokens=new)
        prompt, name = tuple(ids), f"r{self.engine.steps}"
        request = Request(id=name, prompt_ids=prompt, params=params, **how)
        seq = Sequence.start(request, 100, 0.0)
        self.engine.scheduler.add(seq)
        return seq

    def ask(self, ids, new=1, **how):
        """Compute it to the end. Returns how many of its tokens were found."""
        seq = self.start(ids, new, **how)
        while self.engine.busy:
            self.engine.step()
        self.engine.settle()
        return seq.cached


@pytest.mark.parametrize("n", [1, 3, 4, 5, 8, 9, 15])
def test_all_but_the_last_token_of_a_prompt_is_found_again(n):
    cache = Cache()
    assert cache.ask(TEXT[:n]) == 0
    assert cache.ask(TEXT[:n]) == n - 1


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
    assert cache.manager.pools[0].used == 4
    cache.ask(TEXT[:13])  # a whole page in place of the first tail, and one more tail
    assert cache.manager.pools[0].used == 5
    assert cache.ask((*TEXT[:8], 1, 2, 3)) == 10


def test_equal_prompts_at_once_keep_their_pages_once():
    cache = Cache()
    for _ in range(3):
        cache.start(TEXT[:8])
    cache.engine.drain()
    assert cache.manager.pools[0].used == 2


def test_another_tenant_finds_nothing_and_needs_all_the_room():
    cache = Cache()
    cache.ask(TEXT[:9], tenant="a")
    manager = cache.manager
    assert manager.cached_tokens(cache.start(TEXT[:9], tenant="a")) == 8
    assert manager.cached_tokens(cache.start(TEXT[:9], tenant="b")) == 0
    cache.engine.drain()
    assert cache.ask(TEXT[:9], tenant="c") == 0
    assert cache.ask(TEXT[:9], tenant="a", adapter="a") == 0
    assert cache.ask(TEXT[:9], tenant="a", cache_salt="a") == 0


def test_the_page_that_was_of_no_use_for_longest_goes_first():
    cache = Cache(pages=5)
    for first in (1, 2, 3, 4, 6):
        cache.ask((first, 8, 8))
    assert cache.ask((1, 8, 9)) == 2  # of use: the second is the oldest now
    cache.ask((7, 8, 8))
    assert cache.ask((1, 8, 7)) == 2
    assert cache.ask((2, 8, 7)) == 0


def test_the_snapshot_that_was_of_no_use_for_longest_goes_first():
    cache = Cache(specs=(State(((2,),)),), slots=5)  # one is zero, one of who runs
    for first in (1, 2, 3):
        cache.ask((first, *TEXT[:4]))
    assert cache.ask((1, *TEXT[:5])) == 4
    cache.ask((4, *TEXT[:4]))
    assert cache.ask((1, *TEXT[:6])) == 4
    assert cache.ask((2, *TEXT[:6])) == 0


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


def test_a_pinned_prompt_stays_and_yields_before_another_would_have_to():
    cache = Cache(pages=3)
    cache.ask((1, 8, 8), pin_s=50)
    cache.ask((2, 8, 8), pin_s=60, tenant="a")
    for first in (3, 4, 5):
        cache.ask((first, 8, 8))
    assert cache.ask((1, 8, 7)) == cache.ask((2, 8, 7), tenant="a") == 2
    # It takes two pages of the three: of both, the one that would end first has to go.
    cache.ask(TEXT[:8])
    assert cache.ask((2, 8, 7), tenant="a") == 2
    assert cache.ask((1, 8, 7)) == 0


def test_a_pin_ends_at_its_time():
    cache = Cache(pages=2)
    cache.ask((1, 8, 8), pin_s=20)
    for first in range(2, 30):  # a step takes a second, and each of these two
        cache.ask((first, 8, 8))
    assert cache.engine.steps > 40
    assert not cache.manager.shared.pins
    assert cache.ask((1, 8, 7)) == 0


def test_a_pinned_prompt_is_found_after_others_went_on_from_it():
    cache = Cache()
    cache.ask(TEXT[:10], pin_s=100)
    cache.ask((*TEXT[:10], 1, 2, 3))
    assert cache.ask((*TEXT[:10], 0, 5, 6)) == 10


def test_of_too_many_pins_the_one_that_ends_first_goes():
    cache = Cache()
    cache.ask(TEXT[:4])
    manager = cache.manager
    for n in range(MAX_PINS + 2):
        assert manager.pin(n, ("", "", ""), TEXT[:4], 1e6 - n) == 4
    cache.ask(TEXT[:2])
    assert set(manager.shared.pins) == set(range(MAX_PINS))


def test_who_goes_on_from_anothers_chunks_agrees_with_them():
    """Both ask the same at once; the second finds what the first has computed meanwhile."""
    cache = Cache(step_tokens=2 * P)
    first, second = (cache.start(range(20, 20 + 8 * P)) for _ in range(2))
    cache.engine.drain()
    assert first.usage().diverged_at == 0
    assert second.usage().cached_tokens == 8 * P - 1
    assert second.usage().diverged_at is None


def test_what_packed_pages_cannot_keep_is_not_said_to_differ():
    cache = Cache(packed=True)
    seqs = []
    for ids in (TEXT[:10], TEXT[:10], (*TEXT[:6], 1, 2, 3, 4)):
        seqs.append(cache.start(ids))
        cache.engine.drain()
    assert [seq.cached for seq in seqs] == [0, 8, 4]
    assert [seq.usage().diverged_at for seq in seqs] == [0, None, 6]


def test_who_starts_finds_the_room_that_running_prompts_will_take():
    """Each takes four pages, and one more while it runs, of eight."""
    cache = Cache(pages=8, step_tokens=5)
    first, second = (cache.start((n, *TEXT[:15])) for n in (1, 2))
    cache.engine.step()
    assert (first.begun, second.begun) == (True, False)
    cache.engine.drain()
    assert cache.engine.scheduler.counts.preemptions == 0


def test_idle_pages_that_a_prompt_shares_are_room_only_once():
    cache = Cache(pages=8)
    cache.ask(TEXT[:16])
    other, again = cache.start((1, *TEXT[:15])), cache.start(TEXT[:16])
    cache.engine.step()
    assert (other.begun, again.begun) == (True, False)


def test_a_short_prompt_needs_little_room_though_its_window_is_long():
    cache = Cache(pages=14, specs=(WindowKV(1, 4, 40),))
    first, second = (cache.start((n, *TEXT[:5])) for n in (1, 2))
    cache.engine.step()
    assert first.begun
    assert second.begun


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
    test_a_pinned_prompt_stays_and_yields_before_another_would_have_to()
    test_a_pin_ends_at_its_time()
    test_a_pinned_prompt_is_found_after_others_went_on_from_it()
    test_of_too_many_pins_the_one_that_ends_first_goes()
    test_the_snapshot_that_was_of_no_use_for_longest_goes_first()
    test_who_goes_on_from_anothers_chunks_agrees_with_them()
    test_what_packed_pages_cannot_keep_is_not_said_to_differ()
    test_who_starts_finds_the_room_that_running_prompts_will_take()
    test_idle_pages_that_a_prompt_shares_are_room_only_once()
    test_a_short_prompt_needs_little_room_though_its_window_is_long()
    test_the_longest_of_a_node_is_a_neighbour_in_the_order_of_tokens()
