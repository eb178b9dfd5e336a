"""Writing to the cache: new tokens into hot pages, and complete hot pages into the pool."""

from types import ModuleType

import mlx.core as mx

from mlxserve.kernels.registry import check_close, native

Pair = tuple[mx.array, mx.array]


def append(
    hot: Pair, pool: Pair, index: mx.array, k: mx.array, v: mx.array, moves: mx.array | None = None
) -> tuple[Pair, Pair]:
    """Copy hot pages to pool pages (`moves`), then put the new tokens into hot pages.

    hot: K and V, `[n_hot * 64, Hk, D]` each, token-major; pool: K and V, `[pages, Hk, 64, D]` each,
    head-major. index: int32 `[T]`, where in hot each token goes; k, v: `[T, Hk, D]`, written in the
    cache's dtype. moves: int32 `[n, 2]`, (hot page, pool page). Returns hot and pool; drop the
    arrays that were given, so that their memory is written in place. Raises ValueError (native) for
    shapes and dtypes that don't fit; tokens and pages out of range aren't written.
    """
    kernels = native("append")
    if kernels is None:
        return _reference(hot, pool, index, k, v, moves)
    return _native(kernels, hot, pool, index, k, v, moves)


def _native(
    kernels: ModuleType,
    hot: Pair,
    pool: Pair,
    index: mx.array,
    k: mx.array,
    v: mx.array,
    moves: mx.array | None,
) -> tuple[Pair, Pair]:
    if k.dtype not in (mx.float32, hot[0].dtype):
        k, v = k.astype(hot[0].dtype), v.astype(hot[0].dtype)
    hot_k, hot_v, pool_k, pool_v = kernels.append(*hot, *pool, index, k, v, moves)
    return (hot_k, hot_v), (pool_k, pool_v)


def _reference(
    hot: Pair, pool: Pair, index: mx.array, k: mx.array, v: mx.array, moves: mx.array | None
) -> tuple[Pair, Pair]:
    page = pool[0].shape[2]
    # Page by page, in slices: each takes a third of a scatter's time.
    for source, target in [] if moves is None else moves.tolist():  # type: ignore[union-attr]
        for hot_x, pool_x in zip(hot, pool, strict=True):
            pool_x[target] = hot_x[source * page : (source + 1) * page].swapaxes(0, 1)
    if index.size:
        for hot_x, x in zip(hot, (k, v), strict=True):
            hot_x[index] = x
    return hot, pool


def check(kernels: ModuleType) -> None:
    """Kernel against reference in each dtype, with pages to seal. Raises ArithmeticError."""
    index, moves = mx.array([3, 130, 64], mx.int32), mx.array([[1, 2], [2, 0]], mx.int32)
    k = mx.random.normal((3, 2, 5), key=mx.random.key(0))
    for dtype in (mx.float32, mx.float16, mx.bfloat16):
        results = []
        for run in (lambda *args: _native(kernels, *args), _reference):
            made = [
                mx.random.normal(shape, key=mx.random.key(i)).astype(dtype)
                for i, shape in enumerate(((192, 2, 5), (192, 2, 5), (3, 2, 64, 5), (3, 2, 64, 5)))
            ]
            results.append(run((made[0], made[1]), (made[2], made[3]), index, k, k * 2, moves))
        for got, expected in zip(*results, strict=True):
            for a, b in zip(got, expected, strict=True):
                check_close("append", a, b, 0.0)
