"""Fields within fields: one that has no effect is named, one that can't be honoured is refused."""

import json

import pytest

import mlxserve
from tests.support.model_dir import write_model_dir
from tests.support.serving import NAME, serving

CHAT = [{"role": "user", "content": "x"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CLAUDE_TOOL = {"name": "f", "input_schema": {"type": "object"}}
HEADER = "x-mlxserve-ignored"


def chat(server, **body):
    return server.http.post(
        "/v1/chat/completions", json={"messages": CHAT, "max_tokens": 1, **body}
    )


def message(server, **body):
    given = {"model": NAME, "messages": CHAT, "max_tokens": 1, **body}
    return server.http.post("/v1/messages", json=given)


def block(**more):
    return [{"role": "user", "content": [{"type": "text", "text": "x", **more}]}]


UNKNOWN = [
    (chat, {"stream": True, "stream_options": {"zzz": 1}}, "stream_options.zzz"),
    (chat, {"messages": [{**CHAT[0], "zzz": 1}, {**CHAT[0], "zzz": 2}]}, "messages[0].zzz"),
    (chat, {"messages": [*CHAT, *block(zzz=1)]}, "messages[1].content[0].zzz"),
    (chat, {"tools": [TOOL | {"zzz": 1}]}, "tools[0].zzz"),
    (
        chat,
        {"tools": [TOOL, {**TOOL, "function": {"name": "g", "zzz": 1}}]},
        "tools[1].function.zzz",
    ),
    (chat, {"response_format": {"type": "json_object", "zzz": 1}}, "response_format.zzz"),
    (chat, {"chat_template_kwargs": {"zzz": 1}}, "chat_template_kwargs.zzz"),
    (chat, {"reasoning_effort": "high"}, "reasoning_effort"),
    (chat, {"max_tokens": 2, "max_completion_tokens": 1}, "max_tokens"),
    (message, {"thinking": {"type": "disabled", "zzz": 1}}, "thinking.zzz"),
    (message, {"thinking": {"type": "enabled"}}, "thinking"),
    (message, {"tool_choice": {"type": "auto", "zzz": 1}}, "tool_choice.zzz"),
    (message, {"messages": block(zzz=1)}, "messages[0].content[0].zzz"),
    (message, {"tools": [CLAUDE_TOOL | {"eager_input_streaming": True}]},
     "tools[0].eager_input_streaming"),
    (message, {"output_config": {"effort": "low", "zzz": 1}},
     "output_config.zzz, output_config.effort"),
]  # fmt: skip


@pytest.mark.parametrize(("ask", "body", "named"), UNKNOWN)
def test_what_has_no_effect_is_named_by_its_place(server, ask, body, named):
    got = ask(server, **body)
    assert (got.status_code, got.headers.get(HEADER)) == (200, named)


def test_strict_refuses_it(llm):
    with serving(llm, strict=True) as strict:
        for ask, body, named in UNKNOWN:
            first = named.split(", ")[0]
            error = ask(strict, **body).json()["error"]
            assert error["message"] == f"{first} has no effect here; leave it out"
        assert chat(strict).status_code == message(strict).status_code == 200


@pytest.mark.parametrize(
    ("ask", "body", "place"),
    [
        (chat, {"stream": True, "stream_options": {"include_obfuscation": True}},
         "stream_options.include_obfuscation"),
        (chat, {"response_format": {"type": "json_object", "schema": {}}},
         "response_format.schema"),
        (chat, {"messages": [{**CHAT[0], "audio": {"id": "a"}}]}, "messages[0].audio"),
        (message, {"messages": block(citations={"enabled": True})},
         "messages[0].content[0].citations"),
        (message, {"system": [{"type": "text", "text": "x", "citations": {"enabled": True}}]},
         "system[0].citations"),
        (message, {"tools": [CLAUDE_TOOL | {"input_examples": [{}]}]}, "tools[0].input_examples"),
        (message, {"tools": [CLAUDE_TOOL | {"defer_loading": True}]}, "tools[0].defer_loading"),
    ],
)  # fmt: skip
def test_what_is_known_and_can_t_be_honoured_is_refused(server, ask, body, place):
    got = ask(server, **body)
    assert got.status_code == 400
    assert got.json()["error"]["message"].startswith(f"{place} can't be honoured: ")


@pytest.mark.parametrize(
    ("ask", "body"),
    [
        (chat, {"stream": True, "stream_options": {"include_obfuscation": False}}),
        (chat, {"messages": [{**CHAT[0], "annotations": [], "refusal": None}]}),
        (chat, {"metadata": {"any": "thing"}}),
        (message, {"messages": block(citations=None)}),
        (message, {"messages": block(citations={"enabled": False})}),
        (message, {"tools": [CLAUDE_TOOL | {"defer_loading": False, "input_examples": []}]}),
        (message, {"metadata": {"user_id": "me"}}),
        (message, {"thinking": {"type": "disabled"}}),
    ],
)
def test_what_asks_for_nothing_more_is_fine(server, ask, body):
    got = ask(server, **body)
    assert (got.status_code, got.headers.get(HEADER)) == (200, None)


def test_what_a_template_reads_has_an_effect(tmp_path):
    """A key of messages, a role and a variable that only this model's template knows."""
    template = (
        "{% if deep is defined %}{{ deep }}{% endif %}{{ reasoning_effort }}"
        "{% for m in messages %}{% if m.role == 'critic' %}!{% endif %}"
        "{{ m.mood }}{{ m.content }}{% endfor %}"
    )
    settings = write_model_dir(tmp_path) / "tokenizer_config.json"
    settings.write_text(json.dumps({"eos_token": "<|end|>", "chat_template": template}))
    with mlxserve.load(tmp_path) as llm, serving(llm, strict=True) as server:
        got = chat(
            server,
            messages=[{"role": "critic", "content": "x", "mood": "good"}],
            reasoning_effort="low",
            chat_template_kwargs={"deep": 1},
        )
        assert got.status_code == 200, got.text
        assert got.json()["usage"]["prompt_tokens"] == len("1low!goodx")  # a byte each


@pytest.mark.parametrize(
    ("ask", "body", "words"),
    [
        (chat, {"reasoning_effort": "zzz"}, ['reasoning_effort is "zzz"', "low, medium, high"]),
        (message, {"output_config": {"effort": "zzz"}}, ['output_config.effort is "zzz"']),
        (message, {"thinking": {"type": "zzz"}}, ["enabled, adaptive or disabled"]),
        (chat, {"response_format": {}}, ["response_format is {}"]),
        (chat, {"max_completion_tokens": 0}, ["max_completion_tokens is 0"]),
        (message, {"output_format": {"type": "text"}}, ["output_format is", "json_schema"]),
        (message, {"thinking": {"type": "enabled", "budget_tokens": 0}},
         ["thinking.budget_tokens is 0"]),
        (message, {"tool_choice": {"type": "any", "name": "f"}, "tools": [CLAUDE_TOOL]},
         ['tool_choice.name is "f"', "left out"]),
        (message, {"tool_choice": {"type": "tool", "name": "g"}, "tools": [CLAUDE_TOOL]},
         ['tool_choice.name is "g"; it must be the name of one of tools']),
        (message, {"tool_choice": {"type": "tool"}, "tools": [CLAUDE_TOOL]},
         ["tool_choice.name is null"]),
        (message, {"tools": [{"name": "f"}]}, ["tools[0].input_schema is missing"]),
        (message, {"stop_sequences": [""]}, ["stop_sequences: stop string ''"]),
        (message, {"messages": [CHAT[0], {"role": "assistant", "content": "The"}]},
         ["messages[1] is the assistant's", "end with the user's"]),
        (message, {"messages": [{"role": "assistant", "content": [
            {"type": "tool_use", "id": "a", "name": "f", "input": "x"}]}, CHAT[0]]},
         ['messages[0].content[0].input is "x"; it must be an object']),
        (chat, {"logit_bias": {"01": 1}}, ['logit_bias has "01"']),
        (chat, {"logit_bias": {"1_0": 1}}, ['logit_bias has "1_0"']),
        (chat, {"logit_bias": {"9" * 5000: 1}}, ["its keys must be token ids"]),
        (message, {"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}},
         ["output_config.format: ", '"not"']),
        (message, {"output_format": {"type": "json_schema", "schema": {}},
                   "output_config": {"format": {"type": "json_schema", "schema": {}}}},
         ["output_config.format and output_format"]),
    ],
)  # fmt: skip
def test_a_wrong_value_within_a_field_is_named_with_what_may_be(server, ask, body, words):
    got = ask(server, **body)
    assert got.status_code == 400
    assert all(word in got.json()["error"]["message"] for word in words), got.text


def test_a_cache_control_is_checked_wherever_it_stands(server):
    result = {"type": "tool_result", "tool_use_id": "a"}
    inner = {"type": "text", "text": "x", "cache_control": {"type": "zzz"}}
    messages = [{"role": "user", "content": [{**result, "content": [inner]}]}]
    got = message(server, messages=messages)
    assert got.status_code == 400
    counted = {"model": NAME, "messages": messages}
    assert server.http.post("/v1/messages/count_tokens", json=counted).json() == got.json()
    place = "messages[0].content[0].content[0].cache_control"
    assert got.json()["error"]["message"].startswith(f'{place} is {{"type": "zzz"}}; it must be')


@pytest.mark.parametrize("levels", [150, 500])
def test_a_fix_is_never_cut_off(server, levels):
    value = 1
    for _ in range(levels):
        value = {"a" * 20: value}
    error = chat(server, chat_template_kwargs=value).json()["error"]
    assert error["message"].startswith("chat_template_kwargs.aaa")
    assert error["message"].endswith("nested over 100 levels deep; flatten it")
    assert error["param"].startswith("chat_template_kwargs.aaa")
    value = 1
    for _ in range(levels):
        value = [value]
    error = server.complete(prompt=[value]).json()["error"]
    assert error["message"].endswith("they must be whole numbers")
