"""The masks of a step: which tokens grammars, and budgets for thinking, allow in its rows.

Engine thread only.
"""

from collections.abc import Sequence as Seq

import mlx.core as mx
import numpy as np
from llguidance import LLExecutor
from llguidance.numpy import fill_next_token_bitmask_par

from mlxserve.errors import RequestError
from mlxserve.sequence import Sequence


class Masks:
    """Masks for a model's vocabulary, those of several rows at once."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._executor: LLExecutor | None = None

    def mask(self, seqs: Seq[Sequence]) -> tuple[mx.array, dict[int, RequestError]]:
        """What may be drawn next: a bit for each token, see `kernels.select.allowed`.

        All tokens before that are committed. Also returns why some can't go on, by index. To these,
        as to those that ended, everything is allowed: their rows take part and are dropped.
        """
        if self._executor is None:
            self._executor = LLExecutor()
        bits = np.zeros((len(seqs), -(-self._vocab_size // 32)), np.int32)
        live = [i for i, seq in enumerate(seqs) if not seq.finished]
        formed = [i for i in live if seqs[i].matcher is not None]
        for i in formed:
            seqs[i].matcher.follow(seqs[i].ids)
        matchers = [(seqs[i].matcher.inner, i) for i in formed]
        if matchers:
            fill_next_token_bitmask_par(self._executor, matchers, bits)
        failures = {i: error for i in formed if (error := seqs[i].matcher.failure) is not None}
        bits[[i for i in range(len(seqs)) if i not in formed or i in failures]] = -1
        for i in live:
            thought = seqs[i].thought
            if thought is not None and thought.must_close(seqs[i].ids):
                _allow_only(bits[i], thought.budget.closing)
        return mx.array(bits.view(np.uint32)), failures


def _allow_only(bits: np.ndarray, token: int) -> None:
    """Of a row, int32 `[V / 32]`; unless a grammar forbids it now, in the midst of a character."""
    at, bit = token // 32, np.uint32(1 << token % 32)
    words = bits.view(np.uint32)
    if words[at] & bit:
        words[:] = 0
        words[at] = bit
