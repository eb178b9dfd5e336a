"""Answers that must have a form, over HTTP: from random weights, every one of them has it."""

import json
import re

import pytest

from tests.support.serving import NAME, serving

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Bob"]}, "age": {"type": "integer", "maximum": 120}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "clock"}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}


def schema(value):
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": value}}


def content(server, **body):
    got = server.chat(**{"max_tokens": 400, "temperature": 1.0, **body})
    assert got.status_code == 200, got.text
    choice = got.json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    return choice["message"]["content"]


@pytest.mark.parametrize("seed", range(3))
def test_json_schema(server, seed):
    told = json.loads(content(server, response_format=FORMAT, seed=seed))
    assert told["name"] in ("Ada", "Bob")
    assert type(told["age"]) is int
    assert told["age"] <= 120


def test_regex_choice_and_lark(server):
    assert re.fullmatch(r"[a-c]{3}-\d{2}", content(server, regex=r"[a-c]{3}-\d{2}"))
    assert content(server, choice=["yes", "no"]) in ("yes", "no")
    assert re.fullmatch(r"(ab)+!", content(server, grammar='start: "ab"+ "!"', seed=2))


def test_completions_take_them_too(server):
    got = server.complete(prompt="Say", choice=["left", "right"], max_tokens=9, temperature=1.0)
    assert got.json()["choices"][0]["text"] in ("left", "right")


def test_several_answers_have_it_and_a_stream_too(server, client):
    got = server.chat(response_format=FORMAT, n=3, max_tokens=400, temperature=1.0, seed=1).json()
    for choice in got["choices"]:
        assert set(json.loads(choice["message"]["content"])) == {"name", "age"}
    stream = client.chat.completions.create(
        model=NAME, messages=[{"role": "user", "content": "Hi"}], response_format=FORMAT,
        stream=True, seed=1, max_tokens=400,
    )  # fmt: skip
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == got["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    ("body", "message", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format is", "response_format"),
        ({"response_format": {"type": "json_schema"}}, "json_schema.schema", "response_format"),
        ({"response_format": schema({"type": "object", "not": {}})}, '"not"', "response_format"),
        ({"response_format": schema({"$ref": "#"})}, "for ever", "response_format"),
        ({"response_format": FORMAT, "regex": "a"}, "response_format and regex", "regex"),
        ({"regex": "("}, "the regex can't be used", "regex"),
        ({"regex": "a\\"}, "a backslash alone", "regex"),
        ({"regex": "[a&&b]"}, "no token of this model", "regex"),
        ({"choice": []}, "no text to choose", "choice"),
        ({"choice": ["a" * 300_000]}, "300000 bytes", "choice"),
        ({"grammar": "nonsense"}, "Lark grammar can't be used", "grammar"),
        ({"choice": ["a"], "ignore_eos": True}, "ignore_eos", "ignore_eos"),
        ({"regex": "(", "tools": [TOOL]}, "the", "regex"),
        ({"grammar": "start: /a/", "tools": [TOOL]}, "grammar and tools", "grammar"),
    ],
)
def test_a_form_that_can_t_be_is_refused_by_name(server, body, message, param):
    told = [server.chat(**body)]
    if "tools" not in body:
        told.append(server.complete(prompt="x", **body))
    for got in told:
        assert got.status_code == 400
        assert message in got.json()["error"]["message"]
        assert got.json()["error"]["param"] == param


def test_what_a_format_of_calls_can_t_write_is_the_tools_fault(llm):
    pattern = {"type": "object", "properties": {"k": {"type": "string", "pattern": "a+"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": pattern, "strict": True}}
    with serving(llm, tool_format="glm") as server:
        got = server.chat(tools=[tool])
    assert (got.status_code, got.json()["error"]["param"]) == (400, "tools")
    assert "pattern in 'k' of 'f'" in got.json()["error"]["message"]


def test_no_form_is_none(server):
    plain = server.chat(max_tokens=20, temperature=0).json()
    text = server.chat(max_tokens=20, temperature=0, response_format={"type": "text"}).json()
    assert text["choices"] == plain["choices"]
