"""Grammars under which a model can only write calls of the tools that it was offered.

In llguidance's form of Lark. A call is written as its family does, so that the same parser reads
it (`parsers/`); what is between the marks follows the tool's JSON schema. A new family is a class
here and a line in `_FAMILIES`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from mlxserve.text.parsers import REASONING_FORMATS
from mlxserve.text.tokenizer import Tokenizer
from mlxserve.text.tool_grammar.base import ToolGrammar
from mlxserve.text.tool_grammar.families import (
    DeepSeek,
    Glm,
    Hermes,
    Llama3Json,
    Mistral,
    Pythonic,
    Qwen3Coder,
    ToolCode,
)
from mlxserve.text.tool_grammar.gemma import Gemma
from mlxserve.text.tool_grammar.harmony import Harmony

__all__ = ["ToolGrammar", "make_tool_grammar"]

_FAMILIES: dict[str, type[ToolGrammar]] = {
    family.tool_format: family
    for family in (
        DeepSeek,
        Gemma,
        Glm,
        Harmony,
        Hermes,
        Llama3Json,
        Mistral,
        Pythonic,
        Qwen3Coder,
        ToolCode,
    )
}


def make_tool_grammar(
    tool_format: str,
    tools: Sequence[Mapping[str, Any]],
    tokenizer: Tokenizer,
    *,
    parallel: bool,
    reasoning_format: str | None = None,
) -> ToolGrammar:
    """The grammars for one request.

    tool_format: a name from `parsers.TOOL_FORMATS`, or "harmony". tools: those that may be called,
    as in OpenAI's API. parallel: whether several calls may be made. reasoning_format: a name from
    `parsers.REASONING_FORMATS`: what may come before them. Raises RequestError for parameters that
    the family has no way to write.
    """
    functions = [tool["function"] for tool in tools]
    # `<think>` stands before grammars of any kind: it is the matcher's to allow.
    reasoning = (
        None if reasoning_format == "think" else REASONING_FORMATS.get(reasoning_format or "")
    )
    return _FAMILIES[tool_format](functions, tokenizer, parallel=parallel, reasoning=reasoning)
