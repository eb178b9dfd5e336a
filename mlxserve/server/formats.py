"""How a model writes what isn't text."""

from __future__ import annotations

from dataclasses import dataclass

from mlxserve.server.tools import GENERIC_FORMAT
from mlxserve.text.parsers import (
    HARMONY,
    REASONING_FORMATS,
    detect_reasoning_format,
    detect_tool_format,
    make_parser,
)
from mlxserve.text.parsers.harmony import REASONING as HARMONY_REASONING
from mlxserve.text.tokenizer import Tokenizer
from mlxserve.types import ThinkingBudget

_THOUGHTS = REASONING_FORMATS | {HARMONY: HARMONY_REASONING}


@dataclass(frozen=True, slots=True)
class Formats:
    """How a model writes tool calls and reasoning. tools: None if that isn't known.

    generic: its template knows no tools, so they are described in the chat. marks: ids of what
    opens reasoning, and of what closes it; None where these aren't tokens of their own.
    """

    tools: str | None
    reasoning: str | None
    generic: bool
    marks: tuple[tuple[int, ...], int] | None

    @classmethod
    def of(cls, tokenizer: Tokenizer, tools: str | None, reasoning: str | None) -> Formats:
        """What the chat template shows, where it isn't said."""
        templates = "\n".join(tokenizer.chat_templates.values())
        generic = "tools" not in templates
        found = GENERIC_FORMAT if generic else detect_tool_format(templates)
        reasoning = reasoning or detect_reasoning_format(templates)
        return cls(tools or found, reasoning, generic, _marks(tokenizer, reasoning))

    def budget(self, tokens: int | None, prompt: str) -> ThinkingBudget | None:
        """For the answer to a rendered prompt; None where it can't be kept. Raises RequestError."""
        if tokens is None or self.marks is None:
            return None
        opening, closing = self.marks
        inside = _THOUGHTS[str(self.reasoning)].opened_by(prompt)
        return ThinkingBudget(tokens=tokens, opening=opening, closing=closing, inside=inside)

    def __post_init__(self) -> None:
        make_parser(self.tools, self.reasoning)  # raises RequestError for a name that isn't known


def _marks(tokenizer: Tokenizer, reasoning: str | None) -> tuple[tuple[int, ...], int] | None:
    """A model writes a token of its own in one way, and a word beside one most likely, too."""
    if reasoning not in _THOUGHTS:
        return None
    found = _THOUGHTS[reasoning]
    # A line break may be one token with what follows.
    opening, closing = (
        tokenizer.encode(mark.rstrip(), add_special_tokens=False)
        for mark in (found.opens, found.closes)
    )
    marks = {mark.encode() for mark in found.keeps}
    if not opening or tokenizer.token_bytes(opening[0]) not in marks or len(closing) != 1:
        return None
    return tuple(opening), closing[0]
