"""Tools' JSON schemas as expressions of Lark."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlxserve.errors import RequestError
from mlxserve.text import lark
from mlxserve.text.schema import check_ends

Schema = Mapping[str, Any]

ANY_OBJECT: Schema = {"type": "object"}

ANY_BOOLEAN = '("true" | "false" | "True" | "False")'
"""Models write Python's words for it, too, where a value isn't part of JSON."""

# As models write JSON; more white space would let an answer go on for ever.
_JSON = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

ASSERTIONS = frozenset({
    "type", "enum", "const", "$ref", "$dynamicRef", "anyOf", "oneOf", "allOf", "not", "if",
    "then", "else", "properties", "required", "additionalProperties", "patternProperties",
    "propertyNames", "minProperties", "maxProperties", "dependentRequired", "dependentSchemas",
    "unevaluatedProperties", "items", "prefixItems", "contains", "minContains", "maxContains",
    "minItems", "maxItems", "uniqueItems", "unevaluatedItems", "minLength", "maxLength",
    "pattern", "format", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum",
    "multipleOf",
})  # fmt: skip
"""The keywords of JSON Schema (Draft 2020-12) that bear on an instance; others are annotations."""


def refused(what: str) -> RequestError:
    """For what a family can't write."""
    return RequestError(
        f"{what} can't be enforced in this model's format; change it, or leave out strict and set "
        "tool_choice to auto"
    )


def only(where: str, schema: Schema, *keywords: str) -> None:
    """Refuse a schema that says more than these keywords do."""
    if beyond := sorted(ASSERTIONS.intersection(schema) - set(keywords)):
        raise refused(f"{beyond[0]} in {where}")


def is_plain(schema: Any, type_: str, *more: str) -> bool:
    """Whether a schema names this type and says no more, but for these keywords."""
    if not isinstance(schema, dict):
        return False
    return schema.get("type") == type_ and ASSERTIONS.intersection(schema) == {"type", *more}


def check_object(where: str, schema: Schema) -> None:
    """Refuse a schema that says more of an object than which properties it has."""
    only(where, schema, "type", "properties", "required", "additionalProperties")
    if schema.get("type", "object") != "object":
        raise refused(f"type {schema['type']!r} in {where}")


def parameters_of(function: Mapping[str, Any]) -> Schema:
    """The schema of a tool's arguments."""
    return {**ANY_OBJECT, **(function.get("parameters") or {})}


def json_form(where: str, schema: Any) -> str:
    """JSON, without line breaks, and with spaces as models write them."""
    if not isinstance(schema, Mapping):
        return f"%json {json.dumps(schema)}"
    check_ends(where, schema)
    return f"%json {json.dumps({**schema, 'x-guidance': _JSON})}"


@dataclass(frozen=True, slots=True)
class Parameter:
    """One argument of a tool. where: what a refusal calls it."""

    name: str
    schema: Any
    required: bool
    where: str


def parameters(function: Mapping[str, Any]) -> list[Parameter]:
    """A tool's arguments by name, for formats that write each of them on its own.

    Arguments that the schema doesn't describe are left out, unless it requires them.
    """
    schema = parameters_of(function)
    check_object(f"the parameters of {function['name']!r}", schema)
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    described, required = properties(schema)
    return [
        Parameter(
            name,
            shared | each if isinstance(each, dict) else each,
            name in required,
            f"{name!r} of {function['name']!r}",
        )
        for name, each in described.items()
    ]


def properties(schema: Schema) -> tuple[dict[str, Any], list[str]]:
    """Schemas of an object's properties by name, in order, and the names that are required."""
    described: dict[str, Any] = dict(schema.get("properties") or {})
    required: list[str] = list(schema.get("required") or ())
    others = schema.get("additionalProperties", True)
    return described | {name: others for name in required if name not in described}, required


def text_form(where: str, schema: Schema, mark: str) -> str:
    """A terminal: a string's own text, without quotes. mark: what closes it, so isn't in it."""
    if "anyOf" in schema:
        only(where, schema, "type", "anyOf")
        return lark.one_of(text_form(where, branch, mark) for branch in schema["anyOf"])
    only(where, schema, "type", "enum", "const", "minLength", "maxLength")
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if "enum" in schema or "const" in schema:
        listed = schema.get("enum", [schema.get("const")])
        values = [
            value
            for value in listed
            if isinstance(value, str)
            and value == schema.get("const", value)
            and least <= len(value) <= (len(value) if most is None else most)
        ]
        for value in values:
            if mark in value:
                raise refused(f"{mark!r} in a value of {where}")
        if not values:
            raise refused(f"{where}, which no string can be,")
        return lark.one_of(map(lark.literal, values))
    if not least and most is None:
        return lark.ANY_TEXT
    return f"/(?s:.{{{least},{'' if most is None else most}}})/"
