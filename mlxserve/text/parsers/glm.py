"""GLM 4.5 to 4.7: a name, then tags in pairs.

`<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`, with line breaks
between the tags up to 4.6.
"""

from mlxserve.text.parsers.base import Call, Calls, ToolFormat
from mlxserve.text.parsers.reader import Reader


class Glm(ToolFormat):
    """Values are bare text: a string's own, JSON for the rest."""

    opens = ("<tool_call>",)
    keeps = frozenset(
        f"<{slash}{tag}>" for tag in ("tool_call", "arg_key", "arg_value") for slash in ("", "/")
    )

    def read(self, read: Reader, opening: str) -> Calls:
        """See `ToolFormat.read`."""
        name = yield from read.name()
        arguments = {}
        while (yield from read.expect("<arg_key>", "</tool_call>")) == "<arg_key>":
            key, _ = yield from read.find("</arg_key>")
            yield from read.expect("<arg_value>")
            key, json = key.strip(), not self.tools.is_text(name, key.strip())
            then = ("<arg_key>", "</tool_call>")
            value = yield from read.find_before("</arg_value>", *then, json=json)
            arguments[key] = self.tools.value(name, key, value)
        yield Call(name, arguments)
