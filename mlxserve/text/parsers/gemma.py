"""FunctionGemma and Gemma 4: `call:name{key:value,...}` between special tokens.

Strings stand between special tokens too, so that nothing in them needs an escape:
`<|tool_call>call:name{key:<|"|>text<|"|>}<tool_call|>` in Gemma 4, and in FunctionGemma
`<start_function_call>call:name{key:<escape>text<escape>}<end_function_call>`.
"""

import re
from typing import Any, ClassVar

from mlxserve.text.parsers.base import Call, Calls, ToolFormat
from mlxserve.text.parsers.reader import Reader, Steps
from mlxserve.text.parsers.values import MAX_DEPTH, TooDeep, load_json

_WORD = re.compile(r"[\w.+\-]{0,256}")
_CONSTANTS = {"None": None, "True": True, "False": False}


class Gemma(ToolFormat):
    """Keys are bare or strings; numbers, lists and objects are written as in JSON."""

    marks: ClassVar = {
        "<|tool_call>": ("<tool_call|>", '<|"|>'),
        "<start_function_call>": ("<end_function_call>", "<escape>"),
    }
    opens = tuple(marks)
    keeps = frozenset(marks).union(*marks.values())

    def read(self, read: Reader, opening: str) -> Calls:
        """See `ToolFormat.read`."""
        closing, quote = self.marks[opening]
        yield from read.expect("call:")
        name = yield from read.name()
        yield from read.expect("{")
        arguments = yield from _object(read, quote, MAX_DEPTH)
        yield from read.expect_or_end(closing)
        yield Call(name, arguments)


def _value(read: Reader, quote: str, depth: int) -> Steps[Any]:
    if not depth:
        raise TooDeep
    match (yield from read.optional(quote, "{", "[")):
        case "{":
            return (yield from _object(read, quote, depth))
        case "[":
            return (yield from _list(read, quote, depth))
        case None:
            word = yield from read.match(_WORD)
            return _CONSTANTS[word] if word in _CONSTANTS else load_json(word)
    return (yield from read.find(quote))[0]


def _object(read: Reader, quote: str, depth: int) -> Steps[dict[str, Any]]:
    items = {}
    while not (yield from read.optional("}")):
        if (yield from read.optional(quote)):
            key, _ = yield from read.find(quote)
            yield from read.expect(":")
        else:
            key, _ = yield from read.find(":")
        items[key.strip()] = yield from _value(read, quote, depth - 1)
        if (yield from read.expect(",", "}")) == "}":
            break
    return items


def _list(read: Reader, quote: str, depth: int) -> Steps[list[Any]]:
    items = []
    while not (yield from read.optional("]")):
        items.append((yield from _value(read, quote, depth - 1)))
        if (yield from read.expect(",", "]")) == "]":
            break
    return items
