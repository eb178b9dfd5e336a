"""Random schedules: every query reads exactly its own tokens, and every page is accounted for.

They are the same each time, so that CI is: 120 schedules in `make test`, which take about 12,000
steps. Others, and more of them, on demand:
`MLXSERVE_FUZZ_EXAMPLES=5000 python -m pytest tests/cache/test_fuzz.py`.
"""

import os

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.support.schedules import CHOICES, WORDS, Schedule, Setup

ASKED = os.environ.get("MLXSERVE_FUZZ_EXAMPLES")
EXAMPLES = [10, pytest.param(int(ASKED or 120), marks=pytest.mark.full)]

setups = st.builds(
    Setup,
    seed=st.integers(0, 2**32),
    **{name: st.sampled_from(values) for name, values in CHOICES.items()},
)
words = st.sampled_from(WORDS)
indices = st.integers(0, 1000)
pages = st.sampled_from([0, 1, 5])  # of new tokens


class Requests(RuleBasedStateMachine):
    """Requests come, go on, and are aborted; `step` checks all that has to hold."""

    steps = 0

    @initialize(setup=setups)
    def start(self, setup):
        self.schedule = Schedule(setup)
        self.P = setup.page_tokens

    @rule(word=words, drawn=st.integers(0, 2**32), n=st.integers(1, 6), odd=indices, new=pages)
    def add(self, word, drawn, n, odd, new):
        """A prompt of up to six pages, of words that its first bits choose."""
        length = max(1, n * self.P - odd % self.P)
        prompt = [WORDS[(drawn >> i % 32) % 3] for i in range(length)]
        self.schedule.add([word, *prompt], new * self.P + 1)

    @rule(which=indices, cut=indices, more=st.lists(words, max_size=9), new=pages)
    def add_what_begins_alike(self, which, cut, more, new):
        self.schedule.add(self.schedule.like(which, cut, more), new * self.P + 1)

    @rule(which=indices, new=pages)
    def add_the_same(self, which, new):
        self.schedule.add(self.schedule.like(which, -1, []), new * self.P + 1)

    @rule(which=indices, more=st.lists(words, min_size=1, max_size=70), new=pages)
    def add_a_longer_one(self, which, more, new):
        self.schedule.add(self.schedule.like(which, -1, more), new * self.P + 1)

    @rule(which=indices, cut=indices, score=st.booleans())
    def add_a_score_or_another_tenant(self, which, cut, score):
        prompt = self.schedule.like(which, cut, [])
        self.schedule.add(prompt, self.P, score=score, tenant="" if score else "other")

    @rule(which=indices, cut=indices, pin_s=st.sampled_from([1, 50]))
    def add_a_pinned_one(self, which, cut, pin_s):
        self.schedule.add(self.schedule.like(which, cut, []), self.P, pin_s=pin_s)

    @rule(n=st.integers(1, 12))
    @precondition(lambda self: self.schedule.engine.busy)
    def step(self, n):
        for _ in range(n):
            if self.schedule.engine.busy:
                self.schedule.engine.step()

    @rule()
    @precondition(lambda self: not self.schedule.engine.scheduler.busy)
    def settle(self):
        self.schedule.engine.settle()

    @rule(which=indices)
    @precondition(lambda self: self.schedule.engine.scheduler.busy)
    def abort(self, which):
        self.schedule.abort(which)

    def teardown(self):
        if hasattr(self, "schedule"):
            self.schedule.end()
            Requests.steps += self.schedule.engine.steps


@pytest.mark.full
@pytest.mark.parametrize("examples", EXAMPLES)
def test_every_query_reads_its_own_tokens_whatever_happens(examples):
    """At least 8,000 steps in `make test`, each with `check_integrity` after it."""
    Requests.steps = 0
    run_state_machine_as_test(
        Requests,
        settings=settings(
            max_examples=examples,
            stateful_step_count=30,
            derandomize=ASKED is None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=[phase for phase in Phase if phase is not Phase.explain],
        ),
    )
    assert Requests.steps >= 8000 * examples // 120
