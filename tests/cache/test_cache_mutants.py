# ruff: noqa: E501
"""Every mutant of the cache's rules is caught: by a rule's own test, a random schedule or the matrix.

One that isn't says that a test is missing, or that the line has no purpose.
"""

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from mlxserve import types
from mlxserve.cache import (
    allocator,
    batch,
    file,
    groups,
    manager,
    prefix,
    shared,
    storage,
    transfer,
)
from mlxserve.engine import cache_plan, scheduler
from mlxserve.errors import DamagedError
from mlxserve.kernels import registry
from tests.cache import test_file as files
from tests.cache import test_restored as restored
from tests.cache import test_sharing as sharing
from tests.cache import test_storage as stored
from tests.cache.saved import small, small_tensors
from tests.support.matrix import Cell, committed, prove
from tests.support.mutants import mutated, params
from tests.support.schedules import walk

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        registry.recorder() is None,
        reason="only on machines with native kernels: nothing is recorded",
    ),
]

SEEDS = 25
CELLS = [
    Cell("full", "all cached", 4, "greedy"),
    Cell("full, window, state", "all cached", 4, "greedy"),
    Cell("full, window, latent, state", "others join", 4, "greedy"),
    Cell("keep, less than a page", "others join", 4, "greedy"),
    Cell("window, sinks, 8 bits", "part cached", 4, "greedy"),
    Cell("full", "part cached", 4, "greedy"),
    Cell("keep, over a page", "evicted", 4, "greedy"),
    Cell("8/4 bits", "preempted", 4, "greedy"),
    Cell("keep, over a page", "preempted", 4, "greedy"),
    Cell("full", "saved and restored", 4, "greedy"),
    Cell("keep, over a page", "saved and restored", 4, "greedy"),
    Cell("full, window, state", "saved and restored", 4, "greedy"),
]

# What each module must not do: (old, new).
MUTANTS = {
    allocator: [
        ("heapq.heappush(self._free, page)\n            self.pinned", "pass\n            self.pinned"),
        ("self.pinned -= self._only_pinned(page)\n        self._holders", "self._holders"),
        ("            self.pinned += self._only_pinned(page)\n\n", "\n"),
        ("self.idle[page] = None", "heapq.heappush(self._free, page)"),
        ("+ 1\n        self.idle.pop(page, None)", "+ 1"),
        ("self._holders[page] = self._holders.get(page, 0) + 1", "self._holders[page] = 1"),
        ("self._holders[page] -= 1", "self._holders[page] = 0"),
        ("self._cached.remove(page)", "pass"),
        ("self.idle.move_to_end(page)", "self.idle.move_to_end(page, last=False)"),
        ("if page in self.idle:\n            del self.idle[page]", "if page in self.idle:\n            pass"),
        ("return len(self._free) + len(self.idle)", "return len(self._free)"),
    ],
    groups: [
        ("max(0, position - self.window + 1)", "max(0, position - self.window + 2)"),
        ("max(0, position - self.window + 1) //", "max(0, position - self.window + 1 + self.page_tokens) //"),
        ("return self.spec.trims and not self.bits", "return self.spec.trims"),
        ("return self.spec.trims and not self.bits", "return not self.bits"),
        ("return self.spec.trims and not self.bits", "return False"),
        ("return -(-self.spec.keep // self.page_tokens)", "return self.spec.keep // self.page_tokens"),
        ("return -(-self.spec.keep // self.page_tokens)", "return 0"),
        ("return pages if bound is None else min(pages, bound)", "return pages if bound is None else bound"),
        ("window_pages(self.spec, self.page_tokens)", "window_pages(self.spec)"),
        ("None if bound is None else bound + 1", "bound"),
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
        ("self._remove(tail)", "pass"),
        ("if not tail.users:", "if True:"),
        ("tail = node.children[node.order[place]]", "tail = node.children[node.order[0]]"),
        ("node.users += 1", "pass"),
        ("node.users -= 1", "pass"),
        ("next(iter(self._pools[group].idle))", "next(reversed(self._pools[group].idle))"),
        ("self._snapshot_of[next(iter(idle))]", "self._snapshot_of[next(reversed(idle))]"),
        ("self._planned += self._fresh", "pass"),
        ("self._planned += self._fresh\n        self._fresh = []", "self._planned += self._fresh"),
        ("node.snapshot = slot\n        self._freshen(node)", "node.snapshot = slot"),
        ("node.pages[group] = page\n        self._freshen(node)", "node.pages[group] = page"),
        ("self._detach_snapshot(node)\n        self._prune(node)\n\n    def _prune", "self._prune(node)\n\n    def _prune"),
        ("return self.snapshot != NO_PAGE or any", "return any"),
        ("insort(parent.order, key)", "parent.order.append(key)"),
    ],
    manager: [
        ("seq.computed, seq.total - 1\n", "seq.computed, seq.total\n"),
        ("self.tree.root(seq.request.salt)", "self.tree.root(())"),
        ("self.tree.roots.get(seq.request.salt) if", "self.tree.roots.get(()) if"),
        ("return self.sharing and not seq.request.reads", "return self.sharing"),
        ("return self.sharing and not seq.request.reads", "return not seq.request.score"),
        ("or seq.hot:\n            return", ":\n            return"),
        ("if self.shared.cuts:", "if True:"),
        ("path[-1] if path else seq.node, rest)", "seq.node, rest)"),
        ("elif agreed > seq.computed:", "else:"),
        ("kept or found is not None else len(seq.ids)", "True else len(seq.ids)"),
        ("if hot > self.hot.free or not all(", "if not all("),
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
        ("seq.computed += n\n", "seq.computed += n + 1\n"),
        ("or not self.shared.cuts or not seq.hot", "or not seq.hot"),
        ("if found is not None and found[1] == len(key):", "if False:"),
        ("if any(not self.shared.make_room(group, 1) for group in range(len(self.pools))):", "if False:"),
        ("self.pools[group].give([page])\n        self._seals", "pass\n        self._seals"),
        ("if self._left_hot < SPARE_HOT_PAGES:", "if True:"),
        ("self.hot.give(seal.hot for seal in self._seals)  #", "pass  #"),
        ("self.shared.end_pins(now_s)", "pass"),
        ("self.tree.begin_plan()\n", "pass\n"),
        ("self.tree.end_plan()\n", "pass\n"),
        ("pool.give(held if self", "pool.give(reversed(held) if self"),
        ("needed += max(self._pages_of(index, other) - held, 0)", "pass"),
        ("self.groups[group].held(seq.total // self.page_tokens + 1)", "self.groups[group].held(seq.total // self.page_tokens)"),
        ("self.shared.pin(key, salt, ids, until_s)", "self.shared.pin(key, (\"\", \"\"), ids, until_s)"),
        ("self.states.touch(path[-1].snapshot)", "pass"),
        ("self.states.touch(seq.node.snapshot)", "pass"),
        ("held = len(table) - table.count(NO_PAGE)", "held = len(table)"),
        ("self.tree.leave(seq.node)\n        seq.hot", "pass\n        seq.hot"),
        ("pool.touch(page)", "pass"),
        ("self._loads = [load for load in self._loads if load.hot not in seq.hot]", "pass"),
        ("else reversed(held)", "else held"),
        ("self.seal(seq)\n            if keep_tail", "if keep_tail"),
        ("if keep_tail:", "if True:"),
        ("self._seals.append(Seal(seq.hot.pop(0), pages))\n            seq.sealed", "self._seals.append(Seal(seq.hot[0], pages))\n            self.hot.give([seq.hot.pop(0)])\n            seq.sealed"),
        ("seen = min(group.first_seen(seq.accepted), seq.sealed)", "seen = min(group.first_seen(seq.accepted) + 1, seq.sealed)"),
        ("seen = min(group.first_seen(seq.accepted), seq.sealed)", "seen = min(group.first_seen(seq.computed + 1), seq.sealed)"),
        ("max(seq.dropped[index], group.kept_pages)", "seq.dropped[index]"),
        ("or not at_border", ""),
        ("if seal.pages[group] in pages:", "if False:"),
        ("[end // self.page_tokens - len(table)", "[end // self.page_tokens - len(table) - 1"),
        ("needed -= sum(node.pages[index] not in pool.idle for node in path)", "needed -= len(path)"),
        ("key = tuple(seq.ids[at : seq.accepted])", "key = tuple(seq.ids[at : seq.computed + 1])"),
        ("seq.cached += seq.computed - before", "seq.cached += seq.computed"),
    ],
    shared: [
        ("or path[-1].fresh", ""),
        ("(path[-1].snapshot == NO_PAGE or path[-1].fresh)", "path[-1].fresh"),
        ("(*range(min(kept, seen, depth)), *range(seen, depth))", "range(seen, depth)"),
        ("(*range(min(kept, seen, depth)), *range(seen, depth))", "(*range(min(kept, depth)), *range(seen, depth))"),
        ("(*range(min(kept, seen, depth)), *range(seen, depth))", "range(depth)"),
        ("while pages > self.pools[group].available and self.pins:", "while False:"),
        ("and self.pins:\n            self.unpin(min(", "and self.pins:\n            self.unpin(max("),
        ("if pages > self.pools[group].available:\n            return False", "if False:\n            return False"),
        ("if pin.until_s <= now_s]", "if False]"),
        ("MAX_PINS:\n            self.unpin(min(", "MAX_PINS:\n            self.unpin(max("),
        ("while len(self.pins) > MAX_PINS:", "while False:"),
        ("self.tree.enter(nodes[-1])", "pass"),
        ("pool.pin(page)", "pass"),
        ("pool.unpin(reversed(held))", "pool.unpin(held)"),
        ("self.tree.leave(pin.node)", "pass"),
        ("self.unpin(key)\n        self.pins[key]", "self.pins[key]"),
        ("found is None or NO_PAGE in found[0].pages", "found is None"),
        ("if self.cuts else None", "if True else None"),
        ("border = tokens // self.page_tokens * self.page_tokens", "border = tokens"),
        ("there = node.pages[group] != NO_PAGE", "there = False"),
        ("targets[group].append(NO_PAGE if there else own)", "targets[group].append(own)"),
        ("pool.give(reversed(pages))", "pass"),
        ("wanted = snapshot and node.snapshot == NO_PAGE", "wanted = False"),
        ("bool(self.states.free) or self.tree.evict_snapshot()", "bool(self.states.free)"),
        ("self.states.give([slot])", "pass"),
    ],
    types: [
        ("return self.adapter, self.tenant", "return self.adapter, ''"),
        ("return self.adapter, self.tenant", "return '', self.tenant"),
        ("self.tenant, self.cache_salt\n", "self.tenant, ''\n"),
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
        ("        for load in plan.loads:\n            self._load(load.pages, load.hot)\n", ""),
        ("moves = self._moves.pop(layer, None)", "moves = self._moves.get(layer)"),
        # A page is sealed before the tokens are written that complete it.
        ("= append(hot, pool, index, k, v, moves)", "= append(*append(hot, pool, index[:0], k[:0], None if v is None else v[:0], moves), index, k, v)"),
        ("self._state = None\n        moves", "moves"),
        ("self._state = None\n        P =", "P ="),
        ("self._state = None\n        into", "into"),
        ("self._state = None\n        for layer, group", "for layer, group"),
        ("array[slots] = state.astype(array.dtype)", "pass"),
        ("= new[first : first + n]", "= new[:n]"),
        ("if page == NO_PAGE:", "if False:"),
        ("and runs[-1][0] + runs[-1][2] == index", ""),
    ],
    transfer: [
        ("for number in group.pages)", "for number in reversed(group.pages))"),
        ("found = (nodes[-1].snapshot,)", "found = (0,)"),
        ("manager.pin(key, salt, ids, float(\"inf\"))\n    nodes", "0\n    nodes"),
        ("cache.put(layer, part, rows, found[None] if group.pages is None else found)", "pass"),
        ("rows = [placed.slot] if", "rows = [0] if"),
        ("if saved.header.groups != _groups(manager, cache, len(ids)):", "if False:"),
        ("manager.end_plan(())  #", "pass  #"),
        ("manager.begin_plan(())\n", "pass\n"),
        ("found[-1, :, used:] = 0", "pass"),
        ("if cache.short(*needed):", "if False:"),
        ("tokens = manager.pin(key, salt, ids, float(\"inf\"))\n    if", "tokens = len(ids)\n    if"),
    ],
    file: [
        ("if found:\n        raise RequestError(f\"{saved.path}: it was made", "if False:\n        raise RequestError(f\"{saved.path}: it was made"),
        ("if found := damage(saved):", "if (found := damage(saved)) and False:"),
        ("if sums[1] != zlib.crc32(saved.tokens.data):", "if False:"),
        ("if where.size_bytes != len(data):", "if False:"),
        ("if zlib.crc32(prefix) != int.from_bytes(checksum, \"little\"):", "if False:"),
        ("if old != new", "if False"),
        ("if metadata[\"version\"] != str(VERSION):", "if False:"),
        ("entry.blank and array[-1, :, -entry.blank :].any()", "False"),
    ],
    cache_plan: [
        ("\"page_tokens\": str(cache.page_tokens)", "\"page_tokens\": ''"),
        ("\"kv_bits\": f\"{bits.keys or 'plain'}/{bits.values or 'plain'}\" if bits else \"plain\"", "\"kv_bits\": ''"),
        ("\"layers\": layers", "\"layers\": ''"),
    ],
}  # fmt: skip

# Mutants that do the same, and why.
EQUIVALENT = {
    "written.append(own if theirs == NO_PAGE else NO_PAGE)": "a page that nobody has is written too",
    "self._loads = [load for load in self._loads if load.hot not in seq.hot]": (
        "a page is copied for nobody, before whoever has the hot page now writes it"
    ),
    "self._state_moves.pop(seq.slot, None)": "whoever takes the slot says anew what comes there",
    "if self._groups[group].window is not None:": (
        "other groups' pages of that leaf stay until it's their turn, and nobody resumes there"
    ),
    "or seq.hot:\n            return": "at the end of its sealed pages, a sequence has no hot page",
    "if hot > self.hot.free or not all(": "memory.plan_cache has hot pages enough for any step",
    "if self._left_hot < SPARE_HOT_PAGES:": "they are enough in every schedule that we know",
    "pool.give(held if self": "a window that lost any of its pages can't be gone on from",
    "if keep_tail:": "who is preempted keeps its tail too: a page the less, and the same answers",
}


def caught() -> bool:
    """Whether anything is found: what is quickest to find most comes first."""
    return any(fails(check) for check in _checks())


def fails(check) -> bool:
    try:
        check()
    except (Exception, pytest.fail.Exception):
        return True
    return False


def _checks():
    yield from (lambda seed=seed: walk(seed) for seed in range(5))
    yield sharing.every_rule
    yield stored.every_rule
    yield sound_files
    yield from (lambda cell=cell: _prove(cell) for cell in CELLS)
    yield from_files
    yield from (lambda seed=seed: walk(seed) for seed in range(5, SEEDS))


def _prove(cell: Cell) -> None:
    assert prove(cell) == committed()[cell.kind, cell.situation, cell.page_tokens < 64]


def from_files() -> None:
    with TemporaryDirectory() as folder:
        restored.every_rule(Path(folder))


def sound_files() -> None:
    """What isn't of the same cache, or not as it was written, is refused."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "cache.safetensors"
        restored.refuses_others("8 bits", path)
        file.write(path, small(), small_tensors(small()))
        saved, data = file.read(path), path.read_bytes()
        files.test_a_fingerprint_that_differs_is_named(saved, path)
        places = [data.index(b"tiny"), *(entry.offset for entry in saved.layout.entries.values())]
        for changed in (*(flipped(data, place) for place in places), data[:-1], data + b"0"):
            path.write_bytes(changed)
            with pytest.raises(DamagedError):
                file.verify(file.read(path))
        with pytest.raises(ValueError, match="after the last token"):
            file.write(path, small(), lambda name: saved.tensor(name) + 1)
        path.write_bytes(data)
        files.test_another_version_is_refused_by_name(saved, path)


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.fixture(scope="module", autouse=True)
def alone():
    """The answers of requests alone, to compare with: not those of a mutant."""
    for cell in CELLS:
        _prove(cell)
    from_files()


def mutants():
    return [(module, old, new) for module, pairs in MUTANTS.items() for old, new in pairs]


def test_nothing_is_found_in_the_cache_as_it_is():
    assert not caught()


def test_mutants_that_are_left_out_exist():
    assert EQUIVALENT.keys() <= {old for _, old, _ in mutants()}


@pytest.mark.parametrize(
    ("module", "old", "new"),
    params(
        [mutant for mutant in mutants() if mutant[1] not in EQUIVALENT],
        lambda module, old, new: f"{module.__name__}: {old} -> {new}",
        one_in=4,
    ),
)
def test_a_mutant_is_caught(module, old, new):
    with mutated(module, old, new):
        assert caught()
