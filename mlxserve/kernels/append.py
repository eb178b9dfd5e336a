"""Writing to the cache: new tokens into hot pages, then complete hot pages into the pool."""

from types import ModuleType

import mlx.core as mx

from mlxserve.kernels.metal.pack_pages import pack_launch
from mlxserve.kernels.pages import (
    PAGE_TOKENS,
    PackedPages,
    Pool,
    PoolSides,
    Sides,
    arrays_of,
    dtype_name,
    keys_like,
    pack_keys,
    pack_values,
    page_tokens,
    pool_of,
    side_bits,
    values_like,
)
from mlxserve.kernels.registry import metal, native
from mlxserve.kernels.uses import AttentionUse, SealUse

SIDES = ("keys", "values")


def append(
    hot: Sides,
    pool: PoolSides,
    index: mx.array,
    k: mx.array,
    v: mx.array | None,
    moves: mx.array | None = None,
) -> tuple[Sides, PoolSides]:
    """Put the new tokens into hot pages, then copy hot pages to pool pages (`moves`).

    So a page is sealed with the tokens that complete it. P: tokens of a page, see `pages`.
    hot: K and V, `[n_hot * P, Hk, D]` each, token-major; pool: K and V, `[pages, Hk, P, D]` each,
    head-major, or packed (see `pages`): then a page is packed as it is copied. Where the values are
    the keys, hot and pool have one side, which isn't packed, and v is None. index: int32 `[T]`,
    where in hot each token goes; k, v: `[T, Hk, D]`, written in the cache's dtype. moves: int32
    `[n, 2]`, (hot page, pool page). Returns hot and pool; drop the arrays that were given, so that
    their memory is written in place. Raises ValueError where hot, pool and the tokens differ in
    sides, for pages of other sizes, and for packed arrays that don't fit together; the native
    kernel also for all other shapes and dtypes, and it doesn't write what is out of range.
    """
    x = (k,) if v is None else (k, v)
    kernels = native("append")
    if kernels is None:
        return _reference(hot, pool, index, x, moves)
    return _native(kernels, hot, pool, index, x, moves)


def _native(
    kernels: ModuleType,
    hot: Sides,
    pool: PoolSides,
    index: mx.array,
    x: Sides,
    moves: mx.array | None,
) -> tuple[Sides, PoolSides]:
    if x[0].dtype not in (mx.float32, hot[0].dtype):
        x = tuple(side.astype(hot[0].dtype) for side in x)
    sides = [arrays_of(side) for side in pool]
    made = iter(kernels.append(hot, sides, index, x, moves))
    written = tuple(next(made) for _ in hot)
    return written, tuple(pool_of([next(made) for _ in side]) for side in sides)


def _reference(
    hot: Sides, pool: PoolSides, index: mx.array, x: Sides, moves: mx.array | None
) -> tuple[Sides, PoolSides]:
    if not len(hot) == len(pool) == len(x):
        raise ValueError(f"hot has {len(hot)} sides, pool {len(pool)} and the tokens {len(x)}")
    tokens = page_tokens(pool)
    if index.size:
        for hot_x, new in zip(hot, x, strict=True):
            hot_x[index] = new
    if moves is not None and moves.size:
        for side, hot_x, pool_x in zip(SIDES, hot, pool, strict=False):
            _seal(side, hot_x, pool_x, moves, tokens)
    return hot, pool


def _seal(side: str, hot: mx.array, pool: Pool, moves: mx.array, tokens: int) -> None:
    """Copy pages of one side, packed where the pool is: by our Metal kernel, if it was chosen."""
    if isinstance(pool, PackedPages) and tokens == PAGE_TOKENS:
        asked = use(side, hot, pool)
        if (run := metal(asked)) is not None:
            sources, targets = moves[:, 0], moves[:, 1]
            packed = run(pack_launch(hot, sources, asked.bits, keys=side == "keys"))
            for into, part in zip(pool, packed, strict=True):
                into[targets] = part
            return
    like = keys_like if side == "keys" else values_like
    # Page by page, in slices: each takes a third of a scatter's time.
    for source, target in moves.tolist():  # type: ignore[union-attr]
        page = hot[source * tokens : (source + 1) * tokens].swapaxes(0, 1)[None]
        for into, part in zip(arrays_of(pool), arrays_of(like(pool, page)), strict=True):
            into[target] = part[0]


def use(side: str, hot: mx.array, pool: PackedPages) -> SealUse:
    """What sealing pages of a side asks of the op. hot: `[n_hot * P, Hk, D]`."""
    _, heads, dim = hot.shape
    return SealUse(side, heads, dim, dtype_name(hot.dtype), side_bits(side, pool))


def uses(asked: AttentionUse) -> list[SealUse]:
    """The same of layers that attend so, over pages that are packed."""
    sides = zip(SIDES, (asked.key_bits, asked.value_bits), strict=True)
    sizes = asked.kv_heads, asked.dim, asked.dtype
    return [SealUse(side, *sizes, bits) for side, bits in sides if bits]


def check(kernels: ModuleType) -> None:
    """Kernel against reference, bit for bit, in each dtype and format. Raises ArithmeticError."""
    # One of the new tokens lies in a page that moves.
    index, moves = mx.array([3, 130, 64], mx.int32), mx.array([[1, 2], [2, 0]], mx.int32)
    k = mx.random.normal((3, 2, 5), key=mx.random.key(0))
    for dtype, key_bits, value_bits, sides in (
        (mx.float32, None, 4, 2),
        (mx.float16, 8, None, 2),
        (mx.bfloat16, 4, 8, 2),
        (mx.float16, None, None, 1),
    ):
        results = []
        for run in (lambda *args: _native(kernels, *args), _reference):
            hot_k, hot_v, pool_k, pool_v = (
                mx.random.normal(shape, key=mx.random.key(i)).astype(dtype)
                for i, shape in enumerate([(192, 2, 5)] * 2 + [(3, 2, PAGE_TOKENS, 5)] * 2)
            )
            keys = pack_keys(pool_k, key_bits) if key_bits else pool_k
            values = pack_values(pool_v, value_bits) if value_bits else pool_v
            hot, pool, x = (hot_k, hot_v)[:sides], (keys, values)[:sides], (k, k * 2)[:sides]
            hot, pool = run(hot, pool, index, x, moves)
            results.append([*hot, *(array for side in pool for array in arrays_of(side))])
        for got, expected in zip(*results, strict=True):
            if not mx.array_equal(got, expected):
                raise ArithmeticError(
                    f"append differs in {dtype}, keys in {key_bits} and values in {value_bits} bits"
                )
