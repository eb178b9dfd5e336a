"""Which parts of which rows the kernels of attention compute, in tables of integers."""

from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mlxserve.kernels.pages import PAGE_TOKENS

PLAIN_PAGES = 4  # the most of a part of pages that aren't packed
NO_WINDOW = 1 << 30  # more tokens than any context has
# Numbers of all heads that a lane keeps in registers. MLX measured that 88 spill (its pull request
# 4077), in a kernel that is like ours in this respect.
MAX_LANE_NUMBERS = 56


class Parts(NamedTuple):
    """Parts of rows, for one launch.

    rows: int32 `[R, 2]`, at least 4 rows, as paged_attention_merge.metal reads them; work: int32
    `[items, 4 + pages]`, as paged_attention.metal does; pages: the most that a part has.
    """

    rows: mx.array
    work: mx.array
    pages: int

    @property
    def items(self) -> int:
        """How many parts there are."""
        return self.work.shape[0]


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
        self.packed = _parts(table, pages, low, begin, border, packed_pages or PLAIN_PAGES)
        self.plain = _parts(table, pages, low, border, end, PLAIN_PAGES)
        self.count = len(table)


class ChunkPlan:
    """The blocks of rows of several tokens, for layers that share page ids, window and heads.

    table, pages: of `PagedRows`; group: query heads of a KV head, which are folded into the rows of
    queries; block_rows: of these in a block. rows: int32 `[R, 8]`, work: int32 `[items, 2]`, as
    chunk_attention.metal reads them; tokens: of all rows.
    """

    def __init__(
        self,
        table: np.ndarray,
        pages: np.ndarray,
        window: int | None,
        group: int,
        block_rows: int,
    ) -> None:
        first, n, start, base, sealed, at, kept = table.astype(np.int64).T
        if kept.any():
            raise ValueError(f"chunk attention takes no kept pages, got {kept.max()}")
        windows = np.full(len(n), NO_WINDOW if window is None else window)
        rows = np.stack([first, n, start, windows, base, sealed, at, np.cumsum(n) - n], axis=1)
        blocks = -(-n * group // block_rows)
        row = np.repeat(np.arange(len(n)), blocks)
        block = np.arange(len(row)) - (np.cumsum(blocks) - blocks)[row]
        work = np.zeros((max(4, len(row)), 2), np.int32)  # below 8 numbers MLX changes their type
        work[: len(row)] = np.stack([row, block * block_rows], axis=1)
        self.rows, self.work = mx.array(rows.astype(np.int32)), mx.array(work)
        self.items, self.tokens = len(row), int(n.sum())
        self.pages = _page_ids(pages)


def _page_ids(pages: np.ndarray) -> mx.array:
    return mx.array(np.resize(pages, max(8, len(pages))).astype(np.int32))


def _parts(
    table: np.ndarray,
    pages: np.ndarray,
    low: np.ndarray,
    begin: np.ndarray,
    end: np.ndarray,
    most: int,
) -> Parts:
    """Pages begin .. end of each row in parts of at most `most`. low: its oldest token seen."""
    first_part = begin // most
    items = np.where(begin < end, -(-end // most) - first_part, 0)
    first_item = np.cumsum(items) - items
    row = np.repeat(np.arange(len(items)), items)
    part = first_part[row] + np.arange(len(row)) - first_item[row]
    first_page = np.maximum(part * most, begin[row])
    end_page = np.minimum(part * most + most, end[row])
    token, _, position, base, sealed, at, _ = table[row].T
    first_token = first_page * PAGE_TOKENS
    work = np.empty((len(row), 4 + most), np.int32)
    work[:, 0] = token
    work[:, 1] = np.maximum(low[row], first_token) - first_token
    work[:, 2] = np.minimum(position + 1, end_page * PAGE_TOKENS) - first_token
    work[:, 3] = np.clip(base + sealed, first_page, end_page) - first_page
    slots = (at - base + first_page)[:, None] + np.arange(most)
    work[:, 4:] = pages.take(slots, mode="clip")  # behind a part's last page: ids that nobody reads
    rows = np.zeros((max(4, len(items)), 2), np.int32)  # below 8 numbers MLX changes their type
    rows[: len(items)] = np.stack([first_item, items], axis=1)
    return Parts(mx.array(rows), mx.array(work), most)
