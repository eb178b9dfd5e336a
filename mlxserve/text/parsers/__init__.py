"""Tool calls and reasoning in what models write, told apart from the answer's text.

Every family of models has markup of its own, which its chat template shows. A parser takes the
text of one answer as it comes and tells `Content`, `Reasoning` and `ToolCall`s:

    parser = make_parser(detect_tool_format(template), detect_reasoning_format(template), ...)
    text = TextStream(tokenizer, stop, keep=parser.keeps)
    for token_id in answer:
        deltas = parser.feed(text.feed(token_id))
    deltas = parser.feed(text.finish()) + parser.finish()

A new family is a file with a `ToolFormat`, a line in `TOOL_FORMATS`, and one in `_TOOL_MARKS`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from mlxserve.errors import RequestError
from mlxserve.text.parsers.base import MarkupParser, OutputParser, ReasoningFormat, ToolFormat
from mlxserve.text.parsers.deepseek import BEGIN, DeepSeek
from mlxserve.text.parsers.deltas import Content, Delta, Reasoning, ToolCall
from mlxserve.text.parsers.gemma import Gemma
from mlxserve.text.parsers.glm import Glm
from mlxserve.text.parsers.harmony import HarmonyParser
from mlxserve.text.parsers.hermes import Hermes
from mlxserve.text.parsers.llama3_json import Llama3Json
from mlxserve.text.parsers.mistral import Mistral
from mlxserve.text.parsers.pythonic import Pythonic, ToolCode
from mlxserve.text.parsers.qwen3_coder import Qwen3Coder
from mlxserve.text.parsers.values import Tools

__all__ = [
    "REASONING_FORMATS",
    "Content",
    "Delta",
    "OutputParser",
    "Reasoning",
    "ToolCall",
    "detect_reasoning_format",
    "detect_tool_format",
    "make_parser",
]

HARMONY = "harmony"
"""Both a tool format and a reasoning format: its markup can't be taken apart."""

TOOL_FORMATS: dict[str, type[ToolFormat]] = {
    "deepseek": DeepSeek,
    "gemma": Gemma,
    "glm": Glm,
    "hermes": Hermes,
    "llama3_json": Llama3Json,
    "mistral": Mistral,
    "pythonic": Pythonic,
    "qwen3_coder": Qwen3Coder,
    "tool_code": ToolCode,
}

REASONING_FORMATS = {
    "gemma": ReasoningFormat(
        "<|channel>thought\n", "<channel|>", frozenset({"<|channel>", "<channel|>"})
    ),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]", frozenset({"[THINK]", "[/THINK]"})),
    "think": ReasoningFormat("<think>", "</think>", frozenset({"<think>", "</think>"})),
}

# What a template must have in it, all of a line. The first line that fits counts, so what is
# special stands before what it shares marks with.
_TOOL_MARKS: list[tuple[str | None, list[str]]] = [
    (HARMONY, ["<|channel|>", "<|message|>"]),
    ("mistral", ["[TOOL_CALLS]"]),
    ("deepseek", [BEGIN]),
    ("gemma", ["<|tool_call>"]),
    ("gemma", ["<start_function_call>"]),
    ("glm", ["<tool_call>", "<arg_key>"]),
    ("qwen3_coder", ["<tool_call>", "<function=", "<parameter="]),
    (None, ["<tool_calls>["]),  # Apriel's, which has the next lines' marks in its instructions
    ("hermes", ["<tool_call>", '{"name": ']),
    ("hermes", ["<tool_call>", r"{\"name\": "]),
    ("pythonic", ["<|tool_call_start|>"]),
    ("pythonic", ["<|tool_list_start|>"]),
    ("pythonic", ["[func_name1("]),
    ("llama3_json", ['{"name": function name, "parameters": ']),
    ("tool_code", ["```tool_code"]),
]
_REASONING_MARKS: list[tuple[str | None, list[str]]] = [
    (HARMONY, ["<|channel|>", "<|message|>"]),
    ("mistral", ["[THINK]"]),
    ("gemma", ["<|channel>", "<channel|>"]),
    ("think", ["<think>"]),
]


def detect_tool_format(template: str) -> str | None:
    """The format in which a model with this chat template writes tool calls; None if unknown."""
    return _detect(_TOOL_MARKS, template)


def detect_reasoning_format(template: str) -> str | None:
    """The format in which a model with this chat template writes its reasoning, or None."""
    return _detect(_REASONING_MARKS, template)


def _detect(marks: list[tuple[str | None, list[str]]], template: str) -> str | None:
    return next((name for name, all_of in marks if all(m in template for m in all_of)), None)


def make_parser(
    tool_format: str | None,
    reasoning_format: str | None,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    prompt: str = "",
) -> OutputParser:
    """A parser for one answer.

    tool_format, reasoning_format: names from `TOOL_FORMATS` and `REASONING_FORMATS`, or "harmony";
        None leaves that markup in the content. With either of them harmony, both are.
    tools: those the request offers, as in OpenAI's API. They say what type an argument has, and
        which names make a call where a format has no tags.
    prompt: the rendered one: some templates open the reasoning in it.
    Raises RequestError for an unknown format, for harmony beside another, and for a tool without
    a name.
    """
    reasoning = _look_up("reasoning format", REASONING_FORMATS, reasoning_format)
    calls = _look_up("tool format", TOOL_FORMATS, tool_format)
    if HARMONY in (tool_format, reasoning_format):
        if reasoning or calls:
            raise RequestError(
                f"the tool format {tool_format!r} can't go with the reasoning format "
                f"{reasoning_format!r}; harmony goes with harmony"
            )
        return HarmonyParser()
    return MarkupParser(
        reasoning,
        calls(Tools(tools)) if calls else None,
        inside=bool(reasoning and reasoning.opened_by(prompt)),
    )


def _look_up(kind: str, known: Mapping[str, Any], name: str | None) -> Any:
    if name is None or name == HARMONY:
        return None
    if name not in known:
        names = ", ".join(sorted([*known, HARMONY]))
        raise RequestError(f"there is no {kind} {name!r}; choose one of {names}")
    return known[name]
