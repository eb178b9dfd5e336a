"""Gemma's notation: JSON but for keys, which are bare, and strings, which stand between marks.

See `parsers.gemma`. A schema becomes rules here, since no other compiler knows this notation.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

from mlxserve.text import lark
from mlxserve.text.parsers.gemma import Gemma as GemmaParser
from mlxserve.text.schema import check_ends, target
from mlxserve.text.tool_grammar.base import Function, ToolGrammar
from mlxserve.text.tool_grammar.rules import Rules
from mlxserve.text.tool_grammar.schemas import (
    ASSERTIONS,
    Schema,
    check_object,
    json_form,
    only,
    parameters_of,
    properties,
    refused,
    text_form,
)

_NUMERIC = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_KEYWORDS = {
    "string": ("minLength", "maxLength"),
    "integer": _NUMERIC,
    "number": _NUMERIC,
    "boolean": (),
    "null": (),
    "array": ("items", "minItems", "maxItems"),
    "object": ("properties", "required", "additionalProperties"),
}
"""What can be said of each type."""

_PYTHON = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
    "array": list,
    "object": dict,
}
# Bounded, so that it is no infinity.
_NUMBER = r"/-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?([eE][+\-]?[0-9]{1,2})?/"
_NULL = '("null" | "None")'  # templates write the latter
_ANY_KEY = "/[a-zA-Z_][a-zA-Z0-9_]*:/"


class Gemma(ToolGrammar):
    """FunctionGemma and Gemma 4."""

    tool_format = "gemma"
    openings = ("<start_function_call>", "<|tool_call>")

    def _call(self, function: Function) -> str:
        where, schema = f"the parameters of {function['name']!r}", parameters_of(function)
        check_object(where, schema)
        check_ends(where, schema)
        head = lark.literal(f"call:{function['name']}")
        values = _Values(self._rules, self._marks[1], schema)
        return f"{head} {values.of_type('object', where, schema)}"

    def _rest(self) -> str:
        assert self._opening is not None
        call = f"call {self._rules.mark(self._marks[0])}"
        return self._several(call, self._rules.mark(self._opening))

    @property
    def _marks(self) -> tuple[str, str]:
        """What closes a call, and what stands around a string."""
        assert self._opening is not None
        return GemmaParser.marks[self._opening]


class _Values:
    """Values of one tool's schema, as expressions. Raises RequestError for what can't be written.

    quote: the mark around strings. root: the schema that references are looked up in.
    """

    def __init__(self, rules: Rules, quote: str, root: Schema) -> None:
        self._rules, self._quote, self._root = rules, quote, root
        self._refs: dict[str, str] = {}

    def value(self, where: str, schema: Any) -> str:
        """An instance of the schema."""
        if schema is False:
            raise refused(f"{where}, which nothing can be,")
        if schema is True or not ASSERTIONS.intersection(schema):
            return self._any()
        if "$ref" in schema:
            only(where, schema, "$ref")
            return self._reference(where, schema["$ref"])
        if "anyOf" in schema:
            only(where, schema, "anyOf")
            return lark.one_of(self.value(where, branch) for branch in schema["anyOf"])
        types = _types(where, schema)
        if "enum" in schema or "const" in schema:
            only(where, schema, "type", "enum", "const")
            return self._enum(where, schema, types)
        only(where, schema, "type", *(word for each in types for word in _KEYWORDS[each]))
        return lark.one_of(self.of_type(each, where, schema) for each in types)

    def of_type(self, type_: str, where: str, schema: Schema) -> str:
        """An instance of this type."""
        said = {word: schema[word] for word in _KEYWORDS[type_] if word in schema}
        match type_:
            case "string":
                text = text_form(where, said, self._quote)
                return f"{self._rules.mark(self._quote)} {self._rules.up_to(self._quote, text)}"
            case "array":
                return self._array(where, said)
            case "object":
                return self._object(where, said)
            case "number" if not said:
                return _NUMBER
            case "null":
                return _NULL
        return json_form(where, {"type": type_, **said})

    def _array(self, where: str, said: Schema) -> str:
        item = self._rules.rule(self.value(f"the items of {where}", said.get("items", True)))
        least, most = said.get("minItems", 0), said.get("maxItems")
        if most == 0:
            return '"[]"'
        others = f'("," {item}){{{max(least - 1, 0)},{"" if most is None else most - 1}}}'
        return f'"[" {item} {others} "]"' if least else f'"[" ({item} {others})? "]"'

    def _object(self, where: str, said: Schema) -> str:
        described, required = properties(said)
        if described:
            # In the order in which templates show arguments to the model.
            items = []
            for name, each in sorted(described.items(), key=lambda item: item[0].lower()):
                value = self.value(f"{name!r} of {where}", each)
                item = self._rules.rule(f"{self._key(where, name)} {value}")
                items.append((item, name in required))
            return f'"{{" {self._rules.listed(items, ",")} "}}"'
        if (others := said.get("additionalProperties", True)) is False:
            return '"{}"'
        item = self._rules.rule(f"{_ANY_KEY} {self.value(f'the values of {where}', others)}")
        return f'"{{" ({item} ("," {item})*)? "}}"'

    def _key(self, where: str, name: str) -> str:
        if re.fullmatch(r"[\w.-]+", name):
            return lark.literal(f"{name}:")
        if name != name.strip() or self._quote in name:
            raise refused(f"the name {name!r} of {where}")
        return f'{self._string(name)} ":"'

    def _enum(self, where: str, schema: Schema, types: Sequence[str]) -> str:
        values = schema["enum"] if "enum" in schema else [schema["const"]]
        if "const" in schema:
            values = [value for value in values if value == schema["const"]]
        if "type" in schema:
            values = [value for value in values if any(_is(value, each) for each in types)]
        if not values:
            raise refused(f"{where}, which nothing can be,")
        return lark.one_of(self._constant(where, value) for value in values)

    def _constant(self, where: str, value: Any) -> str:
        match value:
            case str():
                if self._quote in value:
                    raise refused(f"{self._quote!r} in a value of {where}")
                return self._string(value)
            case list():
                items = [(self._constant(where, item), True) for item in value]
                return f'"[" {self._rules.listed(items, ",")} "]"'
            case dict():
                items = [
                    (f"{self._key(where, key)} {self._constant(where, item)}", True)
                    for key, item in value.items()
                ]
                return f'"{{" {self._rules.listed(items, ",")} "}}"'
        return lark.literal(json.dumps(value))

    def _string(self, text: str) -> str:
        quote = self._rules.mark(self._quote)
        return f"{quote} {lark.literal(text) if text else ''} {quote}"

    def _reference(self, where: str, ref: str) -> str:
        if ref not in self._refs:
            referred = target(self._root, ref)
            if referred is True:
                raise refused(f"$ref {ref!r} in {where}")
            # Named before it is written, since it may refer to itself.
            name = self._refs[ref] = f"ref_{len(self._rules.named)}"
            self._rules.named[name] = ""
            self._rules.named[name] = self.value(where, referred)
        return self._refs[ref]

    def _any(self) -> str:
        """Any value; free objects have simple keys."""
        if "any" not in self._rules.named:
            string = f"{self._rules.mark(self._quote)} {self._rules.up_to(self._quote)}"
            self._rules.named |= {
                "any": f'{string} | {_NUMBER} | "true" | "false" | {_NULL} | any_list | any_object',
                "any_list": '"[" (any ("," any)*)? "]"',
                "any_item": f"{_ANY_KEY} any",
                "any_object": '"{" (any_item ("," any_item)*)? "}"',
            }
        return "any"


def _types(where: str, schema: Schema) -> list[str]:
    """The types that an instance may have: those named, or else those that the schema is about."""
    named = schema.get("type") or [
        each for each, words in _KEYWORDS.items() if any(word in schema for word in words)
    ]
    types = [named] if isinstance(named, str) else list(named)
    for each in types:
        if each not in _KEYWORDS:
            raise refused(f"type {each!r} in {where}")
    return types


def _is(value: Any, type_: str) -> bool:
    return isinstance(value, _PYTHON[type_]) and isinstance(value, bool) == (type_ == "boolean")
