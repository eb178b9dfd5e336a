"""Outputs of every family: rendered by its model's own template, or from its documentation."""

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlxserve.text.chat import ChatTemplate
from mlxserve.text.parsers import Content, Delta, Reasoning, ToolCall, make_parser

TEMPLATES = Path(__file__).parent / "templates"


def _tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": []}
    described = {"name": name, "description": f"To {name}.", "parameters": parameters}
    return {"type": "function", "function": described}


def _typed(kind: str) -> dict[str, str]:
    return {"type": kind, "description": f"A {kind}."}


TOOLS = [
    _tool(
        "write_note",
        title=_typed("string"),
        text=_typed("string"),
        number=_typed("string"),
        copies=_typed("integer"),
        urgent=_typed("boolean"),
        meta=_typed("object"),
        tags={"type": "array", "description": "Words.", "items": {"type": "string"}},
    ),
    _tool("get_weather", city=_typed("string"), metric=_typed("string")),
    _tool("get_time"),
]

PLAIN = ("get_weather", {"city": "東京", "metric": "celsius"})
# Strings with everything in them that formats are made of.
TEXT = 'She said "no" {really}, \\n isn\'t\nit? <b>é</b> 👍🏽 [1], a:b; ```x``` </tool_call> $ 1,5'
HARD = (
    "write_note",
    {
        "title": "true",
        "text": TEXT,
        "number": "42",
        "copies": 3,
        "urgent": True,
        "meta": {"depth": {"list": [1, -2.5, None, False, {"k": "}]"}]}, "empty": {}},
        "tags": ["a b", "c,d", '"'],
    },
)
BARE = ("get_time", {})

Calls = Sequence[tuple[str, dict[str, Any]]]


@dataclass(frozen=True, kw_only=True)
class Output:
    """What a model wrote, and what it means.

    tool_format, reasoning_format: the formats it is in. prompt: what came before it.
    """

    tool_format: str | None
    reasoning_format: str | None
    text: str
    calls: Calls = ()
    content: str = ""
    reasoning: str = ""
    prompt: str = ""


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model, whose template stands in `templates/`.

    start: how its turn begins; end: what ends it and is never part of the text.
    most: how many calls a message its template can write. alone: they come without other text.
    thinks: the template writes reasoning where it is given.
    """

    tool_format: str
    reasoning_format: str | None = None
    start: str
    end: str
    most: int = 3
    alone: bool = False
    thinks: bool = False
    hard: tuple[str, dict[str, Any]] = HARD
    variables: dict[str, Any] = field(default_factory=dict)


_IM = {"start": "<|im_start|>assistant\n", "end": "<|im_end|>\n"}
_GLM = {"tool_format": "glm", "reasoning_format": "think", "start": "<|assistant|>", "end": ""}
_BAR = chr(0xFF5C)
_DEEPSEEK = {
    "start": f"<{_BAR}Assistant{_BAR}>",
    "end": f"<{_BAR}end\u2581of\u2581sentence{_BAR}>",
    "tool_format": "deepseek",
    "reasoning_format": "think",
}
# Its template puts strings between quotes without escaping what is in them.
_LFM_HARD = (HARD[0], HARD[1] | {"text": 'She said "no" {really} 👍🏽', "tags": ["a b", "it's"]})

FAMILIES = {
    "qwen2.5": Family(tool_format="hermes", **_IM),
    "qwen3": Family(tool_format="hermes", reasoning_format="think", thinks=True, **_IM),
    "hermes3": Family(tool_format="hermes", alone=True, **_IM),
    "qwen3-coder": Family(tool_format="qwen3_coder", **_IM),
    "qwen3.5": Family(tool_format="qwen3_coder", reasoning_format="think", thinks=True, **_IM),
    "llama3.1": Family(
        tool_format="llama3_json",
        start="<|start_header_id|>assistant<|end_header_id|>\n\n",
        end="<|eot_id|>",
        most=1,
        alone=True,
    ),
    "mistral-nemo": Family(tool_format="mistral", start="[/INST]", end="</s>", alone=True),
    "mistral-small-3.2": Family(tool_format="mistral", start="[/INST]", end="</s>", alone=True),
    "ministral-3": Family(
        tool_format="mistral", reasoning_format="mistral", start="[/INST]", end="</s>"
    ),
    "deepseek-r1": Family(alone=True, most=2, **_DEEPSEEK),
    "deepseek-v3.1": Family(**_DEEPSEEK),
    "glm-4.6": Family(thinks=True, **_GLM),
    "glm-4.7": Family(thinks=True, **_GLM | {"start": "<|assistant|></think>"}),
    "gemma4": Family(
        tool_format="gemma",
        reasoning_format="gemma",
        start="<|turn>model\n",
        end="<|tool_response>",
        alone=True,
        thinks=True,
        variables={"enable_thinking": True},
    ),
    "gpt-oss": Family(
        tool_format="harmony",
        reasoning_format="harmony",
        start="<|start|>assistant",
        end="<|call|>",
        most=1,
        alone=True,
        thinks=True,
    ),
    "lfm2.5": Family(
        tool_format="pythonic", reasoning_format="think", thinks=True, hard=_LFM_HARD, **_IM
    ),
}


@functools.cache
def template(name: str) -> ChatTemplate:
    """A model's template."""
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    return ChatTemplate(source(name), special)


def source(name: str) -> str:
    """Its text."""
    return (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")


def message_of(calls: Calls, content: str = "", reasoning: str = "") -> dict[str, Any]:
    """An assistant's message as clients of OpenAI's API send it back."""
    made = [
        {
            "id": f"call{i:05}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments)},
        }
        for i, (name, arguments) in enumerate(calls)
    ]
    message = {"role": "assistant", "content": content or None, "tool_calls": made}
    return message | ({"reasoning_content": reasoning} if reasoning else {})


def rendered(name: str, calls: Calls, content: str = "", reasoning: str = "") -> Output:
    """What the model would have to write for these calls: the template's text for its turn."""
    family = FAMILIES[name]
    user = {"role": "user", "content": "Please."}
    options = {"tools": TOOLS, "variables": family.variables}
    turn = message_of(calls, content, reasoning if family.thinks else "")
    text = template(name).render([user, turn], add_generation_prompt=False, **options)
    prompt = template(name).render([user], **options)
    if not text.startswith(prompt):  # a prompt that wants reasoning, before an answer without
        prompt = text[: text.rindex(family.start) + len(family.start)]
    output = text.removeprefix(prompt).removesuffix(family.end)
    assert text.startswith(prompt)
    return Output(
        tool_format=family.tool_format,
        reasoning_format=family.reasoning_format,
        text=output,
        calls=calls,
        content=content,
        reasoning=reasoning if family.thinks else "",
        prompt=prompt,
    )


def outputs() -> dict[str, Output]:
    """Texts of every family, by name."""
    made = {}
    for name, family in FAMILIES.items():
        several = [PLAIN, family.hard, BARE][: family.most]
        content = "" if family.alone else "Let me see. <b>{x}</b>"
        made[name] = rendered(name, [PLAIN])
        made[f"{name} hard"] = rendered(name, [family.hard], content)
        made[f"{name} without arguments"] = rendered(name, [BARE], content, "I'd call.")
        made[f"{name} several"] = rendered(name, several, content, "Hm <b>\n\nso: {1}.")
    return made | {f"golden {name}": output for name, output in GOLDENS.items()}


def _golden(tool_format: str | None, reasoning_format: str | None, text: str, **means: Any):
    return Output(tool_format=tool_format, reasoning_format=reasoning_format, text=text, **means)


_SF, _SEATTLE = [
    ("get_weather", {"city": city, "metric": "celsius"}) for city in ("San Francisco", "Seattle")
]
GOLDENS = {
    # Llama 3.2 and 3.3, "Zero shot function calling".
    "llama pythonic": _golden(
        "pythonic",
        None,
        "[get_weather(city='San Francisco', metric='celsius'), "
        "get_weather(city='Seattle', metric='celsius')]",
        calls=[_SF, _SEATTLE],
    ),
    "pythonic values": _golden(
        "pythonic",
        None,
        "Sure.\n[write_note(title='it\\'s \"x\" \\u00e9\\ud83d\\udc4d', copies=-1, urgent=true, "
        'meta={\'a\': [1.5, None, {"b": ()}], "c": {}}, text=""), get_time( )]\n\nDone.',
        content="Sure.\nDone.",
        calls=[
            (
                "write_note",
                {
                    "title": 'it\'s "x" é👍',
                    "copies": -1,
                    "urgent": True,
                    "meta": {"a": [1.5, None, {"b": []}], "c": {}},
                    "text": "",
                },
            ),
            BARE,
        ],
    ),
    "llama 4 tags": _golden(
        "pythonic", None, "<|python_start|>[get_time()]<|python_end|>", calls=[BARE]
    ),
    "not pythonic": _golden(
        "pythonic", None, "[1, 2]\n[get_thyme()]\n[x]", content="[1, 2]\n[get_thyme()]\n[x]"
    ),
    # FunctionGemma, "Formatting and best practices".
    "functiongemma": _golden(
        "gemma",
        None,
        "<start_function_call>call:get_weather{city:<escape>Tokyo {,}<escape>}<end_function_call>"
        "<start_function_call>call:write_note{copies:2,tags:[<escape>a<escape>,<escape>b<escape>],"
        "meta:{k:<escape>v<escape>,n:null}}<end_function_call>",
        calls=[
            ("get_weather", {"city": "Tokyo {,}"}),
            ("write_note", {"copies": 2, "tags": ["a", "b"], "meta": {"k": "v", "n": None}}),
        ],
    ),
    # Gemma 3, "Function calling with Gemma", with the fence that its prompt asks for.
    "tool code": _golden(
        "tool_code",
        None,
        'Right away.\n```tool_code\nget_weather(city="Paris", metric="celsius")\nget_time()\n```\n',
        content="Right away.",
        calls=[("get_weather", {"city": "Paris", "metric": "celsius"}), BARE],
    ),
    # gpt-oss, "OpenAI harmony response format": calls, and a preamble before them.
    "harmony": _golden(
        "harmony",
        "harmony",
        "<|channel|>analysis<|message|>Need the weather.<|end|><|start|>assistant<|channel|>"
        "commentary<|message|>I'll look.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.get_weather <|constrain|>json<|message|>{"city":"SF <|end|>"}<|call|>',
        reasoning="Need the weather.",
        content="I'll look.",
        calls=[("get_weather", {"city": "SF <|end|>"})],
    ),
    "harmony answer": _golden(
        None,
        "harmony",
        "<|channel|>analysis<|message|>2 + 2.<|end|><|start|>assistant<|channel|>analysis"
        "<|message|>Easy.<|end|>\n<|start|>assistant<|channel|>final<|message|>It's 4.",
        reasoning="2 + 2.\nEasy.",
        content="It's 4.",
    ),
    "harmony without a header": _golden("harmony", None, "It's <b> 4.", content="It's <b> 4."),
    "harmony without an end": _golden(
        "harmony",
        None,
        "<|channel|>analysis<|message|>Hm<|channel|>final<|message|>Yes.<|return|>",
        reasoning="Hm",
        content="Yes.",
    ),
    "llama several": _golden(
        "llama3_json",
        None,
        'Both:\n{"name": "get_time", "parameters": {}}; {"name": "get_weather", "parameters": '
        '{"city": "a}{\\""}}\nThere.',
        calls=[BARE, ("get_weather", {"city": 'a}{"'})],
        content="Both:\nThere.",
    ),
    "llama tag": _golden(
        "llama3_json",
        None,
        '<|python_tag|>{"type": "function", "name": "new", "parameters": {"a": [1]}}',
        calls=[("new", {"a": [1]})],
    ),
    "not llama": _golden(
        "llama3_json",
        None,
        '{"name": "Bob"}\n{"name": ["get_time"]}\n{"age": 3}\n{x}\n{',
        content='{"name": "Bob"}\n{"name": ["get_time"]}\n{"age": 3}\n{x}\n{',
    ),
    "mistral name and JSON": _golden(
        "mistral",
        "mistral",
        'Hi [x]\n[THINK]hm[/THINK] So:[TOOL_CALLS]get_time{}[TOOL_CALLS]a[ARGS]{"b": "[ARGS]"}',
        reasoning="hm",
        content="Hi [x]\nSo:",
        calls=[BARE, ("a", {"b": "[ARGS]"})],
    ),
    "qwen3_coder without the outer tag": _golden(
        "qwen3_coder",
        None,
        "<function=get_weather>\n<parameter=city>\n\n<x>\n</parameter> y \n\n</parameter>\n"
        "</function>\n</tool_call>\nBye.",
        calls=[("get_weather", {"city": "\n<x>\n</parameter> y \n"})],
        content="Bye.",
    ),
    "qwen3_coder's tags within JSON": _golden(
        "qwen3_coder",
        None,
        '<function=f>\n<parameter=a>\n["</parameter><parameter=b>", {"</function>": '
        '"\\"</parameter></function>"}]\n</parameter>\n<parameter=c>\n"</parameter></function>"\n</parameter>\n'
        "</function>Bye.",
        calls=[
            (
                "f",
                {
                    "a": ["</parameter><parameter=b>", {"</function>": '"</parameter></function>'}],
                    "c": "</parameter></function>",
                },
            )
        ],
        content="Bye.",
    ),
    "glm's tags in what begins like JSON": _golden(
        "glm",
        None,
        '<tool_call>f<arg_key>a</arg_key><arg_value>["x</arg_value><arg_key>b</arg_key><arg_value>'
        '"y" and z"</arg_value><arg_key>c</arg_key><arg_value>{"k": 1} {</arg_value></tool_call>',
        calls=[("f", {"a": '["x', "b": '"y" and z"', "c": '{"k": 1} {'})],
    ),
    "cut in the closing tag": _golden(
        "hermes", None, '<tool_call>{"name": "get_time"}\n</tool_', calls=[BARE]
    ),
    "reasoning opened by the prompt": _golden(
        "hermes",
        "think",
        "Hm.\n</think>\n\n 4 ",
        prompt="...<think>\n",
        reasoning="Hm.",
        content="4 ",
    ),
    "reasoning opened by the prompt and once more": _golden(
        "hermes",
        "think",
        "<think>Hm.</think>4",
        prompt="...<think>\n",
        reasoning="Hm.",
        content="4",
    ),
    "reasoning cut short": _golden(None, "think", "\n<think>\nHm.\n", reasoning="Hm.\n"),
    "reasoning twice": _golden(
        None,
        "think",
        "<think>a</think>b `<think>` c\n<think>\nd\n</think>\n\ne</think>",
        reasoning="a\nd",
        content="b `<think>` c\ne</think>",
    ),
    "calls left in the text": _golden(
        None, "think", "<think></think><tool_call>x", content="<tool_call>x"
    ),
    "plain": _golden(
        None,
        None,
        " a\n<think>b</think>[TOOL_CALLS] \n",
        content=" a\n<think>b</think>[TOOL_CALLS] \n",
    ),
    "plain in a family": _golden("hermes", "think", " <a>\n\n<b> \n<", content=" <a>\n\n<b> \n<"),
}
OUTPUTS = outputs()


def parse(output: Output, pieces: Sequence[str]) -> list[Delta]:
    """What a parser tells of a text in pieces, with neighbouring deltas of a kind put together."""
    parser = make_parser(
        output.tool_format, output.reasoning_format, tools=TOOLS, prompt=output.prompt
    )
    told = [delta for piece in pieces for delta in parser.feed(piece)] + parser.finish()
    joined: list[Delta] = []
    for delta in told:
        last = joined[-1] if joined else None
        if isinstance(delta, Content) and isinstance(last, Content) and delta.reason == last.reason:
            joined[-1] = Content(last.text + delta.text, delta.reason)
        elif isinstance(delta, Reasoning) and isinstance(last, Reasoning):
            joined[-1] = Reasoning(last.text + delta.text, delta.unfinished)
        else:
            joined.append(delta)
    return joined


def calls_in(deltas: Sequence[Delta]) -> Calls:
    """The calls that were told, in order."""
    calls = [delta for delta in deltas if isinstance(delta, ToolCall)]
    assert [call.index for call in calls] == list(range(len(calls)))
    return [(call.name, json.loads(call.arguments)) for call in calls]


def text_in(deltas: Sequence[Delta], kind: type[Content] | type[Reasoning]) -> str:
    """All text of a kind."""
    return "".join([delta.text for delta in deltas if isinstance(delta, kind)])
