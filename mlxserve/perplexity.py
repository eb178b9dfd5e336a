"""How well a model predicts a text: the windows that it is read in, and the number in the end."""

import math


def windows(n_tokens: int, context: int, stride: int) -> list[tuple[int, int, int]]:
    """The windows (start, end, scored_from) in which a text of `n_tokens` is read.

    A window holds tokens start .. end: the model is shown all but the last, at most `context` of
    them, and is judged on how it predicts tokens scored_from .. end. Each window begins `stride`
    tokens after the one before and is judged on what that one didn't reach, its last `stride`
    tokens. So every token but the first counts exactly once, and those after the first window are
    predicted from at least `context - stride + 1` tokens.

    Raises ValueError unless there are two tokens and 1 <= stride <= context.
    """
    if n_tokens < 2 or not 1 <= stride <= context:
        raise ValueError(f"no windows for {n_tokens} tokens, context {context}, stride {stride}")
    found, end = [], 1
    for start in range(0, n_tokens, stride):
        scored_from, end = end, min(start + context + 1, n_tokens)
        found.append((start, end, scored_from))
        if end == n_tokens:
            break
    return found


def perplexity(mean_loss: float) -> float:
    """Of a text, from the mean of its tokens' losses, in nats; infinity where that overflows."""
    return math.exp(mean_loss) if mean_loss < 700 else math.inf
