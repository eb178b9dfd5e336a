"""Device limits -> bytes for the cache -> pages per layer group."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mlxserve import device
from mlxserve.errors import CapacityError
from mlxserve.sequence import SPARE_HOT_PAGES

# Left for activations, the tokenizer and everyone else's needs.
USABLE_FRACTION = 0.9


@dataclass(frozen=True, slots=True)
class GroupShape:
    """What a layer group asks for.

    page_bytes: one sealed page over all its layers; hot_page_bytes: a hot one. window_pages: pages
    per sequence, None for all. scratch_bytes: what attention takes for a while per page that it
    reads, in one layer.
    """

    page_bytes: int
    hot_page_bytes: int
    window_pages: int | None
    scratch_bytes: int


@dataclass(frozen=True, slots=True)
class CachePlan:
    """The most that storage may grow to: hot pages, pages per paged layer group, state slots."""

    hot_pages: int
    pool_pages: tuple[int, ...]
    slots: int = 1


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
    groups: Sequence[GroupShape],
    *,
    slot_bytes: int = 0,
    free_bytes: int,
    max_batch: int,
    max_batched_tokens: int,
    context_tokens: int,
    page_tokens: int,
) -> CachePlan:
    """Divide free bytes among hot pages, the pools and recurrent states.

    Hot pages, states and window pages are bounded by the batch, so they come first; of the latter
    two there are twice as many as the rows need, for prefixes that may come again. Full-attention
    layers share what is left, at most a whole context for each row. slot_bytes: the states of one
    sequence. Raises CapacityError if not even one page is left.
    """
    if free_bytes <= 0:
        raise CapacityError(
            "the weights leave no memory for the cache; take a smaller model or quantisation, or "
            "close other programs"
        )
    chunk_pages = max_batched_tokens // page_tokens
    # A row has two, one that is complete and one that it writes; so have some that just ended.
    hot_pages = 2 * max_batch + chunk_pages + SPARE_HOT_PAGES
    slots = 1 + 2 * max_batch if slot_bytes else 1
    spent = hot_pages * sum(group.hot_page_bytes for group in groups) + slots * slot_bytes
    pools: dict[int, int] = {}
    for index, group in enumerate(groups):
        if group.window_pages is not None:
            # And one that it is about to complete, and one to spare.
            pools[index] = 2 * max_batch * (group.window_pages + 2) + chunk_pages
            spent += pools[index] * group.page_bytes
    full = [index for index in range(len(groups)) if index not in pools]
    if full:
        # A single row may read every page, one layer after another.
        scratch = max(groups[index].scratch_bytes for index in full)
        per_page = sum(groups[index].page_bytes for index in full) + scratch
        affordable = int(USABLE_FRACTION * free_bytes - spent) // per_page
        if affordable < 1:
            raise CapacityError(
                f"{free_bytes / 2**30:.1f} GiB are free, and {spent / 2**30:.1f} GiB are needed "
                "before the first page of context; close other programs or lower max_batch "
                f"({max_batch})"
            )
        wanted = max_batch * -(-context_tokens // page_tokens)
        pools |= dict.fromkeys(full, min(affordable, wanted))
    elif spent > USABLE_FRACTION * free_bytes:
        raise CapacityError(
            f"{free_bytes / 2**30:.1f} GiB are free, and the cache needs {spent / 2**30:.1f} GiB; "
            f"close other programs or lower max_batch ({max_batch})"
        )
    return CachePlan(hot_pages, tuple(pools[index] for index in range(len(groups))), slots)


def _lines(path: str | Path) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
