"""The machine that all parsers share: text until a marker, and then what the marker opens."""

import re
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from mlxserve.text.parsers.deltas import Content, Delta, Reasoning, ToolCall
from mlxserve.text.parsers.reader import Reader, Steps, alternatives
from mlxserve.text.parsers.values import Malformed, NotACall, Tools, dump_json

MAX_DROPPED_SPACE = 64

MIN_MARKUP_CHARS: dict[type[Delta], int] = {Content: 4, Reasoning: 2}
"""Fewer at the end of a text, with which a marker could begin, are text: three may be a fence, and
one of reasoning, which has no other marker than its closing tag, "less than"."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call as a family's grammar reads it. Raises Malformed for what JSON can't say."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    id: str | None = None
    json: str = field(init=False)

    def __post_init__(self) -> None:
        dump_json([self.name, self.id])
        object.__setattr__(self, "json", dump_json(self.arguments))


Calls = Generator[Call | None, None, None]
"""Yields None where it needs more text, and each call once it is complete."""


class ToolFormat:
    """How one family of models writes tool calls.

    opens: what begins a call, wherever it stands. starts: what may begin one at the beginning of
    the output, of a line, or after other markup.
    keeps: special tokens that must be left in the text, see `OutputParser.keeps`.
    """

    opens: ClassVar[tuple[str, ...]] = ()
    starts: ClassVar[tuple[str, ...]] = ()
    keeps: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, tools: Tools) -> None:
        self.tools = tools

    def read(self, read: Reader, opening: str) -> Calls:
        """The calls after `opening`, which has been read. Raises Malformed."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The tags around a family's reasoning. `opens` begins it where `ToolFormat.starts` would.

    keeps: as for `ToolFormat`.
    """

    opens: str
    closes: str
    keeps: frozenset[str]

    def opened_by(self, prompt: str) -> bool:
        """Whether the output to this prompt begins inside the reasoning."""
        return prompt.rstrip().endswith(self.opens.rstrip())


class OutputParser:
    """One answer's text, told apart: content, reasoning and tool calls.

    Where the pieces of text are cut makes no difference to what is told. White space beside markup
    belongs to the markup; where markup parts two stretches of text, a line break stays between.
    What is malformed or unfinished is content, unchanged, with the reason.

    keeps: the family's markup that may be special tokens, which text leaves out. The caller gives
        it to `TextStream(keep=...)`, since without it nothing can be told apart. An end token that
        isn't fed doesn't matter.
    reasoned: where the text between tags of reasoning begins and ends, in characters of the whole;
        None while the end isn't known.
    """

    keeps: frozenset[str] = frozenset()

    def __init__(self) -> None:
        self._read = Reader()
        self.reasoned: list[tuple[int, int | None]] = []
        self._out: list[Delta] = []
        self._n_calls = 0
        self._said: set[type[Delta]] = set()
        self._parted: set[type[Delta]] = set()
        self._marked = False
        self._steps = self._parse()

    def feed(self, text: str) -> list[Delta]:
        """What is certain now that this piece of text has come, in order."""
        # A text that only a local variable holds grows in place: else each piece would copy it.
        grown, self._read.text = self._read.text, ""
        grown += text
        self._read.text = grown
        del grown
        return self._advance()

    def finish(self) -> list[Delta]:
        """The rest, when the output has ended. Call it once."""
        self._read.ended = True
        return self._advance()

    def _advance(self) -> list[Delta]:
        next(self._steps, None)
        out, self._out = self._out, []
        return out

    def _parse(self) -> Steps[None]:
        raise NotImplementedError

    def _say(
        self,
        kind: type[Content] | type[Reasoning],
        text: str,
        reason: str | None = None,
        *,
        unfinished: bool = False,
    ) -> None:
        if not text:
            return
        if kind in self._parted:
            text = "\n" + text
        said = Content(text, reason, unfinished) if kind is Content else Reasoning(text, unfinished)
        self._out.append(said)
        self._parted.discard(kind)
        self._said.add(kind)

    def _part(self) -> None:
        """Markup stands here."""
        self._parted = set(self._said)
        self._marked = True

    def _stream(self, kind: type[Content] | type[Reasoning], until: "Until") -> Steps[str | None]:
        """Tell text as it comes, up to a marker, which is read. None at the text's end."""
        read = self._read
        while (found := until.search(read.text, read.at)) is None:
            cut = until.safe(read.text, read.at)
            self._say(kind, read.text[read.at : cut])
            read.at = cut
            if read.ended:
                self._say_last(kind)
                return None
            read.done()
            yield from read.more()
        self._say(kind, read.text[read.at : found.start()])
        if kind is Reasoning:
            self._reasoned_until(read.gone + found.start("marker"))
        read.at = found.end()
        read.begin(found.start())
        return found["marker"].lstrip("\n")

    def _say_last(self, kind: type[Content] | type[Reasoning]) -> None:
        """What was held back, as it might have become a marker, now that the text has ended."""
        read = self._read
        rest = read.text[read.at :]
        begun = len(rest.strip()) >= MIN_MARKUP_CHARS[kind]
        self._say(kind, rest, "markup ends early" if begun else None, unfinished=begun)
        read.at = len(read.text)
        if kind is Reasoning:
            self._reasoned_until(read.gone + read.at)
        read.done()

    def _reasoned_until(self, end: int) -> None:
        self.reasoned[-1] = (self.reasoned[-1][0], end)

    def _calls(self, calls: Calls, *, marked: bool = True) -> Steps[bool]:
        """Read calls and tell them. False if there is something else, which is told as content.

        marked: by what no text has in it.
        """
        read = self._read
        try:
            for call in calls:
                if call is None:
                    yield
                    continue
                self._out.append(ToolCall(self._n_calls, call.name, call.json, call.id))
                self._n_calls += 1
                self._part()
                read.begin(read.at)
        except Malformed as error:
            # Reading goes on where it stands: no text is looked at twice.
            reason = None if isinstance(error, NotACall) else str(error)
            cut = marked and read.ended and read.at == len(read.text)
            self._say(Content, read.text[read.start : read.at], reason, unfinished=cut)
            read.done()
            return False
        read.done()
        return True


class MarkupParser(OutputParser):
    """For the families that put tags around reasoning and tool calls, in a text without others.

    reasoning, calls: the formats; None leaves that markup in the text.
    inside: whether the output begins inside the reasoning, since the prompt opened it.
    """

    def __init__(
        self, reasoning: ReasoningFormat | None, calls: ToolFormat | None, *, inside: bool = False
    ) -> None:
        super().__init__()
        self._reasoning, self._format, self._inside = reasoning, calls, inside
        self._starts = (calls.starts if calls else ()) + ((reasoning.opens,) if reasoning else ())
        self._marker = Until(calls.opens if calls else (), self._starts)
        self.keeps = frozenset[str]().union(*(each.keeps for each in (reasoning, calls) if each))

    def _parse(self) -> Steps[None]:
        if self._inside and not (yield from self._reason()):
            return
        fresh = True
        while True:
            marker = (yield from self._start()) if fresh else None
            marker = marker or (yield from self._stream(Content, self._marker))
            if marker is None:
                return
            if self._reasoning and marker == self._reasoning.opens:
                if not (yield from self._reason()):
                    return
                fresh = True
            elif self._format:
                calls = self._format.read(self._read, marker)
                fresh = yield from self._calls(calls, marked=marker in self._format.opens)

    def _start(self) -> Steps[str | None]:
        """A marker that counts only at a line's start, at the output's start or after markup."""
        read = self._read
        if self._marked:
            yield from read.skip_space()
        start = read.at
        if self._starts and (marker := (yield from read.accept(*self._starts))):
            read.begin(start)
            return marker
        if self._starts and read.ends_in(self._starts):
            self._say_last(Content)
        return None

    def _reason(self) -> Steps[bool]:
        """Tell reasoning up to the tag that closes it. False at the text's end."""
        assert self._reasoning is not None
        read = self._read
        read.done()
        self._part()
        self.reasoned.append((read.gone + read.at, None))
        yield from read.skip_space()
        # Where the prompt opened the reasoning, some models open it once more.
        if self._inside and not self._said:
            if (yield from read.accept(self._reasoning.opens)):
                self.reasoned[-1] = (read.gone + read.at, None)
                yield from read.skip_space()
            elif read.ends_in((self._reasoning.opens,)):
                self._say_last(Reasoning)
        closed = yield from self._stream(Reasoning, Until((self._reasoning.closes,)))
        read.done()
        self._part()
        return closed is not None


class Until:
    """Finds the first of some markers in a text that grows, with the white space before it.

    anywhere: markers that count wherever they stand. at_line: those that count at a line's start.
    """

    def __init__(self, anywhere: Iterable[str], at_line: Iterable[str] = ()) -> None:
        self._markers = (*anywhere, *("\n" + marker for marker in at_line))
        marker = alternatives(self._markers).pattern
        self._pattern = re.compile(rf"\s{{0,{MAX_DROPPED_SPACE}}}(?P<marker>{marker})")

    def search(self, text: str, at: int) -> re.Match[str] | None:
        """The first marker from `at` on."""
        return self._pattern.search(text, at) if self._markers else None

    def safe(self, text: str, at: int) -> int:
        """Up to where text from `at` can neither be part of a marker nor white space before one."""
        cut = len(text)
        if not self._markers:
            return cut
        longest = min(max(map(len, self._markers)) - 1, cut - at)
        cut -= next(n for n in range(longest, -1, -1) if self._could_begin(text[cut - n :], n))
        tail = text[max(at, cut - MAX_DROPPED_SPACE) : cut]
        return cut - len(tail) + len(tail.rstrip())

    def _could_begin(self, tail: str, n: int) -> bool:
        return n == 0 or any(marker.startswith(tail) for marker in self._markers)
