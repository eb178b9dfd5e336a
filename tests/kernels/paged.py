"""Paged caches with known contents, and attention over them in plain NumPy, float64."""

import mlx.core as mx
import numpy as np

from mlxserve.kernels.attention import PagedRows

P = 64


def dense(q, k, v, start, scale, window=None, sinks=None, softcap=None):
    """One row. q: [n, Hq, D], k, v: [L, Hk, D] of all its tokens."""
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


class Paged:
    """Sequences scattered over random pages; rows: (start, n). `filler` lies in every other slot.

    sealed: False leaves all pages hot. tokens: K and V of each row, as the cache's dtype has them.
    """

    def __init__(
        self, rows, heads, dim, *, window=None, dtype=mx.float32, filler=np.nan, seed=0, sealed=True
    ):
        rng = np.random.default_rng(seed)
        self.rows, self.window = rows, window
        pages = sum(-(-(start + n) // P) for start, n in rows) + 3
        hot = [np.full((pages * P, heads, dim), filler) for _ in "kv"]
        pool = [np.full((pages, heads, P, dim), filler) for _ in "kv"]
        hot_ids, pool_ids = iter(rng.permutation(pages)), iter(rng.permutation(pages))
        self.tokens, table, ids, first = [], [], [], 0
        for start, n in rows:
            end = -(-(start + n) // P)
            done = start // P if sealed else 0
            kv = [_rounded(rng.normal(size=(start + n, heads, dim)), dtype) for _ in "kv"]
            gone = 0 if window is None else max(0, start - window + 1) // P
            base = min(gone, done)
            table.append((first, n, start, base, done - base, len(ids)))
            for page in range(base, end):
                span = slice(page * P, (page + 1) * P)
                if page < done:
                    ids.append(next(pool_ids))
                    for x, pool_x in zip(kv, pool, strict=True):
                        pool_x[ids[-1]] = x[span].swapaxes(0, 1)
                else:
                    ids.append(next(hot_ids))
                    for x, hot_x in zip(kv, hot, strict=True):
                        hot_x[ids[-1] * P :][: len(x[span])] = x[span]
            self.tokens.append(kv)
            first += n
        self.total = first
        self.described = PagedRows(np.array(table), np.array(ids))
        self.hot = tuple(mx.array(x.astype(np.float32)).astype(dtype) for x in hot)
        self.pool = tuple(mx.array(x.astype(np.float32)).astype(dtype) for x in pool)

    def expected(self, q, **how):
        firsts = np.cumsum([0] + [n for _, n in self.rows])
        return np.concatenate(
            [
                dense(q[at : at + n], k, v, start, window=self.window, **how)
                for at, (start, n), (k, v) in zip(firsts, self.rows, self.tokens, strict=False)
            ]
        )


def _rounded(x, dtype):
    return np.array(mx.array(x.astype(np.float32)).astype(dtype).astype(mx.float32), np.float64)
