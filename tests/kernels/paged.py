"""Paged caches with known contents, and attention over them in plain NumPy, float64."""

import mlx.core as mx
import numpy as np

from mlxserve.kernels.attention import PagedRows
from mlxserve.kernels.pages import PackedPages

P = 64


def dense(q, k, v, start, scale, window=None, keep=0, sinks=None, softcap=None):
    """One row. q: [n, Hq, D], k, v: [L, Hk, D] of all its tokens."""
    n, hq, _ = q.shape
    out = np.zeros_like(q)
    for h in range(hq):
        kh, vh = (x[:, h // (hq // k.shape[1])] for x in (k, v))
        for i in range(n):
            p = start + i
            seen = [j for j in range(p + 1) if window is None or j > p - window or j < keep]
            s = kh[seen] @ q[i, h] * scale
            if softcap:
                s = softcap * np.tanh(s / softcap)
            if sinks is not None:
                s = np.append(s, sinks[h])
            w = np.exp(s - s.max())
            w /= w.sum()
            out[i, h] = w[: len(seen)] @ vh[seen]
    return out


def pack(x, bits):
    """Groups along the last axis as the definition has them, in float32. Returns codes, scales and
    biases, `[..., n]`, `[...]` and `[...]`, and what they stand for in float64."""
    x, top = x.astype(np.float32), np.float32(2**bits - 1)
    with np.errstate(all="ignore"):
        low, high = x.min(-1) + np.float32(0), x.max(-1) + np.float32(0)  # no -0
        biases = np.clip(low, -65504, 65504).astype(np.float16)
        scales = np.minimum((high - low) / top, np.float32(65504)).astype(np.float16)
        broken = ~np.isfinite(x).all(-1)
        biases[broken], scales[broken] = np.nan, 0
        scale, bias = (a.astype(np.float32)[..., None] for a in (scales, biases))
        codes = np.clip(np.rint((x - bias) / scale), 0, top)
        codes = np.where(scale > 0, codes, 0).astype(np.uint8)
    return codes, scales, biases, codes * scale.astype(np.float64) + bias.astype(np.float64)


def words(codes, bits):
    """Codes end to end in uint32, low bits first."""
    of_word = codes.reshape(*codes.shape[:-1], -1, 32 // bits).astype(np.uint32)
    return (of_word << np.arange(0, 32, bits, dtype=np.uint32)).sum(-1, dtype=np.uint32)


def packed_keys(x, bits):
    """Pages [pages, Hk, P, D]: the packed arrays, and what they stand for."""
    codes, scales, biases, numbers = pack(x.swapaxes(2, 3), bits)
    return (words(codes, bits), scales, biases), numbers.swapaxes(2, 3)


def packed_values(x, bits):
    dim = x.shape[-1]
    last = np.repeat(x[..., -1:], -dim % 32, axis=-1)
    groups = np.concatenate([x, last], -1).reshape(*x.shape[:3], -1, 32)
    codes, scales, biases, numbers = pack(groups, bits)
    codes, numbers = (a.reshape(*x.shape[:3], -1) for a in (codes, numbers))
    return (words(codes, bits), scales, biases), numbers[..., :dim]


PACK = (packed_keys, packed_values)


class Paged:
    """Sequences scattered over random pages; rows: (start, n).

    `filler` lies in every other slot, and in place of plain tokens that no query sees.

    sealed: False leaves all pages hot. bits: of the pool's keys and values, None where they are
    plain. page: tokens of one. sides: 1 where the values are the keys. tokens: K and V of each row,
    as the cache has them.
    """

    def __init__(
        self,
        rows,
        heads,
        dim,
        *,
        window=None,
        keep=0,
        dtype=mx.float32,
        filler=np.nan,
        seed=0,
        sealed=True,
        bits=(None, None),
        page=P,
        sides=2,
    ):
        rng = np.random.default_rng(seed)
        self.rows, self.window, self.keep = rows, window, keep
        pages = sum(-(-(start + n) // page) for start, n in rows) + 3
        hot = [np.full((pages * page, heads, dim), filler) for _ in range(sides)]
        pool = [np.full((pages, heads, page, dim), filler) for _ in range(sides)]
        hot_ids, pool_ids = iter(rng.permutation(pages)), iter(rng.permutation(pages))
        self.tokens, table, ids, first = [], [], [], 0
        for start, n in rows:
            end = -(-(start + n) // page)
            done = start // page if sealed else 0
            kv = [_rounded(rng.normal(size=(start + n, heads, dim)), dtype) for _ in range(sides)]
            low = 0 if window is None else max(0, start - window + 1)
            base = min(low // page, done)
            kept = min(-(-keep // page), base)
            if kept == base:
                kept = base = 0 if keep else base
            table.append((first, n, start, base, kept + done - base, len(ids), kept))
            for number in (*range(kept), *range(base, end)):
                span = slice(number * page, (number + 1) * page)
                at = np.arange(start + n)[span]
                seen = (at < keep) | (at >= low)
                if number < done:
                    ids.append(next(pool_ids))
                    for i, (x, pool_x) in enumerate(zip(kv, pool, strict=True)):
                        if bits[i]:
                            pool_x[ids[-1]] = x[span].swapaxes(0, 1)
                            _, read = PACK[i](pool_x[ids[-1]][None], bits[i])
                            x[span] = read[0].swapaxes(0, 1)
                        else:
                            pool_x[ids[-1]][:, seen] = x[span][seen].swapaxes(0, 1)
                else:
                    ids.append(next(hot_ids))
                    for x, hot_x in zip(kv, hot, strict=True):
                        hot_x[ids[-1] * page + np.flatnonzero(seen)] = x[span][seen]
            self.tokens.append(kv)
            first += n
        self.total = first
        self.described = PagedRows(np.array(table), np.array(ids), page)
        self.hot = tuple(mx.array(x.astype(np.float32)).astype(dtype) for x in hot)
        self.pool = tuple(
            PackedPages(*map(mx.array, pack(x, n)[0]))
            if n
            else mx.array(x.astype(np.float32)).astype(dtype)
            for x, n, pack in zip(pool, bits, PACK, strict=False)
        )

    def expected(self, q, **how):
        firsts = np.cumsum([0] + [n for _, n in self.rows])
        return np.concatenate(
            [
                dense(
                    q[at : at + n], kv[0], kv[-1], start, window=self.window, keep=self.keep, **how
                )
                for at, (start, n), kv in zip(firsts, self.rows, self.tokens, strict=False)
            ]
        )


def same_bits(got, expected):
    for a, b in zip(got, expected, strict=True):
        a = np.array(a)
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(np.signbit(a)[a == 0], np.signbit(b)[b == 0])


def check_recorded(kernels, step, given, cache):
    """A step that is recorded gives the same as when it is built, and writes its cache in place.

    step: from the inputs and the cache to an output and the cache after it.
    """
    copies = [x + 0 for x in cache]
    mx.eval(given, cache, copies)
    expected, after = step(*given, *cache)
    program = kernels.record(given, cache, [expected], after)
    (got,) = program.run(given, kernels.State(copies))
    for one, other in zip([got, *copies], [expected, *after], strict=True):
        same_bits([one], [np.array(other)])


def _rounded(x, dtype):
    return np.array(mx.array(x.astype(np.float32)).astype(dtype).astype(mx.float32), np.float64)
