"""Which parts of which rows the kernels of decode attention compute, in tables of integers."""

from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mlxserve.kernels.pages import PAGE_TOKENS

PLAIN_PAGES = 4  # the most of a part of pages that aren't packed
# Numbers of all heads that a lane keeps in registers. MLX measured that 88 spill (its pull request
# 4077), in a kernel that is like ours in this respect.
MAX_LANE_NUMBERS = 56


class Parts(NamedTuple):
    """Parts of rows, for one launch.

    rows: int32 `[R, 8]`, work: int32 `[items, 4]`, as paged_attention.metal reads them.
    """

    rows: mx.array
    work: mx.array
    items: int


class DecodePlan:
    """The parts of all rows; one for all layers that share page ids, a window and a form of pages.

    A part is at most so many pages of a row, and begins at a multiple of that, so that what a row
    gets doesn't depend on its batch mates.

    table, pages: of `PagedRows`, rows of one token each. packed_pages: of a part of packed pages; 0
    where the pool isn't packed. packed: the parts in a packed pool; plain: all others.
    """

    def __init__(
        self, table: np.ndarray, pages: np.ndarray, window: int | None, packed_pages: int = 0
    ) -> None:
        table = table.astype(np.int64)
        _, n, position, base, sealed, _, kept = table.T
        if (n != 1).any():
            raise ValueError(f"decode attention takes rows of one token, got {n.max()}")
        if kept.any():
            raise ValueError(f"decode attention takes no kept pages, got {kept.max()}")
        oldest = base * PAGE_TOKENS
        low = oldest if window is None else np.maximum(oldest, position - window + 1)
        begin, end = low // PAGE_TOKENS, position // PAGE_TOKENS + 1
        # Where packed pages end and others begin.
        border = np.clip(base + sealed, begin, end) if packed_pages else begin
        self.packed = _parts(table, low, begin, border, packed_pages or PLAIN_PAGES)
        self.plain = _parts(table, low, border, end, PLAIN_PAGES)
        self.count = len(table)
        self.pages = mx.array(np.resize(pages, max(8, len(pages))).astype(np.int32))


def _parts(
    table: np.ndarray, low: np.ndarray, begin: np.ndarray, end: np.ndarray, most: int
) -> Parts:
    """Pages begin .. end of each row in parts of at most `most`."""
    first, _, position, base, sealed, at, _ = table.T
    first_part = begin // most
    items = np.where(begin < end, -(-end // most) - first_part, 0)
    first_item = np.cumsum(items) - items
    row = np.repeat(np.arange(len(items)), items)
    part = first_part[row] + np.arange(len(row)) - first_item[row]
    work = np.zeros((max(2, len(row)), 4), np.int32)  # below 8 numbers MLX changes their type
    work[: len(row), 0] = row
    work[: len(row), 1] = np.maximum(part * most, begin[row])
    work[: len(row), 2] = np.minimum(part * most + most, end[row])
    work[: len(row), 3] = (at - base)[row]
    rows = np.stack([first, position, low, base, sealed, at, first_item, items], axis=1)
    return Parts(mx.array(rows.astype(np.int32)), mx.array(work), len(row))
