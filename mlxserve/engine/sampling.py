"""Choosing tokens: `(logits [B, V], sequences) -> ids [B]`, each row by its own parameters.

Rows are split by what they need (greedy or a draw), and a draw depends on nothing but its own row,
so that a row's tokens do not depend on who else is in the batch.
"""

import hashlib
import struct
from collections.abc import Sequence as Seq

import mlx.core as mx
import numpy as np

from mlxserve.kernels import select
from mlxserve.sequence import Sequence
from mlxserve.types import SamplingParams

SUM_GROUP = 256  # exponentials that are added up at once


def sample(
    logits: mx.array, seqs: Seq[Sequence], best: mx.array, mask: mx.array | None = None
) -> mx.array:
    """Draw one token per row, lazily.

    logits: float32 `[B, V]`; seqs: the sequence of each row, whose `outputs` counts this token
    already; best: int32 `[B]`, the likeliest of `logits`; mask: which tokens
    a grammar allows, see `select.allowed`. Returns int32 `[B]`. Updates `counts` of sequences with
    penalties.
    """
    params = [seq.request.params for seq in seqs]
    plain = logits
    logits = _biased(_penalised(logits, seqs), seqs)
    if mask is not None:
        logits = select.allowed(logits, mask)
    if logits is plain and all(p.temperature == 0 for p in params):
        return best
    kinds = ["greedy" if p.temperature == 0 else "drawn" for p in params]
    order: list[int] = []
    parts: list[mx.array] = []
    for kind, draw in _DRAWS.items():
        rows = [i for i, k in enumerate(kinds) if k == kind]
        if not rows:
            continue
        chosen = logits if len(rows) == len(seqs) else logits[mx.array(rows)]
        parts.append(draw(chosen, [seqs[i] for i in rows]))
        order += rows
    ids = parts[0] if len(parts) == 1 else mx.concatenate(parts)[mx.array(np.argsort(order))]
    for row, seq in enumerate(seqs):
        if seq.counts is not None:
            seq.counts = seq.counts.at[ids[row]].add(1)
    return ids


def logprobs(
    logits: mx.array, best: mx.array, ids: mx.array, top: int
) -> tuple[mx.array, mx.array, mx.array]:
    """Log-probabilities under the model: of the ids, and of the `top` likeliest tokens.

    logits: float32 `[B, V]`, as the model gave them; best, ids: int32 `[B]`, the likeliest of
    `logits` and those wanted. Returns values `[B]`, then ids and values `[B, top]`, the likeliest
    first and the lowest of equal ones.
    """
    highest = mx.take_along_axis(logits, best[:, None], axis=-1)
    shifted = logits - highest  # before the sum, lest a large logit costs digits of a small loss
    total = _logsumexp(shifted)
    chosen = (mx.take_along_axis(shifted, ids[:, None], axis=-1) - total)[:, 0]
    if not top:
        nothing = mx.zeros((logits.shape[0], 0))
        return chosen, nothing.astype(mx.int32), nothing
    # One pass per token. A partial sort needs about as long, and takes any of equal ones.
    found = [best[:, None]]
    for _ in range(min(top, logits.shape[-1]) - 1):
        logits = mx.put_along_axis(logits, found[-1], mx.array(-mx.inf), axis=-1)
        found.append(select.greedy(logits)[0][:, None])
    ids = mx.concatenate(found, axis=-1)
    return chosen, ids, mx.take_along_axis(shifted, ids, axis=-1) - total


def _penalised(logits: mx.array, seqs: Seq[Sequence]) -> mx.array:
    """Repetition, presence and frequency penalties over the tokens of prompt and output."""
    rows = [i for i, seq in enumerate(seqs) if seq.request.params.needs_history]
    if not rows:
        return logits
    vocab = logits.shape[-1]
    for i in rows:
        if seqs[i].counts is None:
            counts = np.bincount(np.array(seqs[i].ids), minlength=vocab)
            seqs[i].counts = mx.array(counts.astype(np.float32))
    params = [seqs[i].request.params for i in rows]
    counts = mx.stack([seqs[i].counts for i in rows])
    seen = counts > 0
    x = logits[mx.array(rows)]
    repetition = _column(p.repetition_penalty for p in params)
    x = mx.where(seen, mx.where(x > 0, x / repetition, x * repetition), x)
    x = x - seen * _column(p.presence_penalty for p in params)
    x = x - counts * _column(p.frequency_penalty for p in params)
    result = mx.array(logits)
    result[mx.array(rows)] = x
    return result


def _biased(logits: mx.array, seqs: Seq[Sequence]) -> mx.array:
    """Logit bias, and no stop id before min_tokens."""
    added: list[tuple[int, int, float]] = []
    for row, seq in enumerate(seqs):
        params = seq.request.params
        added += [(row, token, bias) for token, bias in params.logit_bias.items()]
        if seq.outputs <= params.min_tokens:
            added += [(row, token, -float("inf")) for token in seq.request.stop_ids]
    if not added:
        return logits
    rows, tokens, values = zip(*added, strict=True)
    return logits.at[mx.array(rows), mx.array(tokens)].add(mx.array(values, mx.float32))


def _greedy(logits: mx.array, seqs: Seq[Sequence]) -> mx.array:
    return select.greedy(logits)[0]


def _drawn(logits: mx.array, seqs: Seq[Sequence]) -> mx.array:
    """One draw per row, by a key of the row's seed and how far it has come."""
    return select.draw(logits, [_choice(seq) for seq in seqs])


def _choice(seq: Sequence) -> select.Choice:
    p: SamplingParams = seq.request.params
    high, low = _key(seq.seed, seq.outputs)
    return select.Choice(high, low, max(p.temperature, 1e-6), p.top_k, p.top_p, p.min_p)


def _key(seed: int, index: int) -> tuple[int, int]:
    digest = hashlib.blake2b(struct.pack("<QQ", seed, index), digest_size=8).digest()
    high, low = struct.unpack("<II", digest)
    return high, low


def _logsumexp(x: mx.array) -> mx.array:
    """`[B, 1]` of x `[B, V]`, in two stages.

    In one, MLX adds a row's exponentials up in float32 one after another, and loses 1e-4 of them
    over a vocabulary of 50,000.
    """
    x = mx.pad(x, [(0, 0), (0, -x.shape[-1] % SUM_GROUP)], constant_values=-mx.inf)
    parts = mx.logsumexp(x.reshape(x.shape[0], -1, SUM_GROUP), axis=-1)
    return mx.logsumexp(parts, axis=-1, keepdims=True)


def _column(values) -> mx.array:
    return mx.array(list(values), mx.float32)[:, None]


_DRAWS = {"greedy": _greedy, "drawn": _drawn}
