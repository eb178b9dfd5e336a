"""Whether attention of rows of several tokens serves a use, is right here, and how fast it is."""

from typing import Any

import mlx.core as mx
import numpy as np

from mlxserve.kernels.attention import PagedRows
from mlxserve.kernels.metal import attention_check
from mlxserve.kernels.metal.attention_trial import Attend, Layout, largest_error, timed
from mlxserve.kernels.metal.chunk_attention import chunk_attention
from mlxserve.kernels.metal.launch import Runner
from mlxserve.kernels.pages import PAGE_TOKENS, PoolSides, Sides
from mlxserve.kernels.uses import ChunkUse
from mlxserve.kernels.verdicts import Timing, Verdict

# The first tokens, across a page's end, more queries than a block has, a few late ones, one page.
ROWS = ((0, 20), (50, 30), (130, 70), (640, 9), (448, 64))
CONTEXTS = (512, 4096)
CHUNKS = (64, 512)  # tokens
CALLS = 4  # per measurement


def unsupported(use: ChunkUse) -> str:
    """Why the kernel can't serve such layers, or ""."""
    return attention_check.unsupported(use)


def check(use: ChunkUse, run: Runner) -> float:
    """The largest error in any token of several ragged rows; see `largest_error`."""
    return largest_error(use, ROWS, _kernel(use, run))


def measure(use: ChunkUse, run: Runner) -> list[Timing]:
    """Kernel and reference for each of CHUNKS at the end of each of CONTEXTS."""
    timings = []
    for context in CONTEXTS:
        for tokens in CHUNKS:
            layout = _chunk(use, tokens, context)
            size = {"rows": tokens, "context": context}
            timings.append(timed(use, layout, _kernel(use, run), **size, calls=CALLS))
    return timings


def judge(use: ChunkUse, verdict: Verdict) -> tuple[bool, str]:
    """Whether to use a kernel that is right, and why: it must be faster at most sizes."""
    return verdict.mostly_faster


def _kernel(use: ChunkUse, run: Runner) -> Attend:
    group = use.q_heads // use.kv_heads

    def attend(
        q: mx.array, hot: Sides, pool: PoolSides, rows: PagedRows, *, window: int | None, **how: Any
    ) -> mx.array:
        plan = rows.chunk_plan(window, group, use.dim)
        return chunk_attention(q, hot, pool, plan, run=run, **how)

    return attend


def _chunk(use: ChunkUse, tokens: int, context: int) -> Layout:
    """One sequence's last tokens, whole pages of them: a row, or one for each page where pages are
    packed, which sees its own page as it was before."""
    length = PAGE_TOKENS if use.key_bits else tokens
    table: list[tuple[int, ...]] = []
    pages: list[int] = []
    for first in range(0, tokens, length):
        start = context - tokens + first
        low = 0 if use.window is None else max(0, start - use.window + 1)
        base, end = low // PAGE_TOKENS, (start + length) // PAGE_TOKENS
        hot = 1 if use.key_bits else 0
        table.append((first, length, start, base, end - base - hot, len(pages), 0))
        pages += range(base, end)
    return Layout(np.array(table), np.array(pages), context // PAGE_TOKENS)
