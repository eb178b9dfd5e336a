"""Schemas whose every instance would go on for ever."""

import pytest

from mlxserve.text.schema import endless_ref

STRING = {"type": "string"}
ENDS = {
    "no reference": {"type": "object", "properties": {"a": STRING}, "required": ["a"]},
    "optional": {"type": "object", "properties": {"a": {"$ref": "#"}}},
    "an array that may be empty": {"type": "array", "items": {"$ref": "#"}},
    "a choice": {"anyOf": [{"$ref": "#/$defs/a"}, STRING], "$defs": {"a": {"items": {}}}},
    "a tree": {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": {
                "type": "object",
                "properties": {"kids": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
                "required": ["kids"],
            }
        },
    },
    "any type": {"properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    "nullable": {
        "type": ["object", "null"],
        "properties": {"a": {"$ref": "#"}},
        "required": ["a"],
    },
    "escaped": {"$ref": "#/$defs/a~1b%25", "$defs": {"a/b%": STRING}},
    "unknown": {"$ref": "#/$defs/nothing"},
    "elsewhere": {"$ref": "https://example.com/schema"},
    "const": {"const": {"$ref": "#"}},
    "prefix": {"type": "array", "prefixItems": [STRING], "items": {"$ref": "#"}, "minItems": 1},
}
ENDLESS = {
    "itself": ({"$ref": "#"}, "#"),
    "two that lead to each other": (
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        "#/$defs/a",
    ),
    "required": (
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        "#",
    ),
    "required, not listed": (
        {"type": "object", "additionalProperties": {"$ref": "#"}, "required": ["a"]},
        "#",
    ),
    "an array that isn't empty": ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "#"),
    "prefix": ({"type": "array", "prefixItems": [{"$ref": "#"}], "minItems": 1}, "#"),
    "all branches": ({"anyOf": [{"$ref": "#"}, {"allOf": [STRING, {"$ref": "#"}]}]}, "#"),
    "below": (
        {
            "type": "object",
            "properties": {"a": {"$ref": "#/$defs/a"}},
            "required": ["a"],
            "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}, "minItems": 2}},
        },
        "#/$defs/a",
    ),
}


@pytest.mark.parametrize("case", ENDS)
def test_some_instance_ends(case):
    assert endless_ref(ENDS[case]) is None


@pytest.mark.parametrize("case", ENDLESS)
def test_no_instance_ends(case):
    schema, ref = ENDLESS[case]
    assert endless_ref(schema) == ref
