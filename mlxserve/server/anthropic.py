"""Anthropic's dialect: requests as msgspec structs, and how they become chats as templates know
them. Blocks of a message are checked where they are turned into text."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import msgspec
from msgspec import Struct

from mlxserve.errors import RequestError
from mlxserve.grammar import Grammar
from mlxserve.report import show_json
from mlxserve.server.body import Dialect
from mlxserve.server.forms import Form, asked_form
from mlxserve.server.problems import Problem
from mlxserve.server.schema import Effort

PIN_S = {None: 300.0, "5m": 300.0, "1h": 3600.0}
"""Seconds that cache_control keeps a prompt, by its ttl."""


class Thinking(Struct, kw_only=True):
    """type: enabled, adaptive or disabled. budget_tokens: of thinking, at the most."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = None


class OutputConfig(Struct, kw_only=True):
    """effort: how much to think, for templates that know it. format: the form of the answer."""

    effort: Effort | None = None
    format: dict[str, Any] | None = None


class ToolChoice(Struct, kw_only=True):
    """type: auto, any (some tool), tool (the one that is named) or none."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Tool(Struct, kw_only=True):
    """A tool of the client's. type: "custom", for Anthropic's own run elsewhere."""

    name: str
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    type: str | None = None
    strict: bool | None = None
    cache_control: dict[str, Any] | None = None


class CountRequest(Struct, kw_only=True):
    """POST /v1/messages/count_tokens. output_format: the older name of output_config.format."""

    model: str
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: dict[str, Any] | None = None


class MessagesRequest(CountRequest, kw_only=True):
    """POST /v1/messages."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    metadata: dict[str, Any] | None = None
    cache_control: dict[str, Any] | None = None


_TEXT = {"type", "text", "cache_control"}
_FORM = {"type", "schema"}
_PIN = {"type", "ttl"}
_NO_CITATIONS = "nothing is cited here; leave it out"

DIALECT = Dialect(
    known={
        "cache_control": _PIN,
        "system[]": _TEXT,
        "system[].cache_control": _PIN,
        "messages[]": {"role", "content"},
        "messages[].content[]": _TEXT
        | {"thinking", "signature", "data"}
        | {"id", "name", "input"}
        | {"tool_use_id", "content", "is_error"},
        "messages[].content[].cache_control": _PIN,
        "messages[].content[].content[]": _TEXT,
        "messages[].content[].content[].cache_control": _PIN,
        "tools[]": Tool.__struct_fields__,
        "tools[].cache_control": _PIN,
        "tool_choice": ToolChoice.__struct_fields__,
        "thinking": Thinking.__struct_fields__,
        "output_config": OutputConfig.__struct_fields__,
        "output_config.format": _FORM,
        "output_format": _FORM,
    },
    refused={
        "container": "this server runs no code; leave it out",
        "context_management": "this server edits no context; leave it out",
        "mcp_servers": "this server calls no tools itself; leave it out",
        "messages[].content[].citations": _NO_CITATIONS,
        "messages[].content[].content[].citations": _NO_CITATIONS,
        "service_tier": "there is one tier; leave it out",
        "system[].citations": _NO_CITATIONS,
        "tools[].defer_loading": "the model is told of all tools at once; leave it out",
        "tools[].input_examples": "templates don't show them; put them into the description",
    },
    harmless={
        "mcp_servers": ([],),
        "messages[].content[].citations": ([], {"enabled": False}),
        "messages[].content[].content[].citations": ([], {"enabled": False}),
        "service_tier": ("auto", "standard_only"),
        "system[].citations": ([], {"enabled": False}),
        "tools[].allowed_callers": (["direct"],),
        "tools[].defer_loading": (False,),
        "tools[].eager_input_streaming": (False,),
        "tools[].input_examples": ([],),
    },
)


def to_chat(asked: CountRequest) -> list[dict[str, Any]]:
    """System and messages as a chat in OpenAI's form, which templates know. Raises Problem."""
    chat: list[dict[str, Any]] = []
    if asked.system:
        text = "\n\n".join(_texts(_blocks("system", asked.system), "system"))
        chat.append({"role": "system", "content": text})
    for i, message in enumerate(asked.messages):
        chat += _message(f"messages[{i}]", message)
    return chat


def check_last(messages: Sequence[dict[str, Any]]) -> None:
    """Raise Problem for an answer that the client has begun: templates end what was said."""
    if messages and messages[-1].get("role") == "assistant":
        where = f"messages[{len(messages) - 1}]"
        raise Problem(
            400,
            f"{where} is the assistant's, and what it has begun can't be continued; end with the "
            "user's",
            param=where,
        )


def tools_of(asked: CountRequest) -> list[dict[str, Any]]:
    """Tools in OpenAI's form. Raises Problem for Anthropic's own, which run on its servers."""
    found = []
    for i, tool in enumerate(asked.tools or ()):
        if tool.type not in (None, "custom"):
            raise Problem(
                400,
                f"tools[{i}] is of type {show_json(tool.type)}; give your own, with an "
                "input_schema",
                param=f"tools[{i}]",
            )
        if tool.input_schema is None:
            where = f"tools[{i}].input_schema"
            raise Problem(400, f"{where} is missing; it must be given", param=where)
        function = {"name": tool.name, "parameters": tool.input_schema}
        if tool.description is not None:
            function["description"] = tool.description
        if tool.strict:
            function["strict"] = True
        found.append({"type": "function", "function": function})
    return found


def choice_of(asked: CountRequest) -> Any:
    """The choice of a tool in OpenAI's form. Raises Problem."""
    if (choice := asked.tool_choice) is None:
        return None
    names = [tool.name for tool in asked.tools or ()] if choice.type == "tool" else [None]
    if choice.name not in names:
        fix = "the name of one of tools" if choice.type == "tool" else "left out but for type tool"
        raise Problem(
            400,
            f"tool_choice.name is {show_json(choice.name)}; it must be {fix}",
            param="tool_choice.name",
        )
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return {"auto": "auto", "any": "required", "none": "none"}[choice.type]


def answer_form(asked: CountRequest) -> Form | None:
    """The form that the answer is to have. Raises RequestError, Problem."""
    given = {
        "output_config.format": asked.output_config and asked.output_config.format,
        "output_format": asked.output_format,
    }
    return asked_form({name: (value, partial(_schema, name)) for name, value in given.items()})


def _schema(name: str, given: dict[str, Any]) -> Grammar:
    match given:
        case {"type": "json_schema", "schema": dict(schema)}:
            return Grammar.json_schema(schema)
    raise RequestError(
        f"{name} is {show_json(given)}; it must be of type json_schema, with a schema"
    )


def pin_s(asked: CountRequest) -> float | None:
    """How long the prompt is to be kept, by the longest of its cache_controls. Raises Problem."""
    controls = {"cache_control": getattr(asked, "cache_control", None)}
    controls |= _controls("system", asked.system)
    for i, message in enumerate(asked.messages):
        controls |= _controls(f"messages[{i}].content", message.get("content"))
    for i, tool in enumerate(asked.tools or ()):
        controls[f"tools[{i}].cache_control"] = tool.cache_control
    wanted = []
    for where, control in controls.items():
        if control is None:
            continue
        ttl = control.get("ttl") if isinstance(control, dict) else control
        kind = control.get("type") if isinstance(control, dict) else control
        if kind != "ephemeral" or not isinstance(ttl, str | None) or ttl not in PIN_S:
            raise Problem(
                400,
                f"{where} is {show_json(control)}; it must be of type ephemeral, with a ttl of 5m "
                "or 1h",
                param=where,
            )
        wanted.append(PIN_S[ttl])
    return max(wanted, default=None)


def _controls(where: str, content: Any) -> dict[str, Any]:
    """The cache_controls of blocks, and of those in them, such as a tool's result, by place."""
    found: dict[str, Any] = {}
    for i, block in enumerate(content if isinstance(content, list) else ()):
        if isinstance(block, dict):
            found[f"{where}[{i}].cache_control"] = block.get("cache_control")
            if block.get("type") == "tool_result":
                found |= _controls(f"{where}[{i}].content", block.get("content"))
    return found


def _blocks(where: str, content: Any) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise Problem(
            400,
            f"{where} is {show_json(content)}; it must be a string or a list of blocks",
            param=where,
        )
    return content


def _texts(blocks: list[dict[str, Any]], where: str) -> list[str]:
    return [_text_of(block, f"{where}[{i}]") for i, block in enumerate(blocks)]


def _text_of(block: dict[str, Any], where: str) -> str:
    """The text of a block that can be nothing else."""
    if block.get("type") != "text":
        kind = show_json(block.get("type"))
        raise Problem(400, f"{where} is of type {kind}; only text can be read here", param=where)
    return _text(block, "text", where)


def _message(where: str, message: dict[str, Any]) -> list[dict[str, Any]]:
    role = message.get("role")
    blocks = _blocks(f"{where}.content", message.get("content"))
    if role == "user":
        return _user(where, blocks)
    if role == "assistant":
        return [_assistant(where, blocks)]
    raise Problem(
        400,
        f"{where}.role is {show_json(role)}; it must be user or assistant",
        param=f"{where}.role",
    )


def _user(where: str, blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Results of tools are messages of their own, before what the user says."""
    chat: list[dict[str, Any]] = []
    said = []
    for i, block in enumerate(blocks):
        at = f"{where}.content[{i}]"
        if block.get("type") != "tool_result":
            said.append(_text_of(block, at))
            continue
        inside = f"{at}.content"
        content = "\n".join(_texts(_blocks(inside, block.get("content") or ""), inside))
        if block.get("is_error"):
            content = f"Error: {content}"
        result = {"role": "tool", "content": content}
        chat.append({**result, "tool_call_id": _text(block, "tool_use_id", at)})
    if said or not chat:
        chat.append({"role": "user", "content": "\n\n".join(said)})
    return chat


def _assistant(where: str, blocks: list[dict[str, Any]]) -> dict[str, Any]:
    said, thought, calls = [], [], []
    for i, block in enumerate(blocks):
        at = f"{where}.content[{i}]"
        match block.get("type"):
            case "thinking":
                thought.append(_text(block, "thinking", at))
            case "redacted_thinking":
                raise Problem(
                    400, f"{at} is redacted_thinking, which nobody here can read", param=at
                )
            case "tool_use":
                if not isinstance(given := block.get("input", {}), dict):
                    raise Problem(
                        400,
                        f"{at}.input is {show_json(given)}; it must be an object",
                        param=f"{at}.input",
                    )
                arguments = msgspec.json.encode(given).decode()
                function = {"name": _text(block, "name", at), "arguments": arguments}
                call = {"id": _text(block, "id", at), "type": "function", "function": function}
                calls.append(call)
            case _:
                said.append(_text_of(block, at))
    message: dict[str, Any] = {"role": "assistant", "content": "\n\n".join(said)}
    if thought:
        message["reasoning_content"] = "\n".join(thought)
    if calls:
        message["tool_calls"] = calls
    return message


def _text(block: dict[str, Any], name: str, where: str) -> str:
    if not isinstance(value := block.get(name), str):
        raise Problem(
            400,
            f"{where}.{name} is {show_json(value)}; it must be a string",
            param=f"{where}.{name}",
        )
    return value


# ---- Answers.


class Usage(Struct):
    """input_tokens: of the prompt, those that had to be computed."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0


class TextBlock(Struct, tag="text"):
    """What was said."""

    text: str


class ThinkingBlock(Struct, tag="thinking"):
    """What the model thought first. signature: nothing is signed here."""

    thinking: str
    signature: str = ""


class ToolUseBlock(Struct, tag="tool_use"):
    """A call of one of the client's tools."""

    id: str
    name: str
    input: dict[str, Any]


Block = TextBlock | ThinkingBlock | ToolUseBlock


class MessageReply(Struct, kw_only=True):
    """An answer."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[Block]
    stop_reason: str | None
    stop_sequence: str | None
    usage: Usage


class CountReply(Struct):
    """Tokens of a prompt."""

    input_tokens: int
