"""Chat templates: the same text as transformers, and errors a user can act on."""

import contextlib
from pathlib import Path
from typing import Any

import pytest

from mlxserve.errors import ModelError, RequestError
from mlxserve.text import chat
from mlxserve.text.chat import ChatTemplate
from mlxserve.text.tokenizer import Tokenizer
from tests.text import templates
from tests.text.support import refused
from tests.text.templates import PAPERS, PLAIN, TOOL_TURNS, TOOLS, TURNS
from tests.text.training import byte_level, save, with_bos, write_json

CASES: list[tuple[str, list[Any], dict[str, Any]]] = [
    (templates.CHATML, PLAIN, {}),
    (templates.CHATML, TURNS, {"add_generation_prompt": False}),
    (templates.CHATML, TURNS, {"thinking": False}),
    (templates.CHATML, TOOL_TURNS, {"tools": TOOLS}),
    (templates.CHATML, [*TOOL_TURNS, TOOL_TURNS[-1]], {"tools": TOOLS * 2}),
    (templates.LLAMA3, PLAIN, {"date_string": "02 Feb 2026"}),
    (templates.LLAMA3, TURNS, {}),
    (templates.LLAMA3, TOOL_TURNS, {"tools": TOOLS}),
    (templates.MISTRAL, TURNS, {}),
    (templates.MISTRAL, TURNS[1:], {"bos_token": "<other>"}),
    (templates.GEMMA, TURNS, {}),
    (templates.GEMMA, [{"role": "user", "content": [{"type": "text", "text": " a "}] * 2}], {}),
    (templates.DOCUMENTS, TURNS, {"documents": PAPERS}),
    (templates.DOCUMENTS, PLAIN * 40, {"documents": PAPERS, "add_generation_prompt": False}),
    (templates.PARTS_ONLY, [{"role": "user", "content": [{"type": "text", "text": "a"}]}], {}),
]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(with_bos(byte_level()), tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(("template", "messages", "options"), CASES)
def test_the_same_as_transformers(
    model_dir: Path, template: str, messages: list[Any], options: dict[str, Any]
):
    transformers = pytest.importorskip("transformers")
    save(with_bos(byte_level()), model_dir, chat_template=template)
    ours = Tokenizer.from_directory(model_dir)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(model_dir)
    options = {"add_generation_prompt": True, **options}
    text = theirs.apply_chat_template(messages, tokenize=False, **options)
    assert ours.render_chat(messages, **options) == text
    ids = theirs.apply_chat_template(messages, return_dict=False, **options)
    assert ours.apply_chat_template(messages, **options) == ids


def test_bos_is_in_the_prompt_once(model_dir: Path):
    save(with_bos(byte_level()), model_dir, chat_template=templates.MISTRAL)
    tokenizer = Tokenizer.from_directory(model_dir)
    assert tokenizer.encode("x")[0] == tokenizer.bos_id
    assert tokenizer.apply_chat_template(PLAIN).count(tokenizer.bos_id) == 1


def _render(source: str, messages: object = PLAIN, **options: Any) -> str:
    variables = options.pop("variables", None)
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})
    return template.render(messages, variables=variables, **options)


def test_a_named_template_is_chosen_by_name_or_for_tools(model_dir: Path):
    named = [
        {"name": "default", "template": "default"},
        {"name": "tool_use", "template": "with tools"},
        {"name": "rag", "template": "with documents"},
    ]
    save(byte_level(), model_dir, chat_template=named)
    tokenizer = Tokenizer.from_directory(model_dir)
    assert tokenizer.chat_template == "default"
    assert tokenizer.render_chat(PLAIN) == "default"
    assert tokenizer.render_chat(PLAIN, tools=TOOLS) == "with tools"
    assert tokenizer.render_chat(PLAIN, tools=TOOLS, template_name="rag") == "with documents"
    with refused(RequestError, "'nope'", "default, tool_use, rag"):
        tokenizer.render_chat(PLAIN, template_name="nope")


def test_without_a_template_the_error_says_what_to_do(model_dir: Path):
    tokenizer = Tokenizer.from_directory(save(byte_level(), model_dir))
    with refused(RequestError, "no chat template", "plain prompt"):
        tokenizer.apply_chat_template(PLAIN)


def test_text_parts_reach_templates_that_take_only_strings():
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [{"role": "user", "content": parts}]
    assert _render(templates.MISTRAL, messages) == "<s>[INST] one\ntwo[/INST]"


def test_a_string_reaches_templates_that_take_only_parts():
    assert "user:Where is the harbour?" in _render(templates.PARTS_ONLY)


def test_none_is_the_same_as_not_being_there():
    call = TOOL_TURNS[1] | {"content": None, "refusal": None}
    text = _render(templates.CHATML, [PLAIN[0], call], tools=TOOLS)
    assert "None" not in text
    assert _render("{{ 'content' in messages[0] }}", [call]) == "False"
    assert '[call] {"name": "weather", "arguments": {"city": "東京"' in text


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ("Hello", ['messages is "Hello"', "list"]),
        ({"role": "user", "content": "x"}, ['messages is {"role": "user"', "list"]),
        (None, ["messages is null"]),
        ([], ["empty", "at least one"]),
        (["Hello"], ['messages[0] is "Hello"', "object"]),
        ([{"content": "x"}], ["messages[0].role is null"]),
        ([{"role": 3, "content": "x"}], ["messages[0].role is 3"]),
        ([*PLAIN, {"role": "user"}], ["messages[1] has no content"]),
        ([{"role": "assistant", "content": None}], ["messages[0] has no content"]),
        ([{"role": "user", "content": 7}], ["messages[0].content is 7"]),
        ([{"role": "user", "content": b"x"}], ["messages[0].content is a bytes"]),
        ([{"role": "user", "content": {"a": 1}}], ['messages[0].content is {"a": 1}']),
        ([{"role": "user", "content": ["x"]}], ['messages[0].content[0] is "x"']),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            ['messages[0].content[0] is of type "image_url"'],
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], ["content[0].text is null"]),
        ([{"role": "user", "content": "x", "extra": object()}], ["messages[0].extra is a object"]),
        ([{"role": "user", "content": "x", 5: 1}], ["messages[0] has the key 5"]),
    ],
)
def test_what_is_not_a_conversation_is_named(messages: object, words: list[str]):
    with refused(RequestError, *words):
        _render(templates.CHATML, messages)


def test_deep_nesting_is_refused():
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    with refused(RequestError, "nested over 100"):
        _render(templates.CHATML, [{"role": "user", "content": "x", "extra": deep}])


@pytest.mark.parametrize("name", ["tools", "documents"])
def test_tools_and_documents_must_be_lists_of_mappings(name: str):
    for wrong, word in (("x", f'{name} is "x"'), ([1], f"{name}[0] is 1")):
        with refused(RequestError, word):
            _render(templates.CHATML, **{name: wrong})


def test_a_refusing_template_speaks_in_one_line():
    with refused(RequestError, "refuses", "roles must alternate: user, assistant"):
        _render(templates.MISTRAL, PLAIN * 2)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ messages[9].content + 'x' }}", ["fails", "no element 9"]),
        ("{{ messages[0].content + 1 }}", ["fails", "TypeError"]),
        ("{{ 1 / 0 }}", ["fails", "ZeroDivisionError"]),
        ("{% for i in range(10**9) %}x{% endfor %}", ["fails", "OverflowError"]),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", ["fails", "RecursionError"]),
    ],
)
def test_a_failing_template_says_why(source: str, words: list[str]):
    with refused(RequestError, *words):
        _render(source)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("a\n{% if %}", ["line 2"]),
        ("{{ 'a' | no_such_filter }}", ["no_such_filter"]),
        ("{% for x in y %}", ["line 1", "endfor"]),
        ("{% generation %}x", ["line 1"]),
    ],
)
def test_an_invalid_template_is_the_models_fault(source: str, words: list[str]):
    with refused(ModelError, "chat template", *words):
        _render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'a': 1}) }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ raise_exception.__globals__ }}",
        "{{ '{0.__class__}'.format(1) }}",
    ],
)
def test_templates_cannot_leave_the_sandbox(source: str):
    # What is forbidden is an error where it is used, and nothing where it is only shown.
    with contextlib.suppress(ModelError):
        assert _render(source) == ""
        return
    with refused(ModelError, "sandbox forbids"):
        _render(source)


def test_the_text_a_template_makes_is_limited(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(chat, "MAX_RENDERED_CHARS", 1000)
    assert len(_render("{% for i in range(1000) %}x{% endfor %}")) == 1000
    with refused(RequestError, "1000 characters", "shorten"):
        _render("{% for i in range(1001) %}x{% endfor %}")


def test_callers_data_is_left_alone():
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}], "name": None}]
    before = repr(messages)
    _render(templates.CHATML, messages)
    assert repr(messages) == before


def test_a_lone_surrogate_in_a_message_is_refused(model_dir: Path):
    write_json(model_dir / "tokenizer_config.json", {"chat_template": templates.CHATML})
    tokenizer = Tokenizer.from_directory(model_dir)
    with refused(RequestError, "'\\ud83d'", "surrogate"):
        tokenizer.apply_chat_template([{"role": "user", "content": "half \ud83d"}])


def _turns(function: object) -> list[dict[str, Any]]:
    call = {"type": "function", "id": "a", "function": function}
    result = {"role": "tool", "tool_call_id": "a", "content": "calm"}
    return [PLAIN[0], {"role": "assistant", "content": None, "tool_calls": [call]}, result]


def test_arguments_may_be_json_text_as_in_openais_api():
    text = '{"city": "\\u6771\\u4eac", "days": [1, 2]}'
    given = _turns({"name": "weather", "arguments": text})
    assert _render(templates.CHATML, given, tools=TOOLS) == _render(
        templates.CHATML,
        _turns({"name": "weather", "arguments": {"city": "東京", "days": [1, 2]}}),
        tools=TOOLS,
    )
    for none in ("", None, {}):
        assert '"arguments": {}}' in _render(
            templates.CHATML, _turns({"name": "weather", "arguments": none})
        )


@pytest.mark.parametrize("arguments", ["{", "[1]", "null", 5, ["x"], [], "[" * 100_000])
def test_arguments_that_are_no_object_are_refused(arguments: object):
    with refused(RequestError, "messages[1].tool_calls[0]", '"weather"', "no JSON object"):
        _render(templates.CHATML, _turns({"name": "weather", "arguments": arguments}))


@pytest.mark.parametrize("call", ["x", {}, {"function": "weather"}, {"function": {"name": 3}}])
def test_what_is_no_call_is_refused(call: object):
    with refused(RequestError, "messages[0].tool_calls[0] is no call", '"name"'):
        _render(templates.CHATML, [{"role": "assistant", "content": "", "tool_calls": [call]}])
    with refused(RequestError, 'messages[0].tool_calls is "x"'):
        _render(templates.CHATML, [{"role": "assistant", "content": "", "tool_calls": "x"}])


def test_a_result_gets_the_name_of_its_call():
    source = "{% for m in messages %}{{ m.name }};{% endfor %}"
    turns = _turns({"name": "weather", "arguments": {}})
    assert _render(source, turns) == ";;weather;"
    assert _render(source, [*turns[:2], turns[2] | {"name": "mine"}]) == ";;mine;"
    assert _render(source, [*turns[:2], turns[2] | {"tool_call_id": "b"}]) == ";;;"


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("{{ c.arguments | tojson }}", '{"a": "é"}'),
        ("{{ '<' + c.arguments + '>' }}", '<{"a": "é"}>'),
        ("{{ c.arguments }}", '{"a": "é"}'),
        ("{{ m.content + c.arguments | tojson }}", '{"a": "é"}'),
        ("{% if m.content is none %}{{ c.arguments | tojson }}{% endif %}", '{"a": "é"}'),
        ("{{ m.content.oops if m.content is defined }}{{ c.arguments | tojson }}", '{"a": "é"}'),
    ],
)
def test_calls_have_the_form_that_a_template_reads(call: str, expected: str):
    source = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}"
        "{% for call in m.tool_calls or [] %}{% set c = call.function %}{{ c.name }}:"
        + call
        + "{% endfor %}{% endfor %}"
    )
    turn = _turns({"name": "f", "arguments": '{"a": "é"}'})[1]
    for content in (None, ""):
        assert _render(source, [turn | {"content": content}]) == "f:" + expected


def test_reasoning_reaches_a_template_that_calls_it_thinking():
    source = "{% for message in messages %}{{ message.thinking }}{% endfor %}"
    turn = {"role": "assistant", "content": "x", "reasoning_content": "hm"}
    assert _render(source, [turn]) == "hm"
    assert _render(source + "{# reasoning_content #}", [turn]) == ""
