"""How much of a prompt is found in the cache, and what is kept for it. Pages of 4 tokens."""

import weakref
from collections.abc import Iterator
from itertools import product

import pytest

from mlxserve.cache.groups import LayerGroup, group_layers
from mlxserve.cache.manager import CacheManager
from mlxserve.cache.prefix import PrefixTree
from mlxserve.cache.shared import MAX_PINS
from mlxserve.cache.spec import FullKV, KVBits, LayerSpec, State, WindowKV
from mlxserve.engine.scheduler import Scheduler
from mlxserve.errors import CapacityError
from mlxserve.sequence import NO_PAGE, Sequence
from mlxserve.types import Request, SamplingParams
from tests.support.schedules import PaperEngine

P = 4
TEXT = tuple(range(10, 40))
SALT = ("", "", "")
FULL, STATE = FullKV(1, 4), State(((2,),))


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


@pytest.mark.parametrize("how", [{"score": True}, {"prompt_logprobs": 0}])
def test_who_reads_a_prompt_computes_all_of_it(how):
    cache = Cache()
    cache.ask(TEXT[:9])
    assert cache.ask(TEXT[:9], **how) == 0


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


def test_who_asks_just_as_another_ends_copies_nothing_that_is_not_written_yet():
    """The other's last page is sealed by the step that begins it: it takes whole pages only."""
    cache = Cache()
    cache.start(TEXT[:10])
    while cache.engine.busy:
        cache.engine.step()
    assert cache.ask(TEXT[:10]) == 8
    assert cache.ask(TEXT[:10]) == 9


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
        assert manager.pin(n, SALT, TEXT[:4], 1e6 - n) == 4
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


def test_who_starts_finds_the_room_of_a_long_window():
    """Of eleven pages it sees ten, and has one more before that is let go of."""
    cache = Cache(pages=21, specs=(WindowKV(1, 4, 38),))
    first, second = (cache.start((n, *range(10, 53))) for n in (1, 2))
    cache.engine.step()
    assert (first.begun, second.begun) == (True, False)


@pytest.mark.parametrize("window", [1, 2, 4, 5, 6, 38])
@pytest.mark.parametrize("keep", [0, 3, 4, 9])
def test_a_window_holds_as_many_pages_as_it_may_see_and_one(window, keep):
    """A query at the first token of a page sees the most of those before it."""
    group = LayerGroup(WindowKV(1, 4, window, keep), (0,), page_tokens=P)
    seen = [
        {p // P for p in range(query // P * P) if p < keep or p > query - window}
        for query in range(40 * P)
    ]
    assert group.pages_at_most == max(map(len, seen)) + 1


def test_who_starts_finds_the_room_that_a_running_window_will_take():
    """It has let go of many pages, and takes one more before it lets go of the next."""
    cache = Cache(pages=3, specs=(WindowKV(1, 4, 5),))
    cache.start(TEXT[:3], new=60)
    for _ in range(30):
        cache.engine.step()
    other = cache.start(TEXT[:7], new=9)
    cache.engine.step()
    assert not other.begun
    cache.engine.drain()
    assert cache.engine.scheduler.counts.preemptions == 0


def test_a_snapshot_that_somebody_came_by_goes_later():
    """Whoever computes the same page anew leaves the one snapshot at its end."""
    cache = Cache(specs=(STATE,), slots=5)
    for first in (1, 2, 3, 1):  # all of it is needed again, for the token after it
        cache.ask((first, *TEXT[:3]), new=3)
    cache.ask((4, *TEXT[:4]), new=3)
    assert cache.ask((1, *TEXT[:6])) == 4
    assert cache.ask((2, *TEXT[:6])) == 0


def test_a_snapshot_that_was_taken_back_comes_not_again_of_later_tokens():
    """There is a slot for one only: who ran longer has none, and doesn't retake it in a page."""
    cache = Cache(specs=(STATE,), slots=4)
    for first in (1, 2):
        cache.start((first, *TEXT[:5]), new=4)
    cache.engine.drain()  # it compares snapshots with their tokens
    assert [cache.ask((first, *TEXT[:5], 5, 5, 5)) for first in (2, 1)] == [8, 0]


@pytest.mark.parametrize("steps", [1, 2])
def test_a_snapshot_is_of_use_a_step_after_it_was_taken(steps):
    """Who begins in the step that takes it would read its slot before it is written."""
    cache = Cache(specs=(STATE,), slots=9)
    cache.start(TEXT[:6], new=9)
    for _ in range(steps):
        cache.engine.step()
    seq = cache.start(TEXT[:6])
    cache.engine.drain()
    assert seq.cached == (4 if steps == 2 else 0)


def test_a_page_that_goes_takes_its_snapshot_along():
    cache = Cache(pages=2, specs=(FULL, STATE), slots=9)
    for first in (1, 2, 3):
        cache.ask((first, *TEXT[:4]))
    assert cache.manager.states.used == 3  # the one that is zero, and those of two pages


def test_a_page_that_was_taken_back_leaves_nothing_behind():
    cache = Cache(pages=2)
    cache.ask((1, 8, 8))
    (node,) = (node for node in cache.manager.tree.nodes() if node.parent is not None)
    node = weakref.ref(node)
    for first in (2, 3, 4):
        cache.ask((first, 8, 8))
    assert node() is None


CACHES: dict[str, tuple[tuple[LayerSpec, ...], bool]] = {
    "full": ((FULL,), False),
    "packed": ((FULL,), True),
    "window": ((FULL, WindowKV(1, 4, 3)), False),
    "keep": ((WindowKV(1, 4, 6, 5), WindowKV(1, 4, 3, 9)), False),
    "packed window": ((FULL, WindowKV(1, 4, 3)), True),
    "state": ((FULL, STATE), False),
}


@pytest.mark.parametrize("name", CACHES)
def test_a_pin_keeps_as_much_as_a_request_finds(name):
    specs, packed = CACHES[name]
    for n in (1, 3, 4, 6, 8, 13, 14):
        cache = Cache(specs=specs, packed=packed, slots=9)
        cache.ask(TEXT[:15])
        kept = cache.manager.pin("", SALT, TEXT[:n], 100.0)
        assert kept == cache.ask((*TEXT[:n], 1)), f"of {n} tokens"


@pytest.mark.parametrize("n", [2, 6, 11])
def test_a_pin_keeps_nothing_where_a_window_has_no_pages(n):
    """A file has those of the end only: nobody can go on from within the pages before."""
    cache = Cache(specs=(FULL, WindowKV(1, 4, 5)))
    restored(cache, TEXT[:16])
    assert cache.manager.pin("", SALT, TEXT[:n], 100.0) == 0


def test_a_pin_takes_the_place_of_an_earlier_one():
    cache = Cache(pages=4)
    for first in (1, 2):
        cache.ask((first, 8, 8))
        assert cache.manager.pin("key", SALT, (first, 8, 8), 100.0) == 3
    cache.manager.check_integrity([])
    for first in (3, 4, 5):
        cache.ask((first, 8, 8))
    assert cache.ask((1, 8, 7)) == 0
    assert cache.ask((2, 8, 7)) == 2


@pytest.mark.parametrize("name", [name for name in CACHES if not name.startswith("packed")])
def test_a_prefix_from_a_file_is_found_to_its_last_token(name):
    """Another cache is given those pages only that are said to be needed."""
    for n in range(1, 20):
        if name == "state" and n % P:
            continue  # there is a snapshot at the end of whole pages only
        cache = Cache(specs=CACHES[name][0], slots=9)
        shared = cache.manager.shared
        numbers = [shared.needed_pages(group, n) for group in range(len(shared.groups))]
        made = restored(cache, TEXT[:n])
        assert [len(pages) for pages in made.pages] == [len(pages) for pages in numbers]
        assert all(NO_PAGE not in pages for pages in made.pages)
        again = restored(cache, TEXT[:n])
        assert all(set(pages) <= {NO_PAGE} for pages in again.pages)
        assert again.slot == NO_PAGE
        path, tokens = shared.prefix(SALT, TEXT[:n])
        assert tokens == n
        assert (path[-1].snapshot == NO_PAGE) == (name != "state")


def restored(cache, ids):
    """As transfer.restore has it, but for the arrays."""
    made = cache.manager.shared.restore(SALT, ids, snapshot=cache.manager.recurrent)
    cache.manager.end_plan(())
    cache.manager.begin_plan(())
    return made


def test_a_prefix_from_a_file_that_does_not_fit_is_refused():
    cache = Cache(pages=3)
    with pytest.raises(CapacityError, match="holds 13 tokens, and there is memory for 12; raise"):
        restored(cache, TEXT[:13])
    assert cache.manager.tree.roots == {}


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
    for test in [value for name, value in globals().items() if name.startswith("test_")]:
        for arguments in every_case(test):
            test(**arguments)


def every_case(test) -> Iterator[dict[str, object]]:
    """The arguments of a test: each value that a mark lists, with each of the others'."""
    marks = [mark.args for mark in getattr(test, "pytestmark", ()) if mark.name == "parametrize"]
    for values in product(*(values for _, values in marks)):
        yield dict(zip((name for name, _ in marks), values, strict=True))
