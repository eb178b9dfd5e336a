"""Pieces of llguidance's form of Lark, as text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from llguidance import regex_to_lark

ANY_TEXT = "/(?s:.*)/"


def literal(text: str) -> str:
    """This text."""
    return json.dumps(text)


def one_of(forms: Iterable[str]) -> str:
    """Any of some expressions."""
    return f"({' | '.join(forms)})"


def regex(pattern: str) -> str:
    r"""What a regex matches as a whole. As in JSON Schema, \d and \w are ASCII."""
    return f"/{regex_to_lark(pattern, 'dw')}/"


def without(marks: Sequence[str]) -> str:
    """A terminal: text that has none of the marks in it, which all begin with one character.

    Spelled out instead of as a complement: of that, finding out where a text can't go on takes more
    work than the compiler may do. Of a mark that has its first character again, what counts is
    what follows the last.
    """
    tails = {mark[mark.rindex(mark[0]) :] for mark in marks}
    (first,) = {tail[0] for tail in tails}
    begun, broken = _begun(tails, first)
    return f"/([^{_code(first)}]|({begun})*{broken})*({begun})*/"


def _begun(marks: set[str], prefix: str) -> tuple[str, str]:
    """Regexes of what has begun like a mark: at its end, and with a character that belongs to none.

    A mark's first character isn't such a one: another may begin there.
    """
    following = sorted({mark[len(prefix)] for mark in marks if mark.startswith(prefix)})
    longer = [_begun(marks, prefix + char) for char in following if prefix + char not in marks]
    other = f"[^{''.join(map(_code, {prefix[0], *following}))}]"
    char = _code(prefix[-1])
    begun = f"{char}({'|'.join(each for each, _ in longer)})?" if longer else char
    return begun, f"{char}({'|'.join([other, *(each for _, each in longer)])})"


def _code(char: str) -> str:
    return f"\\x{{{ord(char):x}}}"
