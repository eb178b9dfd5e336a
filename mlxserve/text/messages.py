"""Messages, tools and documents of a chat: checked, and copied into plain data."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from mlxserve.errors import RequestError
from mlxserve.report import clip, show, show_json

MAX_DEPTH = 100


def check_messages(messages: object) -> list[dict[str, Any]]:
    """Check a conversation and copy it into plain data. Keys whose value is None are left out.

    A message is a mapping with a `role` and a `content`: a string, or a list of
    `{"type": "text", "text": ...}` parts. A message with `tool_calls` needs no content; the
    arguments of a call may be an object or, as in OpenAI's API, its JSON text. A tool's result gets
    the `name` of the call that its `tool_call_id` names. Other keys pass through to the template.
    Raises RequestError naming what is wrong and where.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise RequestError(
            f"messages is {show_json(messages)}; give a list of objects with role and content",
            param="messages",
        )
    if not messages:
        raise RequestError("messages is empty; give at least one message", param="messages")
    checked = [_check_message(f"messages[{i}]", message) for i, message in enumerate(messages)]
    names: dict[str, str] = {}
    for message in checked:
        calls = message.get("tool_calls", ())
        names |= {str(call["id"]): function_of(call)["name"] for call in calls if "id" in call}
        if message["role"] == "tool" and (name := names.get(str(message.get("tool_call_id")))):
            message.setdefault("name", name)
    return checked


def _check_message(where: str, message: object) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(
            f"{where} is {show_json(message)}; it must be an object with role and content",
            param=where,
        )
    # Templates differ in what they do with None ("None" in the prompt, a crash); a missing key is
    # what all of them test for.
    copied = {key: value for key, value in plain(message, where).items() if value is not None}
    role = copied.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(
            f"{where}.role is {show_json(role)}; it must be a name such as user",
            param=f"{where}.role",
        )
    if (calls := copied.get("tool_calls")) is not None:
        if not isinstance(calls, list):
            raise RequestError(
                f"{where}.tool_calls is {show_json(calls)}; give a list",
                param=f"{where}.tool_calls",
            )
        copied["tool_calls"] = [
            _check_call(f"{where}.tool_calls[{i}]", call) for i, call in enumerate(calls)
        ]
    match copied.get("content"):
        case str():
            pass
        case list(parts):
            for i, part in enumerate(parts):
                _check_part(f"{where}.content[{i}]", part)
        case None:
            if not copied.get("tool_calls"):
                raise RequestError(f"{where} has no content; give a string", param=where)
        case content:
            raise RequestError(
                f"{where}.content is {show_json(content)}; it must be a string or a list of text "
                "parts",
                param=f"{where}.content",
            )
    return copied


def _check_call(where: str, call: object) -> dict[str, Any]:
    """A call whose arguments are an object, since most templates want to write them themselves."""
    function = function_of(call) if isinstance(call, dict) else {}
    if not isinstance(call, dict) or not isinstance(function.get("name"), str):
        raise RequestError(
            f'{where} is no call; give {{"type": "function", "function": {{"name": ..., '
            '"arguments": ...}}',
            param=where,
        )
    arguments = function.get("arguments")
    if arguments is None or arguments == "":
        arguments = {}
    elif isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        raise RequestError(
            f"{where} of {show_json(function['name'])} has arguments that are no JSON object: "
            f"{show_json(function['arguments'])}",
            param=where,
        )
    return with_arguments({"type": "function", **call}, arguments)


def function_of(call: dict[str, Any]) -> dict[str, Any]:
    """What a call calls, with its arguments: OpenAI's form has that within."""
    function = call.get("function", call)
    return function if isinstance(function, dict) else {}


def with_arguments(call: dict[str, Any], arguments: object) -> dict[str, Any]:
    """The call with these arguments in place of its own."""
    function = function_of(call) | {"arguments": arguments}
    return call | ({"function": function} if "function" in call else function)


def _check_part(where: str, part: object) -> None:
    if not isinstance(part, dict):
        raise RequestError(
            f'{where} is {show_json(part)}; it must be {{"type": "text", "text": ...}}',
            param=where,
        )
    if part.get("type") != "text":
        raise RequestError(
            f"{where} is of type {show_json(part.get('type'))}; only text can be read here",
            param=where,
        )
    if not isinstance(part.get("text"), str):
        raise RequestError(
            f"{where}.text is {show_json(part.get('text'))}; it must be a string",
            param=f"{where}.text",
        )


def check_mappings(name: str, values: object) -> list[dict[str, Any]] | None:
    """Check `tools` or `documents` and copy them into plain data. Raises RequestError."""
    if values is None:
        return None
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise RequestError(f"{name} is {show_json(values)}; give a list of objects", param=name)
    for i, value in enumerate(values):
        if not isinstance(value, Mapping):
            where = f"{name}[{i}]"
            raise RequestError(f"{where} is {show_json(value)}; it must be an object", param=where)
    return plain(values, name)


def plain(value: Any, where: str, depth: int = 0) -> Any:
    """A copy made of plain JSON types: what a template gets has no methods to abuse."""
    if depth > MAX_DEPTH:
        raise RequestError(
            f"{clip(where)} is nested over {MAX_DEPTH} levels deep; flatten it", param=where
        )
    if value is None or type(value) in (str, int, float, bool):
        return value
    match value:
        case str():
            return str.__str__(value)
        case Mapping():
            if wrong := [key for key in value if not isinstance(key, str)]:
                raise RequestError(
                    f"{clip(where)} has the key {show(wrong[0])}; keys must be strings", param=where
                )
            return {
                str.__str__(key): plain(item, f"{where}.{key}", depth + 1)
                for key, item in value.items()
            }
        case list() | tuple():
            return [plain(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
    raise RequestError(
        f"{clip(where)} is a {type(value).__name__}; only what JSON can hold may be in a chat",
        param=where,
    )
