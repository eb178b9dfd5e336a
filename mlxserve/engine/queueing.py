"""The sequences that wait, and which of them starts next. Integers and lists: no arrays, no clock.

The order, first rule first:

1. Preempted ones, oldest first: they have delivered tokens already.
2. A line (one tenant's sequences in one class of priority) that has waited too long without a
   start: nobody starves. The clock is the line's and not the sequence's, or else the thousand
   requests of a flood, all old, would go before everybody.
3. The smallest `Request.priority`.
4. The tenant that was served the fewest tokens.
5. Within the line, by policy: order of arrival, or most cached tokens first.
"""

import math
from bisect import insort_left
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import get_args

from mlxserve.config import Policy
from mlxserve.errors import RequestError
from mlxserve.sequence import Sequence

REMEMBERED_TENANTS = 1024


@dataclass(slots=True)
class _Line:
    """One tenant's waiting sequences of one priority, in order of arrival, at least one.

    started_s: when one of them started last.
    """

    seqs: OrderedDict[Sequence, None] = field(default_factory=OrderedDict)
    started_s: float = -math.inf

    @property
    def oldest(self) -> Sequence:
        return next(iter(self.seqs))

    def waited_s(self, now_s: float) -> float:
        return now_s - max(self.oldest.submitted_s, self.started_s)


class WaitingQueue:
    """Waiting sequences, shared fairly between tenants. Engine thread only.

    Fairness is the virtual token counter of Sheng et al. 2024, "Fairness in Serving Large Language
    Models", arXiv:2401.00588. A tenant that comes to wait is lifted to the least count of those who
    wait: what it left unused is no credit. What it had beyond that stays counted, or else a tenant
    with one long request at a time would always come first. While nobody waits nobody is kept from
    anything, and all counts start afresh.

    policy: "fcfs" or "prefix", within one tenant and priority. ageing_s: how long a line waits for
    a start before it goes ahead of priorities and shares, those that waited longest first; under
    "prefix", also how long a sequence is overtaken by later ones of its line. Raises RequestError
    for other values.

    Sequences are added in the order they were submitted in.
    """

    def __init__(self, policy: Policy = "fcfs", ageing_s: float = 10.0) -> None:
        if policy not in get_args(Policy):
            raise RequestError(f"policy is {policy!r}; it must be 'fcfs' or 'prefix'")
        if not ageing_s >= 0:
            raise RequestError(f"ageing_s is {ageing_s}; it must be at least 0 seconds")
        self.policy = policy
        self.ageing_s = ageing_s
        self._preempted: list[Sequence] = []
        self._arrived: dict[Sequence, None] = {}
        self._hurried: dict[Sequence, float] = {}  # those with a budget -> when it has passed
        self._lines: dict[tuple[int, str], _Line] = {}
        self._waiting: dict[str, int] = {}  # tenants in some line -> tokens served
        self._others: OrderedDict[str, int] = OrderedDict()  # the rest, last served last

    def __len__(self) -> int:
        return len(self._preempted) + len(self._arrived)

    def __iter__(self) -> Iterator[Sequence]:
        """Preempted ones first, then in order of arrival."""
        yield from self._preempted
        yield from self._arrived

    def __contains__(self, seq: Sequence) -> bool:
        return seq in self._arrived or seq in self._preempted

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence. O(tenants that wait) if its tenant had none waiting, else O(1)."""
        tenant = seq.request.tenant
        if tenant not in self._waiting:
            least = min(self._waiting.values(), default=0)
            self._waiting[tenant] = max(self._others.pop(tenant, 0), least)
        self._arrived[seq] = None
        if (budget_s := seq.request.ttft_budget_s) is not None:
            self._hurried[seq] = seq.submitted_s + budget_s
        self._lines.setdefault(_key(seq), _Line()).seqs[seq] = None

    def add_front(self, seq: Sequence) -> None:
        """Put a preempted sequence before all that wait, except older preempted ones.

        Of those submitted together, the one preempted last comes first: the newest are preempted
        before the others.
        """
        insort_left(self._preempted, seq, key=lambda seq: seq.submitted_s)

    def late(self, now_s: float) -> list[Sequence]:
        """Those that wait and whose first token can't be there in time any more.

        O(sequences with a budget).
        """
        return [seq for seq, until_s in self._hurried.items() if now_s >= until_s]

    def head(self, now_s: float, cached: Callable[[Sequence], int]) -> Sequence | None:
        """The next to start, which stays in the queue; None if nothing waits.

        cached: how many tokens of a sequence the cache holds; called under "prefix" only, and for
        the sequences of one line. O(lines), and under "prefix" O(sequences of that line).
        """
        if self._preempted:
            return self._preempted[0]
        if not self._lines:
            return None
        starving = max(self._lines.values(), key=lambda line: line.waited_s(now_s))
        if starving.waited_s(now_s) > self.ageing_s:
            return starving.oldest
        key = min(self._lines, key=lambda key: (key[0], self._waiting[key[1]]))
        line = self._lines[key]
        if self.policy == "fcfs" or now_s - line.oldest.submitted_s > self.ageing_s:
            return line.oldest
        return max(line.seqs, key=cached)  # the first of equals: in order of arrival

    def start(self, seq: Sequence, now_s: float) -> None:
        """Take out a sequence because it starts. Raises KeyError if it doesn't wait."""
        if (line := self._lines.get(_key(seq))) and seq in line.seqs:
            line.started_s = now_s
        self.remove(seq)

    def remove(self, seq: Sequence) -> None:
        """Take out a sequence that was aborted. Raises KeyError if it doesn't wait."""
        if seq in self._preempted:
            self._preempted.remove(seq)
            return
        del self._arrived[seq]
        self._hurried.pop(seq, None)
        key = _, tenant = _key(seq)
        del self._lines[key].seqs[seq]
        if self._lines[key].seqs:
            return
        del self._lines[key]
        if all(other != tenant for _, other in self._lines):
            self._remember(tenant, self._waiting.pop(tenant))
        if not self._lines:
            self._others.clear()

    def served(self, tenant: str, tokens: int) -> None:
        """Count tokens computed or made for a tenant, as they are planned: before the next head."""
        if tenant in self._waiting:
            self._waiting[tenant] += tokens
        elif self._waiting:
            self._remember(tenant, self._others.pop(tenant, 0) + tokens)

    def _remember(self, tenant: str, tokens: int) -> None:
        """Keep the count of a tenant that waits for nothing, a bounded number of them.

        The one served least recently is forgotten first: not one that runs, of which there are
        fewer.
        """
        self._others[tenant] = tokens
        if len(self._others) > REMEMBERED_TENANTS:
            self._others.popitem(last=False)


def _key(seq: Sequence) -> tuple[int, str]:
    return seq.request.priority, seq.request.tenant
