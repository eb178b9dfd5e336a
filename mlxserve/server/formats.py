"""How a model writes what isn't text."""

from __future__ import annotations

from dataclasses import dataclass

from mlxserve.server.tools import GENERIC_FORMAT
from mlxserve.text.parsers import detect_reasoning_format, detect_tool_format, make_parser
from mlxserve.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Formats:
    """How a model writes tool calls and reasoning. tools: None if that isn't known.

    generic: its template knows no tools, so they are described in the chat.
    """

    tools: str | None
    reasoning: str | None
    generic: bool

    @classmethod
    def of(cls, tokenizer: Tokenizer, tools: str | None, reasoning: str | None) -> Formats:
        """What the chat template shows, where it isn't said."""
        templates = "\n".join(tokenizer.chat_templates.values())
        generic = "tools" not in templates
        found = GENERIC_FORMAT if generic else detect_tool_format(templates)
        return cls(tools or found, reasoning or detect_reasoning_format(templates), generic)

    def __post_init__(self) -> None:
        make_parser(self.tools, self.reasoning)  # raises RequestError for a name that isn't known
