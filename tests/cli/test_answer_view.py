"""What stands on the screen after an answer: rendered, whole, and free of control characters."""

import os
import random
from collections import Counter

import pytest

from mlxserve.cli import answer_view
from mlxserve.cli.answer_view import AnswerView, MarkdownText, render
from mlxserve.text.thinking import Part
from tests.support.screen import Screen

ANSWER = """\
# Two sums

Here is **the** function, with `code` and a [link](https://example.org):

```python
def add(a, b):

    return a + b  # a long comment that goes on and on until it is far wider than the screen is
```

1. first
2. second

   still the second

| name | sum |
|------|-----|
| one  | 2   |

Roses are red,
violets are blue. 日本語 and 🐻 too.
"""
WIDE_TABLE = "\n".join(
    f"| {' | '.join(cells)} |"
    for cells in (
        [f"column{i}" for i in range(40)],
        ["---"] * 40,
        [f"value{i}" for i in range(40)],
    )
)


class Out:
    """A file that is a terminal."""

    def __init__(self) -> None:
        self.written = ""

    def write(self, text):
        self.written += text

    def flush(self):
        pass

    def isatty(self):
        return True

    def fileno(self):
        return 1


@pytest.fixture
def out(monkeypatch):
    monkeypatch.setattr(os, "get_terminal_size", lambda fd: os.terminal_size((80, 24)))
    monkeypatch.setenv("TERM", "xterm-256color")
    return Out()


def show(out, pieces, rows=24):
    text = MarkdownText(out)
    for piece in pieces:
        text.feed(piece)
    text.finish()
    screen = Screen(rows=rows)
    screen.feed(out.written)
    return screen.text


def letters(text):
    return Counter(char for char in text if char.isalnum())


def test_markdown_is_rendered(out):
    shown = show(out, [ANSWER])
    assert "**" not in shown
    assert "```" not in shown
    assert "|--" not in shown
    assert "Here is the function, with code and a link (https://example.org):" in shown
    assert "Roses are red,\nviolets are blue." in shown
    assert "\n 1 first\n 2 second\n" in shown
    assert "\n\n\n" not in shown
    assert shown.endswith("too.\n")


def test_pieces_make_no_difference(out, monkeypatch):
    whole = show(out, [ANSWER])
    for seed in range(30):
        rng = random.Random(seed)
        cuts = sorted(rng.choices(range(len(ANSWER)), k=40))
        pieces = [ANSWER[a:b] for a, b in zip([0, *cuts], [*cuts, len(ANSWER)], strict=True)]
        out.written = ""
        assert show(out, pieces) == whole
    out.written = ""
    assert show(out, ANSWER) == whole


@pytest.mark.parametrize(
    "block",
    [
        "a < b and <div class=x>html</div> &amp; more",
        "[hidden]: https://example.org/definition",
        "3. three\n4. four\n\n7. seven",
        WIDE_TABLE,
        "a `code",
        "* item\n\n      deep code\n\n* item",
        "~~~~ text\n```\nnot a fence\n~~~~",
        "x" * 500,
        "word " * 200,
        "tab\tand\ttab",
    ],
    ids=lambda block: block[:20],
)  # fmt: skip
def test_no_letter_is_lost(out, block):
    shown = show(out, f"before\n\n{block}\n\nafter\n")
    assert not letters(block.replace("~~~~ text", "")) - letters(shown)
    assert shown.startswith("before\n\n")
    assert shown.endswith("\n\nafter\n")


def test_a_code_block_that_never_ends(out):
    assert show(out, "before\n\n```\nunclosed\n\nafter\n") == "before\n\n unclosed\n\n after\n"


def test_a_block_taller_than_the_screen_stays_as_it_came(out):
    code = "```\n" + "".join(f"line {i} *x*\n" for i in range(60)) + "```\n"
    shown = show(out, f"**before**\n\n{code}\n**after**\n")
    assert shown == f"before\n\n{code}\nafter\n"


def test_one_that_just_fits(out):
    code = "```\n" + "".join(f"line {i}\n" for i in range(20)) + "```"
    shown = show(out, f"before\n\n{code}\n\n**after**")
    assert "```" not in shown
    assert shown.startswith("before\n\n line 0\n line 1\n")


def test_a_window_that_changes_its_size(out, monkeypatch):
    text = MarkdownText(out)
    text.feed("**be")
    monkeypatch.setattr(os, "get_terminal_size", lambda fd: os.terminal_size((40, 24)))
    text.feed("fore**\n\n**after**")
    text.finish()
    assert "\x1b[J" not in out.written.split("after")[0]  # not taken back: wrapped anew meanwhile
    screen = Screen()
    screen.feed(out.written)
    assert screen.text == "**before**\n\nafter\n"


def test_thinking_is_dim_and_no_control_character_passes(out):
    view = AnswerView(out, markdown=True, styled=True)
    for text, thinking in (
        ("\n", True), ("hm\x1b[31m", True), (" so", True), ("\n\n", True),
        ("\n\nYes\x1b]52;c;x\x07", False), (" **sir**\x9b2J", False), ("again", True),
    ):  # fmt: skip
        view.show(Part(text, thinking))
    view.finish()
    screen = Screen()
    screen.feed(out.written)
    assert screen.text == "hm[31m so\n\nYes]52;c;x sir2J\n\nagain\n"
    assert screen.dimmed == "hm[31m soagain"
    assert out.written.count("\x1b[2m") == out.written.count("\x1b[0m\n")


def test_without_styles_the_tags_stay(out):
    out.isatty = lambda: False
    view = AnswerView(out, markdown=False, styled=False)
    for part in (Part("\nhm", True), Part("\n", True), Part("\nYes\x1b", False)):
        view.show(part)
    view.finish()
    assert out.written == "<think>\nhm\n</think>\nYes\x1b\n"


def test_rendering_leaves_no_padding(out):
    rendered = render("a paragraph\n", 60)
    assert rendered == "a paragraph"
    assert answer_view.render("[x]: y", 60) is None
