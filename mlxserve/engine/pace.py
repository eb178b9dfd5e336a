"""How long steps take, learnt from those that ran: `seconds = fixed + per_token * tokens`.

It decides how many prompt tokens may join a step whose other rows wait for their next token, and
tells whether a prompt's first token can be there in time. Numbers only: no arrays, no clock.
"""

import math
from collections import deque
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from statistics import median

RECENT_STEPS = 16
MIN_SPREAD_TOKENS = 32
FIRST_TOKENS = 64  # of a step that must not take long, where nothing is known


@dataclass(frozen=True, slots=True)
class _Step:
    tokens: int
    rows: int
    seconds: float

    @property
    def prompt_tokens(self) -> int:
        return self.tokens - self.rows


@dataclass(frozen=True, slots=True)
class _Line:
    fixed_s: float
    per_token_s: float


class Pace:
    """A line through the recent steps that no single odd one can bend. Engine thread only.

    The slope is the median of the slopes between any two steps (Theil and Sen: Sen 1968, "Estimates
    of the Regression Coefficient Based on Kendall's Tau"), of those that differ by at least
    MIN_SPREAD_TOKENS: closer ones say more about noise. It is known once no single step, such as a
    first one that compiles or one that grows the cache, takes part in half of them.

    The last RECENT_STEPS steps with prompt tokens are kept, and as many without: a long answer
    doesn't wash out what is known about prompts.
    """

    def __init__(self) -> None:
        self._decodes: deque[_Step] = deque(maxlen=RECENT_STEPS)
        self._prompts: deque[_Step] = deque(maxlen=RECENT_STEPS)

    def observe(self, tokens: int, rows: int, seconds: float) -> None:
        """Take in a step of `tokens` in all, of which `rows` were decode rows of one token each.

        Raises ValueError unless 0 <= rows <= tokens, 1 <= tokens and 0 <= seconds < infinity.
        """
        if not 0 <= rows <= tokens or tokens < 1:
            raise ValueError(f"a step of {tokens} tokens with {rows} rows; rows are among tokens")
        if not 0 <= seconds < math.inf:
            raise ValueError(f"a step of {seconds} seconds; it must be finite and at least 0")
        kind = self._decodes if rows == tokens else self._prompts
        kind.append(_Step(tokens, rows, seconds))
        self.__dict__.pop("_line", None)  # worked out again when it is asked for

    def chunk_tokens(self, target_itl_s: float, rows: int, low: int, high: int) -> int:
        """The most prompt tokens that a step with `rows` decode rows may hold to take target_itl_s.

        At least `low`, lest prompts starve, and at most `high`, which is the answer where nobody
        waits (no rows) or nothing was measured. Between them a multiple of 64, above 64. Never more
        than twice the most prompt tokens of a recent step, since the line is not to be trusted far
        from where it was measured; while it isn't known, twice the most that were on time.

        Raises ValueError unless 0 < target_itl_s, 0 <= rows and 1 <= low <= high.
        """
        if not target_itl_s > 0:
            raise ValueError(f"target_itl_s is {target_itl_s}; it must be above 0")
        if rows < 0 or not 1 <= low <= high:
            raise ValueError(f"rows {rows}, low {low}, high {high}; 0 <= rows, 1 <= low <= high")
        if rows == 0 or not (self._decodes or self._prompts):
            return high
        if (line := self._line) is not None:
            seen = self._prompts
            spare_s = target_itl_s - line.fixed_s - rows * line.per_token_s
            fits = spare_s / line.per_token_s if line.per_token_s else math.copysign(high, spare_s)
        else:
            seen = [step for step in self._prompts if step.seconds <= target_itl_s]
            fits = high
        doubled = 2 * max((step.prompt_tokens for step in seen), default=0)
        n = int(min(fits, doubled, high))
        return max(low, n - n % 64 if 64 < n < high else n)

    def tokens_within(self, limit_s: float) -> int:
        """The most tokens that a step may hold and take no longer than limit_s; at least 1.

        As in the recent steps with prompt tokens, whose time is taken to grow with all their
        tokens; at most twice those of any, and no slower than the last one, since attention slows
        down along a long prompt. FIRST_TOKENS where there was none. Raises ValueError unless
        0 < limit_s.
        """
        if not limit_s > 0:
            raise ValueError(f"limit_s is {limit_s}; it must be above 0")
        if not self._prompts:
            return FIRST_TOKENS
        fits = [step.tokens * limit_s / max(step.seconds, 1e-6) for step in self._prompts]
        known = zip(self._prompts, fits, strict=True)
        most = max(min(2 * step.tokens, fit) for step, fit in known)
        return max(1, int(min(most, fits[-1])))

    def seconds_for(self, tokens: int) -> float | None:
        """How long so many prompt tokens take; None while too little is known.

        In steps like the recent one with most prompt tokens, its decode rows included.
        """
        if (line := self._line) is None:
            return None
        step = max(self._prompts, key=lambda step: step.prompt_tokens)
        steps = math.ceil(tokens / step.prompt_tokens)
        return steps * (line.fixed_s + step.rows * line.per_token_s) + tokens * line.per_token_s

    def ttft_s(self, queued_tokens: int, own_tokens: int) -> float | None:
        """When the first token of a prompt comes, after the prompts before it; None as above."""
        return self.seconds_for(queued_tokens + own_tokens)

    @cached_property
    def _line(self) -> _Line | None:
        """The line through the recent steps, or None while one step could bend it."""
        steps = [*self._decodes, *self._prompts]
        slopes, part = [], [0] * len(steps)
        for (i, a), (j, b) in combinations(enumerate(steps), 2):
            if abs(a.tokens - b.tokens) >= MIN_SPREAD_TOKENS:
                slopes.append((a.seconds - b.seconds) / (a.tokens - b.tokens))
                part[i] += 1
                part[j] += 1
        if not self._prompts or 2 * max(part, default=0) >= len(slopes):
            return None
        slope = max(0.0, median(slopes))
        fixed = max(0.0, median(step.seconds - slope * step.tokens for step in steps))
        return _Line(fixed, slope)
