"""How well a model predicts a text: the windows it is read in, and the loss of each token."""

import numpy as np

_BLOCK_BYTES = 32 << 20


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


def token_losses(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Minus the log-probability of each target, in nats: float64 `[T]`.

    logits: `[T, V]`; targets: `[T]`, ids. In float64, a few rows at a time: all of `[T, V]` would
    be twice the size of the logits themselves.
    """
    rows = max(1, _BLOCK_BYTES // (8 * logits.shape[1]))
    losses = np.empty(len(targets), np.float64)
    for at in range(0, len(targets), rows):
        block = logits[at : at + rows].astype(np.float64)
        chosen = np.take_along_axis(block, targets[at : at + rows, None], axis=1)[:, 0]
        top = block.max(axis=1)
        np.exp(block - top[:, None], out=block)
        losses[at : at + rows] = np.log(block.sum(axis=1)) + top - chosen
    return losses
