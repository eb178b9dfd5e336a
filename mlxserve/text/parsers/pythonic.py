"""Calls in Python's syntax: Llama 3.2 and 4 (`[name(key="value"), ...]`), LFM2, Gemma 3."""

import ast
import re
from typing import Any, ClassVar

from mlxserve.text.parsers.base import Call, Calls, ToolFormat
from mlxserve.text.parsers.reader import Reader, Steps
from mlxserve.text.parsers.values import MAX_DEPTH, Malformed, NotACall, TooDeep, load_json

_WORD = re.compile(r"[\w.+\-]{0,256}")
_QUOTES = "\"'"
_CONSTANTS = {
    "True": True,
    "true": True,
    "False": False,
    "false": False,
    "None": None,
    "null": None,
}


class Pythonic(ToolFormat):
    """A list of calls, bare or between tags.

    An answer may be a list of something else, so without tags only the names of tools that were
    offered make a call.
    """

    closes: ClassVar = {
        "<|python_start|>": "<|python_end|>",
        "<|tool_call_start|>": "<|tool_call_end|>",
    }
    opens = tuple(closes)
    starts = ("[",)
    keeps = frozenset({*closes, *closes.values()})

    def read(self, read: Reader, opening: str) -> Calls:
        """See `ToolFormat.read`."""
        calls = []
        bare = opening == "["
        if not bare:
            yield from read.expect("[")
        following = ","
        while following == ",":
            yield from read.skip_space()
            name = yield from (read.match(_WORD) if bare else read.name())
            if bare and (name not in self.tools or not (yield from read.accept("("))):
                raise NotACall("another list")
            if not bare:
                yield from read.expect("(")
            calls.append(Call(name, (yield from _arguments(read))))
            following = yield from read.expect(",", "]")
        if not bare:
            yield from read.expect_or_end(self.closes[opening])
        yield from calls


class ToolCode(ToolFormat):
    """Gemma 3, as its maker's guides have it prompted: a fence with a call on each line."""

    opens = ("```tool_code\n",)

    def read(self, read: Reader, opening: str) -> Calls:
        """See `ToolFormat.read`."""
        while not (yield from read.optional("```")):
            name = yield from read.name()
            yield from read.expect("(")
            yield Call(name, (yield from _arguments(read)))


def _arguments(read: Reader) -> Steps[dict[str, Any]]:
    """`key=value, ...)`, the parenthesis before it already read."""
    arguments: dict[str, Any] = {}
    if (yield from read.optional(")")):
        return arguments
    following = ","
    while following == ",":
        key = yield from read.name()
        yield from read.expect("=")
        arguments[key] = yield from _value(read, MAX_DEPTH)
        following = yield from read.expect(",", ")")
    return arguments


def _value(read: Reader, depth: int) -> Steps[Any]:
    """A literal."""
    if not depth:
        raise TooDeep
    opening = yield from read.peek()
    if opening in _QUOTES:
        return (yield from _string(read, opening))
    if opening in "[(":
        read.at += 1
        return (yield from _items(read, "]" if opening == "[" else ")", depth))
    if opening == "{":
        read.at += 1
        return (yield from _dictionary(read, depth))
    word = yield from read.match(_WORD)
    return _CONSTANTS[word] if word in _CONSTANTS else load_json(word)


def _string(read: Reader, quote: str) -> Steps[str]:
    read.at += 1
    inside = yield from read.quoted(quote)
    inside = inside.replace("\n", "\\n").replace("\r", "\\r")
    try:
        text = ast.literal_eval(quote + inside + quote)
        # JSON's way to write what is beyond U+FFFF is two halves, which Python leaves apart.
        return text.encode("utf-16", "surrogatepass").decode("utf-16")
    except (SyntaxError, ValueError) as error:
        raise Malformed("a call has a string that isn't Python's") from error


def _items(read: Reader, closing: str, depth: int) -> Steps[list[Any]]:
    items = []
    while not (yield from read.optional(closing)):
        items.append((yield from _value(read, depth - 1)))
        if (yield from read.expect(",", closing)) == closing:
            break
    return items


def _dictionary(read: Reader, depth: int) -> Steps[dict[str, Any]]:
    items = {}
    while not (yield from read.optional("}")):
        quote = yield from read.peek()
        if quote not in _QUOTES:
            raise read.unexpected("a key in quotes")
        key = yield from _string(read, quote)
        yield from read.expect(":")
        items[key] = yield from _value(read, depth - 1)
        if (yield from read.expect(",", "}")) == "}":
            break
    return items
