"""Choosing tokens: kernel and reference against NumPy in float64, and against each other."""

import mlx.core as mx
import numpy as np
import pytest

from mlxserve.kernels import select
from mlxserve.kernels.native import load
from mlxserve.kernels.select import Choice

NOWHERE = -float("inf")


def logits_of(rows, vocab, seed=0, spread=3.0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(rows, vocab), scale=spread).astype(np.float32)


def scaled_by(logits, temperature):
    """As float32 arithmetic gives it, so that ties stay ties."""
    return (logits - logits.max()) / np.float32(temperature)


def kept_by(logits, c):
    """The ids that are kept, in float64: top-k, top-p, min-p, equal ones by id."""
    x = scaled_by(logits, c.temperature).astype(np.float64)
    order = np.argsort(-x, kind="stable")[: c.top_k or len(x)]
    probs = np.exp(x[order]) / np.exp(x[order]).sum()
    if c.top_p < 1:
        order = order[np.cumsum(probs) - probs < np.float32(c.top_p)]
    return set(order[np.exp(x[order]) >= np.float32(c.min_p)].tolist())


CHOICES = [
    Choice(1, 2),
    Choice(1, 2, 0.7, top_k=1),
    Choice(1, 2, 0.7, top_k=40),
    Choice(1, 2, 1.0, top_k=10**6),
    Choice(1, 2, 1.3, top_p=0.9),
    Choice(1, 2, 1.0, top_p=1e-6),
    Choice(1, 2, 50.0, top_p=0.7),
    Choice(1, 2, 1.0, min_p=0.05),
    Choice(1, 2, 1.0, min_p=1.0),
    Choice(1, 2, 2.0, 50, 0.8, 0.02),
    Choice(1, 2, 1e-6, 3, 0.5, 0.5),
]


@pytest.mark.parametrize("choice", CHOICES, ids=str)
@pytest.mark.parametrize("vocab", [1, 2, 7, 16, 33, 1000, 5003])
def test_filters_keep_what_float64_keeps(choice, vocab, kernel_level):
    logits = logits_of(4, vocab, seed=vocab)
    got = np.array(select.filtered(mx.array(logits), [choice] * 4))
    for row, x in zip(got, logits, strict=True):
        kept = kept_by(x, choice)
        assert set(np.flatnonzero(row > NOWHERE).tolist()) == kept
        at = sorted(kept)
        np.testing.assert_allclose(row[at], scaled_by(x, choice.temperature)[at], rtol=1e-6)


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_equal_logits_are_kept_by_id(choice, kernel_level):
    rng = np.random.default_rng(1)
    # Few values: nearly every border lies among equals. Probabilities with short binary fractions,
    # so that sums are exact and "reaches p" has one answer.
    logits = rng.integers(0, 3, (6, 203)).astype(np.float32) * np.float32(np.log(2))
    got = np.array(select.filtered(mx.array(logits), [choice] * 6))
    for row, x in zip(got, logits, strict=True):
        kept = np.flatnonzero(row > NOWHERE)
        order = np.argsort(-x, kind="stable")
        assert set(kept.tolist()) == set(order[: len(kept)].tolist())
        assert abs(len(kept) - len(kept_by(x, choice))) <= (choice.top_p < 1)


def test_all_equal(kernel_level):
    """Of 1024 tokens: shares that float32 holds exactly, so that sums have no rounding."""
    for how, expected in (
        ({"top_k": 17}, 17),
        ({"top_p": 0.25}, 256),
        ({"min_p": 0.9}, 1024),
        ({"top_k": 128, "top_p": 0.5}, 64),
    ):
        kept = select.filtered(mx.zeros((1, 1024)), [Choice(0, 0, **how)])
        assert np.flatnonzero(np.array(kept) > NOWHERE).tolist() == list(range(expected))


def test_forbidden_tokens_are_never_drawn(kernel_level):
    logits = logits_of(1, 500)
    logits[0, 7:] = NOWHERE
    for choice in CHOICES:
        rows = [choice._replace(key_low=i) for i in range(50)]
        drawn = select.draw(mx.array(np.repeat(logits, 50, axis=0)), rows)
        assert max(drawn.tolist()) < 7


@pytest.mark.parametrize("vocab", [1, 2, 3, 16, 17, 33, 100, 1001, 4096])
def test_kernel_and_reference_draw_the_same(vocab, native_level):
    logits = mx.array(logits_of(64, vocab, seed=vocab, spread=2.0))
    rng = np.random.default_rng(vocab)
    rows = [
        CHOICES[i % len(CHOICES)]._replace(
            key_high=int(rng.integers(2**32)), key_low=int(rng.integers(2**32))
        )
        for i in range(64)
    ]
    got = select.draw(logits, rows)
    assert got.tolist() == select._draw(select._filtered(logits, rows), rows).tolist()


def test_the_noise_is_mx_random_s(native_level):
    """Over a flat row the highest noise wins, so that one wrong word among 1000 would show."""
    flat = mx.zeros((500, 1000))
    rows = [Choice(i * 7919, i) for i in range(500)]
    assert mx.array_equal(select.draw(flat, rows), select._draw(flat, rows))


def test_a_row_draws_the_same_alone_and_in_any_batch(kernel_level):
    logits = mx.array(logits_of(22, 777))
    rows = [CHOICES[i % 11]._replace(key_low=i) for i in range(22)]
    batch = select.draw(logits, rows).tolist()
    kept = select.filtered(logits, rows)
    for i in (0, 3, 4, 9, 21):
        assert select.draw(logits[i : i + 1], rows[i : i + 1]).tolist() == batch[i : i + 1]
        alone = select.filtered(logits[i : i + 1], rows[i : i + 1])
        if kernel_level != "reference":
            assert mx.array_equal(alone, kept[i : i + 1])


def test_a_large_vocabulary_is_cut_as_float64_cuts_it(native_level):
    """The reference is some 100 of 11000 tokens off: it adds 262144 numbers in float32."""
    logits = logits_of(3, 262_144)
    rows = [Choice(1, 2, 1.0, 64, 0.95), Choice(3, 4, 1.0, 0, 0.9), Choice(5, 6, 0.8, 0, 1.0, 0.01)]
    got = np.array(select.filtered(mx.array(logits), rows))
    for row, x, choice in zip(got, logits, rows, strict=True):
        kept = set(np.flatnonzero(row > NOWHERE).tolist())
        assert len(kept ^ kept_by(x, choice)) <= 2


@pytest.mark.parametrize("vocab", [1, 7, 16, 17, 1023, 1024, 1025, 50_000])
def test_greedy_takes_the_first_of_the_likeliest(vocab, kernel_level):
    logits = logits_of(5, vocab, seed=vocab)
    logits[1] = 3.0
    logits[2, [vocab // 2, vocab - 1]] = 50.0
    logits[3] = -1e30
    ids, finite = select.greedy(mx.array(logits))
    assert ids.dtype == mx.int32
    assert ids.tolist() == logits.argmax(-1).tolist()
    assert finite.tolist() == [True] * 5


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), NOWHERE])
@pytest.mark.parametrize("place", [0, 15, 16, 999, 1030])
def test_greedy_sees_every_number_that_is_not_finite(bad, place, kernel_level):
    logits = logits_of(3, 1031)
    logits[1, place] = bad
    ids, finite = select.greedy(mx.array(logits))
    assert finite.tolist() == [True, False, True]
    assert 0 <= ids[1].item() < 1031


@pytest.mark.parametrize("fill", [float("nan"), float("inf"), NOWHERE])
def test_rows_of_nothing_but_damage_stay_in_range(fill, kernel_level):
    logits = mx.full((2, 50), fill)
    assert all(0 <= i < 50 for i in select.greedy(logits)[0].tolist())
    drawn = select.draw(logits, [Choice(1, 2), Choice(1, 2, 1.0, 5, 0.9, 0.1)])
    assert all(0 <= i < 50 for i in drawn.tolist())


def test_wrong_arguments_are_refused_by_name():
    native = load().module
    if native is None:
        pytest.skip("only on machines with native kernels")
    logits = mx.zeros((2, 8))
    with pytest.raises(ValueError, match="draw: 1 filters for 2 rows of logits"):
        native.draw(logits, [Choice(1, 2)])
    with pytest.raises(ValueError, match="draw: logits is float16, expected float32"):
        native.draw(logits.astype(mx.float16), [Choice(1, 2)] * 2)
    with pytest.raises(ValueError, match=r"greedy: logits has shape \[8\], expected 2 dimensions"):
        native.greedy(logits[0])
    with pytest.raises(ValueError, match="greedy: logits of 0 tokens aren't supported"):
        native.greedy(mx.zeros((2, 0)))
    for wrong in ({"temperature": 0.0}, {"top_k": -1}, {"top_p": 0.0}, {"min_p": 1.5}):
        with pytest.raises(
            ValueError, match="filtered: temperature or a filter is out of its range"
        ):
            native.filtered(logits, [Choice(1, 2, **wrong)] * 2)


@pytest.mark.parametrize("vocab", [1, 31, 32, 203, 5003])
def test_only_tokens_whose_bit_is_set_are_allowed(vocab, kernel_level):
    rng = np.random.default_rng(vocab)
    logits = logits_of(5, vocab)
    may = rng.random((5, -(-vocab // 32) * 32)) < [[0], [1], [0.5], [0.01], [0.99]]
    bits = np.packbits(may, axis=1, bitorder="little").view(np.uint32)
    got = select.allowed(mx.array(logits), mx.array(bits))
    expected = np.where(may[:, :vocab], logits, -np.float32(np.inf))
    np.testing.assert_array_equal(np.array(got), expected)


@pytest.mark.parametrize("bits", [np.zeros((2, 7), np.uint32), np.zeros((2, 6), np.int32)])
def test_bits_of_another_shape_or_kind_are_refused(bits, kernel_level):
    with pytest.raises(ValueError, match="allowed: "):
        mx.eval(select.allowed(mx.array(logits_of(2, 190)), mx.array(bits)))
