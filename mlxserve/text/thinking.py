"""Telling a model's thinking, between `<think>` and `</think>`, from its answer."""

from typing import NamedTuple

OPEN, CLOSE = "<think>", "</think>"


class Part(NamedTuple):
    """A stretch of text that is all thinking, or all answer."""

    text: str
    thinking: bool


class ThinkingSplitter:
    """Splits a text that arrives in pieces; the tags themselves are left out.

    Text is held back only while it could still become the tag that would change the kind. Where
    the pieces are cut makes no difference to the joined text of either kind.

    thinking: whether the text begins inside; some templates open the tag in the prompt.
    """

    def __init__(self, *, thinking: bool = False) -> None:
        self._thinking = thinking
        self._held = ""

    def feed(self, text: str) -> list[Part]:
        """The parts that are certain now, in order; none of them is empty."""
        text = self._held + text
        parts = []
        while True:
            tag = CLOSE if self._thinking else OPEN
            before, found, after = text.partition(tag)
            if not found:
                break
            parts.append(Part(before, self._thinking))
            self._thinking = not self._thinking
            text = after
        n_held = next(n for n in range(len(tag) - 1, -1, -1) if text.endswith(tag[:n]))
        self._held = text[len(text) - n_held :]
        parts.append(Part(text[: len(text) - n_held], self._thinking))
        return [part for part in parts if part.text]

    def finish(self) -> list[Part]:
        """What was held back, now that no more comes."""
        held, self._held = self._held, ""
        return [Part(held, self._thinking)] if held else []


def opens_thinking(prompt: str) -> bool:
    """Whether an answer to this rendered prompt begins inside its thinking."""
    return prompt.rstrip().endswith(OPEN)
