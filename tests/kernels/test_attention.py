"""Paged attention against NumPy in float64, over random tables."""

import mlx.core as mx
import numpy as np
import pytest

from mlxserve.kernels.attention import RowPages, paged_attention

P = 64


def dense(q, k, v, start, scale, window=None, sinks=None, softcap=None):
    """One row in plain NumPy. q: [n, Hq, D], k, v: [L, Hk, D] of all its tokens."""
    n, hq, _ = q.shape
    out = np.zeros_like(q)
    for h in range(hq):
        kh, vh = (x[:, h // (hq // k.shape[1])] for x in (k, v))
        for i in range(n):
            p = start + i
            first = 0 if window is None else max(0, p - window + 1)
            s = kh[first : p + 1] @ q[i, h] * scale
            if softcap:
                s = softcap * np.tanh(s / softcap)
            if sinks is not None:
                s = np.append(s, sinks[h])
            w = np.exp(s - s.max())
            w /= w.sum()
            out[i, h] = w[: p + 1 - first] @ vh[first : p + 1]
    return out


def paged(rng, rows, heads, dim, window):
    """Scatter each row's tokens over random pages. rows: (start, n). Garbage everywhere else."""
    garbage = lambda *shape: rng.normal(size=shape) * 1e3  # noqa: E731
    hot = [garbage(30 * P, heads, dim) for _ in "kv"]
    pool = [garbage(40, heads, P, dim) for _ in "kv"]
    hot_ids, pool_ids = iter(rng.permutation(30)), iter(rng.permutation(40))
    made, tokens, first = [], [], 0
    for start, n in rows:
        length, sealed = start + n, start // P
        kv = [rng.normal(size=(length, heads, dim)) for _ in "kv"]
        gone = 0 if window is None else max(0, start - window + 1) // P
        table = [int(next(pool_ids)) for _ in range(gone, sealed)]
        tail = [int(next(hot_ids)) for _ in range(sealed, -(-length // P))]
        for x, hot_x, pool_x in zip(kv, hot, pool, strict=True):
            for j, page in enumerate(table):
                pool_x[page] = x[(gone + j) * P : (gone + j + 1) * P].swapaxes(0, 1)
            for j, page in enumerate(tail):
                part = x[(sealed + j) * P : (sealed + j + 1) * P]
                hot_x[page * P : page * P + len(part)] = part
        pages = mx.array(table, mx.int32) if table else None
        made.append(RowPages(first, n, start, gone * P, pages, mx.array(tail, mx.int32)))
        tokens.append(kv)
        first += n
    to_mx = lambda pair: tuple(mx.array(x.astype(np.float32)) for x in pair)  # noqa: E731
    return to_mx(hot), to_mx(pool), made, tokens


@pytest.mark.parametrize("window", [None, 1, 16, 64, 100])
@pytest.mark.parametrize("options", ["plain", "softcap", "sinks", "both"])
@pytest.mark.parametrize(("hq", "hk", "dim"), [(4, 2, 32), (3, 3, 80), (8, 1, 64)])
def test_ragged_rows_equal_dense_attention(window, options, hq, hk, dim):
    rng = np.random.default_rng(hq * 100 + (window or 0))
    rows = [(0, 1), (63, 1), (64, 1), (200, 1), (0, 70), (60, 10), (128, 64), (130, 1), (5, 200)]
    hot, pool, made, tokens = paged(rng, rows, hk, dim, window)
    total = sum(n for _, n in rows)
    q = rng.normal(size=(total, hq, dim))
    how = {"scale": dim**-0.5}
    if options in ("softcap", "both"):
        how["softcap"] = 2.0
    if options in ("sinks", "both"):
        how["sinks"] = rng.normal(size=hq)
    as_mx = {k: mx.array(v.astype(np.float32)) if k == "sinks" else v for k, v in how.items()}
    out = paged_attention(mx.array(q.astype(np.float32)), hot, pool, made, window=window, **as_mx)
    expected = np.concatenate(
        [
            dense(q[row.first : row.first + row.n], k, v, row.start, window=window, **how)
            for row, (k, v) in zip(made, tokens, strict=True)
        ]
    )
    np.testing.assert_allclose(np.array(out), expected, atol=2e-5)


def test_rows_that_do_not_cover_the_queries_are_refused():
    rng = np.random.default_rng(0)
    hot, pool, made, _ = paged(rng, [(0, 4)], 2, 32, None)
    with pytest.raises(ValueError, match="rows cover 4 tokens, q has 5"):
        paged_attention(mx.zeros((5, 4, 32)), hot, pool, made, scale=1.0)
    with pytest.raises(ValueError, match="3 query heads can't share 2"):
        paged_attention(mx.zeros((4, 3, 32)), hot, pool, made, scale=1.0)
