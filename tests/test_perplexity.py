"""Windows over a text, against their definition."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxserve.perplexity import windows


@given(st.integers(2, 300), st.integers(1, 60), st.data())
def test_every_token_but_the_first_counts_once(n_tokens, context, data):
    stride = data.draw(st.integers(1, context))
    found = windows(n_tokens, context, stride)
    scored = [i for start, end, first in found for i in range(first, end)]
    assert scored == list(range(1, n_tokens))
    for i, (start, end, first) in enumerate(found):
        assert start == i * stride
        assert start < first < end <= start + context + 1
        if i:
            assert first - start >= context - stride + 1  # the context of the first that counts
            assert end - first == stride or end == n_tokens


def test_windows_by_hand():
    assert windows(10, 4, 2) == [(0, 5, 1), (2, 7, 5), (4, 9, 7), (6, 10, 9)]
    assert windows(9, 4, 4) == [(0, 5, 1), (4, 9, 5)]
    assert windows(5, 4, 2) == [(0, 5, 1)]
    assert windows(2, 512, 256) == [(0, 2, 1)]


@pytest.mark.parametrize("wrong", [(1, 4, 2), (9, 4, 5), (9, 4, 0), (9, 0, 0)])
def test_windows_that_make_no_sense(wrong):
    with pytest.raises(ValueError, match="no windows"):
        windows(*wrong)
