"""Tools over HTTP: what a model is told of them, and calls that are enforced and read."""

import json
import re

import pytest

import mlxserve
from mlxserve.grammar import Grammar
from mlxserve.server import turn
from tests.support.model_dir import SPECIAL, write_model_dir
from tests.support.serving import NAME, serving

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Oslo", "Rome", 'a "quoted" name']},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
CHAT = [{"role": "user", "content": "How is the weather?"}]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


def ask(client, **more):
    return client.chat.completions.create(
        **{"model": NAME, "messages": CHAT, "max_tokens": 600, "temperature": 1.0, **more}
    )


@pytest.fixture
def says(monkeypatch):
    """Let the model say these words, though it may call tools, which a form would allow too."""

    def these(text):
        monkeypatch.setattr(turn, "_grammar", lambda *_: Grammar.choice([text]))

    return these


def check_weather(call):
    assert (call.type, call.function.name) == ("function", "get_weather")
    arguments = json.loads(call.function.arguments)
    assert arguments["city"] in WEATHER["function"]["parameters"]["properties"]["city"]["enum"]
    assert set(arguments) <= {"city", "days"}
    assert arguments.get("days", 1) in range(1, 10)


@pytest.mark.parametrize("seed", range(4))
def test_a_call_that_is_asked_for_is_made_whatever_the_model_would_say(client, seed):
    got = ask(client, tools=[WEATHER, CLOCK], tool_choice=NAMED, seed=seed).choices[0]
    assert (got.finish_reason, got.message.content) == ("tool_calls", None)
    (call,) = got.message.tool_calls
    check_weather(call)


def test_one_call_is_made_where_they_may_not_be_parallel(client):
    got = ask(client, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False, seed=1)
    (call,) = got.choices[0].message.tool_calls
    check_weather(call)


def test_a_streamed_call_is_the_same(client):
    options = {"tools": [WEATHER], "tool_choice": NAMED, "seed": 3}
    (whole,) = ask(client, **options).choices[0].message.tool_calls
    chunks = [c.choices[0] for c in ask(client, **options, stream=True)]
    (told,) = [call for chunk in chunks for call in chunk.delta.tool_calls or ()]
    assert told.index == 0
    assert told.function.name == whole.function.name
    assert told.function.arguments == whole.function.arguments
    assert chunks[-1].finish_reason == "tool_calls"
    assert not any(chunk.delta.content for chunk in chunks)


@pytest.mark.parametrize("stream", [False, True])
def test_the_answer_ends_with_the_first_call_where_they_may_not_be_parallel(client, says, stream):
    says(f"Let me see.\n{CALL}\n{CALL} So be it.")
    got = ask(client, tools=[WEATHER], parallel_tool_calls=False, stream=stream)
    if stream:
        choices = [chunk.choices[0] for chunk in got]
        content = "".join(choice.delta.content or "" for choice in choices)
        calls = [call for choice in choices for call in choice.delta.tool_calls or ()]
        reason = choices[-1].finish_reason
    else:
        message, reason = got.choices[0].message, got.choices[0].finish_reason
        content, calls = message.content, message.tool_calls
        assert got.usage.completion_tokens == len(f"Let me see.\n{CALL}")  # a byte each
    assert (content, len(calls), reason) == ("Let me see.", 1, "tool_calls")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("cut", [len("\n<tool_"), len("\n<tool_call>"), len(CALL) - 20])
def test_half_a_call_is_left_out_of_an_answer_that_was_cut(client, says, caplog, stream, cut):
    says(f"Let me see.{CALL}")
    most = len("Let me see.") + cut
    got = ask(client, tools=[WEATHER], max_tokens=most, stream=stream)
    choices = [chunk.choices[0] for chunk in got] if stream else got.choices
    parts = [choice.delta if stream else choice.message for choice in choices]
    assert "".join(part.content or "" for part in parts) == "Let me see."
    assert not any(part.tool_calls for part in parts)
    assert choices[-1].finish_reason == "length"
    assert re.search("left out, since the answer was cut there: .* ends early", caplog.text)


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_are_those_of_the_content(llm, client, says, stream):
    says(f"<think>Oslo?</think>Let me see.\n{CALL}\nOslo, then.")
    with serving(llm, reasoning_format="think") as server:
        body = {"tools": [WEATHER], "stop": ["Oslo"], "max_tokens": 200, "stream": stream}
        got = server.chat(**body)
    if stream:
        lines = [line[6:] for line in got.text.splitlines() if line.startswith("data: {")]
        choices = [json.loads(line)["choices"][0] for line in lines]
    else:
        choices = [{"delta": got.json()["choices"][0]["message"]} | got.json()["choices"][0]]
    deltas = [choice["delta"] for choice in choices]
    (call,) = [call for delta in deltas for call in delta.get("tool_calls") or ()]
    assert json.loads(call["function"]["arguments"]) == {"city": "Oslo"}
    thought = "".join(delta.get("reasoning_content") or "" for delta in deltas)
    content = "".join(delta.get("content") or "" for delta in deltas)
    assert (thought, content.strip()) == ("Oslo?", "Let me see.")
    says("One Oslo, two")
    got = ask(client, tools=[WEATHER], stop=["Oslo"], stream=stream)
    choices = [chunk.choices[0] for chunk in got] if stream else got.choices
    parts = [choice.delta if stream else choice.message for choice in choices]
    assert "".join(part.content or "" for part in parts) == "One "
    assert choices[-1].finish_reason == "stop"


def test_a_required_call_is_whole_whatever_the_stop_strings(client):
    got = ask(client, tools=[WEATHER], tool_choice=NAMED, stop=["name", "}", "city"]).choices[0]
    check_weather(got.message.tool_calls[0])
    assert got.finish_reason == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
def test_text_around_calls_is_content_and_markup_never_is(client, says, stream):
    says(f"Let me see.\n{CALL}\n{CALL}")
    got = ask(client, tools=[WEATHER], stream=stream)
    if stream:
        deltas = [chunk.choices[0].delta for chunk in got]
        content = "".join(delta.content or "" for delta in deltas)
        calls = [call for delta in deltas for call in delta.tool_calls or ()]
        assert [call.index for call in calls] == [0, 1]
    else:
        content, calls = got.choices[0].message.content, got.choices[0].message.tool_calls
    assert content.strip() == "Let me see."
    assert [json.loads(call.function.arguments) for call in calls] == [{"city": "Oslo"}] * 2
    assert len({call.id for call in calls}) == 2


def test_a_malformed_call_is_text_and_the_log_says_why(client, says, caplog):
    said = '<tool_call>\n{"name": "get_weather", "arguments": {"city": \n</tool_call>'
    says(said)
    got = ask(client, tools=[WEATHER]).choices[0]
    assert got.message.content == said
    assert (got.message.tool_calls, got.finish_reason) == (None, "stop")
    assert "markup is told as text: a call has '<'" in caplog.text


def test_without_tools_markup_is_text(client):
    got = ask(client, extra_body={"choice": [CALL]}).choices[0]
    assert (got.message.content, got.message.tool_calls) == (CALL, None)


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_is_told_apart(llm, stream):
    body = {"choice": ["<think>Hm, 2 or 3?</think>Three."], "max_tokens": 100, "stream": stream}
    with serving(llm, reasoning_format="think") as server:
        got = server.chat(**body)
    if stream:
        lines = [line[6:] for line in got.text.splitlines() if line.startswith("data: {")]
        deltas = [json.loads(line)["choices"][0]["delta"] for line in lines]
        told = [
            "".join(delta.get(name) or "" for delta in deltas)
            for name in ("reasoning_content", "content")
        ]
    else:
        message = got.json()["choices"][0]["message"]
        told = [message["reasoning_content"], message["content"]]
        details = got.json()["usage"]["completion_tokens_details"]
        assert details["reasoning_tokens"] == len("Hm, 2 or 3?")  # a byte each
    assert told == ["Hm, 2 or 3?", "Three."]


@pytest.mark.parametrize("stream", [False, True])
def test_half_a_tag_of_reasoning_is_left_out_where_the_answer_was_cut_and_only_there(llm, stream):
    whole, spelled = "<think>Hm.\n</think>Three.", "<think>a </thi"
    cuts = [(whole, "<thin", ""), (whole, "<think>Hm.\n</", "Hm."), (spelled, spelled, "a </thi")]
    cuts += [(whole, "<think>Hm.\n</think", "Hm."), (whole, "<think>Hm.\n<", "Hm.\n<")]
    with serving(llm, reasoning_format="think") as server:
        for said, told, thought in cuts:
            most = len(told) + (said == told)  # and the end, where it comes by itself
            got = server.chat(choice=[said], max_tokens=most, stream=stream)
            if stream:
                lines = [line[6:] for line in got.text.splitlines() if line.startswith("data: {")]
                choices = [json.loads(line)["choices"][0] for line in lines]
            else:
                choices = [
                    choice | {"delta": choice["message"]} for choice in got.json()["choices"]
                ]
            deltas = [choice["delta"] for choice in choices]
            assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == thought
            assert not any(delta.get("content") for delta in deltas)
            assert choices[-1]["finish_reason"] == ("stop" if said == told else "length")


@pytest.mark.parametrize("thought", ["\n\n", "\nHm 🙂\n\n", "a < b </b> c", ""])
def test_reasoning_tokens_are_those_that_were_drawn_between_the_tags(llm, thought):
    said = [f"<think>{thought}</think>Three."]
    with serving(llm, reasoning_format="think") as server:
        for drawn in (len(thought.encode()), len(thought) // 2):
            most = len("<think>") + drawn  # a byte each; the second time it is cut within
            most += 100 if drawn == len(thought.encode()) else 0
            usage = server.chat(choice=said, max_tokens=most).json()["usage"]
            assert usage["completion_tokens_details"]["reasoning_tokens"] == drawn


def text_of(server, messages, **more):
    """The prompt that a chat becomes."""
    ids = server.http.post("/tokenize", json={"messages": messages, **more}).json()["tokens"]
    return server.http.post("/detokenize", json={"tokens": ids}).json()["prompt"]


def test_a_model_whose_template_knows_no_tools_is_told_of_them_and_of_results(server):
    call = {"id": "c1", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
    chat = [
        {"role": "system", "content": "Be brief."},
        *CHAT,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "Noon"},
    ]
    text = text_of(server, chat, tools=[WEATHER, CLOCK])
    for part in ("Be brief.", "get_weather", "Weather of a city", '{"name": "clock"', "Noon"):
        assert part in text
    assert "clock" not in text_of(server, CHAT)


def test_a_system_message_in_parts_is_extended(server):
    parts = [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind."}]
    chat = [{"role": "system", "content": parts}, *CHAT]
    text = text_of(server, chat, tools=[CLOCK])
    assert text.startswith("Be brief.\nBe kind.\n\nYou can call")
    assert '{"name": "clock"' in text
    asked = {"messages": chat, "tools": [CLOCK]}
    ids = server.http.post("/tokenize", json=asked).json()["tokens"]
    assert ids.count(256 + SPECIAL.index("<|system|>")) == 1


# As of Gemma 1 and 2.
NO_SYSTEM = """\
{%- if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for m in messages %}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate') }}
    {%- endif %}
    {{- '[' + m.role + ']' + m.content + '[end]' }}
{%- endfor %}"""


@pytest.fixture(scope="module")
def without_system(tmp_path_factory):
    """A server of a model whose template has no system message."""
    path = write_model_dir(tmp_path_factory.mktemp("model"))
    settings = {"eos_token": SPECIAL[0], "chat_template": NO_SYSTEM}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    with mlxserve.load(path, max_batch=2) as model, serving(model) as served:
        yield served


def test_without_a_system_message_the_user_s_first_tells_of_tools(without_system):
    calls = [
        {"id": id_, "type": "function", "function": {"name": "clock", "arguments": "{}"}}
        for id_ in ("c1", "c2")
    ]
    chat = [
        *CHAT,
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "Noon"},
        {"role": "tool", "tool_call_id": "c2", "content": "Night"},
    ]
    text = text_of(without_system, chat, tools=[CLOCK])
    first, _, results = text.split("[end]")[:3]
    assert first.startswith("[user]You can call")
    assert '{"name": "clock"' in first
    assert first.endswith(f"\n\n{CHAT[0]['content']}")
    assert results.startswith("[user]")
    assert results.index("Noon") < results.index("Night")


def test_without_a_system_message_a_call_that_is_asked_for_is_made(without_system):
    got = without_system.chat(tools=[WEATHER], tool_choice=NAMED, max_tokens=600, seed=1)
    (call,) = got.json()["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "get_weather"


def test_a_system_message_that_the_template_refuses_is_still_refused(without_system):
    chat = [{"role": "system", "content": "Be brief."}, *CHAT]
    got = without_system.http.post(
        "/v1/chat/completions", json={"messages": chat, "tools": [CLOCK], "max_tokens": 1}
    )
    assert got.status_code == 400
    assert "System role not supported" in got.json()["error"]["message"]


@pytest.mark.parametrize("tool_format", ["deepseek", "gemma", "glm", "harmony", "pythonic"])
def test_a_call_is_enforced_in_every_format(llm, tool_format):
    both = tool_format if tool_format == "harmony" else None
    with serving(llm, tool_format=tool_format, reasoning_format=both) as server:
        got = server.chat(
            tools=[WEATHER], tool_choice=NAMED, max_tokens=600, temperature=1.0, seed=1
        )
    choice = got.json()["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    assert "city" in json.loads(call["function"]["arguments"])


def test_no_choice_is_no_tools(client):
    plain = ask(client, max_tokens=1).usage.prompt_tokens
    assert ask(client, max_tokens=1, tools=[CLOCK]).usage.prompt_tokens > plain
    none = ask(client, max_tokens=1, tools=[CLOCK], tool_choice="none")
    assert none.usage.prompt_tokens == plain


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"tools": [CLOCK, CLOCK]}, "two tools have one name"),
        ({"tools": [CLOCK], "tool_choice": "always"}, 'tool_choice is "always"'),
        ({"tools": [CLOCK], "tool_choice": NAMED}, "a function among tools"),
        ({"tool_choice": "required"}, "tool_choice needs tools"),
        ({"tools": [{"type": "web_search"}]}, "only functions"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, 'has the name "a b"'),
        ({"tools": [CLOCK] * 200}, "200 tools are over 128"),
        ({"tools": 3}, "tools is 3; it must be a list"),
        ({"tools": [CLOCK], "tool_choice": "required", "grammar": "start: /a/"}, None),
        ({"tools": [CLOCK], "grammar": "start: /a/"}, "can't be asked for at once"),
    ],
)
def test_what_can_t_be_done_is_refused_by_name(server, body, message):
    got = server.chat(max_tokens=60, **body)
    if message is None:  # what is required wins: the answer is a call
        assert got.status_code == 200
        assert got.json()["choices"][0]["finish_reason"] in ("tool_calls", "length")
        return
    assert got.status_code == 400
    assert message in got.json()["error"]["message"]


def with_schema(schema):
    function = {"name": "f", "parameters": schema}
    return [CLOCK, {"type": "function", "function": function}]


ENDLESS = {"$ref": "#"}
NO_TYPE = {"type": "object", "properties": {"a": {"type": "zzz"}}}
BEYOND = {
    "type": "object",
    "properties": {
        "a": {"type": "string", "format": "int64"},
        "b": {"type": "array", "uniqueItems": True},
        "c": {"type": "string", "pattern": "(?!x).*"},
    },
}


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("schema", [3, {"type": "array"}, {"type": "string"}, ENDLESS, NO_TYPE])
def test_a_schema_that_can_t_be_one_of_arguments_is_refused_at_once(llm, server, choice, schema):
    before = llm.stats().prompt_tokens
    got = server.chat(tools=with_schema(schema), tool_choice=choice, max_tokens=40)
    assert got.status_code == 400
    error = got.json()["error"]
    assert error["param"] == "tools[1].function.parameters"
    assert error["message"].startswith("tools[1].function.parameters")
    claude = {"name": "f", "input_schema": schema if isinstance(schema, dict) else {"type": 3}}
    body = {"model": NAME, "messages": CHAT, "max_tokens": 40, "tools": [claude]}
    got = server.http.post("/v1/messages", json=body)
    assert got.status_code == 400
    assert got.json()["error"]["message"].startswith("tools[0].input_schema")
    assert llm.stats().prompt_tokens == before


def test_a_schema_that_can_t_be_enforced_is_refused_only_where_it_would_be(server):
    tools = with_schema(BEYOND)
    assert server.chat(tools=tools, max_tokens=1).status_code == 200
    named = {"type": "function", "function": {"name": "clock"}}
    assert server.chat(tools=tools, tool_choice=named, max_tokens=1).status_code == 200
    got = server.chat(tools=tools, tool_choice="required", max_tokens=1)
    assert got.json()["error"]["param"] == "tools[1].function.parameters"


@pytest.mark.parametrize("schema", [{}, None, {"properties": {"a": {"type": "integer"}}}])
def test_arguments_are_an_object_where_the_schema_leaves_it_open(client, schema):
    tools, choice = with_schema(schema), {"type": "function", "function": {"name": "f"}}
    got = ask(client, tools=tools, tool_choice=choice, max_tokens=60, seed=1).choices[0]
    if got.finish_reason == "tool_calls":
        assert isinstance(json.loads(got.message.tool_calls[0].function.arguments), dict)
    else:  # a long one
        assert (got.finish_reason, got.message.content) == ("length", "")


def test_a_call_in_the_chat_that_is_none_is_refused_by_name(server):
    chat = [*CHAT, {"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}]
    got = server.http.post("/v1/chat/completions", json={"messages": chat, "max_tokens": 1})
    assert got.status_code == 400
    assert "messages[1].tool_calls[0] is no call" in got.json()["error"]["message"]
