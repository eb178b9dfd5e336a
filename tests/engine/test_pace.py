"""How long steps take: a known line is found again, and a step is kept to its target."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxserve.engine.pace import RECENT_STEPS, Pace

LOW, HIGH = 32, 2048
LINES = {
    "fixed_s": st.floats(1e-3, 0.1),
    "per_token_s": st.floats(1e-5, 1e-2),
    "seed": st.integers(0, 2**32),
}


def run(pace, fixed_s, per_token_s, rng, steps=40, noise=0.05, odd=()):
    """Steps of all sizes that take what the line says, but for noise; an odd one, far longer."""
    for number in range(steps):
        rows = rng.randint(0, 8)
        prompt = rng.randint(16, 512) if number % 2 else 0
        tokens = max(1, rows + prompt)
        seconds = (fixed_s + per_token_s * tokens) * rng.uniform(1 - noise, 1 + noise)
        pace.observe(tokens, min(rows, tokens) if prompt else tokens, seconds)
        if number in odd:
            pace.observe(tokens + 100, rows, seconds * 100)


@given(**LINES, odd=st.sets(st.integers(0, 39), max_size=3))
@settings(deadline=None)
def test_a_known_line_is_found_under_noise_and_odd_steps(fixed_s, per_token_s, seed, odd):
    pace = Pace()
    run(pace, fixed_s, per_token_s, random.Random(seed), odd=odd)
    rows = 4
    for prompt in (256, 512):
        truth = fixed_s + per_token_s * (rows + prompt)
        n = pace.chunk_tokens(truth, rows, LOW, HIGH)
        assert fixed_s + per_token_s * (rows + n) <= 1.15 * truth
        assert fixed_s + per_token_s * (rows + n + 64) >= 0.85 * truth


@given(**LINES)
@settings(deadline=None)
def test_without_noise_the_target_is_met_to_64_tokens(fixed_s, per_token_s, seed):
    pace = Pace()
    run(pace, fixed_s, per_token_s, random.Random(seed), noise=0.0)
    for rows, prompt in ((1, 100), (8, 300), (32, 500)):
        target = fixed_s + per_token_s * (rows + prompt + 0.5)
        assert pace.chunk_tokens(target, rows, LOW, HIGH) == prompt // 64 * 64


def test_a_first_step_that_compiles_misleads_nobody():
    pace = Pace()
    pace.observe(512, 0, 30.0)
    for _ in range(3):
        assert pace.chunk_tokens(0.05, 8, LOW, HIGH) <= 128  # twice what was on time
        assert pace.seconds_for(1000) is None
        pace.observe(8, 8, 0.0108)
        pace.observe(72, 8, 0.0172)
    assert pace.chunk_tokens(0.05, 8, LOW, HIGH) == 384  # 392 tokens and the fixed 10 ms: 49 ms
    assert pace.seconds_for(1000) < 1.0


def test_it_follows_a_machine_that_slows_down_and_recovers():
    pace, rng = Pace(), random.Random(0)
    sizes = []
    for factor in (1, 4, 1):
        for _ in range(60):
            n = pace.chunk_tokens(0.06 * 1.01, 8, LOW, HIGH)
            pace.observe(8 + n, 8, factor * (0.01 + 1e-4 * (8 + n)) * rng.uniform(0.99, 1.01))
            pace.observe(8, 8, factor * (0.01 + 1e-4 * 8) * rng.uniform(0.99, 1.01))
        sizes.append(n)
    assert sizes[0] == sizes[2] == 448
    assert 40 <= sizes[1] <= 46  # 40 ms, and 0.4 ms a token


@given(
    **LINES,
    targets=st.lists(st.floats(1e-4, 100.0), min_size=2),
    steps=st.integers(0, 40),
    rows=st.integers(0, 64),
    low=st.integers(1, 300),
    extra=st.integers(0, 2000),
)
@settings(deadline=None)
def test_more_time_never_means_fewer_tokens_and_the_bounds_hold(
    fixed_s, per_token_s, seed, targets, steps, rows, low, extra
):
    pace = Pace()
    run(pace, fixed_s, per_token_s, random.Random(seed), steps, odd=(0,))
    sizes = [pace.chunk_tokens(target, rows, low, low + extra) for target in sorted(targets)]
    assert sizes == sorted(sizes)
    assert all(low <= n <= low + extra for n in sizes)
    assert all(n % 64 == 0 or n <= 64 or n in (low, low + extra) for n in sizes)


def test_more_rows_leave_less_room():
    pace = Pace()
    run(pace, 0.01, 1e-4, random.Random(1), noise=0.0)
    sizes = [pace.chunk_tokens(0.05, rows, LOW, HIGH) for rows in range(1, 400, 7)]
    assert sizes == sorted(sizes, reverse=True)
    assert (sizes[0], sizes[-1]) == (384, LOW)


def test_nothing_measured_or_nobody_waiting_needs_no_limit():
    pace = Pace()
    assert pace.chunk_tokens(0.05, 8, LOW, HIGH) == HIGH
    pace.observe(8, 8, 0.01)
    assert pace.chunk_tokens(0.05, 8, LOW, HIGH) == LOW
    assert pace.chunk_tokens(0.05, 0, LOW, HIGH) == HIGH


def test_after_decode_steps_alone_prompts_grow_by_doubling_and_stop_where_it_is_enough():
    pace, sizes = Pace(), []
    for _ in range(20):
        pace.observe(4, 4, 0.0104)
    for _ in range(8):
        sizes.append(pace.chunk_tokens(0.0365, 4, LOW, HIGH))
        pace.observe(4 + sizes[-1], 4, 0.01 + 1e-4 * (4 + sizes[-1]))
    assert sizes == [32, 64, 128, 256, 256, 256, 256, 256]


def test_a_long_answer_does_not_wash_out_what_is_known_about_prompts():
    pace = Pace()
    run(pace, 0.01, 1e-4, random.Random(2), noise=0.0)
    before = pace.chunk_tokens(0.05, 4, LOW, HIGH)
    for _ in range(1000):
        pace.observe(4, 4, 0.0104)
    assert pace.chunk_tokens(0.05, 4, LOW, HIGH) == before == 384


def test_what_a_row_costs_is_not_taken_for_what_a_prompt_token_costs():
    """A row reads a long context: 2 ms each here, where a prompt token takes 0.1 ms."""
    pace = Pace()
    for number in range(RECENT_STEPS):
        rows = 1 + number % 8
        pace.observe(rows, rows, 0.01 + 2e-3 * rows)
    for _ in range(3):
        pace.observe(512 + 4, 4, 0.018 + 1e-4 * 512)
    assert pace.chunk_tokens(0.05, 4, LOW, HIGH) in (256, 320)  # 32 ms for prompts


def test_steps_that_take_no_longer_for_more_tokens_take_as_many_as_they_may():
    pace = Pace()
    run(pace, 0.01, 0.0, random.Random(3), noise=0.0)
    assert pace.chunk_tokens(0.02, 4, LOW, 256) == 256
    assert pace.chunk_tokens(0.005, 4, LOW, 256) == LOW


def test_the_time_to_the_first_token_counts_whole_steps_and_the_rows_beside_them():
    pace = Pace()
    for _ in range(RECENT_STEPS):
        pace.observe(8, 8, 0.0108)
        pace.observe(136, 8, 0.0236)
    # Steps of 128 prompt tokens and 8 rows, 10 ms and 0.1 ms a token.
    assert pace.seconds_for(128) == pytest.approx(0.0236)
    assert pace.seconds_for(1280) == pytest.approx(10 * 0.0236)
    assert pace.seconds_for(1) == pytest.approx(0.0109)
    assert pace.ttft_s(1152, 128) == pytest.approx(10 * 0.0236)
    assert pace.seconds_for(0) == 0


def test_no_time_is_told_before_prompts_were_seen():
    pace = Pace()
    assert pace.ttft_s(0, 100) is None
    for rows in range(1, 200):
        pace.observe(rows, rows, 0.01 + 1e-4 * rows)
    assert pace.ttft_s(0, 100) is None


@pytest.mark.parametrize(
    ("step", "message"),
    [
        ((0, 0, 1.0), "a step of 0 tokens"),
        ((4, 5, 1.0), "4 tokens with 5 rows"),
        ((4, -1, 1.0), "-1 rows"),
        ((4, 4, -0.1), "-0.1 seconds"),
        ((4, 4, math.nan), "nan seconds"),
        ((4, 4, math.inf), "inf seconds"),
    ],
)
def test_impossible_steps_are_refused(step, message):
    with pytest.raises(ValueError, match=message):
        Pace().observe(*step)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((0.0, 1, 1, 2), "target_itl_s is 0.0"),
        ((math.nan, 1, 1, 2), "target_itl_s is nan"),
        ((1.0, -1, 1, 2), "rows -1"),
        ((1.0, 1, 0, 2), "low 0"),
        ((1.0, 1, 3, 2), "low 3, high 2"),
    ],
)
def test_impossible_limits_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        Pace().chunk_tokens(*values)


@given(
    fixed_s=st.floats(1e-3, 0.1),
    per_token_s=st.floats(1e-5, 1e-2),
    per_context_s=st.floats(0, 1e-7),
    seed=st.integers(0, 2**32),
)
@settings(deadline=None)
def test_no_step_of_a_long_prompt_takes_longer_than_it_may(
    fixed_s, per_token_s, per_context_s, seed
):
    """Whatever the device and however its attention slows down as the context grows."""
    pace, rng, done, steps = Pace(), random.Random(seed), 0, []
    while done < 50_000 and len(steps) < 300:
        n = min(pace.tokens_within(1.0), HIGH)
        seconds = fixed_s + n * (per_token_s + per_context_s * done)
        pace.observe(n, 0, seconds * rng.uniform(0.95, 1.05))
        steps.append((n, seconds))
        done += n
    assert max(seconds for _, seconds in steps) <= 1.5
    slow = per_token_s + per_context_s * done
    assert steps[-1][0] >= min(HIGH, 0.4 * (1 - fixed_s) / slow)  # and none is needlessly small


def test_a_limit_of_a_step_holds_before_anything_is_known():
    pace = Pace()
    sizes = [pace.tokens_within(1.0)]
    for tokens, seconds in ((64, 0.3), (128, 0.7), (182, 1.0)):
        pace.observe(tokens, 0, seconds)
        sizes.append(pace.tokens_within(1.0))
    assert sizes == [64, 128, 182, 182]
    pace.observe(8, 8, 0.02)  # what decodes says nothing about prompts
    assert pace.tokens_within(1.0) == sizes[3]
    with pytest.raises(ValueError, match="limit_s is 0"):
        pace.tokens_within(0)
