"""Markup that is wrong, unfinished, huge or hostile: text with a reason, and never an error."""

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mlxserve.text.parsers import Content, Reasoning, ToolCall, make_parser
from mlxserve.text.parsers.reader import MAX_HELD_CHARS
from mlxserve.text.parsers.values import MAX_DEPTH
from tests.text.parsers.families import OUTPUTS, TOOLS, Output, calls_in, parse, text_in

_BAR, _LOW = chr(0xFF5C), chr(0x2581)


def _deepseek(text: str) -> str:
    return text.replace("<|", f"<{_BAR}").replace("|>", f"{_BAR}>").replace("_", _LOW)


# The format, a text that is no call from its first markup on, and words of the reason.
WRONG = [
    ("hermes", "<tool_call>x</tool_call>", "'x' where '{'"),
    ("hermes", "<tool_call>", "ends early"),
    ("hermes", '<tool_call>{"name": "a", "arguments": {}', "ends early"),
    ("hermes", '<tool_call>{"name": "a", "arguments": {"b": "c', "ends early"),
    ("hermes", '<tool_call>{"name": "a", "arguments": {"b": "c\\', "ends early"),
    (
        "hermes",
        '<tool_call>{"name": "a", "arguments": {}}}</tool_call>',
        "'}' where",
    ),
    ("hermes", '<tool_call>{"name": "a", "arguments": {}} or</tool_call>', "'o' where"),
    ("hermes", '<tool_call>{"name": "a", "arguments": [1]}</tool_call>', "no object"),
    ("hermes", '<tool_call>{"name": 7, "arguments": {}}</tool_call>', "no name"),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>', "no name"),
    ("hermes", '<tool_call>{"name": "a", "arguments": {"b": NaN}}</tool_call>', "valid JSON"),
    (
        "hermes",
        '<tool_call>{"name": "a", "arguments": {"b": 1e999}}</tool_call>',
        "written as JSON",
    ),
    ("hermes", '<tool_call>{"name": "a", "arguments": {"b": "\\ud800"}}</tool_call>', "as JSON"),
    ("hermes", '<tool_call>{"name": "\\udc00", "arguments": {}}</tool_call>', "as JSON"),
    ("hermes", "<tool_call>{name: 1,}</tool_call>", "valid JSON"),
    ("hermes", '<tool_call>{"name": "a" "arguments": {}}</tool_call>', "valid JSON"),
    ("qwen3_coder", "<tool_call>\n<function=a>\n<parameter=b>\n1\n</parameter>", "ends early"),
    ("qwen3_coder", "<tool_call>\n<function=a>\nb</function>", "'b' where"),
    ("qwen3_coder", "<function=>", "'>' where a name"),
    ("glm", "<tool_call>", "ends where a name"),
    ("glm", "<tool_call>a b", "'b' where '<arg_key>'"),
    ("glm", "<tool_call>a<arg_key>b</arg_key></tool_call>", "'<arg_value>'"),
    ("glm", "<tool_call>a<arg_key>b</arg_key><arg_value>c</arg_value>", "ends early"),
    ("mistral", "[TOOL_CALLS][]", "empty"),
    ("mistral", '[TOOL_CALLS][{"name": "a"}, {"arguments": {}}]', "no name"),
    ("mistral", '[TOOL_CALLS][{"name": "a"}, {"name": "b", "arguments": {"c": 1e999}}]', "JSON"),
    ("mistral", "[TOOL_CALLS]a[ARGS][1]", "'[' where '{'"),
    ("mistral", "[TOOL_CALLS]a[CALL_ID]b", "ends early"),
    ("deepseek", _deepseek("<|tool_calls_begin|>a"), "'a' where"),
    ("deepseek", _deepseek("<|tool_call_begin|>a<|tool_sep|>{}x<|tool_call_end|>"), "'x' where"),
    ("gemma", "<|tool_call>call:a{b:c}<tool_call|>", "valid JSON"),
    ("gemma", '<|tool_call>call:a{b:<|"|>c', "ends early"),
    ("gemma", "<start_function_call>a{}", "'a' where 'call:'"),
    ("pythonic", "[get_time(1)]", "where '='"),
    ("pythonic", "[get_time(a=open('x'))]", "valid JSON"),
    ("pythonic", "[get_time(a='\\x')]", "isn't Python's"),
    ("pythonic", "[get_time(a={1: 2})]", "a key in quotes"),
    ("pythonic", "<|python_start|>[(a=1)]<|python_end|>", "'(' where a name"),
    ("tool_code", "```tool_code\nimport os\n```", "'o' where '('"),
    ("llama3_json", '{"name": "get_time", "parameters": 5}', "no object"),
    ("llama3_json", '{"name": "get_time", "parameters": {', "ends early"),
    ("llama3_json", "<|python_tag|>print(1)", "'p' where '{'"),
    ("harmony", "<|channel|>commentary to=python<|message|>print(1)", "'p' where '{'"),
    ("harmony", '<|channel|>commentary to=functions.a<|message|>{"b', "ends early"),
    ("harmony", "<|channel|>analysis<|end|>", "no body"),
    ("harmony", "<|channel|>analysis", "ends early"),
]


@pytest.mark.parametrize(("tool_format", "text", "words"), WRONG)
def test_what_is_malformed_is_text_with_a_reason(tool_format: str, text: str, words: str):
    before = "" if tool_format == "harmony" else "Well:\n"
    output = Output(tool_format=tool_format, reasoning_format=None, text=before + text)
    deltas = parse(output, [output.text])
    assert text_in(deltas, Content) == output.text
    assert calls_in(deltas) == []
    (reason,) = [each.reason for each in deltas if isinstance(each, Content) and each.reason]
    assert words in reason
    assert "\n" not in reason
    for i in range(1, len(output.text)):
        assert parse(output, [output.text[:i], output.text[i:]]) == deltas


def test_a_good_call_after_a_bad_one_is_read():
    good = '<tool_call>{"name": "a", "arguments": {}}</tool_call>'
    for bad in ("<tool_call>{</tool_call>", '<tool_call>{"name": "b}</tool_call>"</tool_call>'):
        output = Output(tool_format="hermes", reasoning_format=None, text=f"{bad}\n{good}")
        deltas = parse(output, list(output.text))
        assert calls_in(deltas) == [("a", {})]
        assert text_in(deltas, Content) == bad


def marked(name: str) -> bool:
    """Whether calls begin with what no text has in it."""
    starts = ("<|python_start|>", "<|tool_call_start|>")
    bare = OUTPUTS[name].tool_format in ("llama3_json", "pythonic")
    return not bare or any(start in OUTPUTS[name].text for start in starts)


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in sorted(OUTPUTS) if marked(name)])
def test_wherever_an_output_is_cut_markup_is_told_to_be_unfinished(name: str):
    output = OUTPUTS[name]
    for i in range(len(output.text)):
        parser = make_parser(
            output.tool_format, output.reasoning_format, tools=TOOLS, prompt=output.prompt
        )
        deltas = parser.feed(output.text[:i]) + parser.finish()
        content = [delta for delta in deltas if isinstance(delta, Content)]
        certain = "".join(delta.text for delta in content if not delta.unfinished).rstrip()
        # The first 3 characters of a marker are as likely text.
        told = output.content.startswith(certain)
        assert told or output.content.startswith(certain[:-3].rstrip())
        assert all(delta.reason for delta in content if delta.unfinished)
        thought = [delta for delta in deltas if isinstance(delta, Reasoning)]
        certain = "".join(delta.text for delta in thought if not delta.unfinished).rstrip()
        # And the first one of a tag that closes reasoning.
        told = output.reasoning.startswith(certain)
        assert told or output.reasoning.startswith(certain[:-1].rstrip())


@pytest.mark.parametrize(
    "text", ["a < b", "a </b", "a\n</thin", "a <", "a </think", "[/b]\n</t> </"]
)
def test_what_looks_like_half_a_tag_is_not_lost(text: str):
    output = Output(tool_format=None, reasoning_format="think", text=f"<think>{text}")
    deltas = parse(output, list(output.text))
    assert text_in(deltas, Reasoning) == text
    for i in range(1, len(output.text)):
        assert parse(output, [output.text[:i], output.text[i:]]) == deltas


@pytest.mark.parametrize("name", sorted(OUTPUTS))
def test_where_reasoning_is_told_to_be_is_all_of_it(name: str):
    output = OUTPUTS[name]
    parser = make_parser(
        output.tool_format, output.reasoning_format, tools=TOOLS, prompt=output.prompt
    )
    for char in output.text:
        parser.feed(char)
    parser.finish()
    told = [output.text[begin:end].strip() for begin, end in parser.reasoned]
    assert "\n".join(filter(None, told)) == output.reasoning.strip()


def test_calls_before_one_that_is_cut_off_are_read():
    text = OUTPUTS["deepseek-v3.1 several"].text
    cut = text[: text.rindex("{}")]
    output = Output(tool_format="deepseek", reasoning_format=None, text=cut)
    deltas = parse(output, [cut])
    assert [name for name, _ in calls_in(deltas)] == ["get_weather", "write_note"]
    content = text_in(deltas, Content)
    assert content.startswith("Let me see.")
    assert "get_time" in content
    assert "write_note" not in content


@pytest.mark.parametrize(
    ("tool_format", "opening"),
    [
        ("hermes", '<tool_call>{"name": "a", "arguments": {"b": "'),
        ("hermes", '<tool_call>{"name": "a", "arguments": {"b": ['),
        ("hermes", "<tool_call>"),
        ("qwen3_coder", "<tool_call><function=a><parameter=b>"),
        ("glm", "<tool_call>a<arg_key>"),
        ("mistral", "[TOOL_CALLS]"),
        ("gemma", '<|tool_call>call:a{b:<|"|>'),
        ("pythonic", "[get_time(a='"),
        ("llama3_json", '{"name": "'),
        ("harmony", "<|channel|>commentary to=functions.a<|message|>"),
        ("harmony", "<|channel|>"),
    ],
)
def test_markup_without_end_is_let_go(tool_format: str, opening: str):
    text = opening + " 1," * (MAX_HELD_CHARS // 3 + 100)
    output = Output(tool_format=tool_format, reasoning_format=None, text=text)
    whole = parse(output, [text])
    assert text_in(whole, Content) == text
    assert len([delta for delta in whole if isinstance(delta, Content) and delta.reason]) == 1
    pieces = [text[i : i + 4099] for i in range(0, len(text), 4099)]
    assert parse(output, pieces) == whole


@pytest.mark.parametrize(
    ("tool_format", "before", "opens", "closes", "after"),
    [
        ("hermes", '<tool_call>{"name": "a", "arguments": ', '{"b":', "}", "}</tool_call>"),
        ("mistral", "[TOOL_CALLS]a", '{"b":', "}", ""),
        (
            "glm",
            "<tool_call>a<arg_key>b</arg_key><arg_value>",
            "[",
            "]",
            "</arg_value></tool_call>",
        ),
        ("gemma", "<|tool_call>call:a", "{b:", "}", "<tool_call|>"),
        ("gemma", "<|tool_call>call:a{b:", "[", "]", "}<tool_call|>"),
        ("pythonic", "[get_time(a=", "[", "]", ")]"),
        ("pythonic", "[get_time(a=", "{'b':", "}", ")]"),
    ],
)
def test_depth_is_limited(tool_format: str, before: str, opens: str, closes: str, after: str):
    def deltas(depth: int) -> list[object]:
        text = before + opens * depth + "1" + closes * depth + after
        output = Output(tool_format=tool_format, reasoning_format=None, text=text)
        told = parse(output, [text])
        assert calls_in(told) or text_in(told, Content) == text
        return [delta.reason if isinstance(delta, Content) else None for delta in told]

    assert deltas(MAX_DEPTH - 2) == [None]
    for depth in (MAX_DEPTH + 2, 50_000):
        assert f"nested over {MAX_DEPTH}" in str(deltas(depth)[0])


_MARKUP = sorted(
    {part for output in OUTPUTS.values() for part in output.text.split() if len(part) < 40}
)


@st.composite
def mutated(draw: st.DrawFn) -> Output:
    """A text with pieces taken out, doubled, put elsewhere or from others; or of another family."""
    output = OUTPUTS[draw(st.sampled_from(sorted(OUTPUTS)))]
    text = output.text
    output = draw(st.sampled_from([output, OUTPUTS[draw(st.sampled_from(sorted(OUTPUTS)))]]))
    for _ in range(draw(st.integers(1, 4))):
        i, j = sorted((draw(st.integers(0, len(text))), draw(st.integers(0, len(text)))))
        text = draw(
            st.sampled_from(
                [
                    text[:i] + text[j:],
                    text[:j] + text[i:],
                    text[:i] + draw(st.sampled_from(_MARKUP)) + text[i:],
                    text[:i] + draw(st.text(max_size=4)) + text[i:],
                    text[i:] + text[:i],
                ]
            )
        )
    return Output(
        tool_format=output.tool_format,
        reasoning_format=output.reasoning_format,
        text=text,
        prompt=output.prompt,
    )


@pytest.mark.full
@settings(deadline=None, max_examples=200)
@given(output=mutated(), data=st.data())
def test_any_text_is_parsed_the_same_however_it_is_cut(output: Output, data: st.DataObject):
    whole = parse(output, [output.text])
    assert parse(output, list(output.text)) == whole
    i = data.draw(st.integers(0, len(output.text)))
    assert parse(output, [output.text[:i], "", output.text[i:]]) == whole
    for delta in whole:
        if isinstance(delta, ToolCall):
            assert isinstance(json.loads(delta.arguments), dict)
        else:
            assert isinstance(delta, Content | Reasoning)
            assert delta.text


# What is told is made of the text: nothing is invented, and nothing but markup is lost.
@settings(deadline=None, max_examples=200)
@given(text=st.text("<>/[]{}\n tolc_a", max_size=60))
@example(text=" " * 200 + "<tool_call>" + " " * 200)
def test_text_with_bits_of_markup_stays_as_it_is(text: str):
    output = Output(tool_format="hermes", reasoning_format=None, text=text)
    deltas = parse(output, list(text))
    assert deltas == parse(output, [text])
    assert text_in(deltas, Content) == text
