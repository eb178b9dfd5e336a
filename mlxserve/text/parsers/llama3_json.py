"""Llama 3.1 to 3.3 and 4: the answer is `{"name": ..., "parameters": {...}}` and nothing else."""

from mlxserve.text.parsers.base import Calls, ToolFormat
from mlxserve.text.parsers.hermes import call_of
from mlxserve.text.parsers.reader import Reader
from mlxserve.text.parsers.values import NotACall

_KEYS = ('"name"', '"type"', '"function"', '"parameters"', '"arguments"')


class Llama3Json(ToolFormat):
    """JSON without a tag, or after `<|python_tag|>`.

    An answer may be JSON that is no call, so without the tag only the names of tools that were
    offered make one. Several calls are parted by semicolons or line breaks.
    """

    opens = ("<|python_tag|>",)
    starts = ("{",)
    keeps = frozenset({"<|python_tag|>"})

    def read(self, read: Reader, opening: str) -> Calls:
        """See `ToolFormat.read`."""
        if opening == "{":
            begin = read.at
            if (yield from read.optional(*_KEYS)) is None:
                raise NotACall("other JSON")
            read.at = begin - 1
        value = yield from read.json()
        assert isinstance(value, dict)
        if opening == "{" and value.get("name") not in self.tools:
            raise NotACall("other JSON")
        yield call_of(value, "arguments" if "arguments" in value else "parameters")
        yield from read.optional(";")
