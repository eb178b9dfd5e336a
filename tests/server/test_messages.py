"""Anthropic's dialect, through its own client."""

import json
from typing import Literal

import anthropic
import pydantic
import pytest
import tokenizers

import mlxserve
from mlxserve.grammar import Grammar
from mlxserve.server import turn
from tests.support.model_dir import write_thinking_model_dir
from tests.support.serving import NAME, TIMEOUT_S, serving

CHAT = [{"role": "user", "content": "Tell me"}]
GREEDY = {"extra_body": {"temperature": 0.0}}
TOOL = {
    "name": "clock",
    "description": "The time somewhere",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def claude(server):
    with anthropic.Anthropic(
        base_url=server.url, api_key="none", max_retries=0, timeout=TIMEOUT_S
    ) as made:
        yield made


def post(server, **body):
    given = {"model": NAME, "max_tokens": 8, "messages": CHAT, **body}
    return server.http.post("/v1/messages", json=given)


def test_an_answer_is_that_of_generate(llm, claude):
    expected = mlxserve.generate(llm, CHAT, max_tokens=30)
    got = claude.messages.create(model=NAME, max_tokens=30, messages=CHAT, **GREEDY)
    assert [block.text for block in got.content] == [expected.text]
    reason = {"stop": "end_turn", "length": "max_tokens"}[expected.finish_reason]
    assert (got.stop_reason, got.role, got.type) == (reason, "assistant", "message")
    assert got.usage.output_tokens == len(expected.token_ids)
    with claude.messages.stream(model=NAME, max_tokens=30, messages=CHAT, **GREEDY) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert [block.text for block in streamed.content] == [expected.text]
    assert (streamed.stop_reason, streamed.usage.output_tokens) == (
        reason,
        got.usage.output_tokens,
    )
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")


def test_tokens_read_and_cached_add_up_to_those_counted(claude):
    system = "A prompt that no other test has. " * 4
    counted = claude.messages.count_tokens(model=NAME, system=system, messages=CHAT).input_tokens
    for cached in (False, True):
        got = claude.messages.create(
            model=NAME, max_tokens=2, system=[{"type": "text", "text": system}], messages=CHAT
        ).usage
        assert got.input_tokens + got.cache_read_input_tokens == counted
        assert (got.cache_read_input_tokens > len(system)) == cached


def test_a_stop_sequence_is_named(llm, claude):
    text = mlxserve.generate(llm, CHAT, max_tokens=30).text
    stop = text[4:7]
    got = claude.messages.create(
        model=NAME, max_tokens=30, messages=CHAT, stop_sequences=["not this", stop], **GREEDY
    )
    assert (got.stop_reason, got.stop_sequence) == ("stop_sequence", stop)
    assert got.content[0].text == text[: text.index(stop)]


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "clock"}])
def test_a_tool_is_used(claude, choice):
    got = claude.messages.create(
        model=NAME, max_tokens=600, messages=CHAT, tools=[TOOL],
        tool_choice={**choice, "disable_parallel_tool_use": True},
    )  # fmt: skip
    (block,) = got.content
    assert (got.stop_reason, block.type, block.name) == ("tool_use", "tool_use", "clock")
    assert block.input in ({"city": "Oslo"}, {"city": "Rome"})
    assert block.id.startswith("toolu_")


@pytest.mark.parametrize("stream", [False, True])
def test_one_tool_is_used_where_they_may_not_be_parallel(claude, monkeypatch, stream):
    call = '<tool_call>\n{"name": "clock", "arguments": {"city": "Oslo"}}\n</tool_call>'
    monkeypatch.setattr(turn, "_grammar", lambda *_: Grammar.choice([f"{call}\n{call}"]))
    body = {"model": NAME, "max_tokens": 600, "messages": CHAT, "tools": [TOOL]}
    body["tool_choice"] = {"type": "auto", "disable_parallel_tool_use": True}
    if stream:
        with claude.messages.stream(**body) as events:
            got = events.get_final_message()
    else:
        got = claude.messages.create(**body)
    assert (got.stop_reason, [block.type for block in got.content]) == ("tool_use", ["tool_use"])


class Clock(pydantic.BaseModel):
    """Of a form."""

    city: Literal["Oslo", "Rome"]


def test_an_answer_has_the_form_that_is_asked_for(server, claude):
    got = claude.messages.parse(
        model=NAME, max_tokens=300, messages=CHAT, output_format=Clock
    )  # fmt: skip
    assert got.parsed_output.city in ("Oslo", "Rome")
    schema = {"type": "json_schema", "schema": TOOL["input_schema"]}
    for form in ({"output_config": {"format": schema}}, {"output_format": schema}):
        told = post(server, max_tokens=300, **form).json()
        assert json.loads(told["content"][0]["text"])["city"] in ("Oslo", "Rome")


def test_a_streamed_use_of_a_tool_is_whole(claude):
    choice = {"type": "any", "disable_parallel_tool_use": True}
    with claude.messages.stream(
        model=NAME, max_tokens=600, messages=CHAT, tools=[TOOL], tool_choice=choice
    ) as stream:
        for event in stream:
            assert event.type != "text"
        got = stream.get_final_message()
    assert got.stop_reason == "tool_use"
    assert all(block.input["city"] in ("Oslo", "Rome") for block in got.content)


def test_a_conversation_with_tools_becomes_one_that_the_template_knows(server):
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "What time is it?"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "t1", "name": "clock", "input": {"city": "Rome"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "Noon", "is_error": True},
                {"type": "text", "text": "And now?"},
            ],
        },
    ]
    openai = [
        {"role": "user", "content": "What time is it?"},
        {
            "role": "assistant",
            "content": "I look.",
            "tool_calls": [
                {
                    "id": "t1",
                    "type": "function",
                    "function": {"name": "clock", "arguments": '{"city":"Rome"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "Error: Noon"},
        {"role": "user", "content": "And now?"},
    ]
    body = {"model": NAME, "messages": messages}
    counted = server.http.post("/v1/messages/count_tokens", json=body).json()
    assert (
        counted["input_tokens"]
        == server.http.post("/tokenize", json={"messages": openai}).json()["count"]
    )


@pytest.mark.parametrize("stream", [False, True])
def test_thinking_is_a_block_before_the_text(llm, monkeypatch, stream):
    said = Grammar.choice(["<think>Hm, 2?</think>Three."])
    monkeypatch.setattr(turn, "_grammar", lambda *_: said)
    thinking = {"type": "enabled", "budget_tokens": 1024}
    with (
        serving(llm, reasoning_format="think") as server,
        anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as claude,
    ):
        ask = {"model": NAME, "max_tokens": 90, "messages": CHAT, "thinking": thinking}
        if stream:
            with claude.messages.stream(**ask) as events:
                got = events.get_final_message()
        else:
            raw = claude.messages.with_raw_response.create(**ask)
            assert raw.headers["x-mlxserve-ignored"] == "thinking.budget_tokens"
            got = raw.parse()
    assert [(b.type, getattr(b, b.type)) for b in got.content] == [
        ("thinking", "Hm, 2?"),
        ("text", "Three."),
    ]


@pytest.fixture(scope="module")
def thinker(tmp_path_factory):
    with mlxserve.load(write_thinking_model_dir(tmp_path_factory.mktemp("thinker"))) as model:
        yield model


@pytest.fixture
def thoughts(thinker, monkeypatch):
    """Ask; the answer, its tokens, and after how many of them its thinking ends, if it does."""
    submitted = []
    submit = thinker.submit
    monkeypatch.setattr(
        thinker, "submit", lambda answers, out: (submitted.extend(answers), submit(answers, out))
    )
    (close,) = thinker.tokenizer.encode("</think>")

    def ask(budget=None, **body):
        thinking = {"type": "enabled", "budget_tokens": budget}
        given = {"temperature": 0.0, "max_tokens": 60, "thinking": thinking, **body}
        with serving(thinker) as server:
            got = post(server, **given)
        assert got.status_code == 200, got.text
        assert "x-mlxserve-ignored" not in got.headers
        ids = submitted[-1].token_ids
        kinds = [block["type"] for block in got.json()["content"]]
        return got.json(), kinds, ids, ids.index(close) if close in ids else None

    return ask


@pytest.mark.parametrize("budget", [1, 20])
def test_thinking_ends_when_its_budget_is_used_up(thoughts, budget):
    _, kinds, drawn, end = thoughts()
    assert (kinds, end) == (["thinking"], None)
    _, kinds, ids, end = thoughts(budget)
    assert (kinds, end) == (["thinking", "text"], budget)
    assert ids[:budget] == drawn[:budget]  # until then nothing is changed


# By format: its marks, and a text in which the model thinks as long as it may.
OWN_MARKS = {
    "gemma": (
        ["<|channel>", "<channel|>"],
        '<|channel> "thought\\n" TEXT <channel|> "ok"',
    ),
    "harmony": (
        ["<|start|>", "<|channel|>", "<|message|>"],
        '<|channel|> "analysis" <|message|> TEXT <|end|> <|start|> "assistant" '
        '<|channel|> "final" <|message|> "ok"',
    ),
}


@pytest.mark.parametrize("reasoning_format", OWN_MARKS)
def test_thinking_in_marks_of_several_tokens_has_a_budget_too(
    tmp_path, monkeypatch, reasoning_format
):
    names, form = OWN_MARKS[reasoning_format]
    marks = [tokenizers.AddedToken(name, special=True) for name in names]
    shown = "{# tools " + " ".join(names) + " #}"
    with mlxserve.load(write_thinking_model_dir(tmp_path, marks, shown, "<|system|>")) as llm:
        for name in [*names, "<|end|>"]:
            form = form.replace(name, f"<[{llm.tokenizer.encode(name)[0]}]>")
        said = Grammar.lark(f"start: {form}\nTEXT: /(?s:.*)/")
        monkeypatch.setattr(turn, "_grammar", lambda *_: said)
        for budget in (2, 20):
            thinking = {"type": "enabled", "budget_tokens": budget}
            with serving(llm) as server:
                got = post(server, thinking=thinking, temperature=0.0, max_tokens=100)
            assert "x-mlxserve-ignored" not in got.headers
            thought, text = got.json()["content"]
            assert (text["type"], text["text"]) == ("text", "ok")
            assert 0 < len(thought["thinking"]) <= budget + 3  # not in the midst of a character


def test_a_budget_that_is_not_used_up_changes_nothing(thoughts):
    assert thoughts(1000)[1:] == thoughts()[1:]


def test_a_call_that_is_asked_for_comes_after_thinking_within_the_budget(thoughts):
    choice = {"type": "any", "disable_parallel_tool_use": True}
    told, kinds, _, end = thoughts(
        30, max_tokens=600, temperature=1.0, tools=[TOOL], tool_choice=choice
    )
    assert 30 <= end < 34  # not in the midst of a character
    assert kinds == ["thinking", "tool_use"]
    assert told["content"][1]["input"]["city"] in ("Oslo", "Rome")


def test_a_budget_of_nothing_is_refused(thinker):
    with serving(thinker) as server:
        got = post(server, thinking={"type": "enabled", "budget_tokens": 0})
    assert got.status_code == 400
    assert "thinking.budget_tokens is 0" in got.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "status", "kind", "message"),
    [
        ({"model": "other"}, 404, "not_found_error", "\"other\" isn't served"),
        ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens"),
        ({"max_tokens": 0}, 400, "invalid_request_error", "max_tokens is 0"),
        ({"messages": []}, 400, "invalid_request_error", "messages is empty"),
        ({"messages": [{"role": "system", "content": "x"}]}, 400, "invalid_request_error", "role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            400, "invalid_request_error", 'messages[0].content[0] is of type "image"; only text',
        ),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, 400, "invalid_request_error", "b"),
        ({"mcp_servers": [{}]}, 400, "invalid_request_error", "mcp_servers can't be honoured"),
        ({"system": [{"type": "text", "text": "x", "cache_control": {"type": "x"}}]}, 400,
         "invalid_request_error", "cache_control"),
        ({"messages": [{"role": "user", "content": "long " * 3000}]}, 400,
         "invalid_request_error", "this model can take"),
    ],
)  # fmt: skip
def test_errors_have_anthropic_s_shape(server, body, status, kind, message):
    got = post(server, **body)
    assert got.status_code == status
    told = got.json()
    assert (told["type"], told["error"]["type"]) == ("error", kind)
    assert message in told["error"]["message"]


def test_an_error_in_a_stream_is_an_event(server, llm, monkeypatch):
    def refuse(*_):
        raise mlxserve.CapacityError("no room")

    monkeypatch.setattr(llm, "submit", refuse)
    got = post(server, stream=True)
    assert got.status_code == 429
    assert json.loads(got.text)["error"]["type"] == "rate_limit_error"


def test_cache_control_pins_the_prompt(server, llm, monkeypatch):
    seen = []
    submit = llm.submit
    monkeypatch.setattr(
        llm, "submit", lambda answers, out: (seen.extend(answers), submit(answers, out))
    )
    block = {"type": "text", "text": "Keep this.", "cache_control": {"type": "ephemeral"}}
    assert post(server, system=[block]).status_code == 200
    block["cache_control"]["ttl"] = "1h"
    assert post(server, system=[block]).status_code == 200
    assert post(server).status_code == 200
    assert [answer.request.pin_s for answer in seen] == [300.0, 3600.0, None]
