"""DeepSeek V3, R1 and V3.1: special tokens around a name and JSON.

- V3 and R1 write begin, "function", separator, the name, the JSON in a Markdown fence, end.
- V3.1 writes begin, the name, separator, the JSON, end.
"""

from mlxserve.text.parsers.base import Call, Calls, ToolFormat
from mlxserve.text.parsers.reader import Reader


def _special(name: str) -> str:
    """Its tokens are spelled with U+FF5C for a bar and U+2581 for a space."""
    return f"<\uff5c{name.replace(' ', chr(0x2581))}\uff5c>"


ALL_BEGIN, ALL_END = _special("tool calls begin"), _special("tool calls end")
BEGIN, SEPARATOR, END = map(_special, ("tool call begin", "tool sep", "tool call end"))


class DeepSeek(ToolFormat):
    """Any number of calls between one beginning and one end."""

    opens = (ALL_BEGIN, BEGIN)
    keeps = frozenset({ALL_BEGIN, ALL_END, BEGIN, SEPARATOR, END})

    def read(self, read: Reader, opening: str) -> Calls:
        """See `ToolFormat.read`."""
        if opening == ALL_BEGIN:
            yield from read.expect(BEGIN)
        following = BEGIN
        while following == BEGIN:
            name = yield from read.name()
            yield from read.expect(SEPARATOR)
            fenced = (yield from read.peek()) != "{"
            if fenced:
                name = yield from read.name()
                yield from read.expect("```json")
            arguments = yield from read.json()
            assert isinstance(arguments, dict)
            if fenced:
                yield from read.expect("```")
            yield from read.expect_or_end(END)
            yield Call(name, arguments)
            following = yield from read.optional(BEGIN, ALL_END)
