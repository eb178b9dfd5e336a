"""Calls and reasoning told apart: what the templates write comes back, however it is cut."""

import json

import pytest

from mlxserve.errors import RequestError
from mlxserve.text.parsers import (
    Content,
    Reasoning,
    ToolCall,
    detect_reasoning_format,
    detect_tool_format,
    make_parser,
)
from mlxserve.text.stream import TextStream
from mlxserve.text.tokenizer import Tokenizer
from tests.text.parsers.families import (
    FAMILIES,
    OUTPUTS,
    PLAIN,
    TOOLS,
    Output,
    calls_in,
    message_of,
    parse,
    rendered,
    source,
    template,
    text_in,
)
from tests.text.support import refused
from tests.text.training import byte_level, save

NAMES = sorted(OUTPUTS)


@pytest.mark.parametrize("name", NAMES)
def test_what_was_written_is_read(name: str):
    output = OUTPUTS[name]
    deltas = parse(output, [output.text])
    assert calls_in(deltas) == list(output.calls)
    assert text_in(deltas, Content) == output.content
    assert text_in(deltas, Reasoning) == output.reasoning
    assert not any(isinstance(delta, Content) and delta.reason for delta in deltas)


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_where_a_text_is_cut_makes_no_difference(name: str):
    output = OUTPUTS[name]
    whole = parse(output, [output.text])
    assert parse(output, list(output.text)) == whole
    for i in range(1, len(output.text)):
        assert parse(output, [output.text[:i], output.text[i:]]) == whole


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_arguments_may_be_long(name: str):
    calls = [("get_weather", {"city": "x, " * 20_000})]
    output = rendered(name, calls)
    pieces = [output.text[i : i + 999] for i in range(0, len(output.text), 999)]
    assert calls_in(parse(output, pieces)) == calls


# gpt-oss writes no text but messages.
@pytest.mark.parametrize("name", sorted(FAMILIES.keys() - {"gpt-oss"}))
def test_text_stands_around_calls(name: str):
    family = FAMILIES[name]
    output = rendered(name, [PLAIN])
    text = f"Before {{x}} <b>.\n{output.text}\n\nAfter."
    pieces = parse(
        Output(tool_format=family.tool_format, reasoning_format=None, text=text), list(text)
    )
    assert calls_in(pieces) == [PLAIN]
    # What a template writes without reasoning may still be empty tags for it.
    content = text_in(pieces, Content).replace("<think>", "").replace("</think>", "").split()
    assert content == ["Before", "{x}", "<b>.", "After."]


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_formats_are_known_by_the_template(name: str):
    family = FAMILIES[name]
    assert detect_tool_format(source(name)) == family.tool_format
    assert detect_reasoning_format(source(name)) == family.reasoning_format


def test_a_template_without_markup_has_no_format():
    plain = "{% for message in messages %}{{ message.role }}: {{ message.content }}{% endfor %}"
    assert detect_tool_format(plain) is None
    assert detect_reasoning_format(plain) is None


def test_formats_that_do_not_exist_or_do_not_go_together_are_refused():
    with refused(RequestError, "tool format 'herms'", "hermes"):
        make_parser("herms", None)
    with refused(RequestError, "reasoning format 'thnk'", "think"):
        make_parser(None, "thnk")
    for tool in ({}, {"function": "f"}, {"function": {"name": 1}}, {"type": "web_search"}):
        with refused(RequestError, "tools[1] has no function with a name"):
            make_parser("hermes", None, tools=[TOOLS[0], tool])
    for tool_format, reasoning_format in (("harmony", "think"), ("hermes", "harmony")):
        with refused(RequestError, repr(tool_format), repr(reasoning_format), "harmony"):
            make_parser(tool_format, reasoning_format)


@pytest.mark.parametrize("name", NAMES)
def test_markup_made_of_special_tokens_stays_in_the_text(name: str, tmp_path_factory):
    output = OUTPUTS[name]
    parser = make_parser(
        output.tool_format, output.reasoning_format, tools=TOOLS, prompt=output.prompt
    )
    backend = byte_level()
    backend.add_special_tokens([*sorted(parser.keeps), "<|never shown|>"])
    tokenizer = Tokenizer.from_directory(save(backend, tmp_path_factory.mktemp("model")))
    ids = tokenizer.encode(output.text + "<|never shown|>")
    stream = TextStream(tokenizer, keep=parser.keeps)
    pieces = [*(stream.feed(token) for token in ids), stream.finish()]
    assert "".join(pieces) == output.text
    assert parse(output, pieces) == parse(output, [output.text])


def test_a_call_is_told_as_soon_as_it_is_complete():
    parser = make_parser("hermes", None)
    text = '<tool_call>\n{"name": "a", "arguments": {"b": 1}}\n</tool_call>'
    assert [parser.feed(char) for char in text[:-1]] == [[]] * (len(text) - 1)
    assert parser.feed(text[-1]) == [ToolCall(0, "a", '{"b": 1}')]


def test_text_is_held_back_only_while_it_could_be_markup():
    parser = make_parser("hermes", "think")
    assert parser.feed("1 < 2 and ") == [Content("1 < 2 and")]
    assert parser.feed("<tool") == []
    assert parser.feed("s> 3") == [Content(" <tools> 3")]
    assert parser.finish() == []


def test_ids_of_calls_that_the_model_made_are_kept():
    output = OUTPUTS["mistral-small-3.2 several"]
    ids = [delta.id for delta in parse(output, [output.text]) if isinstance(delta, ToolCall)]
    assert ids == ["call00000", "call00001", "call00002"]


DEEP = "[" * 100 + "]" * 100
SCHEMAS = {
    "string": ({"type": "string"}, {x: x for x in ("7", "true", "[1]", " x\n", DEEP)}),
    "integer": ({"type": "integer"}, {"7": 7, " 7 ": 7, "seven": "seven"}),
    "boolean": ({"type": "boolean"}, {"true": True, "False": False}),
    "object": ({"type": "object"}, {'{"a": [null]}': {"a": [None]}, "{a}": "{a}"}),
    "nullable": ({"type": ["string", "null"]}, {"null": None, "7": "7", "None": None}),
    "either": ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, {"7": 7, "[]": "[]"}),
    "enum": ({"enum": ["1", "2"]}, {"1": "1"}),
    "numbers": ({"enum": [1, 2]}, {"1": 1}),
    "open": ({}, {"7": 7, "x": "x", '"x"': "x", "None": None, "NaN": "NaN"}),
}


@pytest.mark.parametrize("kind", SCHEMAS)
def test_bare_values_have_the_type_that_the_tool_asks_for(kind: str):
    schema, values = SCHEMAS[kind]
    tools = [{"function": {"name": "f", "parameters": {"properties": {"x": schema}}}}]
    for written, value in values.items():
        parser = make_parser("glm", None, tools=tools)
        pair = f"<arg_key>x</arg_key><arg_value>{written}</arg_value>"
        (call,) = parser.feed(f"<tool_call>f{pair}</tool_call>")
        assert isinstance(call, ToolCall)
        assert json.loads(call.arguments) == {"x": value}


def test_a_tool_that_was_not_offered_is_called_all_the_same():
    parser = make_parser("qwen3_coder", None, tools=TOOLS)
    text = "<tool_call><function=other><parameter=a>\n1\n</parameter></function></tool_call>"
    assert parser.feed(text) == [ToolCall(0, "other", '{"a": 1}')]


RESULT = {"role": "tool", "tool_call_id": "call00000", "content": "21 degrees"}


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_a_conversation_of_openais_api_reaches_the_template(name: str):
    user = {"role": "user", "content": "Please."}
    messages = [user, message_of([PLAIN]), RESULT]
    text = template(name).render(messages, tools=TOOLS)
    assert "get_weather" in text
    assert "東京" in text
    assert "21 degrees" in text
    assert "\\u6771" not in text
    assert '\\"city\\"' not in text
    assert "None" not in text
