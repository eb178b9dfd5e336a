"""One model of bytes: weights, the cache's arrays and their growth, and what a step makes.

The engine admits by it, `mlxserve plan` shows it, and tests/engine/test_memory.py holds it against
what MLX measures.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from mlxserve import device
from mlxserve.errors import CapacityError
from mlxserve.sequence import SPARE_HOT_PAGES
from mlxserve.types import MAX_TOP_LOGPROBS

# Of the free bytes, left unplanned: what MLX doesn't count. That is the interpreter's objects,
# recorded steps, threads' buffers and what allocators lose by rounding up, measured 27 to 31 MiB
# beside 87 to 290 MiB of MLX's; and on Metal freed buffers that wait to be used again
# (device.REUSE_FRACTION).
SPARE_FRACTION = 0.05
# Arrays of a row's logits that exist at once while it is sampled: the last step's and this one's,
# and with penalties eight more. 20 alternatives reported of every row take 18, and the spare.
PLAIN_LOGITS, MOST_LOGITS = 2, 10
READ_BYTES = 64 << 20  # for logits, and what is made of them, where a prompt is read
MIN_PAGES = 8  # what each of the cache's arrays starts with, and then doubles


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a step makes for each token, in numbers of `itemsize` bytes.

    ahead: of layers whose results exist at once; outside: before the first and after the last.
    heads: each layer's query heads, 0 where it doesn't attend. vocab_size: logits of a row that is
    sampled or read, float32.
    """

    ahead: int
    heads: tuple[int, ...]
    outside: int
    vocab_size: int
    itemsize: int

    def nbytes(self, tokens: int, rows: int, logits: int = MOST_LOGITS) -> int:
        """The most that exists at once in a step of so many tokens that samples so many rows.

        logits: arrays of a row's logits. What attention gathers isn't in it: see `CacheShape`.
        """
        made = tokens * (self.ahead + self.outside) * self.itemsize
        return made + 4 * rows * self.vocab_size * logits

    def read_bytes(self, tokens: int, alternatives: int) -> int:
        """The most that exists while so many tokens of a prompt are read, after their step."""
        rows = min(tokens, rows_read_at_once(self.vocab_size, alternatives))
        logits = rows * _read_row_bytes(self.vocab_size, alternatives)
        return tokens * self.outside * self.itemsize + logits

    def largest_bytes(self, tokens: int, rows: int) -> int:
        """What to leave for steps of at most so many tokens and rows."""
        return max(self.nbytes(tokens, rows), self.read_bytes(tokens, MAX_TOP_LOGPROBS))


@dataclass(frozen=True, slots=True)
class GroupShape:
    """What a layer group asks for.

    page_bytes: one sealed page over all its layers, 0 where it has none here; hot_page_bytes: a hot
    one. array_bytes: one page in the largest array, of a layer's keys or of its values.
    window_pages: pages per sequence, None for all. scratch_bytes: what attention takes for a while
    per page that it reads, in one layer; 0 where it reads pages where they lie.
    """

    page_bytes: int
    hot_page_bytes: int
    array_bytes: int
    window_pages: int | None
    scratch_bytes: int = 0


@dataclass(frozen=True, slots=True)
class CachePlan:
    """Sizes of storage: hot pages, pages per paged layer group, state slots.

    Either the most that it may grow to, or what it has grown to.
    """

    hot_pages: int
    pool_pages: tuple[int, ...]
    slots: int = 1


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What the cache's arrays take. groups: the paged ones; slot_bytes: one sequence's states."""

    groups: tuple[GroupShape, ...]
    slot_bytes: int = 0

    def nbytes(self, sizes: CachePlan) -> int:
        """All arrays at these sizes."""
        pages = zip(self.groups, sizes.pool_pages, strict=True)
        hot = sizes.hot_pages * sum(group.hot_page_bytes for group in self.groups)
        return hot + sizes.slots * self.slot_bytes + sum(g.page_bytes * n for g, n in pages)

    def peak_bytes(self, sizes: CachePlan, step_bytes: int) -> int:
        """The most that exists at once beside the weights, once arrays have grown to these sizes.

        The arrays, and either a step's results or, between two steps, the array of a pool that is
        growing as it was before. Those of hot pages and states are small beside these.
        """
        pages = list(zip(self.groups, sizes.pool_pages, strict=True))
        scratch = max((group.scratch_bytes * n for group, n in pages), default=0)
        growth = max((group.array_bytes * _before(n) for group, n in pages), default=0)
        return self.nbytes(sizes) + max(step_bytes + scratch, growth)

    def room_bytes(self, free_bytes: int, step_bytes: int) -> int:
        """What all arrays together may take, so that `peak_bytes` fits; 0 where nothing is left.

        free_bytes: what the weights leave. A page costs what it takes in the arrays and its share
        of what attention gathers; or, as the largest array is copied, that of the copy.
        """
        usable = (1 - SPARE_FRACTION) * free_bytes
        here = [group for group in self.groups if group.page_bytes]
        scratch = max((g.scratch_bytes / g.page_bytes for g in here), default=0.0)
        growth = max((g.array_bytes / g.page_bytes for g in here), default=0.0)
        room = min((usable - step_bytes) / (1 + scratch), usable / (1 + growth))
        return max(0, int(room))


def rows_read_at_once(vocab_size: int, alternatives: int) -> int:
    """Rows of a prompt whose logits are made at once where their log-probabilities are read.

    alternatives: likeliest tokens that are reported beside each.
    """
    return max(1, READ_BYTES // _read_row_bytes(vocab_size, alternatives))


def _read_row_bytes(vocab_size: int, alternatives: int) -> int:
    """Three arrays of float32 logits, and one more for each alternative after the first."""
    return 4 * vocab_size * (3 + max(0, alternatives - 1))


def grown(pages: int, needed: int, limit: int) -> int:
    """Pages of an array that has `pages`, once `needed` fit: doubled, up to its limit."""
    while pages < min(needed, limit):
        pages = min(2 * pages, limit)
    return pages


def _before(pages: int) -> int:
    """The pages of an array before it grew to so many; 0 if it never did."""
    before = MIN_PAGES
    while 2 * before < pages:
        before *= 2
    return before if pages > MIN_PAGES else 0


def device_limit_bytes() -> int:
    """What this process may use: Metal's recommended working set, or a CPU's free memory."""
    if device.has_metal():
        return device.recommended_bytes()
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            limits.append(int(line.split()[1]) * 1024)
    return min(limits + _cgroup_limits())


def check_weights(size_bytes: int, limit_bytes: int) -> None:
    """Raise CapacityError, before anything is loaded, for weights that memory can't hold."""
    if size_bytes > limit_bytes:
        raise CapacityError(
            f"the weights take {size_bytes / 2**30:.1f} GiB, and {limit_bytes / 2**30:.1f} GiB of "
            "memory can be used; take a smaller model or quantisation, or close other programs"
        )


def _cgroup_limits() -> list[int]:
    """What a container may still take; files in the page cache are no use of it."""
    found = []
    for folder, limit_file, used_file in (
        (Path("/sys/fs/cgroup"), "memory.max", "memory.current"),
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        limit, used = _lines(folder / limit_file), _lines(folder / used_file)
        if limit and limit[0].isdigit() and used:  # and not "max"
            stat = dict(line.split()[:2] for line in _lines(folder / "memory.stat"))
            files = sum(int(stat.get(key, 0)) for key in ("active_file", "inactive_file"))
            found.append(max(int(limit[0]) - max(int(used[0]) - files, 0), 0))
    return found


def plan_cache(
    shape: CacheShape,
    *,
    step_bytes: int,
    free_bytes: int,
    max_batch: int,
    max_batched_tokens: int,
    context_tokens: int,
    page_tokens: int,
) -> CachePlan:
    """Divide the room for the cache among hot pages, the pools and recurrent states.

    Hot pages and states are bounded by the batch, so they come first. Window layers have pages for
    twice as many rows, for prefixes that may come again; for fewer where these would take more than
    half the room, which full-attention layers need, or all of it if there are none. Those share
    what is left, at most a whole context for each row. step_bytes: of the largest step.
    free_bytes: what the weights leave. Raises CapacityError if not even one page is left.
    """
    if free_bytes <= 0:
        raise CapacityError(
            "the weights leave no memory for the cache; take a smaller model or quantisation, or "
            "close other programs"
        )
    chunk_pages = max_batched_tokens // page_tokens
    # A row has two, one that is complete and one that it writes; so have some that just ended.
    hot_pages = 2 * max_batch + chunk_pages + SPARE_HOT_PAGES
    slots = 1 + 2 * max_batch if shape.slot_bytes else 1
    each = sum(group.page_bytes for group in shape.groups if group.window_pages is None)
    room = shape.room_bytes(free_bytes, step_bytes)

    def bounded(rows: int) -> CachePlan:
        """A row's window, one page that it is about to complete, and one to spare."""
        pages = (
            0 if g.window_pages is None else rows * (g.window_pages + 2) + chunk_pages
            for g in shape.groups
        )
        return CachePlan(hot_pages, tuple(pages), slots)

    row_bytes = shape.nbytes(bounded(1)) - shape.nbytes(bounded(0))
    share = (room // 2 if each else room) - shape.nbytes(bounded(0))
    rows = max(1, min(2 * max_batch, share // row_bytes)) if row_bytes else 2 * max_batch
    least = bounded(rows)
    spent = shape.nbytes(least)
    if spent + each > room:
        raise CapacityError(
            f"{_gib(free_bytes)} are free beside the weights: {_gib(room)} for the cache, after "
            f"{_gib(step_bytes)} for a step's results; it needs {_gib(spent + each)} with its "
            f"first page of context; close other programs, or lower max_batch ({max_batch}) or "
            f"max_batched_tokens ({max_batched_tokens})"
        )
    pages = max_batch * -(-context_tokens // page_tokens)
    if each:
        pages = min(pages, (room - spent) // each)
    pools = tuple(
        pages if group.window_pages is None else n
        for group, n in zip(shape.groups, least.pool_pages, strict=True)
    )
    return CachePlan(hot_pages, pools, slots)


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB"


def _lines(path: str | Path) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
