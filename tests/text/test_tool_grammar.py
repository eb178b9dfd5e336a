"""Under a tool grammar, what a family's models were taught to write is allowed, and little else."""

import functools
import json
import random

import jsonschema
import numpy as np
import pytest

from mlxserve.errors import RequestError
from mlxserve.grammar import Grammar
from mlxserve.text.matcher import Grammars
from mlxserve.text.parsers import TOOL_FORMATS, Content, Reasoning, ToolCall, make_parser
from mlxserve.text.parsers.deepseek import ALL_BEGIN, ALL_END, BEGIN, END, SEPARATOR
from mlxserve.text.parsers.harmony import HarmonyParser
from mlxserve.text.tokenizer import Tokenizer
from mlxserve.text.tool_grammar import make_tool_grammar
from tests.support.model_dir import SPECIAL, byte_tokenizer
from tests.text.parsers import families

FORMATS = [*sorted(TOOL_FORMATS), "harmony"]
MARKS = HarmonyParser.keeps.union(*(each.keeps for each in TOOL_FORMATS.values()))
MARKS |= {"[THINK]", "[/THINK]", "<|channel>", "<channel|>"}
FUNCTION_GEMMA = {"<start_function_call>", "<end_function_call>", "<escape>"}


def tool(name, properties=None, required=(), **more):
    function = {"name": name}
    if properties is not None:
        function["parameters"] = {
            "type": "object",
            "properties": properties,
            "required": list(required),
            "additionalProperties": False,
            **more,
        }
    return {"type": "function", "function": function}


ADD = tool("add", {"a": {"type": "integer"}, "note": {"type": "string"}}, ["a"])
TOOLS = [ADD, tool("stop")]

NODE = {
    "type": "object",
    "properties": {
        "kid": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
        "v": {"type": "string", "minLength": 1, "maxLength": 5},
    },
    "required": ["v"],
    "additionalProperties": False,
}
# A bit of everything that all formats can write.
WALKED = [
    tool(
        "write.it",
        {
            "kind": {"type": "string", "enum": ["x y", '"q"\n', "it's", "</tool_call>", "é😀", ""]},
            "count": {"type": "integer", "minimum": -50},
            "note": {"type": "string", "maxLength": 12},
            "maybe": {"anyOf": [{"type": "string", "maxLength": 4}, {"type": "null"}]},
            "flag": {"type": "boolean"},
            "tags": {"type": "array", "items": {"enum": ["é", "b,", "}]", 3]}, "maxItems": 3},
            "tree": {"$ref": "#/$defs/node"},
            "where": {
                "type": "object",
                "properties": {"x": {"type": "number", "minimum": 0, "maximum": 9}},
                "required": ["x"],
                "additionalProperties": False,
            },
        },
        ["count", "where"],
        **{"$defs": {"node": NODE}},
    ),
    tool("all_optional", {"x": {"type": "boolean"}, "y": {"const": 7}, "z": {"type": "null"}}),
    tool("nothing", {}),
]


def save(path, marks, eos):
    made = byte_tokenizer()
    made.add_special_tokens(sorted(marks))
    made.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    return Tokenizer.from_directory(path)


@pytest.fixture(scope="module")
def spelled(tmp_path_factory):
    """A model that spells its family's marks."""
    return save(tmp_path_factory.mktemp("tokenizer"), [], SPECIAL[1])


@pytest.fixture(scope="module")
def marked(tmp_path_factory):
    """A model that knows its family's marks as tokens."""
    return save(tmp_path_factory.mktemp("tokenizer"), MARKS - FUNCTION_GEMMA, SPECIAL[1])


@pytest.fixture(params=["spelled", "marked"])
def tokenizer(request):
    return request.getfixturevalue(request.param)


def build(tool_format, tokenizer, tools=TOOLS, *, parallel=True, reasoning_format=None):
    return make_tool_grammar(
        tool_format, tools, tokenizer, parallel=parallel, reasoning_format=reasoning_format
    )


@functools.cache
def grammars_of(tokenizer):
    return Grammars(tokenizer, tokenizer.vocab_size)


def allowed(tokenizer, grammar, text):
    """How much of a text the grammar allows, and whether an answer may end there."""
    matcher = grammars_of(tokenizer).matcher(grammar, []).inner
    ids = tokenizer.encode(text, add_special_tokens=False)
    n = matcher.try_consume_tokens(ids)
    return n, n == len(ids) and matcher.is_accepting()


def told(tool_format, text, tools=TOOLS, reasoning=None):
    """The calls that are read from a text, the content, and the reasoning."""
    parser = make_parser(tool_format, reasoning, tools=tools)
    deltas = parser.feed(text) + parser.finish()
    calls = [(d.name, json.loads(d.arguments)) for d in deltas if isinstance(d, ToolCall)]
    texts = [
        "".join(d.text for d in deltas if isinstance(d, kind)) for kind in (Content, Reasoning)
    ]
    return calls, *texts


def walk(tokenizer, grammar, seed, limit=6000):
    """A text by drawing among the allowed tokens, those of more than a byte more often."""
    rng, ids = random.Random(seed), []
    matcher, data = grammars_of(tokenizer).matcher(grammar, []), b""
    for _ in range(limit):
        bits = np.frombuffer(matcher.inner.compute_bitmask(), np.uint8)
        choices = np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist()
        assert matcher.failure is None
        marks = [token for token in choices if token >= 256]
        rest = choices[: len(choices) - len(marks)]
        token = rng.choice(marks if marks and (not rest or rng.random() < 0.2) else rest)
        if token in tokenizer.eos_ids:
            return data.decode()
        data += tokenizer.token_bytes(token)
        ids.append(token)
        matcher.follow(ids)
    raise AssertionError(f"it doesn't end: {data[-200:]!r}")


def check(calls, tools):
    schemas = {each["function"]["name"]: each["function"]["parameters"] for each in tools}
    for name, arguments in calls:
        jsonschema.validate(arguments, schemas[name])


# ---- How families write calls, from their documentation and their models' templates.


def plain_json(value):
    return json.dumps(value, ensure_ascii=False)


def bare(value):
    return value if isinstance(value, str) else plain_json(value)


def in_gemma(value):
    match value:
        case str():
            return f'<|"|>{value}<|"|>'
        case list():
            return f"[{','.join(map(in_gemma, value))}]"
        case dict():
            return f"{{{','.join(f'{k}:{in_gemma(v)}' for k, v in value.items())}}}"
    return plain_json(value)


def in_python(name, arguments):
    return f"{name}({', '.join(f'{k}={plain_json(v)}' for k, v in arguments.items())})"


def in_object(name, arguments, key="arguments"):
    return plain_json({"name": name, key: arguments})


def in_qwen(name, arguments):
    pairs = [f"<parameter={k}>\n{bare(v)}\n</parameter>\n" for k, v in arguments.items()]
    return f"<tool_call>\n<function={name}>\n{''.join(pairs)}</function>\n</tool_call>"


def in_glm(name, arguments):
    pairs = [
        f"<arg_key>{k}</arg_key>\n<arg_value>{bare(v)}</arg_value>\n" for k, v in arguments.items()
    ]
    return f"<tool_call>{name}\n{''.join(pairs)}</tool_call>"


def in_harmony(name, arguments):
    header = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
    return header + plain_json(arguments)


WRITERS = {
    "deepseek": (
        lambda name, args: f"{BEGIN}{name}{SEPARATOR}{plain_json(args)}{END}",
        lambda calls: ALL_BEGIN + "".join(calls) + ALL_END,
    ),
    "gemma": (lambda name, args: f"<|tool_call>call:{name}{in_gemma(args)}<tool_call|>", "".join),
    "glm": (in_glm, "\n".join),
    "harmony": (in_harmony, "".join),
    "hermes": (lambda *call: f"<tool_call>\n{in_object(*call)}\n</tool_call>", "\n".join),
    "llama3_json": (lambda *call: in_object(*call, "parameters"), "; ".join),
    "mistral": (in_object, lambda calls: f"[TOOL_CALLS][{', '.join(calls)}]"),
    "pythonic": (in_python, lambda calls: f"[{', '.join(calls)}]"),
    "qwen3_coder": (in_qwen, "\n".join),
    "tool_code": (in_python, lambda calls: "\n".join(["```tool_code", *calls, "```"])),
}


def written(tool_format, *calls, tokenizer=None):
    """Calls as models of a family write them; calls: (name, arguments)."""
    write, join = WRITERS[tool_format]
    text = join([write(*call) for call in calls])
    if (
        tool_format == "pythonic"
        and tokenizer
        and len(tokenizer.encode("<|tool_call_start|>")) == 1
    ):
        return f"<|tool_call_start|>{text}<|tool_call_end|>"
    return text


# ---- Calls alone.


@pytest.mark.parametrize("tool_format", FORMATS)
@pytest.mark.parametrize(
    "calls",
    [
        [("add", {"a": -3})],
        [("add", {"a": 3, "note": 'ünï 😀 </tool> \\ stop "it\'s" {b}: [c], (d)='})],
        [("add", {"a": 3, "note": ""})],
        [("stop", {})],
        [("add", {"a": 1}), ("stop", {})],
    ],
)
def test_what_models_were_taught_is_allowed_and_read_back(tokenizer, tool_format, calls):
    text = written(tool_format, *calls, tokenizer=tokenizer)
    one_only = tool_format == "harmony" and len(calls) > 1  # its mark of a call ends the answer
    assert allowed(tokenizer, build(tool_format, tokenizer).calls(), text)[1] is not one_only
    assert one_only or told(tool_format, text) == (calls, "", "")


@pytest.mark.parametrize("tool_format", FORMATS)
@pytest.mark.parametrize(
    "calls", [[("subtract", {"a": 1})], [("add", {})], [("add", {"a": "x"})], [("add", {"b": 1})]]
)
def test_nothing_else_is(tokenizer, tool_format, calls):
    text = written(tool_format, *calls, tokenizer=tokenizer)
    n, ends = allowed(tokenizer, build(tool_format, tokenizer).calls(), text)
    assert n < len(tokenizer.encode(text))
    assert not ends


@pytest.mark.parametrize("tool_format", FORMATS)
def test_a_second_call_needs_leave(tokenizer, tool_format):
    two = written(tool_format, ("add", {"a": 1}), ("add", {"a": 2}), tokenizer=tokenizer)
    for parallel in (True, False):
        grammar = build(tool_format, tokenizer, parallel=parallel).calls()
        assert allowed(tokenizer, grammar, two)[1] == (parallel and tool_format != "harmony")


@pytest.mark.parametrize("tool_format", FORMATS)
def test_calls_come_to_an_end(spelled, tool_format):
    many = written(tool_format, *[("add", {"a": 1})] * 17)
    assert not allowed(spelled, build(tool_format, spelled).calls(), many)[1]


@pytest.mark.parametrize("name", families.FAMILIES)
def test_what_a_model_s_own_template_writes_is_allowed(marked, name):
    """Its tokens are only those that the template writes: none stands in a string."""
    family = families.FAMILIES[name]
    hard = (
        family.hard[0],
        {**family.hard[1], "text": family.hard[1]["text"].replace("tool_call", "x")},
    )
    several = [families.PLAIN, hard, families.BARE][: family.most]
    for calls in ([families.PLAIN], [hard], [families.BARE], several):
        text = families.rendered(name, calls).text.split("</think>")[-1].strip("\n")
        grammar = build(family.tool_format, marked, families.TOOLS).calls()
        assert allowed(marked, grammar, text)[1], text


@pytest.mark.full
@pytest.mark.parametrize("tool_format", FORMATS)
def test_every_walk_is_calls_that_keep_to_their_schema(tokenizer, tool_format):
    grammar, names = build(tool_format, tokenizer, WALKED).calls(), set()
    for seed in range(5):
        text = walk(tokenizer, grammar, seed)
        calls, content, _ = told(tool_format, text, WALKED)
        assert calls, text
        assert not content, text
        check(calls, WALKED)
        names |= {name for name, _ in calls}
    assert len(names) > 1


# What ends a string in formats that have no way to escape it.
CLOSING = {
    "gemma": '<|"|>',
    "glm": "</arg_value>",
    "qwen3_coder": "</parameter>",
}


@pytest.mark.parametrize("tool_format", FORMATS)
def test_marks_in_a_string_are_its_text_or_not_allowed(spelled, tool_format):
    format_ = TOOL_FORMATS.get(tool_format, HarmonyParser)
    grammar = build(tool_format, spelled).calls()
    for mark in sorted({*format_.keeps, *getattr(format_, "opens", ()), "</parameter>", "```"}):
        calls = [("add", {"a": 1, "note": f"see {mark}, and\n{mark}"})]
        text = written(tool_format, *calls)
        is_allowed = allowed(spelled, grammar, text)[1]
        # `<|end|>` is a token here.
        assert is_allowed == (mark not in (CLOSING.get(tool_format), "<|end|>")), mark
        if is_allowed:
            assert told(tool_format, text) == (calls, "", "")


NESTED = {
    "list": {"type": "array", "items": {"type": "string"}},
    "object": {"type": "object", "additionalProperties": {"type": "string"}},
    "maybe": {"type": ["string", "null"]},
    "any": {},
}


@pytest.mark.parametrize("name", NESTED)
@pytest.mark.parametrize("tool_format", FORMATS)
def test_marks_in_a_string_within_json_do_not_end_it(spelled, tool_format, name):
    format_ = TOOL_FORMATS.get(tool_format, HarmonyParser)
    tools = [tool("f", {"key": NESTED[name], "more": {"type": "integer"}}, ["key", "more"])]
    grammar = build(tool_format, spelled, tools).calls()
    marks = {*format_.keeps, *getattr(format_, "opens", ()), "</function>", "</parameter>", "```"}
    # As if the value, the call, or both ended there.
    ends = ["</parameter><parameter=x>", "</parameter></function></tool_call>"]
    ends += ["</arg_value><arg_key>", "</arg_value></tool_call>", "}}</tool_call>", '")]\n```']
    for mark in [*sorted(marks), *ends]:
        text = f'see {mark}, \\ "and"\n{mark}'
        value = {"list": [text, text], "object": {"k": text}}.get(name, text)
        bare_json = tool_format in ("glm", "qwen3_coder")
        arguments = {"key": plain_json(value) if bare_json else value, "more": 1}
        written_ = written(tool_format, ("f", arguments))
        closes = (tool_format == "gemma" and mark == CLOSING["gemma"]) or mark == "<|end|>"
        assert allowed(spelled, grammar, written_)[1] is not closes, mark
        if not closes:
            assert told(tool_format, written_, tools) == (
                [("f", {"key": value, "more": 1})],
                "",
                "",
            )


@pytest.mark.parametrize("tool_format", FORMATS)
def test_fields_that_are_optional_may_be_left_out_and_others_not(spelled, tool_format):
    names = ["b", "c", "d"]
    for required in ([], ["c"], ["b", "d"], names):
        tools = [tool("f", {name: {"type": "integer"} for name in names}, required)]
        grammar = build(tool_format, spelled, tools).calls()
        for some in ([], ["b"], ["c"], ["d"], ["b", "c"], ["b", "d"], ["c", "d"], names):
            text = written(tool_format, ("f", dict.fromkeys(some, 5)))
            assert allowed(spelled, grammar, text)[1] == (set(required) <= set(some)), text


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "string", "enum": ["a b", "c"]}, ["a b"], ["a", "a bc"]),
        ({"enum": ["a", 1, None]}, ["a", 1, None], ["b", "1", 2]),
        ({"type": "string", "minLength": 2, "maxLength": 3}, ["éé", "abc"], ["a", "abcd"]),
        ({"type": "string", "const": "k"}, ["k"], ["", "kk"]),
        ({"type": ["string", "null"]}, ["x", None], [1, True]),
        ({"type": "integer", "minimum": 3, "maximum": 12}, [3, 12], [2, 13, 4.5]),
        ({"type": "number"}, [3, -4.5, 1e-7], ["x", None]),
        ({"type": "boolean"}, [True, False], ["x", 1]),
        (
            {"type": "array", "items": {"type": "integer"}, "minItems": 1},
            [[1], [1, 2]],
            [[], ["x"]],
        ),
        ({"type": "array", "maxItems": 0}, [[]], [[1]]),
        ({"type": "array", "items": {"type": "string"}}, [[], ["a", 'b"]']], [[1]]),
        (
            {"type": "object", "additionalProperties": {"type": "null"}},
            [{}, {"k": None}],
            [{"k": 1}],
        ),
        ({"anyOf": [{"type": "integer"}, {"type": "array"}]}, [1, [1, "x", {"k": [True]}]], ["x"]),
        ({}, [1, "a b", None, {"k": ["v", {}]}], []),
    ],
)
@pytest.mark.parametrize("tool_format", FORMATS)
def test_values_keep_to_their_schema(spelled, tool_format, schema, right, wrong):
    tools = [tool("f", {"key": schema}, ["key"])]
    grammar = build(tool_format, spelled, tools).calls()

    def text_of(value):
        # Where a value may be more than a string, formats with tags have strings in quotes.
        in_tags = tool_format in ("glm", "qwen3_coder") and schema.get("type") != "string"
        return written(tool_format, ("f", {"key": plain_json(value) if in_tags else value}))

    for value in right:
        assert allowed(spelled, grammar, text_of(value))[1], value
        assert told(tool_format, text_of(value), tools)[0] == [("f", {"key": value})]
    for value in wrong:
        assert not allowed(spelled, grammar, text_of(value))[1], value


def test_python_s_own_words_and_quotes_are_allowed(marked):
    text = "<|tool_call_start|>[write.it(kind='it\\'s', count=2, flag=True, "
    text += 'where={"x": 1})]<|tool_call_end|>'
    kind = {"type": "string", "enum": ["it's", "b"]}
    for each in ({"type": "string"}, kind):
        properties = WALKED[0]["function"]["parameters"]["properties"] | {"kind": each}
        tools = [tool("write.it", properties, **{"$defs": {"node": NODE}})]
        quoted = text if each != kind else text.replace("'it\\'s'", '"it\'s"')
        assert allowed(marked, build("pythonic", marked, tools).calls(), quoted)[1]
        ((_, arguments),) = told("pythonic", quoted, tools)[0]
        assert arguments == {"kind": "it's", "count": 2, "flag": True, "where": {"x": 1}}


def test_functiongemma_has_marks_of_its_own(tmp_path):
    tokenizer = save(tmp_path, FUNCTION_GEMMA, SPECIAL[1])
    text = "<start_function_call>call:add{a:1,note:<escape>{x}, y:<escape>}<end_function_call>"
    assert allowed(tokenizer, build("gemma", tokenizer).calls(), text)[1]
    assert told("gemma", text)[0] == [("add", {"a": 1, "note": "{x}, y:"})]
    other = written("gemma", ("add", {"a": 1}))
    assert not allowed(tokenizer, build("gemma", tokenizer).calls(), other)[1]


@pytest.mark.full
@pytest.mark.parametrize("tool_format", FORMATS)
def test_a_hundred_tools_of_twenty_optional_fields_fit(spelled, tool_format):
    fields = {f"field_{i}": {"type": "string", "enum": ["a", "b"]} for i in range(20)}
    tools = [tool(f"tool_{i}", fields) for i in range(100)]
    text = written(tool_format, ("tool_77", {"field_3": "b", "field_9": "a"}))
    assert allowed(spelled, build(tool_format, spelled, tools).calls(), text)[1]


# ---- Calls within text, or beside another form.


@pytest.mark.parametrize("tool_format", sorted(TOOL_FORMATS))
def test_within_text_a_call_must_keep_to_its_schema(tokenizer, tool_format):
    grammar = build(tool_format, tokenizer).calls_within_text()
    call = written(tool_format, ("add", {"a": 1}), tokenizer=tokenizer)
    for text in ("", "Hello.", "One:\n- [x]\n- {y}\n", call):
        assert allowed(tokenizer, grammar, text)[1], text
    wrong = written(tool_format, ("add", {"a": "x"}), tokenizer=tokenizer)
    assert not allowed(tokenizer, grammar, wrong)[1]
    if not call.startswith(("{", "[add")):  # there, a call is all of an answer
        assert allowed(tokenizer, grammar, f"So: {call}")[1]
        assert not allowed(tokenizer, grammar, f"So: {wrong}")[1]


@pytest.mark.parametrize(
    ("tool_format", "text"),
    [
        ("deepseek", f'{BEGIN}add{SEPARATOR}{{"a": "x"}}{END}'),
        ("gemma", "<start_function_call>call:add{a:<escape>x<escape>}<end_function_call>"),
        ("llama3_json", 'So:\n{"parameters": {"a": "x"}, "name": "add"}'),
        ("llama3_json", '  {"name": "add", "parameters": {"a": "x"}}'.strip()),
        ("llama3_json", '<|python_tag|>{"name": "add", "parameters": {"a": "x"}}'),
        ("mistral", 'So [TOOL_CALLS]add[ARGS]{"a": "x"}'),
        ("pythonic", 'So:\n[ add(a="x")]'),
        ("pythonic", '<|python_start|>[add(a="x")]<|python_end|>'),
        ("qwen3_coder", "<function=add>\n<parameter=b>\nx\n</parameter>\n</function>"),
        ("tool_code", 'So:\n```tool_code\nadd(a="x")\n```'),
    ],
)
def test_no_other_spelling_of_a_call_escapes(tokenizer, tool_format, text):
    assert told(tool_format, text)[0], "the parser takes it for a call"
    assert not allowed(tokenizer, build(tool_format, tokenizer).calls_within_text(), text)[1]


@pytest.mark.full
@pytest.mark.parametrize("tool_format", FORMATS)
def test_every_walk_within_text_has_only_right_calls(marked, tool_format):
    grammar = build(tool_format, marked, WALKED).calls_within_text()
    found = [told(tool_format, walk(marked, grammar, seed), WALKED)[0] for seed in range(12)]
    for calls in found:
        check(calls, WALKED)
    if tool_format not in ("llama3_json", "tool_code"):  # whose calls don't begin with a token
        assert any(found)
    if tool_format != "harmony":  # whose text seldom begins without one
        assert not all(found)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (Grammar.json_schema({"type": "integer"}), "17"),
        (Grammar.json_schema({"properties": {"x": {"type": "null"}}}), '{"x": null}'),
        (Grammar.json_object(), '{"name": "Ada"}'),
        (Grammar.choice(["yes", "no"]), "no"),
        (Grammar.regex("[ab/]+"), "ab/ba"),
    ],
)
@pytest.mark.parametrize("tool_format", FORMATS)
def test_a_call_or_an_answer_of_a_form(spelled, tool_format, form, text):
    grammar = build(tool_format, spelled).calls_or(form)
    head = "<|channel|>final<|message|>" if tool_format == "harmony" else ""
    assert allowed(spelled, grammar, head + text)[1]
    assert allowed(spelled, grammar, written(tool_format, ("add", {"a": 1})))[1]
    assert not allowed(spelled, grammar, f"{head}other")[1]


def test_an_answer_s_spaces_are_bounded_beside_tools(spelled):
    grammar = build("hermes", spelled).calls_or(Grammar.json_object())
    assert not allowed(spelled, grammar, '{"a":' + 100 * " " + "1}")[1]


# ---- Reasoning first.


def test_harmony_thinks_says_what_it_does_and_calls(marked):
    analysis = "<|channel|>analysis<|message|>Hm {.<|end|><|start|>assistant"
    preamble = "<|channel|>commentary<|message|>I'll add.<|end|><|start|>assistant"
    final = "<|channel|>final<|message|>It's 4."
    call = written("harmony", ("add", {"a": 2}))
    calls, within = build("harmony", marked).calls(), build("harmony", marked).calls_within_text()
    for text, in_calls, in_text in [
        (analysis + call, True, True),
        (analysis + preamble + call, False, True),
        (preamble + call, False, True),
        (analysis + final, False, True),
        (final, False, True),
        (analysis, False, False),
        (analysis + "It's 4.", False, False),
        (final + "<|end|><|start|>assistant" + call, False, False),
    ]:
        assert allowed(marked, calls, text)[1] == in_calls, text
        assert allowed(marked, within, text)[1] == in_text, text
    read = told("harmony", analysis + preamble + call)
    assert read == ([("add", {"a": 2})], "I'll add.", "Hm {.")


@pytest.mark.parametrize(
    ("tool_format", "thought"),
    [("gemma", "<|channel>thought\nHm.<channel|>"), ("mistral", "[THINK]Hm.[/THINK]")],
)
def test_reasoning_in_a_family_s_own_marks_may_come_first(tokenizer, tool_format, thought):
    text = thought + written(tool_format, ("add", {"a": 2}))
    thinks = build(tool_format, tokenizer, reasoning_format=tool_format).calls()
    assert allowed(tokenizer, thinks, text)[1]
    assert told(tool_format, text, TOOLS, tool_format) == ([("add", {"a": 2})], "", "Hm.")
    assert not allowed(tokenizer, thinks, thought)[1]
    assert not allowed(tokenizer, build(tool_format, tokenizer).calls(), text)[1]


# ---- What can't be enforced.


@pytest.mark.parametrize(
    ("tool_format", "properties", "message"),
    [
        ("gemma", {"k": {"type": "string", "pattern": "a+"}}, "pattern in 'k' of the parameters"),
        ("gemma", {"k": {"enum": ['a<|"|>']}}, "in a value of 'k'"),
        ("gemma", {"k": {"oneOf": [{"type": "null"}]}}, "oneOf in 'k'"),
        ("gemma", {" k": {"type": "null"}}, "the name ' k'"),
        ("gemma", {"k": {"$ref": "#/$defs/none"}}, "\\$ref '#/\\$defs/none'"),
        ("glm", {"k": {"type": "string", "format": "date"}}, "format in 'k' of 'f'"),
        ("glm", {"k ": {"type": "null"}}, "the name 'k ' of 'f'"),
        ("qwen3_coder", {"k": {"type": "string", "enum": ["</parameter>"]}}, "in a value of 'k'"),
        ("qwen3_coder", {"a>b": {"type": "null"}}, "the name 'a>b'"),
        ("pythonic", {"a b": {"type": "null"}}, "the name 'a b' of 'f'"),
    ],
)
def test_what_a_format_can_t_write_is_refused_by_name(marked, tool_format, properties, message):
    with pytest.raises(RequestError, match=f"{message}.* can't be enforced in this model's format"):
        build(tool_format, marked, [tool("f", properties)])


@pytest.mark.parametrize("tool_format", ["gemma", "glm", "pythonic", "qwen3_coder", "tool_code"])
def test_parameters_that_aren_t_known_by_name_are_refused(spelled, tool_format):
    one = {"type": "object", "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": one}}]
    with pytest.raises(RequestError, match="anyOf in the parameters of 'f' can't be enforced"):
        build(tool_format, spelled, tools)
    assert build("hermes", spelled, tools)


@pytest.mark.parametrize("tool_format", FORMATS)
def test_arguments_that_never_end_are_refused(spelled, tool_format):
    endless = {**NODE, "required": ["kid"], "properties": {"kid": {"$ref": "#/$defs/node"}}}
    tools = [tool("f", {"k": {"$ref": "#/$defs/node"}}, ["k"], **{"$defs": {"node": endless}})]
    with pytest.raises(RequestError, match="'f' has a \\$ref to '#/\\$defs/node' that each"):
        build(tool_format, spelled, tools)


def test_a_lark_answer_beside_tools_is_refused(spelled):
    with pytest.raises(RequestError, match="a lark grammar and tools"):
        build("hermes", spelled).calls_or(Grammar.lark("start: /a/"))
