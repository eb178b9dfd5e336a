"""Tools of a request: what may be called, and how models are told that were not taught to."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mlxserve.errors import RequestError
from mlxserve.grammar import Grammar
from mlxserve.report import show_json
from mlxserve.server.problems import Problem
from mlxserve.text.matcher import check_schema
from mlxserve.text.messages import check_messages

NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")

GENERIC_FORMAT = "hermes"
"""Of models whose templates know no tools: one that their texts are likely to have shown them."""

INSTRUCTIONS = """You can call these functions:
{tools}

To call one, answer with its name and arguments as JSON between these tags, and nothing else:
<tool_call>
{{"name": NAME, "arguments": {{...}}}}
</tool_call>"""


@dataclass(frozen=True, slots=True)
class Tools:
    """What a request says of tools.

    offered: those the model is told of, in OpenAI's form. choice: "auto", or "required" if it must
    call one. callable: those it may call. parallel: whether several at once. field: what a tool's
    schema is called in the request.
    """

    offered: tuple[dict[str, Any], ...] = ()
    callable: tuple[dict[str, Any], ...] = ()
    choice: Literal["auto", "required"] = "auto"
    parallel: bool = True
    field: str = "function.parameters"

    def check_schemas(self, *, enforced: bool) -> None:
        """Whether all are schemas, and, if calls are enforced, can be. Raises RequestError."""
        for i, tool in enumerate(self.offered):
            parameters = tool["function"].get("parameters")
            where = f"tools[{i}].{self.field}"
            try:
                schema = Grammar.json_schema(parameters or {})
                check_schema(schema, enforced=enforced and tool in self.callable)
            except RequestError as error:
                raise RequestError(f"{where}: {error}", param=where) from None

    @property
    def strict(self) -> bool:
        """Whether the arguments of some call must keep to its schema."""
        return any(tool["function"].get("strict") for tool in self.offered)


def check_tools(
    tools: Any,
    choice: Any,
    parallel: bool | None,
    most: int,
    field: str = "function.parameters",
) -> Tools:
    """The fields tools, tool_choice and parallel_tool_calls. Raises Problem.

    With the choice "none" the model isn't told of any. field: see `Tools`.
    """
    tools = tools or []
    if len(tools) > most:
        raise Problem(400, f"{len(tools)} tools are over {most}; send fewer", param="tools")
    offered = tuple(_check_tool(f"tools[{i}]", tool, field) for i, tool in enumerate(tools))
    names = [tool["function"]["name"] for tool in offered]
    if len(set(names)) < len(names):
        raise Problem(400, "two tools have one name; give each its own", param="tools")
    if not offered:
        if choice not in (None, "none", "auto"):
            raise Problem(400, "tool_choice needs tools; send some", param="tool_choice")
        return Tools()
    several = True if parallel is None else parallel
    match choice:
        case None | "auto":
            return Tools(offered, offered, "auto", several, field)
        case "none":
            return Tools()
        case "required":
            return Tools(offered, offered, "required", several, field)
        case {"type": "function", "function": {"name": name}} if name in names:
            return Tools(offered, (offered[names.index(name)],), "required", False, field)
    raise Problem(
        400,
        f"tool_choice is {show_json(choice)}; it must be none, auto, required or a function among "
        "tools",
        param="tool_choice",
    )


def _check_tool(where: str, tool: Any, field: str) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise Problem(400, f"{where} is {show_json(tool)}; it must be an object", param=where)
    if tool.get("type") != "function":
        kind = show_json(tool.get("type"))
        raise Problem(400, f"{where} is of type {kind}; only functions can be used", param=where)
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str) or not NAME.fullmatch(name):
        raise Problem(
            400,
            f"{where} has the name {show_json(name)}; use 1 to 64 letters, digits and _ . -",
            param=where,
        )
    parameters, at = function.get("parameters"), f"{where}.{field}"
    if not isinstance(parameters, dict | None):
        raise Problem(400, f"{at} is {show_json(parameters)}; it must be a JSON schema", param=at)
    if (kind := (parameters or {}).get("type", "object")) != "object":
        raise Problem(
            400,
            f"{at} is of type {show_json(kind)}; arguments have names: it must be an object",
            param=at,
        )
    return tool


def tell_generically(
    messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], *, takes_system: bool
) -> list[dict[str, Any]]:
    """A chat for a template that knows no tools: they, calls and results become text.

    takes_system: whether the template has a system message. Without, the tools are described in
    front of what the user said first. Raises RequestError for what isn't a chat.
    """
    told = _as_texts(check_messages(messages))
    if not tools:
        return told
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    text = INSTRUCTIONS.format(tools=listed)
    if takes_system:
        if told[0]["role"] != "system":
            return [{"role": "system", "content": text}, *told]
        return [{**told[0], "content": f"{_content(told[0])}\n\n{text}"}, *told[1:]]
    at = next((i for i, message in enumerate(told) if message["role"] == "user"), None)
    if at is None:
        return [{"role": "user", "content": text}, *told]
    told[at] = {**told[at], "content": f"{text}\n\n{_content(told[at])}"}
    return told


def _as_texts(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Results of tools that follow each other become one message: some templates want turns."""
    told: list[dict[str, Any]] = []
    for before, message in zip([None, *messages], messages, strict=False):
        if message["role"] != "tool":
            told.append(_with_calls_as_text(message))
            continue
        result = f"<tool_response>\n{_content(message)}\n</tool_response>"
        if before and before["role"] == "tool":
            told[-1]["content"] += f"\n{result}"
        else:
            told.append({"role": "user", "content": result})
    return told


def _with_calls_as_text(message: dict[str, Any]) -> dict[str, Any]:
    if not message.get("tool_calls"):
        return message
    texts = [_content(message)] if message.get("content") else []
    for call in message["tool_calls"]:
        function = call.get("function", call)
        told = {"name": function["name"], "arguments": function["arguments"]}
        texts.append(f"<tool_call>\n{json.dumps(told, ensure_ascii=False)}\n</tool_call>")
    return {"role": message["role"], "content": "\n".join(texts)}


def _content(message: dict[str, Any]) -> str:
    """The text of a message that was checked; its parts are text, too."""
    content = message.get("content")
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content)
    return content or ""
