"""Grammars under which a model can only write calls of the tools that it was offered.

In llguidance's form of Lark. A call is written as its family does, so that the same parser reads
it; what is between the marks follows the tool's JSON schema.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from mlxserve.errors import RequestError
from mlxserve.grammar import Grammar
from mlxserve.text.tokenizer import Tokenizer

# As models write JSON; more white space would let an answer go on for ever.
_JSON = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_ANY_OBJECT = {"type": "object"}


class ToolGrammar:
    """Builds the grammar for one request.

    tool_format: a name from `parsers.TOOL_FORMATS`. tools: those that may be called, as in OpenAI's
    API. parallel: whether several calls may be made. Raises RequestError for a format in which
    calls can't be enforced.
    """

    def __init__(
        self,
        tool_format: str,
        tools: Sequence[Mapping[str, Any]],
        tokenizer: Tokenizer,
        *,
        parallel: bool,
    ) -> None:
        writers = {
            "hermes": (self._hermes, "<tool_call>"),
            "llama3_json": (self._llama3_json, None),
            "mistral": (self._mistral, "[TOOL_CALLS]"),
            "qwen3_coder": (self._qwen3_coder, "<tool_call>"),
        }
        if tool_format not in writers:
            raise RequestError(
                f"calls can't be enforced in this model's format, {tool_format!r}; leave out "
                "strict, and set tool_choice to auto"
            )
        self._functions = [tool["function"] for tool in tools]
        self._tokenizer = tokenizer
        self._parallel = parallel
        self._write, opening = writers[tool_format]
        self._opening = opening and self._mark(opening)

    def calls(self) -> Grammar:
        """One call, or, if they may be parallel, one after the other, and nothing else."""
        return Grammar.lark("\n".join(["start: calls", *self._write()]))

    def calls_or(self, answer: Grammar) -> Grammar:
        """Calls, or an answer of a form of its own. Raises RequestError for a Lark one."""
        source = {
            "json_schema": lambda: f"%json {answer.value}",
            "json_object": lambda: f"%json {json.dumps(_ANY_OBJECT)}",
            "choice": lambda: " | ".join(map(json.dumps, answer.value)),
            "regex": lambda: f"/{answer.value}/",
        }
        if answer.kind not in source:
            raise RequestError(
                f"a {answer.kind} grammar and tools can't be asked for at once; drop one"
            )
        form = source[answer.kind]()
        return Grammar.lark("\n".join(["start: calls | answer", f"answer: {form}", *self._write()]))

    def calls_within_text(self) -> Grammar:
        """Any text, in which what begins like a call must be one."""
        opening = self._opening
        if opening is None:  # nothing marks a call but that the answer is one
            start = ["start: calls | text", "text: /([^{](.|\\n)*)?/"]
        elif opening.startswith("<"):  # a token that no text spells
            start = ["start: text calls?", "text: /(.|\\n)*/"]
        else:
            lead = rf"lead[lazy]: /(.|\n)*{re.escape(json.loads(opening))}/"
            start = ["start: (lead rest_of_call)* text", "text: /(.|\\n)*/", lead]
        return Grammar.lark("\n".join([*start, *self._write()]))

    # ---- One per family: rules of which `calls` is the first.

    def _hermes(self) -> list[str]:
        opening, closing = self._opening, self._mark("</tool_call>")
        again = f' ("\\n" {opening} rest_of_call)*' if self._parallel else ""
        return [
            f"calls: {opening} rest_of_call{again}",
            f'rest_of_call: "\\n" call "\\n" {closing}',
            *self._objects("arguments"),
        ]

    def _llama3_json(self) -> list[str]:
        again = ' ("; " call)*' if self._parallel else ""
        return [f"calls: call{again}", *self._objects("parameters")]

    def _mistral(self) -> list[str]:
        again = ' (", " call)*' if self._parallel else ""
        return [
            f"calls: {self._opening} rest_of_call",
            f'rest_of_call: "[" call{again} "]"',
            *self._objects("arguments"),
        ]

    def _qwen3_coder(self) -> list[str]:
        opening, closing = self._opening, self._mark("</tool_call>")
        again = f' ("\\n" {opening} rest_of_call)*' if self._parallel else ""
        rules = [
            f"calls: {opening} rest_of_call{again}",
            f'rest_of_call: "\\n" call "\\n" {closing}',
            "call: " + " | ".join(f"call_{i}" for i in range(len(self._functions))),
            # Up to the tag that closes a value.
            "string[lazy]: /(.|\\n)*<\\/parameter>/",
        ]
        for i, function in enumerate(self._functions):
            schema = _parameters(function)
            required = set(schema.get("required", ()))
            parts = [json.dumps(f"<function={function['name']}>\n")]
            for name, value in schema.get("properties", {}).items():
                is_string = isinstance(value, dict) and value.get("type") == "string"
                form = "string" if is_string else f'{_json(value)} "\\n</parameter>"'
                part = f'{json.dumps(f"<parameter={name}>")} "\\n" {form} "\\n"'
                parts.append(part if name in required else f"({part})?")
            parts.append('"</function>"')
            rules.append(f"call_{i}: {' '.join(parts)}")
        return rules

    def _objects(self, arguments: str) -> list[str]:
        """Calls as JSON objects of a name and arguments, in this order."""
        calls = []
        for function in self._functions:
            schema = _parameters(function)
            name = json.dumps(function["name"])
            head = json.dumps(f'{{"name": {name}, "{arguments}": ')
            calls.append(f'({head} {_json(schema)} "}}")')
        return ["call: " + " | ".join(calls)]

    def _mark(self, text: str) -> str:
        """A mark, which the model may know as a token of its own that no text spells."""
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        if len(ids) == 1 and ids[0] in self._tokenizer.special_ids:
            return f"<[{ids[0]}]>"
        return json.dumps(text)


def _parameters(function: Mapping[str, Any]) -> dict[str, Any]:
    return dict(function.get("parameters") or _ANY_OBJECT)


def _json(schema: Any) -> str:
    if isinstance(schema, dict):
        return f"%json {json.dumps(schema | {'x-guidance': _JSON})}"
    return f"%json {json.dumps(schema)}"
