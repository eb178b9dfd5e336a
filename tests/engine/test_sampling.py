"""Sampling against NumPy: which tokens may be drawn, how often, and alike in any batch."""

import mlx.core as mx
import numpy as np
import pytest

from mlxserve.engine.sampling import logprobs, sample
from mlxserve.sequence import Sequence
from mlxserve.types import Request, SamplingParams

V = 50


def sequence(prompt=(1, 2, 3), outputs=(), stop_ids=(), seed=0, **params):
    request = Request(
        id="r",
        prompt_ids=tuple(prompt),
        params=SamplingParams(seed=seed, **params),
        stop_ids=frozenset(stop_ids),
    )
    seq = Sequence.start(request, 10_000, 0.0)
    seq.ids += outputs
    seq.pending = 1  # the token being drawn, as the scheduler has it
    return seq


def draw(logits, seqs):
    return sample(logits, seqs, mx.argmax(logits, axis=-1).astype(mx.int32))


def random_logits(rows=1, seed=0, spread=3.0):
    return np.random.default_rng(seed).normal(size=(rows, V), scale=spread).astype(np.float32)


def draws(logits, n=400, **params):
    """n draws of one row under n seeds."""
    seqs = [sequence(seed=i, **params) for i in range(n)]
    return np.array(draw(mx.array(np.repeat(logits, n, axis=0)), seqs))


def allowed(logits, *, temperature, top_k=0, top_p=1.0, min_p=0.0):
    """The set of tokens that may be drawn, and their probabilities, in float64."""
    x = logits.astype(np.float64) / temperature
    order = np.argsort(-x)
    keep = order[: top_k or V]
    probs = np.exp(x[keep] - x[keep].max())
    probs /= probs.sum()
    keep = keep[np.cumsum(probs) - probs < top_p]
    probs = np.exp(x[keep] - x[keep].max())
    probs /= probs.sum()
    keep, probs = keep[probs >= min_p * probs[0]], probs[probs >= min_p * probs[0]]
    return dict(zip(keep.tolist(), (probs / probs.sum()).tolist(), strict=True))


@pytest.mark.full
@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"temperature": 0.5},
        {"temperature": 2.0, "top_k": 5},
        {"temperature": 1.0, "top_p": 0.7},
        {"temperature": 1.5, "min_p": 0.1},
        {"temperature": 2.0, "top_k": 20, "top_p": 0.8, "min_p": 0.05},
        {"temperature": 1.0, "top_p": 1e-6},
        {"temperature": 1.0, "top_k": V},
    ],
    ids=str,
)
def test_draws_follow_the_filtered_distribution(params):
    logits = random_logits(seed=3, spread=1.5)
    n = 4000
    expected = allowed(logits[0], **params)
    tokens, counts = np.unique(draws(logits, n, **params), return_counts=True)
    assert set(tokens.tolist()) <= set(expected)
    for token, probability in expected.items():
        seen = counts[tokens == token].sum() / n
        # Five standard deviations; a very rare token may come up once or twice.
        assert abs(seen - probability) < 5 * (probability * (1 - probability) / n) ** 0.5 + 2 / n


def test_zero_temperature_takes_the_likeliest_whatever_the_filters():
    logits = random_logits(4)
    seqs = [sequence(), sequence(top_k=3), sequence(top_p=0.1), sequence(min_p=0.9)]
    assert draw(mx.array(logits), seqs).tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [1e-4, 1e-10, 1e-40])
def test_a_tiny_temperature_takes_the_likeliest(temperature):
    logits = random_logits(seed=5)
    assert set(draws(logits, 20, temperature=temperature)) == {logits.argmax()}


def test_a_row_draws_the_same_alone_and_in_any_batch():
    kinds = [
        {"temperature": 1.0},
        {"temperature": 0.0},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 1.2, "top_k": 7, "repetition_penalty": 1.3},
        {"temperature": 1.0, "min_p": 0.05, "logit_bias": {4: 3.0}},
        {"presence_penalty": 0.5},
    ]
    logits = random_logits(len(kinds) * 3, seed=1)

    def make(i):
        return sequence(seed=i, outputs=list(range(i % 4)), **kinds[i % len(kinds)])

    alone = [draw(mx.array(logits[i : i + 1]), [make(i)]).item() for i in range(len(logits))]
    rng = np.random.default_rng(0)
    for _ in range(5):
        order = rng.permutation(len(logits))[: rng.integers(2, len(logits))]
        batch = draw(mx.array(logits[order]), [make(int(i)) for i in order]).tolist()
        assert batch == [alone[i] for i in order]


def test_the_same_seed_draws_anew_at_each_token_and_other_seeds_differ():
    logits = mx.array(np.zeros((1, V), np.float32))
    by_position = [
        draw(logits, [sequence(outputs=[5] * i, temperature=1.0)]).item() for i in range(30)
    ]
    by_seed = [draw(logits, [sequence(seed=i, temperature=1.0)]).item() for i in range(30)]
    assert len(set(by_position)) > 10
    assert len(set(by_seed)) > 10


def test_penalties_count_prompt_and_output():
    logits = np.full((1, V), -50.0, np.float32)
    logits[0, [5, 6, 7]] = [4.0, 3.9, 3.0]

    def first(**params):
        # 5 stands once in the prompt and twice in the output, 6 once in the output.
        seq = sequence(prompt=[5, 1], outputs=[5, 5, 6], **params)
        return draw(mx.array(logits), [seq]).item()

    assert first() == 5
    assert first(repetition_penalty=2.0) == 7  # 4/2, 3.9/2 against 3
    assert first(presence_penalty=0.5) == 5  # 3.5, 3.4, 3.0
    assert first(frequency_penalty=0.5) == 6  # 4 - 1.5, 3.9 - 0.5, 3.0
    assert first(frequency_penalty=1.0) == 7


def test_a_repetition_penalty_also_lowers_negative_logits():
    logits = np.full((1, V), -50.0, np.float32)
    logits[0, [5, 6]] = [-1.0, -1.5]
    seq = sequence(prompt=[5], repetition_penalty=2.0)
    assert draw(mx.array(logits), [seq]).item() == 6


def test_penalties_follow_the_tokens_drawn():
    """Each token is penalised from the step after it is drawn, though it may not be read yet."""
    logits = mx.array(np.array([[3.0, 2.9, 2.8] + [-9.0] * (V - 3)], np.float32))
    seq = sequence(prompt=[10], presence_penalty=1.0)
    drawn = []
    for _ in range(3):
        drawn.append(draw(logits, [seq]).item())
        seq.pending += 1
    assert drawn == [0, 1, 2]


def test_bias_is_added_and_can_forbid():
    logits = random_logits()
    best = int(logits.argmax())
    assert draw(mx.array(logits), [sequence(logit_bias={9: 100.0})]).item() == 9
    assert draw(mx.array(logits), [sequence(logit_bias={best: -100.0})]).item() != best


def test_no_stop_id_before_min_tokens():
    logits = random_logits()
    best = int(logits.argmax())
    how = {"stop_ids": [best], "min_tokens": 2}
    got = [
        draw(mx.array(logits), [sequence(outputs=[1] * n, **how)]).item() == best for n in range(4)
    ]
    assert got == [False, False, True, True]


def test_a_mask_forbids_before_temperature_and_filters():
    """What a grammar forbids takes no part in what filters keep, however likely it is."""
    logits = random_logits(seed=4, spread=2.0)
    inside = [3, 17, 40]
    mask = np.zeros((1, -(-V // 32)), np.uint32)
    for token in inside:
        mask[0, token // 32] |= np.uint32(1 << token % 32)
    best = inside[int(logits[0, inside].argmax())]
    for params in ({}, {"temperature": 1.0, "top_k": 1}, {"temperature": 5.0, "top_p": 1e-6}):
        seq = sequence(logit_bias={7: 1e6}, **params)
        token = sample(mx.array(logits), [seq], mx.array([7]), mx.array(mask)).item()
        assert token == best
    seqs = [sequence(seed=i, temperature=5.0) for i in range(60)]
    tokens = sample(
        mx.array(np.repeat(logits, 60, axis=0)),
        seqs,
        mx.array([7] * 60),
        mx.array(np.repeat(mask, 60, axis=0)),
    )
    assert set(tokens.tolist()) == set(inside)


def own_logprobs(logits, ids, top):
    best = mx.argmax(logits, axis=-1).astype(mx.int32)
    return tuple(np.array(x) for x in logprobs(logits, best, mx.array(ids), top))


@pytest.mark.parametrize("vocab", [3, V, 256, 1000, 50_001])
def test_logprobs_are_the_model_s_own(vocab):
    logits = np.random.default_rng(3).normal(size=(3, vocab), scale=3).astype(np.float32)
    ids = [2, 0, vocab - 1]
    exact = logits.astype(np.float64)
    exact = exact - np.log(np.exp(exact).sum(-1, keepdims=True))
    for top in (0, 1, 5):
        chosen, top_ids, values = own_logprobs(mx.array(logits), ids, top)
        np.testing.assert_allclose(chosen, exact[range(3), ids], atol=3e-6)
        order = np.argsort(-exact, axis=-1)[:, :top]
        assert np.array_equal(top_ids, order)
        np.testing.assert_allclose(values, np.take_along_axis(exact, order, -1), atol=3e-6)


def test_equal_tokens_are_reported_lowest_id_first():
    logits = np.zeros((2, V), np.float32)
    logits[0, [41, 7, 30]] = 2.0
    logits[1, 12] = -1.0
    _, top_ids, _ = own_logprobs(mx.array(logits), [0, 0], 5)
    assert top_ids.tolist() == [[7, 30, 41, 0, 1], [0, 1, 2, 3, 4]]


def test_large_logits_cost_a_likely_token_no_digits():
    """A token ahead of the others by 9: its loss is small beside the logits themselves."""
    logits = np.full((1, V), 20_000.0, np.float32)
    logits[0, 4] += 9.0
    chosen, _, _ = own_logprobs(mx.array(logits), [4], 0)
    np.testing.assert_allclose(chosen, -np.log1p(49 * np.exp(-9.0)), atol=3e-6)
