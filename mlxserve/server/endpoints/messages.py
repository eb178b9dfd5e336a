"""POST /v1/messages and /v1/messages/count_tokens, in Anthropic's dialect."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from mlxserve.checks import checked_integer
from mlxserve.grammar import Grammar
from mlxserve.server import anthropic, turn
from mlxserve.server.anthropic import (
    Block,
    CountReply,
    CountRequest,
    MessageReply,
    MessagesRequest,
    TextBlock,
    ThinkingBlock,
    ToolUseBlock,
    Usage,
)
from mlxserve.server.body import ignored_header, parse
from mlxserve.server.exchange import ChatExchange, Event, answer
from mlxserve.server.forms import named
from mlxserve.server.service import Service, new_id, read, reply, service
from mlxserve.server.tools import Tools, check_tools
from mlxserve.text.parsers import Content, Delta, Reasoning, ToolCall
from mlxserve.types import SamplingParams

DEFAULT_TEMPERATURE = 1.0


async def messages(request: Request) -> Response:
    """Answer a chat, at once or as a stream."""
    return await answer(request, _prepare)


async def count_tokens(request: Request) -> Response:
    """Tokens of the prompt that a chat becomes."""
    served, data = service(request), await read(request)

    def work() -> tuple[int, list[str]]:
        asked, ignored = parse(data, CountRequest, anthropic.DIALECT)
        served.check_model(asked.model)
        chat, tools = anthropic.to_chat(asked), _tools(served, asked)
        anthropic.answer_form(asked)  # these two take no tokens of the prompt
        anthropic.pin_s(asked)
        variables = _thinking(asked) | _effort(asked)
        ids = turn.prompt_of(served, chat, tools, variables)[1]
        return len(ids), ignored + _without_effect(served, asked, tools)

    count, ignored = await served.prepare(work)
    return reply(CountReply(count), ignored_header(ignored, strict=served.config.strict))


def _prepare(served: Service, data: bytes, tenant: str) -> tuple[_Message, list[str]]:
    """Everything that can be wrong with a request is found here."""
    asked, ignored = parse(data, MessagesRequest, anthropic.DIALECT)
    served.check_model(asked.model)
    anthropic.check_last(asked.messages)
    budget = asked.thinking and asked.thinking.budget_tokens
    if budget is not None:
        budget = checked_integer("thinking.budget_tokens", budget, 1)
        ignored += ["thinking.budget_tokens"] if served.formats.marks is None else []
    given: dict[str, Any] = {
        "max_tokens": asked.max_tokens,
        "temperature": asked.temperature,
        "top_k": asked.top_k,
        "top_p": asked.top_p,
        "stop": asked.stop_sequences,
    }
    values = {"temperature": DEFAULT_TEMPERATURE, **served.config.sampling}
    values |= {name: value for name, value in given.items() if value is not None}

    def sampling(grammar: Grammar | None) -> SamplingParams:
        with named("stop_sequences", "stop"):
            return SamplingParams(**values, grammar=grammar)

    tools = _tools(served, asked)
    found = turn.prepare(
        served,
        turn.Asked(
            messages=anthropic.to_chat(asked),
            tools=tools,
            form=anthropic.answer_form(asked),
            sampling=sampling,
            variables=_thinking(asked) | _effort(asked),
            options={"tenant": tenant, "pin_s": anthropic.pin_s(asked)},
            thinking_tokens=budget,
        ),
    )
    ignored += _without_effect(served, asked, tools)
    return _Message(served, asked, found.delivery, found), ignored


def _tools(served: Service, asked: CountRequest) -> Tools:
    choice, tools = asked.tool_choice, anthropic.tools_of(asked)
    parallel = not (choice and choice.disable_parallel_tool_use)
    return check_tools(
        tools, anthropic.choice_of(asked), parallel, served.config.max_tools, "input_schema"
    )


def _thinking(asked: CountRequest) -> dict[str, Any]:
    """Of the template: whether to think, in the name that most of them give it."""
    if asked.thinking is None:
        return {}
    return {"enable_thinking": asked.thinking.type != "disabled"}


def _effort(asked: CountRequest) -> dict[str, Any]:
    return turn.effort_variables(asked.output_config.effort if asked.output_config else None)


def _without_effect(served: Service, asked: CountRequest, tools: Tools) -> list[str]:
    """Fields that this model's template takes no notice of."""
    found = []
    thinking, thinks = _thinking(asked), served.formats.reasoning is not None
    if thinking and not turn.reads_any(served, tools, thinking):
        # A model that always thinks, or never, does as it is told all the same.
        found += ["thinking"] if thinking["enable_thinking"] != thinks else []
    if (effort := _effort(asked)) and not turn.reads_any(served, tools, effort):
        found.append("output_config.effort")
    return found


@dataclass(eq=False)
class _Message(ChatExchange[MessagesRequest]):
    """An answer under way, and how it is told."""

    id: str = field(default_factory=lambda: new_id("msg_"))
    _open: type[Delta] | None = None
    _index: int = -1

    def reply(self) -> MessageReply:
        """All of it."""
        said = self.turn.said[0]
        blocks: list[Block] = []
        if said.reasoning:
            blocks.append(ThinkingBlock("".join(said.reasoning)))
        if said.content:
            blocks.append(TextBlock("".join(said.content)))
        blocks += [
            ToolUseBlock(self._call_id(call), call.name, json.loads(call.arguments))
            for call in said.calls
        ]
        return self._told(blocks, self._usage(), *self._stop())

    def _told(
        self, blocks: list[Block], usage: Usage, reason: str | None, sequence: str | None
    ) -> MessageReply:
        return MessageReply(
            id=self.id,
            model=self.model,
            content=blocks,
            stop_reason=reason,
            stop_sequence=sequence,
            usage=usage,
        )

    def _usage(self) -> Usage:
        done = self.turn.answers[0].completion().usage
        return Usage(
            done.prompt_tokens - done.cached_tokens, done.completion_tokens, done.cached_tokens
        )

    def _stop(self) -> tuple[str, str | None]:
        """Why it ended, and the stop sequence if it was one."""
        if (sequence := self.turn.stop_string(0)) is not None:
            return "stop_sequence", sequence
        reason = self.turn.finish_reason(0)
        return {"tool_calls": "tool_use", "length": "max_tokens"}.get(reason, "end_turn"), None

    async def events(self) -> AsyncGenerator[Event | None]:
        """Named events: each block is begun, added to and ended."""
        prompt = len(self.turn.answers[0].request.prompt_ids)
        begun = self._told([], Usage(prompt, 0), None, None)
        yield "message_start", {"type": "message_start", "message": begun}
        async for event in self.turn.delivery:
            if event is None:
                yield None
                continue
            index, piece, out = event
            for delta in self.turn.feed(index, piece, out):
                for told in self._delta(delta):
                    yield told["type"], told
        if self._open is not None:
            yield "content_block_stop", {"type": "content_block_stop", "index": self._index}
        reason, sequence = self._stop()
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        end = {"type": "message_delta", "delta": delta, "usage": self._usage()}
        yield "message_delta", end
        yield "message_stop", {"type": "message_stop"}

    def _delta(self, delta: Delta) -> list[dict[str, Any]]:
        told: list[dict[str, Any]] = []
        if type(delta) is not self._open or isinstance(delta, ToolCall):
            if self._open is not None:
                told.append({"type": "content_block_stop", "index": self._index})
            self._open, self._index = type(delta), self._index + 1
            block = self._empty_block(delta)
            told.append(
                {"type": "content_block_start", "index": self._index, "content_block": block}
            )
        match delta:
            case Content(text):
                new = {"type": "text_delta", "text": text}
            case Reasoning(text):
                new = {"type": "thinking_delta", "thinking": text}
            case ToolCall():
                new = {"type": "input_json_delta", "partial_json": delta.arguments}
        told.append({"type": "content_block_delta", "index": self._index, "delta": new})
        return told

    def _empty_block(self, delta: Delta) -> Block:
        match delta:
            case Content():
                return TextBlock("")
            case Reasoning():
                return ThinkingBlock("")
            case ToolCall():
                return ToolUseBlock(self._call_id(delta), delta.name, {})

    def _call_id(self, call: ToolCall) -> str:
        return self.turn.call_id(call, "toolu_")
