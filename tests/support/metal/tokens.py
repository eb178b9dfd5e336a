"""A kernel's text as tokens, for what the C++ compiler can't be told about Metal."""

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass

_TOKEN = re.compile(
    r"""//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|[A-Za-z_]\w*|::|\d[\w.]*|[^\s\w]""",
    re.DOTALL,
)
_SPACES = ("device", "constant", "thread", "threadgroup")
_SCALARS = (
    *("bool", "char", "uchar", "short", "ushort", "int", "uint", "long", "ulong"),
    *("half", "float", "bfloat"),
)
_TYPES = {
    *_SCALARS,
    *(f"{scalar}{n}" for scalar in _SCALARS for n in (2, 3, 4)),
    *(f"{sign}int{bits}_t" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    *("float16_t", "bfloat16_t", "auto", "void", "size_t"),
}
_QUALIFIERS = ("const", "constexpr", "volatile", "static")


@dataclass(frozen=True, slots=True)
class Token:
    """A word or a sign. line: from 1; start: where it begins in the text."""

    text: str
    line: int
    start: int


def tokens(text: str) -> list[Token]:
    """The tokens of a text without comments and literals."""
    found, line, end = [], 1, 0
    for match in _TOKEN.finditer(text):
        line += text.count("\n", end, match.start())
        end = match.start()
        word = match[0]
        if not word.startswith(("//", "/*", '"', "'")):
            found.append(Token(word, line, match.start()))
    return found


def threadgroup_variables(text: str) -> list[Token]:
    """The `threadgroup` of each declaration of a variable there, as opposed to a pointer's."""
    all_tokens = tokens(text)
    return [
        token
        for i, token in enumerate(all_tokens)
        if token.text == "threadgroup"
        and _starts_statement(all_tokens, i)
        and _declares_variable(all_tokens[i + 1 :])
    ]


def mark_threadgroup_variables(text: str) -> str:
    """The text with MSL_THREADGROUP for these; lines keep their numbers."""
    for token in reversed(threadgroup_variables(text)):
        end = token.start + len("threadgroup")
        text = f"{text[: token.start]}MSL_THREADGROUP{text[end:]}"
    return text


def unqualified_pointers(text: str, types: set[str]) -> Iterator[Token]:
    """The type of each pointer or reference that names no address space, which Metal refuses.

    types: names of types beside Metal's own and those that the text declares.
    """
    all_tokens = tokens(text)
    known = _TYPES | types | _declared_types(all_tokens)
    for i, token in enumerate(all_tokens):
        if token.text not in known and token.text not in ("vec", "atomic"):
            continue
        end = _end_of_type(all_tokens, i)
        points = end < len(all_tokens) and all_tokens[end].text in ("*", "&")
        if points and not _has_space(all_tokens, i, end):
            yield token


def _starts_statement(all_tokens: list[Token], i: int) -> bool:
    while i > 0 and all_tokens[i - 1].text in _QUALIFIERS:
        i -= 1
    return i == 0 or all_tokens[i - 1].text in (";", "{", "}", ":")


def _declares_variable(following: list[Token]) -> bool:
    """Whether a type and a name follow, and no `*` or `&` between them."""
    depth = names = 0
    for token in following:
        if token.text in "<>":
            depth += 1 if token.text == "<" else -1
        elif depth == 0:
            if token.text in ("*", "&", "("):
                return False
            if token.text in (";", "[", "=", "{", ","):
                return names >= 2
            if token.text not in _QUALIFIERS and token.text[0].isidentifier():
                names += 1
    return False


def _declared_types(all_tokens: list[Token]) -> set[str]:
    introducers = ("struct", "using", "typename", "class", "enum")
    return {
        following.text
        for token, following in itertools.pairwise(all_tokens)
        if token.text in introducers and following.text[0].isidentifier()
    }


def _end_of_type(all_tokens: list[Token], i: int) -> int:
    """Behind a type's name, its template arguments and qualifiers."""
    i += 1
    if i < len(all_tokens) and all_tokens[i].text == "<":
        depth = 0
        while i < len(all_tokens):
            depth += {"<": 1, ">": -1}.get(all_tokens[i].text, 0)
            i += 1
            if depth == 0:
                break
    while i < len(all_tokens) and all_tokens[i].text in (*_QUALIFIERS, *_SPACES):
        i += 1
    return i


def _has_space(all_tokens: list[Token], i: int, end: int) -> bool:
    start = i
    while start > 0 and all_tokens[start - 1].text in (*_QUALIFIERS, *_SPACES, "metal", "::"):
        start -= 1
    return any(token.text in _SPACES for token in all_tokens[start:end])
