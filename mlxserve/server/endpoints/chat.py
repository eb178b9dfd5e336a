"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass, field
from typing import Any

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from mlxserve.checks import checked_integer
from mlxserve.grammar import Grammar
from mlxserve.server import openai, turn
from mlxserve.server.body import parse
from mlxserve.server.exchange import DONE, ChatExchange, Event, answer
from mlxserve.server.problems import Problem
from mlxserve.server.schema import (
    ChatChoice,
    ChatChunk,
    ChatDelta,
    ChatLogprobs,
    ChatReply,
    ChatRequest,
    FunctionCall,
    Message,
    ToolCallReply,
    UsageReply,
)
from mlxserve.server.service import Service, new_id, now
from mlxserve.server.tools import check_tools
from mlxserve.text.parsers import Content, Delta, Reasoning, ToolCall
from mlxserve.types import Logprob, SamplingParams


async def chat_completions(request: Request) -> Response:
    """Answer a chat, at once or as a stream."""
    return await answer(request, _prepare)


def _prepare(served: Service, data: bytes, tenant: str) -> tuple[_Chat, list[str]]:
    """Everything that can be wrong with a request is found here."""
    words = served.llm.tokenizer.template_words
    asked, ignored = parse(data, ChatRequest, openai.DIALECT, words)
    served.check_model(asked.model)
    include_usage = openai.includes_usage(asked)
    more: dict[str, Any] = {"logprobs": bool(asked.logprobs)}
    if asked.top_logprobs is not None:
        if not asked.logprobs:
            raise Problem(400, "top_logprobs needs logprobs: true; give both", param="top_logprobs")
        more["top_logprobs"] = asked.top_logprobs
    if asked.max_completion_tokens is not None:
        name = "max_completion_tokens"
        more["max_tokens"] = checked_integer(name, asked.max_completion_tokens, 1)
        if asked.max_tokens not in (None, asked.max_completion_tokens):
            ignored.append("max_tokens")
    openai.check_conversation(asked.messages, words)
    variables = dict(asked.chat_template_kwargs or {})
    effort = turn.effort_variables(asked.reasoning_effort)

    def sampling(grammar: Grammar | None) -> SamplingParams:
        return openai.sampling_params(asked, served.config, **more, grammar=grammar)

    most = served.config.max_tools
    tools = check_tools(asked.tools, asked.tool_choice, asked.parallel_tool_calls, most)
    found = turn.prepare(
        served,
        turn.Asked(
            messages=asked.messages,
            tools=tools,
            form=openai.answer_form(asked),
            sampling=sampling,
            variables=variables | effort,
            options=openai.request_options(asked, tenant),
        ),
    )
    ignored += [f"chat_template_kwargs.{n}" for n in turn.unread(served, tools, variables)]
    if effort and not turn.reads_any(served, tools, effort):
        ignored.append("reasoning_effort")
    return _Chat(served, asked, found.delivery, found, include_usage), ignored


@dataclass(eq=False)
class _Chat(ChatExchange[ChatRequest]):
    """A chat under way, and how it is told."""

    include_usage: bool
    id: str = field(default_factory=lambda: new_id("chatcmpl-"))
    created: int = field(default_factory=now)

    def reply(self) -> ChatReply:
        """All of it."""
        choices = []
        for index, (one, said) in enumerate(zip(self.turn.answers, self.turn.said, strict=True)):
            message = Message("assistant", "".join(said.content))
            if said.reasoning:
                message.reasoning_content = "".join(said.reasoning)
            if said.calls:
                message.content = message.content or None
                message.tool_calls = [self._call(call) for call in said.calls]
            logprobs = one.completion().logprobs
            choices.append(
                ChatChoice(
                    index=index,
                    message=message,
                    logprobs=None if logprobs is None else self._logprobs(logprobs),
                    finish_reason=self.turn.finish_reason(index),
                )
            )
        return ChatReply(
            id=self.id,
            created=self.created,
            model=self.model,
            choices=choices,
            usage=self._usage(),
        )

    async def events(self) -> AsyncGenerator[Event | None]:
        """What is new, as it comes."""
        for index in range(len(self.turn.answers)):
            yield self._chunk([_delta(index, Message("assistant", ""))])
        async for event in self.turn.delivery:
            if event is None:
                yield None
                continue
            index, piece, out = event
            told = [self._message(delta) for delta in self.turn.feed(index, piece, out)]
            if out.logprob is not None and self.asked.logprobs:
                # Of the token that came, even if its text is held back.
                logprobs = self._logprobs([out.logprob])
                first, *told = told or [Message(content="")]
                yield self._chunk([_delta(index, first, logprobs)])
            for message in told:
                yield self._chunk([_delta(index, message)])
            if out.last:
                reason = self.turn.finish_reason(index)
                yield self._chunk([_delta(index, Message(), finish_reason=reason)])
        if self.include_usage:
            chunk = self._chunk([])
            chunk.usage = self._usage()
            yield chunk
        yield DONE

    def _message(self, delta: Delta) -> Message:
        match delta:
            case Content(text):
                return Message(content=text)
            case Reasoning(text):
                return Message(reasoning_content=text)
            case ToolCall(index):
                return Message(tool_calls=[self._call(delta, index)])

    def _call(self, call: ToolCall, index: int | UnsetType = UNSET) -> ToolCallReply:
        function = FunctionCall(call.name, call.arguments)
        call_id = self.turn.call_id(call, "call_")
        return ToolCallReply(index=index, id=call_id, type="function", function=function)

    def _usage(self) -> UsageReply:
        answers = self.turn.answers
        return openai.usage(answers, len(answers), self.turn.reasoning_tokens)

    def _logprobs(self, found: Iterable[Logprob]) -> ChatLogprobs:
        tokenizer = self.served.llm.tokenizer
        return ChatLogprobs([openai.token_logprob(tokenizer, one) for one in found])

    def _chunk(self, choices: list[ChatDelta]) -> ChatChunk:
        chunk = ChatChunk(id=self.id, created=self.created, model=self.model, choices=choices)
        if self.include_usage:
            chunk.usage = None  # in all but the last
        return chunk


def _delta(
    index: int,
    delta: Message,
    logprobs: ChatLogprobs | None = None,
    finish_reason: str | None = None,
) -> ChatDelta:
    return ChatDelta(index=index, delta=delta, logprobs=logprobs, finish_reason=finish_reason)
