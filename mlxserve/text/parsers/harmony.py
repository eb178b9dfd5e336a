"""Harmony, the format of gpt-oss: a sequence of messages, each with a header.

`<|channel|>analysis<|message|>...<|end|>` is reasoning, `<|channel|>final<|message|>...` the
answer, and a message `to=functions.name` a call, with JSON as its body. The parts of a header come
in several orders. The prompt ends with `<|start|>assistant`: the output begins inside a header.
Source: the guide "OpenAI harmony response format", and the chat template of gpt-oss.
"""

import re

from mlxserve.text.parsers.base import Call, Calls, OutputParser, ReasoningFormat, Until
from mlxserve.text.parsers.deltas import Content, Reasoning
from mlxserve.text.parsers.reader import Steps
from mlxserve.text.parsers.values import Malformed

_ENDS = ("<|end|>", "<|return|>", "<|call|>")
_BEGINS = ("<|start|>", "<|channel|>")
_BODY = "<|message|>"
_MAX_HEADER_CHARS = 1024

_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


REASONING = ReasoningFormat(
    "<|channel|>analysis<|message|>",
    "<|end|>",
    frozenset({"<|channel|>", "<|message|>", "<|end|>"}),
)
"""As models write it; the parser reads headers of other forms, too."""


class HarmonyParser(OutputParser):
    """Channels tell reasoning from the answer, and recipients make calls.

    What comes without a header is content.
    """

    keeps = frozenset({*_ENDS, *_BEGINS, _BODY, "<|constrain|>"})
    _until = Until((*_ENDS, *_BEGINS, _BODY))

    def __init__(self) -> None:
        super().__init__()
        # What the message's body is; None once it was read as a call's.
        self._kind: type[Content] | type[Reasoning] | None = Content

    def _parse(self) -> Steps[None]:
        read = self._read
        header = yield from read.accept(*_BEGINS, _BODY, " to=", "to=")
        while True:
            self._kind = Content
            if header:
                read.at = read.start
                yield from self._calls(self._message())
            if self._kind:
                if self._kind is Reasoning:
                    self.reasoned.append((read.gone + read.at, None))
                marker = yield from self._stream(self._kind, self._until)
                if marker is None:
                    return
                if marker in _BEGINS:  # the message before has no end
                    read.at -= len(marker)
                read.done()
            self._part()
            yield from read.skip_space()
            read.done()
            header = yield from read.accept(*_BEGINS, _BODY)

    def _message(self) -> Calls:
        """Read a header, and the body too if it is a call's; else `_kind` becomes the body's."""
        read = self._read
        read.begin(read.at, _MAX_HEADER_CHARS)
        _, ending = yield from read.find(_BODY, *_ENDS)
        if ending != _BODY:
            raise Malformed("a message has no body")
        header = read.text[read.start : read.at]
        to, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
        if not to or to[1] == "assistant":
            self._kind = Reasoning if channel and channel[1] == "analysis" else Content
            return
        read.begin(read.start)
        arguments = {}
        if not (yield from read.optional(*_ENDS)):
            arguments = yield from read.json()
            yield from read.expect_or_end(*_ENDS)
        assert isinstance(arguments, dict)
        self._kind = None
        yield Call(to[1].removeprefix("functions."), arguments)
