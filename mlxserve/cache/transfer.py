"""Pages of a prefix out of the cache, for a file, and back into it. Engine thread only."""

from collections.abc import Hashable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx
import numpy as np

from mlxserve.cache.file import REBUILD, SavedCache
from mlxserve.cache.file_header import SIDES, Form, Group, Header, side_parts
from mlxserve.cache.groups import LayerGroup
from mlxserve.cache.manager import CacheManager
from mlxserve.cache.spec import LayerSpec, State
from mlxserve.cache.storage import empty_pages
from mlxserve.errors import CapacityError, InvariantError, RequestError
from mlxserve.kernels.pages import arrays_of, dtype_name


class Pages(Protocol):
    """The arrays of a whole cache: `Storage`, or those of several processes as if they were one.

    groups: the manager's, in its order, with all layers and heads of the model.
    """

    page_tokens: int
    dtype: mx.Dtype
    groups: list[LayerGroup]
    specs: dict[int, LayerSpec]

    def get(self, layer: int, name: str, rows: Seq[int]) -> np.ndarray: ...

    def put(self, layer: int, name: str, rows: Seq[int], given: np.ndarray) -> None: ...

    def short(self, *needed: int) -> bool: ...

    def grow(self, *needed: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Source:
    """A prefix that is kept while it is written to a file.

    rows: of each layer's arrays: its pages, or the slot of its states at the prefix's end.
    """

    header: Header
    rows: dict[int, tuple[int, ...]]


def source(
    manager: CacheManager,
    cache: Pages,
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
            f"{cache.page_tokens} tokens, and needs room for them"
        )
    index_of = {group.layers: index for index, group in enumerate(cache.groups)}
    groups, rows = _groups(manager, cache, tokens), {}
    for group in groups:
        if group.pages is None:
            found = (nodes[-1].snapshot,)
        else:
            index = index_of[group.layers]
            found = tuple(nodes[number].pages[index] for number in group.pages)
        rows |= dict.fromkeys(group.layers, found)
    return Source(Header(dict(fingerprint), tokens, cache.page_tokens, groups), rows)


def tensor(cache: Pages, source: Source, ids: Seq[int], name: str) -> np.ndarray:
    """One tensor of the file, by its name in the header; bfloat16 as its bits."""
    header = source.header
    if name == "tokens":
        return np.array(ids[: header.tokens], np.int32)
    _, number, part = name.split(".", 2)
    layer = int(number)
    found = cache.get(layer, part, source.rows[layer])
    numbers = next(group.pages for group in header.groups if layer in group.layers)
    if numbers is None:
        return found[0]
    last_page, used = divmod(header.tokens, header.page_tokens)
    if used and part in SIDES and numbers[-1] == last_page:
        found[-1, :, used:] = 0  # what others left there
    return found


def restore(
    manager: CacheManager, cache: Pages, key: Hashable, salt: Hashable, saved: SavedCache
) -> int:
    """Put a file's pages into the cache, pinned under `key`. Returns the tokens that are there.

    No step may be under way. Raises RequestError for a file of a cache of another form, and
    CapacityError if the pages don't fit.
    """
    ids = saved.tokens.tolist()
    if saved.header.groups != _groups(manager, cache, len(ids)):
        raise RequestError(f"{saved.path}: its pages aren't of the form of this cache's; {REBUILD}")
    placed = manager.shared.restore(salt, ids, snapshot=manager.recurrent)
    needed = manager.hot.used, *(pool.used for pool in manager.pools), manager.states.used
    if cache.short(*needed):
        cache.grow(*needed)
    pages = {group.layers: rows for group, rows in zip(cache.groups, placed.pages, strict=True)}
    for group in saved.header.groups:
        rows = [placed.slot] if group.pages is None else pages[group.layers]
        for layer in group.layers:
            for part in group.parts:
                found = saved.tensor(f"layers.{layer}.{part}")
                cache.put(layer, part, rows, found[None] if group.pages is None else found)
    manager.end_plan(())  # they are written: no step has to do it
    manager.begin_plan(())
    tokens = manager.pin(key, salt, ids, float("inf"))
    if tokens != len(ids):
        raise InvariantError(f"{tokens} of {len(ids)} tokens were restored")
    return tokens


def _groups(manager: CacheManager, cache: Pages, tokens: int) -> tuple[Group, ...]:
    """What is needed of each layer to go on after so many tokens."""
    groups = []
    for index, group in enumerate(cache.groups):
        if numbers := manager.shared.needed_pages(index, tokens):
            groups.append(Group(group.layers, tuple(numbers), page_parts(group, cache.dtype)))
    for layer, spec in cache.specs.items():
        if isinstance(spec, State):
            shapes = enumerate(spec.shapes)
            parts = {f"state.{j}": Form("float32", shape) for j, shape in shapes}
            groups.append(Group((layer,), None, parts))
    return tuple(groups)


def page_parts(group: LayerGroup, dtype: mx.Dtype) -> dict[str, Form]:
    """The arrays of one page of a layer, by name. dtype: of what isn't packed."""
    parts = {}
    for name, side in zip(SIDES, empty_pages(group, 1, dtype), strict=False):
        arrays = arrays_of(side)
        names = side_parts(name, packed=len(arrays) > 1)
        parts |= {
            part: Form(dtype_name(array.dtype), tuple(array.shape[1:]))
            for part, array in zip(names, arrays, strict=True)
        }
    return parts
