"""Stop strings against a search in the whole text."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxserve.errors import RequestError
from mlxserve.text.stream import StopStrings
from tests.text.support import cut, refused

# Few letters, so that matches, near matches and overlaps are common.
texts = st.one_of(st.text("ab", max_size=40), st.text("abc\n😀", max_size=40))
stop_lists = st.lists(
    st.one_of(st.text("ab", min_size=1, max_size=6), st.text("abc\n😀", min_size=1, max_size=4)),
    max_size=4,
)


def _run(pieces: list[str], stops: list[str]) -> tuple[str, bool]:
    stream = StopStrings(stops)
    shown = "".join([stream.feed(piece)[0] for piece in pieces])
    return shown + stream.finish(), stream.stopped


def _expected(text: str, stops: list[str]) -> tuple[str, bool]:
    found = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    return (text[: min(found)[1]], True) if found else (text, False)


@given(pieces=cut(texts), stops=stop_lists)
def test_the_same_as_searching_the_whole_text(pieces: list[str], stops: list[str]):
    assert _run(pieces, stops) == _expected("".join(pieces), stops)


@given(pieces=cut(texts), stops=stop_lists)
def test_only_what_could_still_match_is_held_back(pieces: list[str], stops: list[str]):
    stream = StopStrings(stops)
    shown = seen = ""
    for piece in pieces:
        text, stopped = stream.feed(piece)
        shown, seen = shown + text, seen + piece
        if stopped:
            break
        beginnings = {stop[:n] for stop in stops for n in range(len(stop))}
        held = max((len(b) for b in beginnings if seen.endswith(b)), default=0)
        assert shown == seen[: len(seen) - held]


@pytest.mark.parametrize(
    ("pieces", "stops", "expected"),
    [
        (["Hello\n", "\nUser:"], ["\n\nUser"], "Hello"),
        (["a", "b", "c"], ["abd"], "abc"),
        (["aaab"], ["aab"], "a"),
        (["aa", "ab"], ["aab"], "a"),
        (["xabcd"], ["abcd", "bc"], "xa"),
        (["xabc"], ["abc", "bc"], "x"),
        (["<", "|im_", "end|>"], ["<|im_end|>"], ""),
        (["😀", "😀😀"], ["😀😀😀"], ""),
    ],
)
def test_examples(pieces: list[str], stops: list[str], expected: str):
    assert _run(pieces, stops)[0] == expected


def test_nothing_comes_after_a_stop():
    stream = StopStrings(["."])
    assert stream.feed("One. Two.") == ("One", True)
    assert stream.feed(" Three") == ("", True)
    assert stream.finish() == ""


def test_without_stop_strings_text_passes_at_once():
    stream = StopStrings([])
    assert stream.feed("text") == ("text", False)
    assert stream.finish() == ""


def test_an_empty_stop_string_is_refused():
    with refused(RequestError, "stop string", "empty"):
        StopStrings(["ok", ""])


@pytest.mark.full
def test_time_is_linear_in_a_long_near_match():
    n = 300_000
    stream = StopStrings(["a" * n + "b"])
    began = time.thread_time()
    shown = sum(len(stream.feed("a")[0]) for _ in range(n + 1000))
    shown += len(stream.finish())
    assert shown == n + 1000
    # Copying the held text for every piece would move 45 GB.
    assert time.thread_time() - began < 4
