"""Helpers for the tests of texts."""

import contextlib
import itertools
from collections.abc import Iterator

import pytest
from hypothesis import strategies as st

from mlxserve.errors import MlxserveError


@contextlib.contextmanager
def refused(kind: type[MlxserveError], *words: str) -> Iterator[None]:
    """Expect an error in one line that has these words in it."""
    with pytest.raises(kind) as caught:
        yield
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


WORDS = [
    "the",
    " harbour",
    "42",
    "don't",
    "\n",
    "  ",
    "é",
    "ß",
    "東京",
    "😀",
    "👍🏽",
    "</s>",
    "▁",
    "<0x41>",
]

# Characters from every plane, and words that the tokenizers know.
any_text = st.lists(st.one_of(st.sampled_from(WORDS), st.text(max_size=8)), max_size=12).map(
    "".join
)


@st.composite
def cut(draw: st.DrawFn, texts: st.SearchStrategy[str]) -> list[str]:
    """A text, cut into pieces anywhere."""
    text = draw(texts)
    cuts = draw(st.lists(st.integers(0, len(text)), max_size=8).map(sorted))
    borders = [0, *cuts, len(text)]
    return [text[a:b] for a, b in itertools.pairwise(borders)]
