"""Pages of a prefix out of the cache, for a file, and back into it. Engine thread only."""

from collections.abc import Hashable, Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlxserve.cache.file import SavedCache
from mlxserve.cache.file_header import PACKED, Form, Group, Header, side_parts
from mlxserve.cache.manager import CacheManager
from mlxserve.cache.spec import State
from mlxserve.cache.storage import Storage
from mlxserve.errors import CapacityError, InvariantError
from mlxserve.kernels.pages import PoolSides, arrays_of, dtype_name, pool_of
from mlxserve.sequence import NO_PAGE

SIDES = ("k", "v")
COPY_THREADS = 2  # more than two don't copy faster from a file that the system has in memory


@dataclass(frozen=True, slots=True)
class Source:
    """A prefix that is kept while it is written to a file.

    pages: of each paged group; slot: of the states at its end, or NO_PAGE.
    """

    header: Header
    pages: tuple[tuple[int, ...], ...]
    slot: int


def source(
    manager: CacheManager,
    storage: Storage,
    key: Hashable,
    salt: Hashable,
    ids: Seq[int],
    fingerprint: Mapping[str, str],
) -> Source:
    """What the cache has of these tokens, pinned under `key`.

    Raises CapacityError if it has nothing of them (any more).
    """
    tokens = manager.pin(key, salt, ids, float("inf"))
    nodes, _ = manager.shared.prefix(salt, ids)
    if not nodes:
        raise CapacityError(
            f"nothing of the {len(ids)} tokens is left in the cache; it keeps whole pages of "
            f"{storage.page_tokens} tokens, and needs room for them"
        )
    groups, pages = [], []
    for index, group in enumerate(manager.groups):
        numbers = manager.shared.needed_pages(index, tokens)
        pages.append(tuple(nodes[number].pages[index] for number in numbers))
        if numbers:
            parts = _page_parts(storage.pool[group.layers[0]])
            groups.append(Group(group.layers, tuple(numbers), parts))
    slot = nodes[-1].snapshot if manager.recurrent else NO_PAGE
    for layer, spec in storage.specs.items():
        if isinstance(spec, State):
            shapes = enumerate(spec.shapes)
            parts = {f"state.{j}": Form("float32", shape) for j, shape in shapes}
            groups.append(Group((layer,), None, parts))
    header = Header(dict(fingerprint), tokens, storage.page_tokens, tuple(groups))
    return Source(header, tuple(pages), slot)


def tensor(storage: Storage, source: Source, ids: Seq[int], name: str) -> np.ndarray:
    """One tensor of the file, by its name in the header; bfloat16 as its bits."""
    if name == "tokens":
        return np.array(ids[: source.header.tokens], np.int32)
    _, number, part, *rest = name.split(".")
    layer = int(number)
    if part == "state":
        return np.array(storage.states[layer][int(rest[0])][source.slot])
    side = storage.pool[layer][SIDES.index(part)]
    array = arrays_of(side)[PACKED.index(rest[0]) if rest else 0]
    group = storage.group_of[layer]
    found = array[mx.array(source.pages[group], mx.int32)]
    copied = np.array(found.view(mx.uint16) if found.dtype == mx.bfloat16 else found)
    used = source.header.tokens % source.header.page_tokens
    pages = -(-source.header.tokens // source.header.page_tokens)
    numbers = next(g.pages for g in source.header.groups if layer in g.layers)
    if used and not rest and numbers is not None and numbers[-1] == pages - 1:
        copied[-1, :, used:] = 0  # what others left there
    return copied


def restore(
    manager: CacheManager, storage: Storage, key: Hashable, salt: Hashable, saved: SavedCache
) -> int:
    """Put a file's pages into the cache, pinned under `key`. Returns the tokens that are there.

    No step may be under way. Raises CapacityError if they don't fit.
    """
    ids = saved.tokens.tolist()
    placed = manager.shared.restore(salt, ids, snapshot=manager.recurrent)
    pools = [pool.used for pool in manager.pools]
    if storage.short(manager.hot.used, *pools, manager.states.used):
        storage.grow(manager.hot.used, *pools, manager.states.used)
    targets = {
        group.layers: pages for group, pages in zip(manager.groups, placed.pages, strict=True)
    }
    names = [name for name in saved.layout.entries if name.startswith("layers.")]
    with ThreadPoolExecutor(COPY_THREADS) as pool:
        arrays = dict(zip(names, pool.map(lambda name: _mapped(saved, name), names), strict=True))
    for group in saved.header.groups:
        for layer in group.layers:
            mine = {part: arrays.pop(f"layers.{layer}.{part}") for part in group.parts}
            if group.pages is None:
                storage.put_states(layer, placed.slot, list(mine.values()))
            else:
                storage.put_pages(layer, targets[group.layers], _sides(mine))
    mx.eval(storage.arrays())
    manager.end_plan(())  # they are written: no step has to do it
    manager.begin_plan(())
    tokens = manager.pin(key, salt, ids, float("inf"))
    if tokens != len(ids):
        raise InvariantError(f"{tokens} of {len(ids)} tokens were restored")
    return tokens


def _page_parts(sides: PoolSides) -> dict[str, Form]:
    """Of one page of a layer."""
    parts = {}
    for name, side in zip(SIDES, sides, strict=False):
        arrays = arrays_of(side)
        names = side_parts(name, packed=len(arrays) > 1)
        parts |= {n: _form(array) for n, array in zip(names, arrays, strict=True)}
    return parts


def _form(pages: mx.array) -> Form:
    return Form(dtype_name(pages.dtype), tuple(pages.shape[1:]))


def _mapped(saved: SavedCache, name: str) -> mx.array:
    array = mx.array(saved.tensor(name))
    form = saved.layout.entries[name].form
    return array.view(mx.bfloat16) if form.dtype == "bfloat16" else array


def _sides(parts: Mapping[str, mx.array]) -> PoolSides:
    """A layer's keys and values, of arrays by the names of their parts."""
    sides = []
    for name in SIDES:
        if arrays := [array for part, array in parts.items() if part.split(".")[0] == name]:
            sides.append(pool_of(arrays))
    return tuple(sides)
