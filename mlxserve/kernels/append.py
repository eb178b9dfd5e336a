"""Writing to the cache: new tokens into hot pages, and complete hot pages into the pool."""

from types import ModuleType

import mlx.core as mx

from mlxserve.kernels.pages import (
    PAGE_TOKENS,
    Pair,
    PoolPair,
    arrays_of,
    keys_like,
    pack_keys,
    pack_values,
    pool_of,
    values_like,
)
from mlxserve.kernels.registry import native


def append(
    hot: Pair,
    pool: PoolPair,
    index: mx.array,
    k: mx.array,
    v: mx.array,
    moves: mx.array | None = None,
) -> tuple[Pair, PoolPair]:
    """Copy hot pages to pool pages (`moves`), then put the new tokens into hot pages.

    hot: K and V, `[n_hot * 64, Hk, D]` each, token-major; pool: K and V, `[pages, Hk, 64, D]` each,
    head-major, or packed (see `pages`): then a page is packed as it is copied. index: int32 `[T]`,
    where in hot each token goes; k, v: `[T, Hk, D]`, written in the cache's dtype. moves: int32
    `[n, 2]`, (hot page, pool page). Returns hot and pool; drop the arrays that were given, so that
    their memory is written in place. The native kernel raises ValueError for shapes and dtypes that
    don't fit, and doesn't write tokens and pages that are out of range.
    """
    kernels = native("append")
    if kernels is None:
        return _reference(hot, pool, index, k, v, moves)
    return _native(kernels, hot, pool, index, k, v, moves)


def _native(
    kernels: ModuleType,
    hot: Pair,
    pool: PoolPair,
    index: mx.array,
    k: mx.array,
    v: mx.array,
    moves: mx.array | None,
) -> tuple[Pair, PoolPair]:
    if k.dtype not in (mx.float32, hot[0].dtype):
        k, v = k.astype(hot[0].dtype), v.astype(hot[0].dtype)
    pool_k, pool_v = (arrays_of(side) for side in pool)
    hot_k, hot_v, *made = kernels.append(*hot, pool_k, pool_v, index, k, v, moves)
    n = len(pool_k)
    return (hot_k, hot_v), (pool_of(made[:n]), pool_of(made[n:]))


def _reference(
    hot: Pair, pool: PoolPair, index: mx.array, k: mx.array, v: mx.array, moves: mx.array | None
) -> tuple[Pair, PoolPair]:
    # Page by page, in slices: each takes a third of a scatter's time.
    for source, target in [] if moves is None else moves.tolist():  # type: ignore[union-attr]
        for hot_x, pool_x, like in zip(hot, pool, (keys_like, values_like), strict=True):
            page = hot_x[source * PAGE_TOKENS : (source + 1) * PAGE_TOKENS].swapaxes(0, 1)[None]
            for into, part in zip(arrays_of(pool_x), arrays_of(like(pool_x, page)), strict=True):
                into[target] = part[0]
    if index.size:
        for hot_x, x in zip(hot, (k, v), strict=True):
            hot_x[index] = x
    return hot, pool


def check(kernels: ModuleType) -> None:
    """Kernel against reference, bit for bit, in each dtype and format. Raises ArithmeticError."""
    index, moves = mx.array([3, 130, 64], mx.int32), mx.array([[1, 2], [2, 0]], mx.int32)
    k = mx.random.normal((3, 2, 5), key=mx.random.key(0))
    for dtype, key_bits, value_bits in (
        (mx.float32, None, 4),
        (mx.float16, 8, None),
        (mx.bfloat16, 4, 8),
    ):
        results = []
        for run in (lambda *args: _native(kernels, *args), _reference):
            hot_k, hot_v, pool_k, pool_v = (
                mx.random.normal(shape, key=mx.random.key(i)).astype(dtype)
                for i, shape in enumerate(((192, 2, 5), (192, 2, 5), (3, 2, 64, 5), (3, 2, 64, 5)))
            )
            keys = pack_keys(pool_k, key_bits) if key_bits else pool_k
            values = pack_values(pool_v, value_bits) if value_bits else pool_v
            hot, pool = run((hot_k, hot_v), (keys, values), index, k, k * 2, moves)
            results.append([*hot, *arrays_of(pool[0]), *arrays_of(pool[1])])
        for got, expected in zip(*results, strict=True):
            if not mx.array_equal(got, expected):
                raise ArithmeticError(
                    f"append differs in {dtype}, keys in {key_bits} and values in {value_bits} bits"
                )
