"""Pages of a saved prompt cut for several ranks and put together again, against NumPy.

The ranks' caches are all in this process; what rank 0 and the others say goes through msgpack.
"""

from dataclasses import replace

import mlx.core as mx
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxserve.cache import file
from mlxserve.cache.file_header import DTYPES, Group, Header
from mlxserve.cache.groups import group_layers
from mlxserve.cache.manager import CacheManager
from mlxserve.cache.spec import UNPACKED, FullKV, KVBits, Latent, WindowKV
from mlxserve.cache.storage import Storage
from mlxserve.cache.transfer import page_parts, restore, source, tensor
from mlxserve.distributed import saved
from mlxserve.distributed.messages import Ping, Put, Rows, decode, encode
from mlxserve.distributed.saved import WholeCache, owners
from mlxserve.errors import InvariantError, PeerLost
from mlxserve.models.tensor_parallel import divide_heads
from mlxserve.sequence import NO_PAGE
from tests.cache.saved import random_tensors

PAGES = 12
DIM = 40  # of which packed values fill up a group of 32
SIZES = {"hot_pages": 2 * PAGES, "pool_pages": (2 * PAGES, 2 * PAGES)}
LAYERS = {0: 5, 1: 5, 2: 3}  # KV heads; the last one has a window


class Ranks:
    """A cache in parts. kept: of each layer, the heads of each rank; told: bytes of messages."""

    def __init__(self, kept, dtype=mx.float32, bits=UNPACKED):
        self.kept, self.told, self.sizes = kept, [], []
        self.stores = [
            Storage(self._groups(rank, bits), dtype, **SIZES) for rank in range(len(kept[0]))
        ]
        groups = group_layers(specs([len(heads[0]) for heads in kept.values()]), bits)
        self.cache = WholeCache(
            self.stores[0], groups, len(self.stores), self._held, self._ask, self.sizes.append
        )

    def _groups(self, rank, bits):
        """With the layers of which a rank has heads."""
        heads = {layer: len(some[rank]) for layer, some in self.kept.items()}
        return [
            replace(group, layers=tuple(layer for layer in group.layers if heads[layer]))
            for group in group_layers(specs(heads.values()), bits)
        ]

    def _held(self, rank, layer):
        return self.kept[layer][rank]

    def _ask(self, rank, message):
        data = encode(message)
        answer = encode(saved.answer(self.stores[rank], decode(data)))
        self.told.append(max(len(data), len(answer)))
        return decode(answer)


def specs(heads):
    *full, windowed = heads
    return [*(FullKV(n, DIM) for n in full), WindowKV(windowed, DIM, 100)]


def divided(ranks):
    """Each layer's heads over so many ranks, as a model's are."""
    return {layer: [kv for _, kv in divide_heads(2 * n, n, ranks)] for layer, n in LAYERS.items()}


def random_pages(form, rng):
    dtype = DTYPES[form.dtype][1]
    size = PAGES * form.nbytes
    return np.frombuffer(rng.bytes(size), dtype).reshape(PAGES, *form.shape)


FORMS = [
    (mx.float32, UNPACKED), (mx.bfloat16, UNPACKED), (mx.float16, KVBits(8, 8)),
    (mx.bfloat16, KVBits(0, 4)),
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "bits"), FORMS, ids=str)
@pytest.mark.parametrize("ranks", [2, 3, 7])
def test_pages_come_back_as_they_went(monkeypatch, ranks, dtype, bits):
    """All bits, also NaN's; of seven ranks and five heads, some have a head that others have."""
    monkeypatch.setattr(saved, "PIECE_BYTES", 30_000)
    parted, rng = Ranks(divided(ranks), dtype, bits), np.random.default_rng(5)
    cache = parted.cache
    rows = [
        7,
        3,
        4,
        5,
        0,
        1,
        NO_PAGE,
        2,
        6,
        NO_PAGE,
        8,
        9,
    ]  # a page after the first eight: it grows
    assert cache.short(1, PAGES, PAGES, 1)
    cache.grow(1, PAGES, PAGES, 1)
    assert parted.sizes == [(1, PAGES, PAGES, 1)]
    for store in parted.stores[1:]:
        store.grow(1, PAGES, PAGES, 1)
    written = [i for i, row in enumerate(rows) if row != NO_PAGE]
    for layer, heads in LAYERS.items():
        group = next(group for group in cache.groups if layer in group.layers)
        assert group.spec.heads == cache.specs[layer].heads == heads
        for name, form in page_parts(group, dtype).items():
            pages = random_pages(form, rng)
            cache.put(layer, name, rows, pages)
            wanted = [rows[i] for i in written]
            np.testing.assert_array_equal(
                bits_of(cache.get(layer, name, wanted)), bits_of(pages[written])
            )
            for rank, store in enumerate(parted.stores):
                own = parted.kept[layer][rank]
                np.testing.assert_array_equal(
                    bits_of(store.get(layer, name, wanted)), bits_of(pages[written][:, list(own)])
                )
    assert max(parted.told) < 30_000 + 200
    assert (told := len(parted.told)) > 2 * len(LAYERS) * (ranks - 1)  # in pieces
    (name, form), *_ = page_parts(cache.groups[0], dtype).items()
    cache.put(0, name, [NO_PAGE] * PAGES, random_pages(form, rng))
    assert len(parted.told) == told


def bits_of(x):
    return x.view(np.dtype(f"u{x.dtype.itemsize}"))


def test_layers_may_be_on_some_ranks_alone(tmp_path):
    """A file goes to two stages: the first two ranks share two layers, the others have the last."""
    none, path = range(0), tmp_path / "prompt.st"
    whole = Storage(group_layers(specs(LAYERS.values())), mx.float32, **SIZES)
    manager = CacheManager(whole.groups, **SIZES)
    forms = [page_parts(group, mx.float32) for group in whole.groups]
    groups = (Group((0, 1), (0, 1, 2), forms[0]), Group((2,), (0, 1, 2), forms[1]))
    header = Header({}, 150, 64, groups)
    made = random_tensors(header)
    file.write(path, header, made.__getitem__)
    parted = Ranks({
        0: [range(3), range(3, 5), none, none], 1: [range(3), range(3, 5), none, none],
        2: [none, none, range(2), range(2, 3)],
    })  # fmt: skip
    assert [sorted(store.pool) for store in parted.stores] == [[0, 1], [0, 1], [2], [2]]
    assert restore(manager, parted.cache, "key", ("", ""), file.read(path)) == 150
    ids = made["tokens"].tolist()
    kept = source(manager, parted.cache, "key", ("", ""), ids, {})
    assert kept.header == header
    for name, expected in made.items():
        np.testing.assert_array_equal(
            bits_of(tensor(parted.cache, kept, ids, name)), bits_of(expected)
        )


@given(st.integers(1, 9), st.integers(1, 5), st.data())
def test_each_head_is_taken_once(kv_heads, sharing, data):
    ranks = data.draw(st.integers(1, kv_heads * sharing))
    kept = [kv for _, kv in divide_heads(kv_heads * sharing, kv_heads, ranks)]
    found = owners([*kept, range(0)])
    assert sorted(head for heads in found for head in heads) == list(range(kv_heads))
    assert all(kept.index(heads) == rank for heads, rank in found.items())


def test_what_is_not_divided_by_heads_is_refused():
    groups = group_layers([Latent(8, 4)])
    store = Storage(groups, mx.float32, hot_pages=1, pool_pages=(1,))
    with pytest.raises(InvariantError, match="layer 0 keeps Latent"):
        WholeCache(
            store, groups, 2, lambda rank, layer: range(1), lambda rank, x: x, lambda needed: None
        )


def test_an_answer_to_something_else_counts_as_a_loss(monkeypatch):
    monkeypatch.setattr(saved, "answer", lambda store, asked: Ping())
    cache = Ranks(divided(2)).cache
    with pytest.raises(PeerLost, match="rank 1 said Ping out of turn"):
        cache.get(0, "k", [1])
    with pytest.raises(PeerLost, match="rank 1 said Ping out of turn"):
        cache.put(0, "k", [1], np.zeros((1, 5, 64, DIM), np.float32))


@pytest.mark.parametrize("changed", [
    {"dtype": "uint16"}, {"shape": (2, 3, 64, DIM)}, {"shape": (1, 3, 64, DIM, 2)},
    {"data": bytes(8)}, {"dtype": "complex"},
], ids=str)  # fmt: skip
def test_a_rank_does_not_write_what_is_no_page_of_its_own(changed):
    """It raises, and so it ends, and all others with it."""
    store = Ranks(divided(2)).stores[0]
    good = Rows.of(np.ones((1, 3, 64, DIM), np.float32))
    with pytest.raises((ValueError, TypeError)):
        saved.answer(store, Put(0, "k", [1], msgspec.structs.replace(good, **changed)))
    assert not store.get(0, "k", range(PAGES - 4)).any()
    saved.answer(store, Put(0, "k", [1], good))
    assert store.get(0, "k", [1]).all()
