"""Thinking and answer told apart, wherever the text is cut."""

import itertools

import pytest

from mlxserve.text.thinking import Part, ThinkingSplitter, opens_thinking

CASES = {
    "plain": ("Hello <b>there</b> </think", [("Hello <b>there</b> </think", False)]),
    "thinking first": ("<think>\nhm\n</think>\n\nYes.", [("\nhm\n", True), ("\n\nYes.", False)]),
    "twice": (
        "a<think>b</think>c<think>d",
        [("a", False), ("b", True), ("c", False), ("d", True)],
    ),
    "empty": ("<think></think>x", [("x", False)]),
    "almost": (
        "<thin<think><<think></thin</think>></think>",
        [("<thin", False), ("<<think></thin", True), ("></think>", False)],
    ),
    "cut short": ("<thi", [("<thi", False)]),
}


def split(pieces, **start):
    splitter = ThinkingSplitter(**start)
    parts = [part for piece in pieces for part in splitter.feed(piece)] + splitter.finish()
    assert all(part.text for part in parts)
    joined = [
        ("".join(part.text for part in run), kind)
        for kind, run in itertools.groupby(parts, lambda part: part.thinking)
    ]
    return [Part(*entry) for entry in joined]


@pytest.mark.parametrize("name", CASES)
def test_cut_anywhere(name):
    text, expected = CASES[name]
    assert split([text]) == expected
    assert split(text) == expected
    for i in range(len(text)):
        for j in range(i, len(text)):
            assert split([text[:i], text[i:j], text[j:]]) == expected


def test_a_template_that_opens_the_thinking():
    assert split(["so</th", "ink>yes"], thinking=True) == [("so", True), ("yes", False)]
    assert opens_thinking("<|assistant|>\n<think>\n")
    assert not opens_thinking("<|assistant|>\n<think>\n\n</think>\n\n")
    assert not opens_thinking("<|assistant|>")


def test_nothing_is_held_back_without_need():
    splitter = ThinkingSplitter()
    assert splitter.feed("a < b") == [("a < b", False)]
    assert splitter.feed(" <th") == [(" ", False)]
    assert splitter.feed("e") == [("<the", False)]
