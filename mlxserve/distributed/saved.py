"""Saved prompts over ranks: the file is rank 0's, and each rank has its KV heads of the pages.

A file has all heads of all layers, whatever the number of ranks. So pages are cut by heads on their
way into the cache, and put side by side on their way out, some at a time: rank 0 waits for an
answer to each piece, so that no more than one is under way.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from mlxserve.cache.file_header import DTYPES
from mlxserve.cache.groups import LayerGroup
from mlxserve.cache.spec import FullKV, WindowKV
from mlxserve.cache.storage import Storage
from mlxserve.cache.transfer import page_parts
from mlxserve.distributed.messages import Done, Get, Message, Put, Rows
from mlxserve.errors import InvariantError, PeerLost
from mlxserve.sequence import NO_PAGE

PIECE_BYTES = 4 << 20  # must pass within a link's timeout; larger ones are no faster on loopback

Kept = Callable[[int, int], range]
"""The KV heads that a rank's cache has of a layer: (rank, layer) to heads of the whole model."""


class WholeCache:
    """The caches of all ranks as one, on rank 0; see `cache.transfer.Pages`.

    storage: rank 0's; groups: of all layers of the model, size: how many ranks there are. kept: see
    `Kept`. ask: has another rank do what a message says, and returns its answer. resize: has all
    others do as `Storage.grow`.
    """

    def __init__(
        self,
        storage: Storage,
        groups: Sequence[LayerGroup],
        size: int,
        kept: Kept,
        ask: Callable[[int, Message], Message],
        resize: Callable[[Sequence[int]], None],
    ) -> None:
        self.page_tokens, self.dtype = storage.page_tokens, storage.dtype
        self._storage, self._ask, self._resize = storage, ask, resize
        self._kept = {
            layer: [kept(rank, layer) for rank in range(size)]
            for group in groups
            for layer in group.layers
        }
        self.groups = [self._whole(group) for group in groups]
        self.specs = {layer: group.spec for group in self.groups for layer in group.layers}
        self._forms = {
            layer: page_parts(group, self.dtype) for group in self.groups for layer in group.layers
        }

    def get(self, layer: int, name: str, rows: Sequence[int]) -> np.ndarray:
        """See `Storage.get`; with the heads of all ranks.

        Each was computed by its rank, so that some may differ in the last bits from what one
        process computes. Raises TypeError where a rank has numbers of another kind.
        """
        form = self._forms[layer][name]
        found = np.empty((len(rows), *form.shape), DTYPES[form.dtype][1])
        for heads, rank in owners(self._kept[layer]).items():
            for some in pieces(len(rows), form.nbytes):
                own = self._get(rank, layer, name, rows[some])
                np.copyto(found[some, heads.start : heads.stop], own, casting="no")
        return found

    def _get(self, rank: int, layer: int, name: str, rows: Sequence[int]) -> np.ndarray:
        if rank == 0:
            return self._storage.get(layer, name, rows)
        match self._ask(rank, Get(layer, name, list(rows))):
            case Rows() as answer:
                return answer.array()
            case message:
                raise _out_of_turn(rank, message)

    def put(self, layer: int, name: str, rows: Sequence[int], given: np.ndarray) -> None:
        """See `Storage.put`; to each rank its heads."""
        for rank, heads in enumerate(self._kept[layer]):
            if not heads:
                continue
            own = given[:, heads.start : heads.stop]
            for some in pieces(len(rows), own[:1].nbytes):
                self._put(rank, layer, name, rows[some], own[some])

    def _put(
        self, rank: int, layer: int, name: str, rows: Sequence[int], given: np.ndarray
    ) -> None:
        if rank == 0:
            self._storage.put(layer, name, rows, given)
            return
        if all(row == NO_PAGE for row in rows):
            return
        answer = self._ask(rank, Put(layer, name, list(rows), Rows.of(given)))
        if not isinstance(answer, Done):
            raise _out_of_turn(rank, answer)

    def short(self, *needed: int) -> bool:
        return self._storage.short(*needed)

    def grow(self, *needed: int) -> None:
        self._resize(needed)
        self._storage.grow(*needed)

    def _whole(self, group: LayerGroup) -> LayerGroup:
        """With all heads."""
        match group.spec:
            case FullKV() | WindowKV() as spec:
                heads = max(heads.stop for heads in self._kept[group.layers[0]])
                return replace(group, spec=replace(spec, heads=heads))
            case spec:
                kind, layer = type(spec).__name__, group.layers[0]
                raise InvariantError(f"layer {layer} keeps {kind}, which isn't divided by KV heads")


def answer(storage: Storage, asked: Get | Put) -> Rows | Done:
    """On another rank: what it has to say to rank 0's message, once that is done."""
    if isinstance(asked, Get):
        return Rows.of(storage.get(asked.layer, asked.name, asked.rows))
    storage.put(asked.layer, asked.name, asked.rows, asked.given.array())
    return Done()


def owners(kept: Sequence[range]) -> dict[range, int]:
    """From whom to take which heads: the first rank that has them.

    kept: the heads of each rank: no others', or just those of some others, or none.
    """
    found: dict[range, int] = {}
    for rank, heads in enumerate(kept):
        if heads:
            found.setdefault(heads, rank)
    return found


def pieces(count: int, row_bytes: int) -> Iterator[slice]:
    """So many rows, some at a time."""
    each = max(1, PIECE_BYTES // row_bytes)
    return (slice(first, first + each) for first in range(0, count, each))


def _out_of_turn(rank: int, message: Message) -> PeerLost:
    return PeerLost(f"rank {rank} said {type(message).__name__} out of turn")
