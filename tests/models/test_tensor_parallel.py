"""Which part of a model each rank has: ranges, what they cover, and what is refused."""

from itertools import pairwise
from types import SimpleNamespace
from typing import NamedTuple

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxserve.engine.footprint import loaded_bytes
from mlxserve.errors import ModelError, RequestError
from mlxserve.kernels import matmul
from mlxserve.models.activations import step_shape
from mlxserve.models.load import load_model, shard_checkpoint
from mlxserve.models.tensor_parallel import Shard, shard_of
from mlxserve.sources.checkpoint import open_checkpoint
from tests.support.model_dir import Packing, write_weights
from tests.support.tiny import tiny_gemma3, tiny_llama

WIDE = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}


class Place(NamedTuple):
    """A rank whose group isn't there: what needs no other rank can be done."""

    rank: int
    size: int

    def sum(self, x: mx.array) -> mx.array:
        return x


def shards_of(n, groups=None, **sizes) -> list[Shard]:
    sizes = {"layers": 1, **sizes}
    return [shard_of(SimpleNamespace(**sizes), Place(rank, n), groups) for rank in range(n)]


def covered(ranges, total) -> bool:
    """Whether each of so many things is in exactly one range, in order, and none is empty."""
    together = [i for some in ranges for i in some]
    return together == list(range(total)) and all(ranges)


@given(st.data())
def test_every_head_channel_and_id_is_in_exactly_one_rank(data):
    kv_heads, sharing = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6))
    heads = kv_heads * sharing
    n = data.draw(st.integers(1, heads))
    group = data.draw(st.sampled_from([32, 64, 128]))
    inner = group * data.draw(st.integers(n, n + 9))
    vocab_size = data.draw(st.integers(heads, 1500))
    parts = shards_of(
        n,
        {"model.layers.0.mlp.down_proj.weight": group},
        heads=heads,
        kv_heads=kv_heads,
        head_dim=64,
        inner=inner,
        vocab_size=vocab_size,
    )
    assert covered([p.heads for p in parts], heads)
    assert covered([p.inner for p in parts], inner)
    assert covered([p.vocabulary for p in parts], vocab_size)
    assert [len(p.vocabulary) for p in parts] == list(parts[0].vocabulary_widths)
    assert {i for p in parts for i in p.kv_heads} == set(range(kv_heads))
    for p in parts:
        # In a rank as in the whole model, query head i attends with KV head i // sharing.
        local = len(p.heads) // len(p.kv_heads)
        assert [p.kv_heads[i // local] for i in range(len(p.heads))] == [
            head // sharing for head in p.heads
        ]
        assert p.inner.start % group == 0
    even(parts, "inner", group)
    even(parts, "vocabulary", 32)
    if n <= kv_heads:
        even(parts, "kv_heads", 1)
        assert covered([p.kv_heads for p in parts], kv_heads)


def even(parts, what, unit):
    """Sizes differ by a unit at the most, and don't grow."""
    sizes = [len(getattr(p, what)) for p in parts]
    assert all(a >= b for a, b in pairwise(sizes))
    # Of what isn't a multiple of the unit, the last part lacks some more.
    assert sizes[0] - sizes[-1] < 2 * unit
    assert sizes[0] - min(sizes[:-1], default=sizes[0]) <= unit


@pytest.mark.parametrize(
    ("heads", "kv_heads", "n", "want"),
    [
        (9, 3, 2, [(6, 2), (3, 1)]),
        (4, 1, 3, [(2, 1), (1, 1), (1, 1)]),
        (8, 2, 3, [(2, 1), (2, 1), (4, 1)]),
        (32, 8, 4, [(8, 2)] * 4),
        (4, 4, 1, [(4, 4)]),
    ],
)
def test_whole_groups_of_heads_as_even_as_can_be(heads, kv_heads, n, want):
    parts = shards_of(n, heads=heads, kv_heads=kv_heads, head_dim=8, inner=320, vocab_size=97)
    assert [(len(p.heads), len(p.kv_heads)) for p in parts] == want


def test_heads_stay_together_where_groups_of_columns_are_wider():
    groups = {"model.layers.3.self_attn.o_proj.weight": 128}
    sizes = {"head_dim": 64, "inner": 640, "vocab_size": 97}
    parts = shards_of(2, groups, heads=6, kv_heads=6, **sizes)
    assert [len(p.heads) for p in parts] == [4, 2]
    parts = shards_of(2, groups, heads=8, kv_heads=1, **sizes)
    assert [len(p.heads) for p in parts] == [4, 4]


@pytest.mark.parametrize("n", [1, 2, 4])
def test_every_number_of_a_matrix_is_on_exactly_one_rank(tmp_path, n):
    tiny = tiny_llama(attention_bias=True, mlp_bias=True, intermediate_size=160, **WIDE)
    checkpoint = open_checkpoint(write_weights(tmp_path / "m", tiny, Packing(4, 32)))
    parts = [shard_checkpoint(checkpoint, Place(rank, n)) for rank in range(n)]
    whole = ("norm.weight", "o_proj.bias", "down_proj.bias")
    for name, stored in checkpoint.tensors.items():
        times = np.zeros(stored.shape, int)
        for part in parts:
            times[np.ix_(*part.region(name, stored.shape))] += 1
        assert (times == (n if name.endswith(whole) else 1)).all(), name


def test_a_kv_head_may_be_on_several_ranks(tmp_path):
    tiny = tiny_gemma3(num_attention_heads=4, num_key_value_heads=1)
    checkpoint = open_checkpoint(write_weights(tmp_path / "m", tiny))
    for rank in range(3):
        part = shard_checkpoint(checkpoint, Place(rank, 3))
        assert part.region("model.layers.0.self_attn.k_proj.weight", (16, 64)) == (
            range(16),
            range(64),
        )


def refused(n, *parts, groups=None, **sizes):
    with pytest.raises(RequestError) as e:
        shards_of(n, groups, **{"head_dim": 64, "inner": 640, "vocab_size": 97} | sizes)
    assert all(part in str(e.value) for part in parts), str(e.value)
    assert "\n" not in str(e.value)


def test_more_ranks_than_heads_are_refused():
    refused(5, "5 processes can't share 4 query heads; use 4 at the most", heads=4, kv_heads=2)


@pytest.mark.parametrize(
    ("n", "heads", "kv_heads"),
    [(3, 4, 4), (4, 4, 1), (5, 9, 3)],
    ids=["too few groups of heads", "too few in a KV head", "between KV heads"],
)
def test_heads_that_would_cut_a_group_of_columns_are_refused(n, heads, kv_heads):
    name = "model.layers.7.self_attn.o_proj.weight"
    refused(n, name, f"{n} processes can't share the {heads} heads of 64", "groups of 128",
            "convert the model with a smaller group size",
            groups={name: 128}, heads=heads, kv_heads=kv_heads)  # fmt: skip


def test_an_mlp_with_too_few_groups_of_columns_is_refused():
    name = "model.layers.1.mlp.down_proj.weight"
    refused(3, name, "3 processes can't share the 128 columns", "groups of 64",
            "smaller group size",
            groups={name: 64}, heads=4, kv_heads=4, inner=128)  # fmt: skip
    assert shards_of(3, heads=4, kv_heads=4, head_dim=64, inner=128, vocab_size=97)


def test_the_checkpoint_is_checked_as_a_whole(tmp_path):
    """A part of what is too large would look right."""
    tiny = tiny_llama()
    name = "model.layers.0.self_attn.q_proj.weight"
    wider = tiny.weights | {name: mx.zeros((80, 64)), "extra.weight": mx.zeros((2,))}
    path = write_weights(tmp_path / "m", tiny._replace(weights=wider))
    with pytest.raises(ModelError, match=r"extra\.weight.*q_proj.weight is \[80, 64\]"):
        shard_checkpoint(open_checkpoint(path), Place(0, 2))


def test_a_head_that_repeats_the_embedding(tmp_path):
    tiny = tiny_llama(tie_word_embeddings=True)
    embedding = tiny.weights["model.embed_tokens.weight"]
    same, other = embedding * 1, mx.concatenate([embedding[:-1], embedding[:1]])
    for rank, head, fits in ((1, same, True), (0, other, True), (1, other, False)):
        path = tmp_path / f"{rank}{fits}"
        write_weights(path, tiny._replace(weights=tiny.weights | {"lm_head.weight": head}))
        if fits:
            load_part(path, Place(rank, 2))
        else:
            with pytest.raises(ModelError, match="tie_word_embeddings is true but lm_head"):
                load_part(path, Place(rank, 2))


def load_part(path, place):
    checkpoint = open_checkpoint(path)
    shard = shard_checkpoint(checkpoint, place)
    return load_model(checkpoint.config, checkpoint.weights(shard.region), shard=shard)


@pytest.mark.parametrize("packing", [None, Packing(4, 32)], ids=["dense", "4 bits"])
def test_a_part_is_loaded_in_its_memory_and_a_layers(tmp_path, packing):
    tiny = tiny_llama(
        num_hidden_layers=12, intermediate_size=1024, hidden_size=128, vocab_size=640, **WIDE
    )
    path = write_weights(tmp_path / "m", tiny, packing, mx.bfloat16)
    checkpoint = open_checkpoint(path)
    parts = [shard_checkpoint(checkpoint, Place(rank, 2)) for rank in range(2)]
    for shard in parts:
        mx.synchronize()
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        weights = checkpoint.weights(shard.region)
        model = load_model(checkpoint.config, weights, shard=shard)
        final, peak = mx.get_active_memory() - before, mx.get_peak_memory() - before
        told = loaded_bytes(
            checkpoint.config, checkpoint.size_bytes, form=matmul.form(), shard=shard
        )
        assert final == pytest.approx(told, rel=0.05)
        assert told == pytest.approx(
            loaded_bytes(checkpoint.config, checkpoint.size_bytes, form=matmul.form()) / 2, rel=0.02
        )
        assert peak < final + checkpoint.size_bytes / 2 * 2 / 12
        del model


def test_the_engine_plans_with_the_part(tmp_path):
    path = write_weights(tmp_path / "m", tiny_llama(**WIDE))
    model = load_part(path, Place(0, 2))
    whole = load_part(path, Place(0, 1))
    assert [spec.heads for spec in model.layer_specs()] == [2, 2]
    assert step_shape(model, mx.float32).heads == (4, 4)
    assert step_shape(model, mx.float32).vocab_size == 97  # sampling is of all logits
    assert step_shape(model, mx.float32).ahead < step_shape(whole, mx.float32).ahead
