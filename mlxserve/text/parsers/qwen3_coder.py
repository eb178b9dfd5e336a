"""Qwen3-Coder, Qwen 3.5, Nemotron 3: XML, a tag for each parameter.

<tool_call>
<function=name>
<parameter=key>
value
</parameter>
</function>
</tool_call>
"""

from mlxserve.text.parsers.base import Call, Calls, ToolFormat
from mlxserve.text.parsers.reader import Reader


class Qwen3Coder(ToolFormat):
    """Values are bare text: a string's own, JSON for lists and objects, Python's for the rest.

    Models sometimes leave out `<tool_call>`.
    """

    opens = ("<tool_call>", "<function=")
    keeps = frozenset({"<tool_call>", "</tool_call>"})

    def read(self, read: Reader, opening: str) -> Calls:
        """See `ToolFormat.read`."""
        if opening == "<tool_call>":
            yield from read.expect("<function=")
        name = yield from read.name()
        yield from read.expect(">")
        arguments = {}
        while (yield from read.expect("<parameter=", "</function>")) == "<parameter=":
            key, _ = yield from read.find(">")
            json, then = not self.tools.is_text(name, key), ("<parameter=", "</function>")
            value = yield from read.find_before("</parameter>", *then, json=json)
            value = value.removeprefix("\n").removesuffix("\n")
            arguments[key] = self.tools.value(name, key, value)
        yield Call(name, arguments)
        yield from read.optional("</tool_call>")
