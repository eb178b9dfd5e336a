"""Mistral: `[TOOL_CALLS]` and then one of two forms.

- Up to Mistral Nemo and Small 3.1: a list, `[{"name": ..., "arguments": {...}, "id": ...}, ...]`.
- Since: `name[ARGS]{...}`, or `name[CALL_ID]id[ARGS]{...}`, with a marker before each call.
"""

from mlxserve.text.parsers.base import Call, Calls, ToolFormat
from mlxserve.text.parsers.hermes import call_of
from mlxserve.text.parsers.reader import Reader
from mlxserve.text.parsers.values import Malformed


class Mistral(ToolFormat):
    """Nothing closes a call: it ends where its JSON does."""

    opens = ("[TOOL_CALLS]",)
    keeps = frozenset({"[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"})

    def read(self, read: Reader, opening: str) -> Calls:
        """See `ToolFormat.read`."""
        if (yield from read.peek()) == "[":
            values = yield from read.json("[")
            assert isinstance(values, list)
            if not values:
                raise Malformed("a list of calls is empty")
            yield from [call_of(value) for value in values]
            return
        name = yield from read.name()
        call_id = None
        if (yield from read.optional("[CALL_ID]")):
            call_id = yield from read.name()
        yield from read.optional("[ARGS]")
        arguments = yield from read.json()
        assert isinstance(arguments, dict)
        yield Call(name, arguments, call_id)
