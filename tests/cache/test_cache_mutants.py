# ruff: noqa: E501
"""Every mutant of the cache's rules is caught: by a random schedule, or by an answer of the matrix.

One that isn't says that a test is missing, or that the line has no purpose.
"""

import pytest

from mlxserve.cache import allocator, batch, groups, manager, prefix, storage
from mlxserve.engine import scheduler
from tests.cache import test_sharing as sharing
from tests.cache import test_storage as stored
from tests.support.matrix import Cell, chosen_kernels, committed, prove
from tests.support.mutants import mutated
from tests.support.schedules import walk

pytestmark = pytest.mark.full

SEEDS = range(60)
CELLS = [
    Cell("full", "all cached", 4, "greedy"),
    Cell("full, window, state", "all cached", 4, "greedy"),
    Cell("full, window, latent, state", "others join", 4, "greedy"),
    Cell("keep, less than a page", "others join", 4, "greedy"),
    Cell("window, sinks, 8 bits", "part cached", 4, "greedy"),
    Cell("full", "part cached", 4, "greedy"),
    Cell("keep, over a page", "evicted", 4, "greedy"),
    Cell("8/4 bits", "preempted", 4, "greedy"),
]

# What each module must not do: (old, new).
MUTANTS = {
    allocator: [
        ("heapq.heappush(self._free, page)\n\n    def cache", "pass\n\n    def cache"),
        ("self.idle[page] = None", "heapq.heappush(self._free, page)"),
        ("+ 1\n        self.idle.pop(page, None)", "+ 1"),
        ("if page in self.idle:\n            del self.idle[page]", "if page in self.idle:\n            pass"),
        ("return len(self._free) + len(self.idle)", "return len(self._free)"),
    ],
    groups: [
        ("max(0, position - self.window + 1)", "max(0, position - self.window + 2)"),
        ("max(0, position - self.window + 1) //", "max(0, position - self.window + 1 + self.page_tokens) //"),
        ("return self.spec.trims and not self.bits", "return self.spec.trims"),
        ("return self.spec.trims and not self.bits", "return not self.bits"),
        ("return self.spec.trims and not self.bits", "return False"),
    ],
    prefix: [
        ("while at + page_tokens <= limit:", "while at <= limit:"),
        ("place - 1) : place + 1]", "place) : place + 1]"),
        ("place - 1) : place + 1]", "place - 1) : place]"),
        ("n > best[1]", "n < best[1]"),
        ("if self._groups[group].window is not None:", "if True:"),
        ("return not self.children and not self.users and not self.holds", "return not self.children and not self.holds"),
        ("return not self.children and not self.users and not self.holds", "return not self.users and not self.holds"),
        ("node.fresh = True", "node.fresh = False"),
        ("            node.fresh = False\n        self._planned = []", "            pass\n        self._planned = []"),
        ("self._remove(node.children[node.order[place - 1]])", "self._remove(node.children[node.order[0]])"),
        ("self._detach_snapshot(node)\n        self._prune(node)\n\n    def _prune", "self._prune(node)\n\n    def _prune"),
        ("return self.snapshot != NO_PAGE or any", "return any"),
        ("insort(parent.order, key)", "parent.order.append(key)"),
    ],
    manager: [
        ("limit = seq.total - 1\n", "limit = seq.total\n"),
        ("self.tree.root(seq.request.salt)", "self.tree.root(())"),
        ("self.tree.roots.get(seq.request.salt) if", "self.tree.roots.get(()) if"),
        ("return self.sharing and not seq.request.score", "return self.sharing"),
        ("return self.sharing and not seq.request.score", "return not seq.request.score"),
        ("or seq.hot:\n            return", ":\n            return"),
        ("part = self._load_part(seq, limit) if self.shared.cuts else 0", "part = self._load_part(seq, limit)"),
        ("* P <= seq.accepted:", "* P <= seq.computed:"),
        ("* P <= seq.accepted:", "* P < seq.accepted:"),
        ("pages = self._put(seq, tuple(seq.ids[at * P : (at + 1) * P]), pages)", "pages = self._put(seq, tuple(seq.ids[at * P : at * P + 1]), pages)"),
        ("pool.share(table[number])", "pass"),
        ("pool.share(theirs)", "pass"),
        ("pool.give([own])", "pass"),
        ("seq.tables[group][seq.sealed] = theirs", "pass"),
        ("written.append(own if theirs == NO_PAGE else NO_PAGE)", "written.append(own)"),
        ("self.tree.drop_tails(seq.node, key)\n        node = self.tree.insert(seq.node, key)\n        written", "node = self.tree.insert(seq.node, key)\n        written"),
        ("self._state_moves[seq.slot] = path[-1].snapshot", "pass"),
        ("self._state_moves[seq.slot] = ZERO_SLOT", "pass"),
        ("self._state_moves[slot] = seq.slot", "self._state_moves[slot] = ZERO_SLOT"),
        ("self._state_moves.pop(seq.slot, None)", "pass"),
        ("if node.fresh or NO_PAGE in node.pages", "if NO_PAGE in node.pages"),
        ("if node.fresh or NO_PAGE in node.pages", "if node.fresh"),
        ("Load(tuple(node.pages), seq.hot[0])", "Load(tuple(seq.node.pages or node.pages), seq.hot[0])"),
        ("seq.computed += n\n        return n", "seq.computed += n + 1\n        return n"),
        ("pool.touch(page)", "pass"),
        ("self._loads = [load for load in self._loads if load.hot not in seq.hot]", "pass"),
        ("else reversed(held)", "else held"),
        ("self.seal(seq)\n            if keep_tail", "if keep_tail"),
        ("if keep_tail:", "if True:"),
        ("self._seals.append(Seal(seq.hot.pop(0), pages))\n            seq.sealed", "self._seals.append(Seal(seq.hot[0], pages))\n            self.hot.give([seq.hot.pop(0)])\n            seq.sealed"),
        ("seen = min(group.first_seen(seq.accepted), seq.sealed)", "seen = min(group.first_seen(seq.accepted) + 1, seq.sealed)"),
        ("seen = min(group.first_seen(seq.accepted), seq.sealed)", "seen = min(group.first_seen(seq.computed + 1), seq.sealed)"),
        ("max(seq.dropped[index], group.kept_pages)", "seq.dropped[index]"),
        ("and seq.accepted == seq.computed", ""),
        ("at_border = seq.computed == seq.sealed * self.page_tokens and", "at_border ="),
        ("if seal.pages[group] in pages:", "if False:"),
        ("[end // self.page_tokens - len(table)", "[end // self.page_tokens - len(table) - 1"),
        ("needed -= sum(node.pages[index] not in pool.idle for node in path)", "needed -= len(path)"),
        ("key = tuple(seq.ids[at : seq.accepted])", "key = tuple(seq.ids[at : seq.computed + 1])"),
        ("seq.cached += min(seq.computed, prompt) - before", "seq.cached += seq.computed"),
    ],
    scheduler: [
        ("if self.manager.recurrent:", "if False:"),
        ("victim = self.running[-1]", "victim = self.running[0]"),
        ("seq.computed += n\n        self.manager.seal(seq)", "seq.computed += n"),
        ("self.running.remove(seq)\n        self.manager.release(seq)\n        seq.preempted", "self.running.remove(seq)\n        seq.preempted"),
        ("border - start if border > start else n", "n"),
    ],
    batch: [
        ("if base <= kept:\n            kept = base = 0", "if False:\n            kept = base = 0"),
        ("kept, base = group.kept_pages, seq.dropped[index]", "kept, base = 0, seq.dropped[index]"),
        ("hot_at = np.cumsum(counts) - counts - start // P", "hot_at = np.cumsum(counts) - counts"),
        ("n = min(end, (own + 1) * P) - start", "n = end - start"),
        ("sealed[: own - base]", "sealed"),
        ("seq.hot[: -(-end // P) - seq.sealed]", "chunk.hot"),
    ],
    storage: [
        ("array[to] = array[source]", "array[source] = array[to]"),
        ("page[pages[group]].swapaxes(0, 1)", "page[pages[group]].reshape(P, *into.shape[1:])"),
        ("if pair[1] != NO_PAGE]", "]"),
        ("for layer in list(self._moves):", "for layer in []:"),
        ("self.loads = bool(plan.loads or plan.states)", "self.loads = False"),
        ("        for load in plan.loads:\n            self._load(load.pages, load.hot)\n", ""),
        ("moves = self._moves.pop(layer, None)", "moves = self._moves.get(layer)"),
    ],
}  # fmt: skip

# Mutants that do the same, and why.
EQUIVALENT = {
    "written.append(own if theirs == NO_PAGE else NO_PAGE)": "a page that nobody has is written too",
    "self._loads = [load for load in self._loads if load.hot not in seq.hot]": (
        "a page is copied for nobody, before whoever has the hot page now writes it"
    ),
    "self.loads = bool(plan.loads or plan.states)": "no step is recorded with reference kernels",
    "self._state_moves.pop(seq.slot, None)": "whoever takes the slot says anew what comes there",
    "if self._groups[group].window is not None:": (
        "other groups' pages of that leaf stay until it's their turn, and nobody resumes there"
    ),
    "or seq.hot:\n            return": "at the end of its sealed pages, a sequence has no hot page",
    "if keep_tail:": "who is preempted keeps its tail too: a page the less, and the same answers",
    "and seq.accepted == seq.computed": "sealed <= accepted <= computed, and the two ends are equal",
}


def caught() -> bool:
    """Whether anything is found: what is quickest to find most comes first."""
    return any(fails(check) for check in _checks())


def fails(check) -> bool:
    try:
        check()
    except Exception:
        return True
    return False


def _checks():
    yield from (lambda seed=seed: walk(seed) for seed in SEEDS[:10])
    yield sharing.every_rule
    yield stored.test_only_pages_that_are_written_are_moved
    yield from (lambda cell=cell: _prove(cell) for cell in CELLS)
    yield from (lambda seed=seed: walk(seed) for seed in SEEDS[10:])


def _prove(cell: Cell) -> None:
    assert prove(cell) == committed()[cell.kind, cell.situation, cell.page_tokens < 64]


@pytest.fixture(scope="module", autouse=True)
def kernels():
    with chosen_kernels():
        yield


def mutants():
    return [(module, old, new) for module, pairs in MUTANTS.items() for old, new in pairs]


def test_nothing_is_found_in_the_cache_as_it_is():
    assert not caught()


def test_mutants_that_are_left_out_exist():
    assert EQUIVALENT.keys() <= {old for _, old, _ in mutants()}


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [mutant for mutant in mutants() if mutant[1] not in EQUIVALENT],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_mutant_is_caught(module, old, new):
    with mutated(module, old, new):
        assert caught()
