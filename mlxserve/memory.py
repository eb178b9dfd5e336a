"""Device limits -> bytes for the cache -> pages per layer group."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mlxserve.errors import CapacityError

# Left for activations, the tokenizer and everyone else's needs.
USABLE_FRACTION = 0.9


@dataclass(frozen=True, slots=True)
class GroupShape:
    """What a layer group asks for.

    page_bytes: one page over all its layers; window_pages: pages per sequence, None for all.
    """

    page_bytes: int
    window_pages: int | None


@dataclass(frozen=True, slots=True)
class CachePlan:
    """The most pages that storage may grow to: hot, and per layer group."""

    hot_pages: int
    pool_pages: tuple[int, ...]


def device_limit_bytes() -> int:
    """What this process may use: Metal's recommended working set, or a CPU's free memory."""
    import mlx.core as mx

    if mx.metal.is_available():
        return int(mx.device_info()["max_recommended_working_set_size"])
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            limits.append(int(line.split()[1]) * 1024)
    cgroup = Path("/sys/fs/cgroup")
    for limit in _lines(cgroup / "memory.max"):
        if limit.isdigit():  # and not "max"
            used = sum(map(int, _lines(cgroup / "memory.current")))
            limits.append(max(int(limit) - used, 0))
    return min(limits)


def plan_cache(
    groups: Sequence[GroupShape],
    *,
    free_bytes: int,
    max_batch: int,
    max_batched_tokens: int,
    context_tokens: int,
    page_tokens: int,
) -> CachePlan:
    """Divide free bytes among hot pages and the pools.

    Hot and window pages are bounded by the batch, so they come first; full-attention layers share
    what is left, at most a whole context for each row. Raises CapacityError if not even one page
    is left.
    """
    chunk_pages = max_batched_tokens // page_tokens
    hot_pages = 2 * max_batch + chunk_pages
    spent = hot_pages * sum(group.page_bytes for group in groups)
    pools: dict[int, int] = {}
    for index, group in enumerate(groups):
        if group.window_pages is not None:
            pools[index] = max_batch * (group.window_pages + 1) + chunk_pages
            spent += pools[index] * group.page_bytes
    full = [index for index in range(len(groups)) if index not in pools]
    if full:
        per_page = sum(groups[index].page_bytes for index in full)
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
    return CachePlan(hot_pages, tuple(pools[index] for index in range(len(groups))))


def _lines(path: str | Path) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
