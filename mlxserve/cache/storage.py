"""The arrays behind the pages. Engine thread only; nothing else may hold a reference to them.

Per layer, K and V apart (one array for all layers would be copied on every write):
    hot     [n_hot * P, Hk, D]    token-major, written by each step through one flat index
    pool    [pages, Hk, P, D]     head-major, or packed; written once per page, when it is sealed
    states  [slots, ...]          of recurrent layers, float32: live ones and snapshots
A write reuses the buffer only while no one else holds it, so arrays are replaced here and nowhere
else, one operation both writes and seals a layer, and a step's arrays are evaluated together with
its tokens. A recorded step is given all of them as its state, and writes the buffers as they are.
"""

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import mlx.core as mx
import numpy as np

from mlxserve.cache.file_header import PACKED, SIDES
from mlxserve.cache.groups import LayerGroup
from mlxserve.cache.spec import Latent, PagedSpec, State
from mlxserve.kernels.append import append
from mlxserve.kernels.pages import PoolSides, Sides, arrays_of, empty_pool, pool_of
from mlxserve.memory import MIN_PAGES, grown
from mlxserve.sequence import NO_PAGE, StepPlan


class Storage:
    """Hot and pool arrays of every layer, in `dtype`. They start small and grow by doubling.

    hot_pages, pool_pages, slots: the most they may grow to; pool_pages is per paged group.
    """

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        dtype: mx.Dtype,
        *,
        hot_pages: int,
        pool_pages: Sequence[int],
        slots: int = 1,
    ) -> None:
        self.groups = [group for group in groups if group.paged]
        self.page_tokens = groups[0].page_tokens
        self.limits = [hot_pages, *pool_pages, slots]
        self.capacity = [min(MIN_PAGES, limit) for limit in self.limits]
        self.dtype = dtype
        self.specs = {layer: group.spec for group in groups for layer in group.layers}
        self.group_of = {layer: i for i, g in enumerate(self.groups) for layer in g.layers}
        self.reset()

    def reset(self) -> None:
        """Empty arrays in place of the present ones."""
        self._moves: dict[int, mx.array] = {}
        self._state: Any = None
        self.hot: dict[int, Sides] = {}
        self.pool: dict[int, PoolSides] = {}
        self.states: dict[int, tuple[mx.array, ...]] = {}
        for layer, spec in sorted(self.specs.items()):
            if isinstance(spec, State):
                shapes = [(self.capacity[-1], *shape) for shape in spec.shapes]
                self.states[layer] = tuple(mx.zeros(shape, mx.float32) for shape in shapes)
            else:
                self._reset_layer(layer, spec)
        mx.eval(self.arrays())
        self._measure()

    def _reset_layer(self, layer: int, spec: PagedSpec) -> None:
        group = self.group_of[layer]
        hot = (self.capacity[0] * self.page_tokens, spec.heads, spec.dim)
        self.pool[layer] = empty_pages(self.groups[group], self.capacity[1 + group], self.dtype)
        self.hot[layer] = tuple(mx.zeros(hot, self.dtype) for _ in self.pool[layer])

    def prepare(self, plan: StepPlan) -> None:
        """Begin a step's copies, lazily; its seals come with each layer's next write."""
        for load in plan.loads:
            self._load(load.pages, load.hot)
        if plan.loads:  # else the pool would be copied: what is queued to read it holds it
            mx.eval([side for sides in self.hot.values() for side in sides])
        if plan.states:
            source, to = (mx.array(slots, mx.int32) for slots in zip(*plan.states, strict=True))
            for arrays in self.states.values():
                for array in arrays:
                    array[to] = array[source]
        if plan.seals:
            moves = []
            for group in range(len(self.groups)):
                pairs = [(seal.hot, seal.pages[group]) for seal in plan.seals]
                written = [pair for pair in pairs if pair[1] != NO_PAGE]
                moves.append(mx.array(written, mx.int32).reshape(-1, 2))
            self._moves = {layer: moves[group] for layer, group in self.group_of.items()}

    def _load(self, pages: Sequence[int], hot: int) -> None:
        """A page of each group's pool, none of it packed, to a hot page."""
        self._state = None
        P = self.page_tokens
        for layer, group in self.group_of.items():
            for into, pool in zip(self.hot[layer], self.pool[layer], strict=True):
                (page,) = arrays_of(pool)
                into[hot * P : (hot + 1) * P] = page[pages[group]].swapaxes(0, 1)

    @property
    def moves(self) -> list[mx.array]:
        """Of pages that wait to be sealed: int32 `[n, 2]` for each group, or nothing."""
        if not self._moves:
            return []
        return [self._moves[group.layers[0]] for group in self.groups if group.layers]

    def write(self, layer: int, index: mx.array, k: mx.array, v: mx.array | None) -> None:
        """Put new tokens at flat hot positions, then seal. index: int32 `[T]`; k, v: `[T, Hk, D]`.

        v: None where a layer keeps one vector for both.
        """
        self._state = None
        moves = self._moves.pop(layer, None)
        hot, pool = self.hot[layer], self.pool[layer]
        self.hot[layer], self.pool[layer] = append(hot, pool, index, k, v, moves)

    def read_states(self, layer: int, slots: mx.array) -> tuple[mx.array, ...]:
        """A recurrent layer's states, `[R, ...]` each. slots: int32 `[R]`."""
        return tuple(array[slots] for array in self.states[layer])

    def write_states(self, layer: int, slots: mx.array, states: Sequence[mx.array]) -> None:
        """Put them back as they are after the step."""
        for array, state in zip(self.states[layer], states, strict=True):
            array[slots] = state.astype(array.dtype)

    def get(self, layer: int, name: str, rows: Sequence[int]) -> np.ndarray:
        """Pages of one of a layer's arrays, or slots of a state; bfloat16 as its bits, uint16.

        name: `k`, `v.codes`, `state.0`, ..., as in a prompt-cache file (`file_header`).
        """
        found = self._array(layer, name)[mx.array([*rows], mx.int32)]
        return np.array(found.view(mx.uint16) if found.dtype == mx.bfloat16 else found)

    def put(self, layer: int, name: str, rows: Sequence[int], given: np.ndarray) -> None:
        """Write such rows, with no step under way; not those for NO_PAGE.

        Raises ValueError for numbers or rows of another form than the array's.
        """
        self._state = None
        into, new = self._array(layer, name), mx.array(given)
        if into.dtype == mx.bfloat16 and new.dtype == mx.uint16:
            new = new.view(mx.bfloat16)
        if new.dtype != into.dtype or new.shape != (len(rows), *into.shape[1:]):
            raise ValueError(
                f"{name} of layer {layer} is given as {new.dtype} {new.shape}, expected "
                f"{len(rows)} of {into.dtype} {into.shape[1:]}"
            )
        for first, row, n in _runs(rows):
            into[row : row + n] = new[first : first + n]
        mx.eval(into)

    def _array(self, layer: int, name: str) -> mx.array:
        side, _, part = name.partition(".")
        if side == "state":
            return self.states[layer][int(part)]
        arrays = arrays_of(self.pool[layer][SIDES.index(side)])
        return arrays[PACKED.index(part) if part else 0]

    def short(self, *needed: int) -> bool:
        """Whether so many hot pages, pages of each group and slots need more than there are."""
        return any(n > have for n, have in zip(needed, self.capacity, strict=True))

    def grow(self, *needed: int) -> None:
        """Double until so many fit. Only between steps, when none is in flight.

        Array by array, so that at most one of them is held twice.
        """
        self._resize(self.capacity, needed)

    def shrink(self, *needed: int) -> None:
        """As few as growing to so many would have given, or what there is. Otherwise as `grow`."""
        least = [min(MIN_PAGES, limit) for limit in self.limits]
        self._resize(least, [min(n, have) for n, have in zip(needed, self.capacity, strict=True)])

    def _resize(self, least: Sequence[int], needed: Sequence[int]) -> None:
        self.capacity = [
            grown(pages, n, limit)
            for pages, n, limit in zip(least, needed, self.limits, strict=True)
        ]
        self._state = None
        for layer, group in self.group_of.items():
            _replace(self.hot, layer, self.capacity[0] * self.page_tokens)
            _replace(self.pool, layer, self.capacity[1 + group])
        for layer in self.states:
            _replace(self.states, layer, self.capacity[-1])
        self._measure()

    def arrays(self) -> list[mx.array]:
        """All of them."""
        sides = [side for sides in (*self.hot.values(), *self.pool.values()) for side in sides]
        states = [array for arrays in self.states.values() for array in arrays]
        return [*(array for side in sides for array in arrays_of(side)), *states]

    def written(self) -> list[mx.array]:
        """Everything a step may have written, to evaluate with it."""
        for layer in list(self._moves):  # those that the step didn't write
            hot = self.hot[layer]
            none = mx.zeros((0, *hot[0].shape[1:]), hot[0].dtype)
            index = mx.zeros((0,), mx.int32)
            self.write(layer, index, none, none if len(hot) > 1 else None)
        return self.arrays()

    def state(self, kernels: ModuleType) -> Any:
        """The arrays for a recorded step, which writes them where they are and seals too.

        Kept until one of them is replaced: what it holds isn't written in place. Recurrent states
        are none of them, since their steps can't be recorded.
        """
        self._moves = {}
        if self._state is None:
            self._state = kernels.State(self.arrays())
        return self._state

    def _measure(self) -> None:
        self.nbytes = sum(array.nbytes for array in self.arrays())


def empty_pages(group: LayerGroup, pages: int, dtype: mx.Dtype) -> PoolSides:
    """A pool of so many pages for one of its layers, lazily; none for recurrent ones."""
    match spec := group.spec:
        case State():
            return ()
        case Latent():
            sides = ("keys",)
        case _:
            sides = ("keys", "values")
    shape = (pages, spec.heads, group.page_tokens, spec.dim)
    return tuple(empty_pool(side, shape, dtype, getattr(group.bits, side)) for side in sides)


def _runs(targets: Sequence[int]) -> list[tuple[int, int, int]]:
    """(index, page, n) where pages follow each other: copied in one go, not page by page."""
    runs: list[tuple[int, int, int]] = []
    for index, page in enumerate(targets):
        if page == NO_PAGE:
            continue
        if runs and runs[-1][1] + runs[-1][2] == page and runs[-1][0] + runs[-1][2] == index:
            first, start, n = runs.pop()
            runs.append((first, start, n + 1))
        else:
            runs.append((index, page, 1))
    return runs


def _replace(held: dict[int, Any], layer: int, rows: int) -> None:
    """A layer's arrays, one by one: the dict lets go of each before the next is made."""
    sides = list(held[layer])
    held[layer] = ()
    for index, side in enumerate(sides):
        arrays = list(arrays_of(side))
        side = sides[index] = None
        for at in range(len(arrays)):
            arrays[at] = _of_length(arrays[at], rows)
        sides[index] = pool_of(arrays)
    held[layer] = tuple(sides)


def _of_length(array: mx.array, rows: int) -> mx.array:
    if array.shape[0] == rows:
        return array
    # Not concatenated with zeros: those would be held as well.
    resized = mx.zeros((rows, *array.shape[1:]), array.dtype)
    n = min(rows, array.shape[0])
    resized[:n] = array[:n]
    mx.eval(resized)
    return resized
