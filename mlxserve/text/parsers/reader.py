"""Reading markup from a text that arrives in pieces.

A grammar is written straight down, as a generator: `name = yield from reader.name()`. Where the
text doesn't reach far enough, the generator yields None and is resumed when there is more. What is
read depends on the text alone, never on where its pieces were cut.
"""

import functools
import re
from collections.abc import Generator
from typing import TypeVar

from mlxserve.text.parsers.values import MAX_DEPTH, Malformed, TooDeep, load_json

T = TypeVar("T")
Steps = Generator[None, None, T]

MAX_HELD_CHARS = 1024 * 1024
"""Markup longer than this is no call: it is given back as text."""

_SPACE = re.compile(r"\s*")
_NAME = re.compile(r"[\w.:/\-]{0,256}")
_BETWEEN_STRINGS = re.compile(r"[ \t\r\n:,0-9A-Za-z.+\-]*")
_IN_QUOTES = {
    quote: re.compile(rf"[^{quote}\\]*(?:\\.[^{quote}\\]*)*", re.DOTALL) for quote in "\"'"
}


class Reader:
    """The text so far and the place where reading stands.

    at: the next character to read. start: where the markup that is being read begins. gone:
    characters that came before `text`.

    Methods that are generators raise Malformed when the text doesn't go on as it must, when it ends
    early, or when the markup is over MAX_HELD_CHARS long. `at` is then where that was noticed.
    """

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.start = 0
        self.gone = 0
        self.ended = False
        self._limit: int | None = None

    def begin(self, start: int, limit: int = MAX_HELD_CHARS) -> None:
        """Markup begins here, and may be `limit` characters long."""
        self.start = start
        self._limit = start + limit

    def done(self) -> None:
        """The markup is over: what was read may be forgotten, which moves `at` and `start`."""
        self._limit = None
        # Not a little at a time, since what is left is copied.
        if 2 * self.at >= len(self.text):
            self.text = self.text[self.at :]
            self.gone += self.at
            self.at = 0
        self.start = self.at

    @property
    def end(self) -> int:
        """Where the text that may be read ends, for now."""
        size = len(self.text)
        return size if self._limit is None else min(size, self._limit)

    def more(self) -> Steps[bool]:
        """Wait for more text. False if none will come."""
        if self._limit is not None and len(self.text) >= self._limit:
            self.at = self._limit
            raise Malformed(f"markup is over {self._limit - self.start} characters long")
        if self.ended:
            return False
        yield
        return True

    def need_more(self) -> Steps[None]:
        """Wait for more text, of which there must be some."""
        if not (yield from self.more()):
            self.at = len(self.text)
            raise Malformed("a call ends early")

    def _take(self, pattern: re.Pattern[str]) -> None:
        """Read as much as the pattern takes of what is there; it must be one that can't fail."""
        found = pattern.match(self.text, self.at, self.end)
        assert found is not None
        self.at = found.end()

    def match(self, pattern: re.Pattern[str]) -> Steps[str]:
        """As much text as the pattern takes: little, since each piece of text is a new try."""
        begin = self.at
        while True:
            self._take(pattern)
            if self.at < self.end:
                break
            end, self.at = self.at, begin
            if not (yield from self.more()):
                self.at = end
                break
        return self.text[begin : self.at]

    def skip_space(self) -> Steps[None]:
        """Go to the next character that is no white space, or to the end."""
        while True:
            self._take(_SPACE)
            if self.at < self.end or not (yield from self.more()):
                return

    def peek(self) -> Steps[str]:
        """The next character that is no white space; it isn't consumed."""
        yield from self.skip_space()
        if self.at == self.end:
            yield from self.need_more()
        return self.text[self.at]

    def name(self) -> Steps[str]:
        """The name that comes next."""
        yield from self.skip_space()
        if not (name := (yield from self.match(_NAME))):
            raise self.unexpected("a name")
        return name

    def accept(self, *words: str) -> Steps[str | None]:
        """Whichever of the words comes next, or None, and then nothing is consumed.

        None of the words may begin another.
        """
        longest = max(map(len, words))
        while True:
            rest = self.text[self.at : min(self.end, self.at + longest)]
            for word in words:
                if rest.startswith(word):
                    self.at += len(word)
                    return word
            if not any(word.startswith(rest) for word in words):
                return None
            if not (yield from self.more()):
                return None

    def optional(self, *words: str) -> Steps[str | None]:
        """As `accept`, after white space. A word in which the text ends is consumed, too."""
        yield from self.skip_space()
        word = yield from self.accept(*words)
        if word is None and self.ends_in(words):
            self.at = self.end
        return word

    def expect(self, *words: str) -> Steps[str]:
        """Whichever of the words comes next, after white space."""
        yield from self.skip_space()
        if (word := (yield from self.accept(*words))) is None:
            if self.ends_in(words):
                yield from self.need_more()
            raise self.unexpected(" or ".join(map(repr, words)))
        return word

    def expect_or_end(self, *words: str) -> Steps[None]:
        """As `expect`, but the text may end before or in the word: what was wanted is complete."""
        yield from self.skip_space()
        if (yield from self.accept(*words)) is None:
            if not self.ends_in(words):
                raise self.unexpected(" or ".join(map(repr, words)))
            self.at = self.end

    def ends_in(self, words: tuple[str, ...]) -> bool:
        """Whether the text ends before or in one of the words."""
        rest = self.text[self.at : self.end]
        return self.ended and any(word.startswith(rest) for word in words)

    def find(self, *words: str) -> Steps[tuple[str, str]]:
        """The text before the first of the words, and that word. Both are consumed."""
        pattern, longest = alternatives(words), max(map(len, words))
        begin = from_ = self.at
        while (found := pattern.search(self.text, from_, self.end)) is None:
            from_ = max(begin, self.end - longest + 1)
            yield from self.need_more()
        self.at = found.end()
        return self.text[begin : found.start()], found[0]

    def find_before(self, word: str, *then: str, json: bool) -> Steps[str]:
        """The text before the first `word` that one of `then` follows, which isn't consumed.

        A value may have the tag in it that closes it; what must follow tells them apart. json: if
        the text is JSON, it may have both in its strings.
        """
        begin = self.at
        if json:
            yield from self._skip_json(word)
        while True:
            yield from self.find(word)
            after = self.at
            follows = yield from self.optional(*then)
            self.at = after
            if follows:
                return self.text[begin : after - len(word)]

    def _skip_json(self, word: str) -> Steps[None]:
        """Go to the end of the JSON that comes next, if there is any and `word` follows it.

        Raises Malformed where the text ends in it: what stands in a string would be taken for the
        end of the value.
        """
        begin = self.at
        try:
            if (opening := (yield from self.peek())) == '"':
                self.at += 1
                yield from self.quoted(opening)
            elif opening in "{[":
                yield from self.json(opening)
            end = self.at
            yield from self.expect(word)
        except Malformed:
            if self.ended:
                raise
            end = begin
        self.at = end

    def quoted(self, quote: str) -> Steps[str]:
        """The text up to a quote, which is consumed. A backslash escapes what follows it."""
        begin = self.at
        while True:
            self._take(_IN_QUOTES[quote])
            if self.at < self.end and self.text[self.at] == quote:
                self.at += 1
                return self.text[begin : self.at - 1]
            yield from self.need_more()

    def json(self, opening: str = "{") -> Steps[object]:
        """The JSON object (or list, where `opening` is "[") that comes next."""
        if (yield from self.peek()) != opening:
            raise self.unexpected(f"{opening!r}")
        begin, depth = self.at, 0
        while True:
            self._take(_BETWEEN_STRINGS)
            if self.at == self.end:
                yield from self.need_more()
                continue
            char = self.text[self.at]
            if char not in '"{}[]':
                raise self.unexpected("JSON")
            self.at += 1
            if char == '"':
                yield from self.quoted(char)
                continue
            depth += 1 if char in "{[" else -1
            if depth > MAX_DEPTH:
                raise TooDeep
            if depth == 0:
                return load_json(self.text[begin : self.at])

    def unexpected(self, wanted: str) -> Malformed:
        """The error for a text that doesn't go on as it must."""
        found = self.text[self.at : self.at + 1]
        return Malformed(
            f"a call has {found!r} where {wanted} must be"
            if found
            else f"a call ends where {wanted} must be"
        )


@functools.cache
def alternatives(words: tuple[str, ...]) -> re.Pattern[str]:
    """Matches any of the words."""
    return re.compile("|".join(map(re.escape, words)))
