"""Attention of a step's new tokens over hot and sealed pages: the reference, in MLX ops."""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True, eq=False, slots=True)
class RowPages:
    """Where one row of a step finds its keys and values.

    Its queries are tokens `first .. first + n` of the step, at positions `start .. start + n`.
    base: position of the first gathered key, a multiple of the page size.
    sealed: int32 page ids in the pool, oldest first, or None; hot: int32 ids of the hot pages
    after them.
    """

    first: int
    n: int
    start: int
    base: int
    sealed: mx.array | None
    hot: mx.array


def paged_attention(
    q: mx.array,
    hot: tuple[mx.array, mx.array],
    pool: tuple[mx.array, mx.array],
    rows: Sequence[RowPages],
    *,
    scale: float,
    window: int | None = None,
    sinks: mx.array | None = None,
    softcap: float | None = None,
) -> mx.array:
    """Softmax attention (Vaswani et al. 2017) of ragged rows over paged keys and values.

    q: `[T, Hq, D]`, rows end to end. hot: K and V, `[n_hot * P, Hk, D]` each, token-major; the new
    tokens are already in them. pool: K and V, `[pages, Hk, P, D]` each, head-major. Returns `[T,
    Hq, D]`.

    The query at position p sees keys up to p, and with `window` only those after p - window.
    sinks: `[Hq]`, a logit per head that takes part in the softmax and has no value (Xiao et al.
    2023, arXiv:2309.17453). softcap: c replaces a score s by c * tanh(s / c) (Gemma 2,
    arXiv:2408.00118). Raises ValueError if the rows do not cover q, or Hq is not a multiple of Hk.
    """
    heads = hot[0].shape[1]
    if q.shape[1] % heads:
        raise ValueError(f"{q.shape[1]} query heads can't share {heads} key heads evenly")
    if sum(row.n for row in rows) != q.shape[0]:
        raise ValueError(f"rows cover {sum(row.n for row in rows)} tokens, q has {q.shape[0]}")
    outs = []
    for row in rows:
        low = row.base if window is None else max(row.base, row.start - window + 1)
        k, v = (
            _gather(hot_kv, pool_kv, row)[:, low - row.base : row.start + row.n - row.base]
            for hot_kv, pool_kv in zip(hot, pool, strict=True)
        )
        rows_q = q[row.first : row.first + row.n].swapaxes(0, 1)
        mask = _mask(row, low, window)
        if softcap is None:
            out = mx.fast.scaled_dot_product_attention(
                rows_q[None], k[None], v[None], scale=scale, mask=mask, sinks=sinks
            )[0]
        else:
            out = _softcapped(rows_q, k, v, scale, softcap, mask, sinks)
        outs.append(out.swapaxes(0, 1))
    return outs[0] if len(outs) == 1 else mx.concatenate(outs)


def _gather(hot: mx.array, pool: mx.array, row: RowPages) -> mx.array:
    """One row's keys (or values) in order of position, `[Hk, tokens, D]`."""
    heads, page, dim = pool.shape[1:]
    tail = hot.reshape(-1, page, heads, dim)[row.hot].reshape(-1, heads, dim).swapaxes(0, 1)
    if row.sealed is None:
        return tail
    sealed = pool[row.sealed].swapaxes(0, 1).reshape(heads, -1, dim)
    return mx.concatenate([sealed, tail], axis=1)


def _mask(row: RowPages, low: int, window: int | None) -> mx.array | str | None:
    """None where every query sees every key, "causal" where only the future is hidden."""
    if row.n == 1:
        return None
    if window is None or row.start + row.n <= low + window:
        return "causal"
    queries = mx.arange(row.start, row.start + row.n)[:, None]
    keys = mx.arange(low, row.start + row.n)[None]
    return (keys <= queries) & (keys > queries - window)


def _softcapped(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    scale: float,
    softcap: float,
    mask: mx.array | str | None,
    sinks: mx.array | None,
) -> mx.array:
    """The same with capped scores, for which MLX has no fused op.

    q: `[Hq, n, D]`; k, v: `[Hk, L, D]`. Returns `[Hq, n, D]`.
    """
    (hq, n, dim), (hk, length, _) = q.shape, k.shape
    grouped = q.reshape(hk, hq // hk, n, dim).astype(mx.float32) * scale
    scores = grouped @ k[:, None].astype(mx.float32).swapaxes(-1, -2)
    scores = softcap * mx.tanh(scores / softcap)
    if mask is not None:
        seen = mx.tri(n, length, length - n, dtype=mx.bool_) if isinstance(mask, str) else mask
        scores = mx.where(seen, scores, -mx.inf)
    if sinks is not None:
        sink = mx.broadcast_to(sinks.reshape(hk, -1, 1, 1), (*scores.shape[:-1], 1))
        weights = mx.softmax(mx.concatenate([scores, sink.astype(mx.float32)], -1), -1)[..., :-1]
    else:
        weights = mx.softmax(scores, -1)
    return (weights @ v[:, None].astype(mx.float32)).reshape(hq, n, dim).astype(q.dtype)
