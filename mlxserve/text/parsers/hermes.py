"""Hermes, and Qwen 2.5 and 3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

from collections.abc import Mapping
from typing import Any

from mlxserve.text.parsers.base import Call, Calls, ToolFormat
from mlxserve.text.parsers.reader import Reader
from mlxserve.text.parsers.values import Malformed


class Hermes(ToolFormat):
    """One JSON object a tag."""

    opens = ("<tool_call>",)
    keeps = frozenset({"<tool_call>", "</tool_call>"})

    def read(self, read: Reader, opening: str) -> Calls:
        """See `ToolFormat.read`."""
        call = call_of((yield from read.json()))
        yield from read.expect_or_end("</tool_call>")
        yield call


def call_of(value: Any, key: str = "arguments") -> Call:
    """A call from `{"name": ..., "arguments": {...}}`. Raises Malformed.

    key: where the arguments are. Without them, the tool takes none.
    """
    name = value.get("name") if isinstance(value, Mapping) else None
    if not isinstance(name, str) or not name:
        raise Malformed("a call has no name")
    arguments = value.get(key)
    if not isinstance(arguments, dict | None):
        raise Malformed(f"a call of {name!r} has {key} that are no object")
    known = value.get("id")
    return Call(name, arguments or {}, known if isinstance(known, str) else None)
