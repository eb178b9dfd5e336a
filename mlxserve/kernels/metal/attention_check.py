"""Whether decode attention serves a use, is right on this device, and how fast it is."""

from typing import Any

import mlx.core as mx
import numpy as np

from mlxserve.kernels.attention import PagedRows
from mlxserve.kernels.metal.attention_trial import Attend, largest_error, lay_out, timed
from mlxserve.kernels.metal.launch import Runner
from mlxserve.kernels.metal.packed_attention import part_pages
from mlxserve.kernels.metal.paged_attention import decode_attention
from mlxserve.kernels.pages import PoolSides, Sides
from mlxserve.kernels.registry import TOLERANCE
from mlxserve.kernels.uses import AttentionUse
from mlxserve.kernels.verdicts import Timing, Verdict

HEAD_DIMS = (64, 72, 80, 96, 112, 128, 192, 256)
# The first token, one page, around a page's end, around the end of a part, and several parts.
POSITIONS = (0, 5, 63, 64, 200, 255, 256, 700, 1100)
CONTEXTS = (512, 4096)
ROWS = (1, 8)
CALLS = 32  # per measurement


def unsupported(use: AttentionUse) -> str:
    """Why the kernel can't serve such layers, or ""."""
    if use.dim not in HEAD_DIMS:
        return f"head dim {use.dim} is none of {', '.join(map(str, HEAD_DIMS))}"
    if use.dtype not in TOLERANCE:
        return f"a cache in {use.dtype} isn't float16 or bfloat16"
    if use.q_heads % use.kv_heads:
        return f"{use.q_heads} query heads can't share {use.kv_heads} key heads evenly"
    if use.keep:
        return f"the first {use.keep} tokens are kept beside the window"
    if use.value_bits and not use.key_bits:
        return f"keys in 16 bits beside values in {use.value_bits}"
    return ""


def check(use: AttentionUse, run: Runner) -> float:
    """The largest error in any of several ragged rows; see `largest_error`."""
    return largest_error(use, [(position, 1) for position in POSITIONS], _kernel(use, run))


def measure(use: AttentionUse, run: Runner) -> list[Timing]:
    """Kernel and reference at each of CONTEXTS x ROWS, in the cache's dtype."""
    timings = []
    for context in CONTEXTS:
        for rows in ROWS:
            layout = lay_out([(context - 1, 1)] * rows, use.window, np.random.default_rng(0))
            size = {"rows": rows, "context": context}
            timings.append(timed(use, layout, _kernel(use, run), **size, calls=CALLS))
    return timings


def judge(use: AttentionUse, verdict: Verdict) -> tuple[bool, str]:
    """Whether to use a kernel that is right, and why: it must be faster at most sizes."""
    return verdict.mostly_faster


def _kernel(use: AttentionUse, run: Runner) -> Attend:
    packed_pages = part_pages(use.key_bits, use.value_bits)

    def attend(
        q: mx.array, hot: Sides, pool: PoolSides, rows: PagedRows, *, window: int | None, **how: Any
    ) -> mx.array:
        plan = rows.decode_plan(window, packed_pages)
        return decode_attention(q, hot, pool, plan, run=run, **how)

    return attend
