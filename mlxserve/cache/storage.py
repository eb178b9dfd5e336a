"""The arrays behind the pages. Engine thread only; nothing else may hold a reference to them.

Per layer, K and V apart (one array for all layers would be copied on every write):
    hot   [n_hot * P, Hk, D]    token-major, written by each step through one flat index
    pool  [pages, Hk, P, D]     head-major, written once per page, when it is sealed
A write reuses the buffer only while no one else holds it, so arrays are replaced here and nowhere
else, one operation both seals and writes a layer, and a step's arrays are evaluated together with
its tokens. A recorded step is given all of them as its state, and writes the buffers as they are.
"""

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import mlx.core as mx

from mlxserve.cache.manager import LayerGroup
from mlxserve.cache.spec import PAGE_TOKENS
from mlxserve.kernels.append import append
from mlxserve.kernels.pages import Pair, Pool, PoolPair, arrays_of, pool_of
from mlxserve.types import Seal

MIN_PAGES = 8


class Storage:
    """Hot and pool arrays of every layer, in `dtype`. They start small and grow by doubling.

    hot_pages, pool_pages: the most they may grow to; pool_pages is per group.
    """

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        dtype: mx.Dtype,
        *,
        hot_pages: int,
        pool_pages: Sequence[int],
    ) -> None:
        self.groups = list(groups)
        self.limits = [hot_pages, *pool_pages]
        self.capacity = [min(MIN_PAGES, limit) for limit in self.limits]
        self.dtype = dtype
        layers = {layer: index for index, group in enumerate(self.groups) for layer in group.layers}
        self.group_of = [layers[layer] for layer in range(len(layers))]
        self.reset()

    def reset(self) -> None:
        """Empty arrays in place of the present ones."""
        self._moves: dict[int, mx.array] = {}
        self._state: Any = None
        self.hot: list[Pair] = []
        self.pool: list[PoolPair] = []
        for index in self.group_of:
            spec = self.groups[index].spec
            n_hot, n_pool = self.capacity[0] * PAGE_TOKENS, self.capacity[1 + index]
            self.hot.append(_pair((n_hot, spec.heads, spec.dim), self.dtype))
            self.pool.append(_pair((n_pool, spec.heads, PAGE_TOKENS, spec.dim), self.dtype))
        mx.eval(self.arrays())
        self._measure()

    def seal(self, moves: Sequence[Seal]) -> None:
        """Copy hot pages to their pool pages, lazily: each layer with its next write."""
        if not moves:
            return
        by_group = [
            mx.array([(move.hot, move.pages[group]) for move in moves], mx.int32)
            for group in range(len(self.groups))
        ]
        self._moves = dict(enumerate(by_group[group] for group in self.group_of))

    @property
    def moves(self) -> list[mx.array]:
        """Of pages that wait to be sealed: int32 `[n, 2]` for each group, or nothing."""
        if not self._moves:
            return []
        first = [self.group_of.index(group) for group in range(len(self.groups))]
        return [self._moves[layer] for layer in first]

    def write(self, layer: int, index: mx.array, k: mx.array, v: mx.array) -> None:
        """Put new tokens at flat hot positions. index: int32 `[T]`; k, v: `[T, Hk, D]`."""
        self._state = None
        moves = self._moves.pop(layer, None)
        hot, pool = self.hot[layer], self.pool[layer]
        self.hot[layer], self.pool[layer] = append(hot, pool, index, k, v, moves)

    def short(self, hot: int, pools: Sequence[int]) -> bool:
        """Whether so many pages need more than the present capacity."""
        return any(n > have for n, have in zip((hot, *pools), self.capacity, strict=True))

    def grow(self, hot: int, pools: Sequence[int]) -> None:
        """Double until so many pages fit. Only between steps, when none is in flight.

        Array by array, so that at most one of them is held twice.
        """
        for index, needed in enumerate((hot, *pools)):
            while self.capacity[index] < min(needed, self.limits[index]):
                self.capacity[index] = min(2 * self.capacity[index], self.limits[index])
        self._state = None
        for layer, group in enumerate(self.group_of):
            hot_k, hot_v = self.hot[layer]
            n_hot, n_pool = self.capacity[0] * PAGE_TOKENS, self.capacity[1 + group]
            self.hot[layer] = _grown(hot_k, n_hot), _grown(hot_v, n_hot)
            pool_k, pool_v = self.pool[layer]
            self.pool[layer] = _grown_pool(pool_k, n_pool), _grown_pool(pool_v, n_pool)
        self._measure()

    def arrays(self) -> list[mx.array]:
        """All of them, layer by layer."""
        sides = [side for pair in (*self.hot, *self.pool) for side in pair]
        return [array for side in sides for array in arrays_of(side)]

    def written(self) -> list[mx.array]:
        """Everything a step may have written, to evaluate with it."""
        for layer in list(self._moves):  # those that the step didn't write
            hot_k = self.hot[layer][0]
            none = mx.zeros((0, *hot_k.shape[1:]), hot_k.dtype)
            self.write(layer, mx.zeros((0,), mx.int32), none, none)
        return self.arrays()

    def state(self, kernels: ModuleType) -> Any:
        """The arrays for a recorded step, which writes them where they are and seals too."""
        self._moves = {}
        if self._state is None:
            self._state = kernels.State(self.arrays())
        return self._state

    def _measure(self) -> None:
        self.nbytes = sum(array.nbytes for array in self.arrays())


def page_bytes(group: LayerGroup, itemsize: int) -> int:
    """Bytes of one page over all layers of a group, keys and values."""
    return 2 * len(group.layers) * group.spec.heads * group.spec.dim * PAGE_TOKENS * itemsize


def _pair(shape: tuple[int, ...], dtype: mx.Dtype) -> Pair:
    return mx.zeros(shape, dtype), mx.zeros(shape, dtype)


def _grown_pool(pool: Pool, pages: int) -> Pool:
    return pool_of([_grown(array, pages) for array in arrays_of(pool)])


def _grown(array: mx.array, rows: int) -> mx.array:
    if array.shape[0] == rows:
        return array
    extra = mx.zeros((rows - array.shape[0], *array.shape[1:]), array.dtype)
    larger = mx.concatenate([array, extra])
    mx.eval(larger)
    return larger
