"""A request while it runs, and what one step does. Engine thread only; no arrays."""

import secrets
from dataclasses import dataclass, field
from typing import Any

from mlxserve.types import Request, ThinkingBudget, Timings, Usage

SPARE_HOT_PAGES = 8  # that sequences which ended may hold, until a step has copied them
NO_PAGE = -1  # in place of a page that a layer group doesn't hold


@dataclass(slots=True)
class Thought:
    """How long an answer has been thinking. read: tokens of prompt and answer that it has seen."""

    budget: ThinkingBudget
    read: int
    inside: bool
    taken: int = 0

    def must_close(self, ids: list[int]) -> bool:
        """Whether its budget is used up and the next token must close it. ids: all known ones."""
        opening, closing = self.budget.opening, self.budget.closing
        for end in range(self.read + 1, len(ids) + 1):
            if tuple(ids[end - len(opening) : end]) == opening:
                self.inside = True
            elif ids[end - 1] == closing:
                self.inside = False
            else:
                self.taken += self.inside
        self.read = len(ids)
        return self.inside and self.taken >= self.budget.tokens


@dataclass(eq=False, slots=True)
class Sequence:
    """A request while it runs. Owned by the engine thread; all per-request state is here.

    ids: the tokens known so far, prompt first.
    computed: how many of them have (or will have, once the submitted steps ran) keys and values
        in the cache; a step moves it towards the total.
    pending: tokens sampled by a step in flight and not read yet (0 or 1).
    begun: whether it may hold pages, or a slot.
    hot: ids of the hot pages, oldest first; hot[j] holds page number sealed + j.
    sealed: number of pages sealed so far.
    tables: per paged layer group, ids of its pool pages by page number: sealed ones, NO_PAGE where
        a window left them behind, then those reserved for hot pages that are about to be complete.
    dropped: per paged layer group, the oldest page number that the window still shows.
    slot: where the states of recurrent layers lie, if the model has any.
    node: where this sequence's sealed pages end in the tree of prefixes; None: it shares nothing.
    preempted: whether it had to start over; what it finds in the cache then is its own.
    cached: prompt tokens that were found in the cache; matched: those that agreed with a prefix of
        it, whether or not every layer could resume there; None: nothing was looked up.
    scored: positions of which what was to be read is delivered; a request that starts over skips
        them.
    counts: occurrences of each token, an array `[V]` on the device, for penalties only.
    matcher: how far the answer has come in its grammar, a `text.matcher.Matcher`, or None.
    thought: how long it has been thinking, if there is a budget for that.
    """

    request: Request
    ids: list[int]
    seed: int
    max_tokens: int
    computed: int = 0
    pending: int = 0
    begun: bool = False
    hot: list[int] = field(default_factory=list)
    sealed: int = 0
    tables: list[list[int]] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    slot: int = NO_PAGE
    node: Any = None
    cached: int = 0
    matched: int | None = None
    preempted: bool = False
    scored: int = 0
    counts: Any = None
    matcher: Any = None
    thought: Thought | None = None
    finished: bool = False
    submitted_s: float = 0.0
    started_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None

    @classmethod
    def start(cls, request: Request, context_tokens: int, submitted_s: float) -> "Sequence":
        """A sequence at its beginning; an answer ends where the context does."""
        seed = secrets.randbits(64) if request.params.seed is None else request.params.seed
        prompt, thinking = len(request.prompt_ids), request.thinking
        wanted, room = request.params.max_tokens, context_tokens - prompt
        return cls(
            request=request,
            thought=thinking and Thought(thinking, prompt, thinking.inside),
            ids=list(request.prompt_ids),
            seed=seed,
            max_tokens=room if wanted is None else min(wanted, room),
            submitted_s=submitted_s,
        )

    def timings(self) -> Timings:
        """How long it took so far."""
        if self.first_token_s is None or self.started_s is None or self.last_token_s is None:
            return Timings()
        prompt = len(self.request.prompt_ids)
        later = len(self.ids) - prompt - 1
        prefill_s = self.first_token_s - self.started_s
        decode_s = self.last_token_s - self.first_token_s
        return Timings(
            ttft_s=self.first_token_s - self.submitted_s,
            prefill_tokens_per_s=prompt / prefill_s if prefill_s > 0 else None,
            decode_tokens_per_s=later / decode_s if later > 0 and decode_s > 0 else None,
        )

    def usage(self) -> Usage:
        """What it read and wrote so far."""
        prompt = len(self.request.prompt_ids)
        diverged_at = None if self.matched == prompt else self.matched
        return Usage(prompt, len(self.ids) - prompt, self.cached, diverged_at)

    @property
    def constrained(self) -> bool:
        """Whether what may come next depends on all that is known of the answer."""
        return self.matcher is not None or self.thought is not None

    @property
    def total(self) -> int:
        """Tokens this request wants computed as things stand."""
        return len(self.ids) + self.pending - self.request.unread

    @property
    def accepted(self) -> int:
        """Computed tokens that can no longer change: their ids are known."""
        return min(self.computed, len(self.ids))

    @property
    def outputs(self) -> int:
        """New tokens, counting the one in flight."""
        return len(self.ids) + self.pending - len(self.request.prompt_ids)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens `start .. start + n` of a sequence; `samples`: and then the next one is drawn.

    hot: ids of the hot pages that these tokens go to, from that of `start` on.
    """

    seq: Sequence
    start: int
    n: int
    samples: bool
    hot: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Seal:
    """A complete hot page and the page of each group's pool that it goes to, or NO_PAGE."""

    hot: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Load:
    """A page of each group's pool whose first tokens are copied to a hot page."""

    pages: tuple[int, ...]
    hot: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: its copies, and the chunks to compute, end to end, decode rows first.

    Before the chunks: `loads`, and `states`, (from, to) among the slots of recurrent states, all
    read before any is written. `seals` come after the chunks' tokens were written and before they
    attend, so that a page that this step completes is read as it will be read ever after.
    """

    chunks: tuple[Chunk, ...]
    seals: tuple[Seal, ...] = ()
    loads: tuple[Load, ...] = ()
    states: tuple[tuple[int, int], ...] = ()

    @property
    def tokens(self) -> int:
        return sum(c.n for c in self.chunks)

    @property
    def prompts(self) -> bool:
        """Whether any row has more than one token."""
        return any(c.n > 1 for c in self.chunks)
