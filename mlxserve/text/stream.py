"""Text as it arrives: whole characters from tokens, and stop strings that never leak.

Everything here is per request and belongs to the thread that reads that request's tokens.
"""

import codecs
from collections.abc import Iterable
from typing import TYPE_CHECKING

from mlxserve.errors import RequestError

if TYPE_CHECKING:
    from mlxserve.text.tokenizer import Tokenizer


class StreamDecoder:
    """Turns token ids into text, piece by piece, without ever splitting a character.

    `feed` of every id and then `finish` give, joined, exactly `tokenizer.decode(ids)`. Special
    tokens give nothing. Bytes that aren't UTF-8 become U+FFFD, but only once no later byte can save
    them.

    at_start: the ids open a text, so a tokenizer that marks words by a leading space drops the
        first one. Pass False where the ids continue a text, so that the space stays.
    keep: special tokens, by their text, that are text all the same: the markup of tool calls.
    """

    def __init__(
        self, tokenizer: "Tokenizer", *, at_start: bool = True, keep: Iterable[str] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._kept = frozenset(token.encode() for token in keep)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._first = at_start
        self._to_strip = tokenizer.decoding.stripped_at_start if at_start else 0

    def feed(self, token_id: int) -> str:
        """The text that this token completes. Raises RequestError for an id out of range."""
        data = self._tokenizer.token_bytes(token_id, first=self._first)
        if token_id in self._tokenizer.special_ids:
            if data not in self._kept:
                return ""
            # It may be the text's first, and what it cuts off stays a broken character.
            self._first, self._to_strip = False, 0
            return self.finish() + data.decode()
        self._first = False
        if self._to_strip and data:
            data = self._strip(data)
        return self._utf8.decode(data)

    def finish(self) -> str:
        """What is left of a character that never got its last bytes: U+FFFD, or nothing."""
        return self._utf8.decode(b"", final=True)

    def _strip(self, data: bytes) -> bytes:
        byte = self._tokenizer.decoding.strip_byte
        while self._to_strip and data.startswith(byte):
            data = data[1:]
            self._to_strip -= 1
        if data:
            self._to_strip = 0
        return data


class StopStrings:
    """Finds the first stop string in a text that arrives in pieces.

    The first is the one that is complete first; of several that end at the same character, the
    longest. Text from its first character on is never given out, and text is held back only while
    it could still become a stop string. Where the pieces are cut makes no difference.

    Linear in the text (times the number of stop strings): Knuth, Morris, Pratt 1977.

    Raises RequestError for an empty stop string.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        # Longest first, so that the first to complete at a character is the longest there.
        self._stops = sorted(set(stops), key=len, reverse=True)
        if "" in self._stops:
            raise RequestError("a stop string is empty; give at least one character")
        self._borders = [_borders(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)
        self.stop: str | None = None

    @property
    def stopped(self) -> bool:
        """Whether a stop string is complete."""
        return self.stop is not None

    def feed(self, text: str) -> tuple[str, bool]:
        """The text that is safe to show, and whether a stop string is complete (the text's end)."""
        if self.stopped or not self._stops:
            return ("" if self.stopped else text), self.stopped
        held, n_held = self._held()
        for i, char in enumerate(text):
            if length := self._advance(char):
                return _head(held, n_held, text, n_held + i + 1 - length), True
        return _head(held, n_held, text, n_held + len(text) - max(self._matched)), False

    def finish(self) -> str:
        """The text held back, now that no more comes. Nothing after a stop."""
        if self.stopped:
            return ""
        held, n_held = self._held()
        self._matched = [0] * len(self._stops)
        return held[:n_held]

    def _held(self) -> tuple[str, int]:
        """The text held back, as (string, how much of its beginning).

        It needn't be kept: it is the matched part of the stop string that has matched furthest.
        Nor is it cut here: a copy per piece would make a long match quadratic.
        """
        n_held = max(self._matched, default=0)
        return (self._stops[self._matched.index(n_held)], n_held) if n_held else ("", 0)

    def _advance(self, char: str) -> int:
        """Take one character. The length of the stop string it completes, or 0."""
        for which, stop in enumerate(self._stops):
            n = self._matched[which]
            while n and stop[n] != char:
                n = self._borders[which][n]
            if stop[n] == char:
                n += 1
            if n == len(stop):
                self.stop = stop
                return n
            self._matched[which] = n
        return 0


def _borders(stop: str) -> list[int]:
    """For each length n, the longest proper beginning of `stop[:n]` that is also its end."""
    borders = [0] * (len(stop) + 1)
    n = 0
    for i in range(1, len(stop)):
        while n and stop[i] != stop[n]:
            n = borders[n]
        if stop[i] == stop[n]:
            n += 1
        borders[i + 1] = n
    return borders


def _head(held: str, n_held: int, text: str, n: int) -> str:
    """The first n characters of `held[:n_held] + text`."""
    return held[:n] if n <= n_held else held[:n_held] + text[: n - n_held]


class TextStream:
    """One request's text: token ids in, text to show out, cut before the first stop string.

    stop: stop strings; none is fine. at_start, keep: as for StreamDecoder.
    """

    def __init__(
        self,
        tokenizer: "Tokenizer",
        stop: Iterable[str] = (),
        *,
        at_start: bool = True,
        keep: Iterable[str] = (),
    ) -> None:
        self._decoder = StreamDecoder(tokenizer, at_start=at_start, keep=keep)
        self._stops = StopStrings(stop)

    @property
    def stopped(self) -> bool:
        """Whether a stop string is complete: no more text comes, the request can be cancelled."""
        return self._stops.stopped

    def feed(self, token_id: int) -> str:
        """The text this token makes safe to show. Raises RequestError for an id out of range."""
        return self._stops.feed(self._decoder.feed(token_id))[0]

    def finish(self) -> str:
        """The rest of the text. Call it once, when the request has ended."""
        return self._stops.feed(self._decoder.finish())[0] + self._stops.finish()
