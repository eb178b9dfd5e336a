"""Which pages each sequence holds: integers and lists, no arrays.

A sequence's newest tokens lie in its private hot pages, which a step writes. A page whose tokens
are all accepted is sealed: moved to the pool of each layer group, where it never changes, and put
into the tree of prefixes. Other sequences take it from there by reference. Window groups let go of
sealed pages that no later query can see.
"""

from collections.abc import Hashable, Iterable
from collections.abc import Sequence as Seq

from mlxserve.cache import integrity
from mlxserve.cache.allocator import PageAllocator
from mlxserve.cache.groups import LayerGroup
from mlxserve.cache.prefix import Node
from mlxserve.cache.shared import ZERO_SLOT, SharedPages
from mlxserve.sequence import NO_PAGE, SPARE_HOT_PAGES, Chunk, Load, Seal, Sequence, StepPlan


class CacheManager:
    """Gives pages to sequences and takes them back. Engine thread only.

    hot_pages: hot page ids, shared by all groups; pool_pages: sealed page ids of each paged group;
    slots: of recurrent states, live ones and snapshots, with one that stays zero. sharing: whether
    equal prefixes are computed once.
    """

    def __init__(
        self,
        groups: Seq[LayerGroup],
        *,
        hot_pages: int,
        pool_pages: Seq[int],
        slots: int = 1,
        sharing: bool = True,
    ) -> None:
        self.sharing = sharing
        self._hot_pages = hot_pages
        self._shared_sizes = tuple(groups), tuple(pool_pages), slots
        self.reset()
        self.groups = self.shared.groups
        self.recurrent, self.page_tokens = self.shared.recurrent, self.shared.page_tokens

    def reset(self) -> None:
        """Everything is free. For a start, and after a step that failed: nobody holds a page."""
        self.hot = PageAllocator(self._hot_pages)
        self.shared = SharedPages(*self._shared_sizes)
        self.pools, self.states, self.tree = self.shared.pools, self.shared.states, self.shared.tree
        self._seals: list[Seal] = []
        self._loads: list[Load] = []
        self._state_moves: dict[int, int] = {}
        self._left_hot = 0  # sealed ones of sequences that ended

    # ---- A step's plan.

    def begin_plan(self, running: Iterable[Sequence], now_s: float = 0.0) -> None:
        """Before the next step is planned: seal what is accepted, drop what windows left behind."""
        self.shared.end_pins(now_s)
        self.tree.begin_plan()
        for seq in running:
            self.seal(seq)
            self._drop_unseen(seq)
            self._snapshot(seq)

    def end_plan(self, chunks: Iterable[Chunk]) -> StepPlan:
        """The step that was planned, with all that has to be copied in it."""
        states = tuple((source, to) for to, source in self._state_moves.items())
        plan = StepPlan(tuple(chunks), tuple(self._seals), tuple(self._loads), states)
        self.hot.give(seal.hot for seal in self._seals)  # the next step writes them after this one
        self._left_hot = 0
        self._seals, self._loads, self._state_moves = [], [], {}
        self.tree.end_plan()
        return plan

    # ---- A sequence's pages.

    def match(self, seq: Sequence) -> None:
        """Move a sequence on over what the tree has of its next tokens.

        It takes the deepest position where every group can resume: full attention needs all pages,
        a window those that it shows, recurrent layers a snapshot. Then, where pages are as they
        were computed, the first tokens of one page more. At least one token is left to compute, for
        what it predicts.
        """
        self._begin(seq)
        P = self.page_tokens
        if seq.node is None or seq.computed != seq.sealed * P or seq.hot:
            return
        before, limit = seq.computed, seq.total - 1
        path = self.tree.follow(seq.node, seq.ids, limit, P)
        self._note_agreed(seq, path)
        while path and not self.shared.resumes(path, seq.sealed + len(path)):
            path.pop()
        if path:
            self._adopt(seq, path)
        if self.shared.cuts:
            self._load_part(seq, limit)
        if not seq.preempted:
            seq.cached += seq.computed - before

    def reserve(self, seq: Sequence, n: int) -> bool:
        """Make room for n more tokens: all of it, or nothing and False.

        Takes hot pages for the tokens, and a pool page per group for each page they complete, so
        that sealing can't fail later. Idle pages of the tree are taken back for it.
        """
        self._begin(seq)
        end = seq.computed + n
        hot = -(-end // self.page_tokens) - seq.sealed - len(seq.hot)
        needs = [end // self.page_tokens - len(table) for table in seq.tables]
        if hot > self.hot.free or not all(
            self.shared.make_room(group, need) for group, need in enumerate(needs)
        ):
            return False
        seq.hot += self.hot.take(max(hot, 0))
        for group, (table, need) in enumerate(zip(seq.tables, needs, strict=True)):
            table += self._take(group, max(need, 0))
        return True

    def has_room(self, seq: Sequence, running: Iterable[Sequence] = ()) -> bool:
        """Whether all tokens of a waiting sequence, and one more page, could be held now.

        running: those that will take pages for their own tokens first.
        """
        path, waiting = self._prefix(seq), [*running]
        for index, (pool, group) in enumerate(zip(self.pools, self.groups, strict=True)):
            needed = self._pages_of(index, seq)
            if group.window is None:  # what others hold needs no room again
                needed -= sum(node.pages[index] not in pool.idle for node in path)
            for other in waiting:
                table = other.tables[index] if other.begun else []
                held = len(table) - table.count(NO_PAGE)
                needed += max(self._pages_of(index, other) - held, 0)
            if pool.available < needed:
                return False
        return True

    def _pages_of(self, group: int, seq: Sequence) -> int:
        """Pages for all tokens that a sequence has, and one more."""
        return self.groups[group].held(seq.total // self.page_tokens + 1)

    def cached_tokens(self, seq: Sequence) -> int:
        """How many tokens of a waiting sequence the tree has, in whole pages."""
        return len(self._prefix(seq)) * self.page_tokens

    def seal(self, seq: Sequence) -> None:
        """Seal every complete accepted page: it's moved in the step that is being planned."""
        P = self.page_tokens
        while (seq.sealed + 1) * P <= seq.accepted:
            at = seq.sealed
            pages = tuple(table[at] for table in seq.tables)
            if seq.node is not None:
                pages = self._put(seq, tuple(seq.ids[at * P : (at + 1) * P]), pages)
            self._seals.append(Seal(seq.hot.pop(0), pages))
            seq.sealed += 1

    def release(self, seq: Sequence, *, keep_tail: bool = False) -> None:
        """Take back everything; the sequence starts again from nothing, or is over.

        What is sealed stays in the tree; keep_tail: so do the tokens after it.
        """
        if seq.node is not None:
            self._seal_rest(seq, keep_tail)
        self._loads = [load for load in self._loads if load.hot not in seq.hot]
        self.hot.give(seq.hot)
        for group, (table, pool) in enumerate(zip(seq.tables, self.pools, strict=False)):
            held = [page for page in table if page != NO_PAGE]
            # The deepest first, so that the oldest idle page of the tree is always a leaf. A window
            # has all that it holds or nothing; it loses the shallowest first, which fewer need.
            pool.give(held if self.groups[group].window is not None else reversed(held))
        if seq.slot != NO_PAGE:
            self._state_moves.pop(seq.slot, None)
            self.states.give([seq.slot])
        if seq.node is not None:
            self.tree.leave(seq.node)
        seq.hot, seq.tables, seq.dropped, seq.slot, seq.node = [], [], [], NO_PAGE, None
        seq.sealed = seq.computed = 0
        seq.begun = False

    def tokens_at_most(self) -> int:
        """The longest sequence that fits when it is alone."""
        unbounded = [
            pool.pages
            for pool, group in zip(self.pools, self.groups, strict=True)
            if group.window is None
        ]
        return (min(unbounded) + 1) * self.page_tokens - 1 if unbounded else 2**31 - 1

    def pin(self, key: Hashable, salt: Hashable, ids: Seq[int], until_s: float) -> int:
        """Keep a prefix for a while; see SharedPages."""
        return self.shared.pin(key, salt, ids, until_s) if self.sharing else 0

    @property
    def unsettled(self) -> bool:
        """Whether pages wait to be sealed."""
        return bool(self._seals)

    # ---- Beginning, and going on from the tree.

    def _shares(self, seq: Sequence) -> bool:
        return self.sharing and not seq.request.reads  # then every position is computed

    def _prefix(self, seq: Sequence) -> list[Node]:
        root = self.tree.roots.get(seq.request.salt) if self._shares(seq) else None
        if root is None:
            return []
        return self.tree.follow(root, seq.ids, seq.total - 1, self.page_tokens)

    def _begin(self, seq: Sequence) -> None:
        if seq.begun:
            return
        seq.begun = True
        seq.tables = [[] for _ in self.groups]
        seq.dropped = [0] * len(self.groups)
        if self._shares(seq):
            seq.node = self.tree.enter(self.tree.root(seq.request.salt))
        if self.recurrent:
            self.shared.make_slot()
            (seq.slot,) = self.states.take(1)
            self._state_moves[seq.slot] = ZERO_SLOT

    def _adopt(self, seq: Sequence, path: Seq[Node]) -> None:
        """Hold the pages of the nodes after a sequence's own."""
        first, depth = seq.sealed, seq.sealed + len(path)
        position = depth * self.page_tokens
        for group, (table, pool) in enumerate(zip(seq.tables, self.pools, strict=True)):
            table += [NO_PAGE] * (depth - len(table))
            for number in self.shared.needed(group, depth, position):
                if number >= first:
                    table[number] = path[number - first].pages[group]
                    pool.share(table[number])
        if self.recurrent:
            self._state_moves[seq.slot] = path[-1].snapshot
            self.states.touch(path[-1].snapshot)
        self._go_to(seq, path[-1])
        seq.sealed, seq.computed = depth, position
        self._drop_unseen(seq)

    def _load_part(self, seq: Sequence, limit: int) -> None:
        """Copy the tokens that agree of one page more.

        Not of a page that is written in this step: copies come before that.
        """
        at = seq.computed
        found = self.tree.longest(seq.node, tuple(seq.ids[at : min(limit, at + self.page_tokens)]))
        if found is None:
            return
        node, n = found
        if node.fresh or NO_PAGE in node.pages or not self.hot.free:
            return
        seq.hot += self.hot.take(1)
        self._loads.append(Load(tuple(node.pages), seq.hot[0]))
        for pool, page in zip(self.pools, node.pages, strict=True):
            pool.touch(page)
        seq.computed += n

    def _note_agreed(self, seq: Sequence, path: Seq[Node]) -> None:
        """How far a prompt agrees with what the tree has, be it that it can't go on from there.

        path: the whole pages after a sequence's own. Its own are in the tree as well, and say
        nothing unless more agrees after them.
        """
        if seq.preempted:
            return
        P = self.page_tokens
        at = (seq.sealed + len(path)) * P
        rest = tuple(seq.ids[at : at + P])
        found = self.tree.longest(path[-1] if path else seq.node, rest)
        agreed = at + (found[1] if found is not None else 0)
        if seq.matched is None:
            kept = self.shared.cuts or len(rest) == P  # less than a page isn't, where none is cut
            seq.matched = agreed if kept or found is not None else len(seq.ids)
        elif agreed > seq.computed:
            seq.matched = max(agreed, seq.matched)

    # ---- Sealing.

    def _put(self, seq: Sequence, key: tuple[int, ...], pages: tuple[int, ...]) -> tuple[int, ...]:
        """A sequence's next page into the tree; returns the pages that are to be written.

        What the tree has already is taken from there instead: the same tokens are kept once.
        """
        self.tree.drop_tails(seq.node, key)
        node = self.tree.insert(seq.node, key)
        written = []
        for group, (own, pool) in enumerate(zip(pages, self.pools, strict=True)):
            theirs = node.pages[group]
            if theirs == NO_PAGE:
                self.tree.attach(node, group, own)
            else:
                pool.share(theirs)
                pool.give([own])
                seq.tables[group][seq.sealed] = theirs
            written.append(own if theirs == NO_PAGE else NO_PAGE)
        self._go_to(seq, node)
        return tuple(written)

    def _seal_rest(self, seq: Sequence, keep_tail: bool) -> None:
        """Seal what a sequence leaves, while hot pages can be spared until it's copied."""
        pending = len(self._seals)
        if self._left_hot < SPARE_HOT_PAGES:
            self.seal(seq)
            if keep_tail:
                self._seal_tail(seq)
        self._left_hot += len(self._seals) - pending

    def _seal_tail(self, seq: Sequence) -> None:
        """Put the tokens of the last page into the tree, as far as there is one to spare."""
        at = seq.sealed * self.page_tokens
        key = tuple(seq.ids[at : seq.accepted])
        if not key or seq.node is None or not self.shared.cuts or not seq.hot:
            return
        found = self.tree.longest(seq.node, key)
        if found is not None and found[1] == len(key):
            return
        if any(not self.shared.make_room(group, 1) for group in range(len(self.pools))):
            return
        pages = tuple(self._take(group, 1)[0] for group in range(len(self.pools)))
        self.tree.drop_tails(seq.node, key)
        node = self.tree.insert(seq.node, key)
        for group, page in enumerate(pages):
            self.tree.attach(node, group, page)
            self.pools[group].give([page])
        self._seals.append(Seal(seq.hot.pop(0), pages))

    def _go_to(self, seq: Sequence, node: Node) -> None:
        """In this order, or the tree might drop what only this sequence is keeping."""
        before, seq.node = seq.node, self.tree.enter(node)
        self.tree.leave(before)

    def _drop_unseen(self, seq: Sequence) -> None:
        """The next query is at `accepted`, or later: what its windows don't show is let go."""
        for index, group in enumerate(self.groups):
            if group.window is None:
                continue
            seen = min(group.first_seen(seq.accepted), seq.sealed)
            table = seq.tables[index]
            for number in range(max(seq.dropped[index], group.kept_pages), seen):
                if table[number] != NO_PAGE:
                    self.pools[index].give([table[number]])
                    table[number] = NO_PAGE
            seq.dropped[index] = max(seq.dropped[index], seen)

    def _snapshot(self, seq: Sequence) -> None:
        """Keep the states at the end of a page, where nothing is computed beyond it yet."""
        at_border = seq.computed == seq.sealed * self.page_tokens
        if not self.recurrent or seq.node is None or not seq.sealed or not at_border:
            return
        if seq.node.snapshot != NO_PAGE:
            self.states.touch(seq.node.snapshot)
            return
        slot = self.shared.take_snapshot(seq.node)
        if slot != NO_PAGE:
            self._state_moves[slot] = seq.slot

    def _take(self, group: int, n: int) -> list[int]:
        """Pages of a pool. Who had one until a moment ago has no more use for sealing it."""
        pages = self.pools[group].take(n)
        for at, seal in enumerate(self._seals):
            if seal.pages[group] in pages:
                kept = (NO_PAGE if i == group else page for i, page in enumerate(seal.pages))
                self._seals[at] = Seal(seal.hot, tuple(kept))
        return pages

    def check_integrity(self, seqs: Seq[Sequence]) -> None:
        """Raise InvariantError unless every page is free, cached or held, and all counts add up.

        seqs: every sequence that runs or waits.
        """
        integrity.check_hot(self.hot, seqs, [seal.hot for seal in self._seals])
        integrity.check_shared(self.shared, seqs)
        for seq in seqs:
            integrity.check_sequence(self.shared, seq)
