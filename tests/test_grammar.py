"""Grammars as values: what they hold, and what is refused before there is a model."""

import dataclasses
import json

import pytest

from mlxserve import Grammar, RequestError, SamplingParams
from mlxserve.grammar import MAX_BYTES, MAX_DEPTH


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar.json_schema({"type": "object", "properties": {"b": {}, "a": {}}}),
        Grammar.json_schema('{"type": "string"}'),
        Grammar.json_object(),
        Grammar.regex("a+"),
        Grammar.choice(["yes", "no", "é"]),
        Grammar.lark('start: "a"'),
    ],
    ids=lambda grammar: grammar.kind,
)
def test_a_grammar_survives_json_and_is_a_key(grammar):
    again = Grammar(**json.loads(json.dumps(dataclasses.asdict(grammar))))
    assert again == grammar
    assert {grammar: 1}[again] == 1


def test_a_schema_keeps_the_order_of_its_properties():
    grammar = Grammar.json_schema({"properties": {"b": {}, "a": {}}})
    assert list(json.loads(grammar.value)["properties"]) == ["b", "a"]


def nested(levels):
    schema = {}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


def circular():
    schema = {}
    schema["items"] = schema
    return schema


REFUSED = {
    "kind": (lambda: Grammar("xml", "<a/>"), "'xml'"),
    "schema is a list": (lambda: Grammar.json_schema([1]), "must be an object"),
    "schema is true": (lambda: Grammar.json_schema("true"), "must be an object"),
    "schema is no JSON": (lambda: Grammar.json_schema("{"), "no JSON"),
    "not plain values": (lambda: Grammar.json_schema({"enum": {1, 2}}), "no JSON"),
    "not a number": (lambda: Grammar.json_schema({"const": float("nan")}), "no JSON"),
    "circular": (lambda: Grammar.json_schema(circular()), "no JSON"),
    "deep": (lambda: Grammar.json_schema(nested(MAX_DEPTH + 1)), "levels deep"),
    "very deep": (lambda: Grammar.json_schema('{"items":' * 10**5 + "{}" + "}" * 10**5), "bytes"),
    "options": (lambda: Grammar.json_schema({"x-guidance": {}}), "x-guidance"),
    "large": (lambda: Grammar.lark("a" * (MAX_BYTES + 1)), "bytes"),
    "surrogate": (lambda: Grammar.regex("\ud800"), "surrogate"),
    "regex is a number": (lambda: Grammar.regex(5), "must be a string"),
    "regex is empty": (lambda: Grammar.regex(""), "is ''"),
    "backslash": (lambda: Grammar.regex("a\\"), "backslash"),
    "object with a value": (lambda: Grammar("json_object", "{}"), "leave it empty"),
    "choice is a string": (lambda: Grammar("choice", "yes"), "a list of texts"),
    "choice of numbers": (lambda: Grammar.choice([1, 2]), "give strings"),
    "no choice": (lambda: Grammar.choice([]), "no text"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_grammar_is_refused_by_name(case):
    make, words = REFUSED[case]
    with pytest.raises(RequestError) as caught:
        make()
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_as_deep_as_is_allowed():
    Grammar.json_schema(nested(MAX_DEPTH - 1))


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"ignore_eos": True}, "ignore_eos"),
        ({"min_tokens": 3}, "min_tokens"),
    ],
)
def test_what_can_t_hold_beside_a_grammar_is_refused(params, words):
    with pytest.raises(RequestError, match=words):
        SamplingParams(grammar=Grammar.regex("a"), **params)


@pytest.mark.parametrize("value", [{"type": "object"}, "a+", 1])
def test_sampling_takes_no_grammar_of_another_type(value):
    with pytest.raises(RequestError, match=r"Grammar\.json_schema"):
        SamplingParams(grammar=value)
