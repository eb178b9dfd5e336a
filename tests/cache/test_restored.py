"""A file is of one kind of cache, and refused by all others; what it holds, the matrix proves."""

import pytest

from mlxserve.errors import RequestError
from tests.support.caches import KINDS, Asked, Run

PROMPT = Asked((*range(20), 3), 1, "greedy")


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
