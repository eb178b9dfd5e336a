"""Under a tool grammar, what a family's models were taught to write is allowed, and little else."""

import json

import pytest

from mlxserve.errors import RequestError
from mlxserve.grammar import Grammar
from mlxserve.text.matcher import Grammars
from mlxserve.text.parsers import ToolCall, make_parser
from mlxserve.text.tokenizer import Tokenizer
from mlxserve.text.tool_grammar import ToolGrammar
from tests.support.model_dir import VOCAB_SIZE, write_model_dir

ADD = {
    "name": "add",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "note": {"type": "string"}},
        "required": ["a"],
        "additionalProperties": False,
    },
}
TOOLS = [{"type": "function", "function": ADD}, {"type": "function", "function": {"name": "stop"}}]
FORMATS = ["hermes", "llama3_json", "mistral", "qwen3_coder"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer.from_directory(write_model_dir(tmp_path_factory.mktemp("tokenizer")))


def allowed(tokenizer, grammar, text):
    """How much of a text the grammar allows, and whether an answer may end there."""
    matcher = Grammars(tokenizer, VOCAB_SIZE).matcher(grammar, []).inner
    ids = tokenizer.encode(text)
    n = matcher.try_consume_tokens(ids)
    return n, n == len(ids) and matcher.is_accepting()


def written(tool_format, *calls):
    """Calls as models of a family write them; calls: (name, arguments)."""
    texts = []
    for name, arguments in calls:
        key = "parameters" if tool_format == "llama3_json" else "arguments"
        as_json = json.dumps({"name": name, key: arguments}, ensure_ascii=False)
        if tool_format == "qwen3_coder":
            values = [
                f"<parameter={k}>\n{v if isinstance(v, str) else json.dumps(v)}\n</parameter>\n"
                for k, v in arguments.items()
            ]
            as_json = f"<function={name}>\n{''.join(values)}</function>"
        tagged = tool_format in ("hermes", "qwen3_coder")
        texts.append(f"<tool_call>\n{as_json}\n</tool_call>" if tagged else as_json)
    if tool_format == "mistral":
        return f"[TOOL_CALLS][{', '.join(texts)}]"
    return ("; " if tool_format == "llama3_json" else "\n").join(texts)


def build(tool_format, tokenizer, *, parallel=True):
    return ToolGrammar(tool_format, TOOLS, tokenizer, parallel=parallel)


@pytest.mark.parametrize("tool_format", FORMATS)
@pytest.mark.parametrize(
    "calls",
    [
        [("add", {"a": -3})],
        [("add", {"a": 3, "note": "ünï </tool> \\ stop"})],
        [("stop", {})],
        [("add", {"a": 1}), ("stop", {})],
    ],
)
def test_what_models_were_taught_is_allowed_and_read_back(tokenizer, tool_format, calls):
    text = written(tool_format, *calls)
    assert allowed(tokenizer, build(tool_format, tokenizer).calls(), text)[1]
    parser = make_parser(tool_format, None, tools=TOOLS)
    told = parser.feed(text) + parser.finish()
    assert [(d.name, json.loads(d.arguments)) for d in told if isinstance(d, ToolCall)] == calls


@pytest.mark.parametrize("tool_format", FORMATS)
@pytest.mark.parametrize(
    "calls", [[("subtract", {"a": 1})], [("add", {})], [("add", {"a": "x"})], [("add", {"b": 1})]]
)
def test_nothing_else_is(tokenizer, tool_format, calls):
    text = written(tool_format, *calls)
    n, ends = allowed(tokenizer, build(tool_format, tokenizer).calls(), text)
    assert n < len(tokenizer.encode(text))
    assert not ends


@pytest.mark.parametrize("tool_format", FORMATS)
def test_a_second_call_needs_leave(tokenizer, tool_format):
    two = written(tool_format, ("add", {"a": 1}), ("add", {"a": 2}))
    assert allowed(tokenizer, build(tool_format, tokenizer).calls(), two)[1]
    one = build(tool_format, tokenizer, parallel=False).calls()
    assert not allowed(tokenizer, one, two)[1]


@pytest.mark.parametrize("tool_format", FORMATS)
def test_within_text_a_call_must_keep_to_its_schema(tokenizer, tool_format):
    grammar = build(tool_format, tokenizer).calls_within_text()
    for text in ("", "Hello.", written(tool_format, ("add", {"a": 1}))):
        assert allowed(tokenizer, grammar, text)[1], text
    wrong = written(tool_format, ("add", {"a": "x"}))
    assert not allowed(tokenizer, grammar, wrong)[1]
    if tool_format != "llama3_json":  # there, a call is all of an answer
        assert allowed(tokenizer, grammar, f"So: {written(tool_format, ('add', {'a': 1}))}")[1]
        assert not allowed(tokenizer, grammar, f"So: {wrong}")[1]


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (Grammar.json_schema({"type": "integer"}), "17"),
        (Grammar.json_object(), "{}"),
        (Grammar.choice(["yes", "no"]), "no"),
        (Grammar.regex("[ab]+"), "abba"),
    ],
)
def test_a_call_or_an_answer_of_a_form(tokenizer, form, text):
    grammar = build("hermes", tokenizer).calls_or(form)
    assert allowed(tokenizer, grammar, text)[1]
    assert allowed(tokenizer, grammar, written("hermes", ("add", {"a": 1})))[1]
    assert not allowed(tokenizer, grammar, "other")[1]


def test_what_can_t_be_enforced_is_refused_by_name(tokenizer):
    with pytest.raises(RequestError, match="'pythonic'; leave out strict"):
        build("pythonic", tokenizer)
    with pytest.raises(RequestError, match="a lark grammar and tools"):
        build("hermes", tokenizer).calls_or(Grammar.lark("start: /a/"))
