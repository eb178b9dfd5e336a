"""A file is of one kind of cache, and refused by all others; what it holds, the matrix proves."""

from dataclasses import replace
from pathlib import Path

import pytest

from mlxserve.cache import file
from mlxserve.errors import RequestError
from mlxserve.kernels import registry
from tests.cache.saved import small_tensors
from tests.support.caches import KINDS, Asked, Run, solo

P = 4
PROMPT = Asked((*range(20), 3), 1, "greedy")
LONG = Asked((*range(12 * P), 3), 6, "greedy")


@pytest.mark.full
@pytest.mark.parametrize("name", KINDS)
def test_a_file_of_another_cache_is_refused_by_name(name, tmp_path):
    refuses_others(name, tmp_path / "prompt.st")


def refuses_others(name, path):
    run = Run(name, 8)
    run.alone(PROMPT)
    run.save(path, PROMPT.ids)
    for other in KINDS.keys() - {name}:
        expect_refusal(Run(other, 8), path, "(kv_bits|layers)")
    expect_refusal(Run(name, 16), path, "page_tokens '8', not '16'")


def expect_refusal(run, path, message):
    with pytest.raises(RequestError, match=f"it was made with .*{message}"):
        run.load(path)
    assert run.core.manager.tree.roots == {}


def saved(path: Path, tokens: int) -> None:
    """The pages of LONG as far as so many tokens."""
    run = Run("full", P)
    run.alone(LONG)
    assert run.save(path, LONG.ids[:tokens]) == tokens


def test_a_long_prompt_finds_room_in_a_new_engine(tmp_path):
    """It has more pages than there are arrays for when an engine starts."""
    path = tmp_path / "prompt.st"
    saved(path, 12 * P)
    run = Run("full", P)
    run.load(path)
    assert run.alone(LONG).cached == 12 * P
    assert run.answers["r0"] == solo("full", P, LONG)


def test_what_came_from_a_file_stays_while_others_pass(tmp_path):
    path = tmp_path / "prompt.st"
    saved(path, 2 * P)
    run = Run("full", P, pool_pages=6)
    run.load(path)
    for first in range(40, 44):
        run.alone(Asked((first, *range(2 * P)), 2, "greedy"))
    assert run.alone(Asked((*LONG.ids[: 2 * P], 1), 2, "greedy")).cached == 2 * P


def test_a_file_whose_pages_are_not_what_it_was_made_with_is_refused(tmp_path):
    """It says that it is of this cache, and its pages have two heads for each that there is."""
    path = tmp_path / "prompt.st"
    saved(path, 2 * P)
    header = file.read(path).header
    (group,) = header.groups
    wider = {
        name: replace(x, shape=(2 * x.shape[0], *x.shape[1:])) for name, x in group.parts.items()
    }
    changed = replace(header, groups=(replace(group, parts=wider),))
    file.write(path, changed, small_tensors(changed))
    run = Run("full", P)
    with pytest.raises(RequestError, match="its pages aren't of the form of this cache's; build"):
        run.load(path)
    assert run.core.manager.tree.roots == {}


recorded = pytest.mark.skipif(
    registry.recorder() is None, reason="only on machines with native kernels: nothing is recorded"
)


@recorded
def test_a_recorded_step_reads_what_a_file_brought(tmp_path):
    """All but one token of the prompt is from the file, and its only step is a recorded one."""
    path = tmp_path / "prompt.st"
    saved(path, 2 * P)
    run = Run("full", P)
    run.alone(Asked((40, *range(9 * P)), 6, "greedy"))  # the arrays have room for all that follows
    for _ in range(3):  # the last leaves nothing that is to be sealed
        run.alone(Asked((50, *range(2 * P)), 6, "greedy"))
    run.load(path)
    before, asked = run.recorded, Asked((*LONG.ids[: 2 * P], 1), 1, "greedy")
    assert run.alone(asked).cached == 2 * P
    assert run.recorded == before + 1
    assert run.answers["r4"] == solo("full", P, asked)


@recorded
def test_a_recorded_step_reads_the_part_of_a_page_that_was_copied_for_it():
    """It joins one that decodes: all but the last token of its prompt is cached, within a page."""
    run, asked = Run("full", P), Asked(tuple(range(2 * P + 3)), 5, "greedy")
    for _ in range(3):
        run.submit(Asked((50, *range(2 * P)), 20, "greedy"))
        run.step(6)
        steps, before = len(run.plans), run.recorded
        seq = run.submit(asked)
        run.step(2)
        in_place = run.recorded - before
        run.drain()
    assert seq.cached == 2 * P + 2
    assert run.plans[steps].loads
    assert in_place == 2
    for name, one in run.asked.items():
        assert run.answers[name] == solo("full", P, one)


def every_rule(path: Path) -> None:
    """All but the first of these tests, for those that ask whether a mutant would be seen."""
    test_a_long_prompt_finds_room_in_a_new_engine(path)
    test_what_came_from_a_file_stays_while_others_pass(path)
    test_a_file_whose_pages_are_not_what_it_was_made_with_is_refused(path)
    test_a_recorded_step_reads_what_a_file_brought(path)
    test_a_recorded_step_reads_the_part_of_a_page_that_was_copied_for_it()
