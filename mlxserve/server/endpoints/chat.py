"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from mlxserve.answers import Answer
from mlxserve.server import openai
from mlxserve.server.delivery import Delivery
from mlxserve.server.problems import Problem
from mlxserve.server.schema import (
    ChatChoice,
    ChatChunk,
    ChatDelta,
    ChatLogprobs,
    ChatReply,
    ChatRequest,
    Message,
)
from mlxserve.server.service import (
    EventStream,
    Service,
    ignored_header,
    new_id,
    now,
    parse,
    read,
    reply,
    service,
    whole,
)
from mlxserve.types import TokenOut


async def chat_completions(request: Request) -> Response:
    """Answer a chat, at once or as a stream."""
    served = service(request)
    served.check_open()
    data = await read(request)
    tenant = request.scope["tenant"].name
    chat, unknown = await served.prepare(lambda: _prepare(served, data, tenant))
    request.scope["delivery"] = chat.delivery
    chat.delivery.start()
    head = ignored_header(unknown)
    if chat.asked.stream:
        try:
            await chat.delivery.begun()
        except BaseException:
            chat.delivery.close()
            raise
        return EventStream(chat.delivery, chat.chunks(), head)
    async for _ in whole(request, chat.delivery):
        pass
    return reply(chat.reply(), head)


def _prepare(served: Service, data: bytes, tenant: str) -> tuple[_Chat, list[str]]:
    """Everything that can be wrong with a request is found here."""
    asked, unknown = parse(data, ChatRequest, strict=served.config.strict)
    served.check_model(asked.model)
    include_usage = openai.includes_usage(asked)
    more: dict[str, Any] = {"logprobs": bool(asked.logprobs)}
    if asked.top_logprobs is not None:
        if not asked.logprobs:
            raise Problem(400, "top_logprobs needs logprobs: true; give both", param="top_logprobs")
        more["top_logprobs"] = asked.top_logprobs
    if asked.max_completion_tokens is not None:
        more["max_tokens"] = asked.max_completion_tokens
    params = openai.sampling_params(asked, served.config, **more)
    variables = dict(asked.chat_template_kwargs or {})
    if asked.reasoning_effort is not None:
        variables["reasoning_effort"] = asked.reasoning_effort
    ids = served.llm.tokenizer.apply_chat_template(asked.messages, **_checked(variables))
    options = openai.request_options(asked, tenant)
    answers = served.llm.prepare(ids, params, chat=True, **options)
    delivery = Delivery(served.llm, served.mailbox, answers)
    return _Chat(served, asked, delivery, include_usage), unknown


def _checked(variables: dict[str, Any]) -> dict[str, Any]:
    """The template's variables; those that are ours can't be among them."""
    for name in ("messages", "tools", "documents", "add_generation_prompt", "template_name"):
        if name in variables:
            raise Problem(
                400,
                f"chat_template_kwargs has {name!r}, which is not the template's to choose",
                param="chat_template_kwargs",
            )
    return variables


@dataclass(eq=False)
class _Chat:
    """A chat under way, and how it is told."""

    served: Service
    asked: ChatRequest
    delivery: Delivery
    include_usage: bool
    id: str = field(default_factory=lambda: new_id("chatcmpl"))
    created: int = field(default_factory=now)

    @property
    def answers(self) -> list[Answer]:
        return list(self.delivery.answers)

    def reply(self) -> ChatReply:
        choices = []
        for index, answer in enumerate(self.answers):
            done = answer.completion()
            logprobs = None
            if done.logprobs is not None:
                tokenizer = self.served.llm.tokenizer
                logprobs = ChatLogprobs(
                    [openai.token_logprob(tokenizer, found) for found in done.logprobs]
                )
            choices.append(
                ChatChoice(
                    index=index,
                    message=Message("assistant", done.text),
                    logprobs=logprobs,
                    finish_reason=done.finish_reason,
                )
            )
        return ChatReply(
            id=self.id,
            created=self.created,
            model=self.served.name,
            choices=choices,
            usage=openai.usage(self.answers, len(self.answers)),
        )

    async def chunks(self) -> AsyncGenerator[ChatChunk | None]:
        for index in range(len(self.answers)):
            yield self._chunk([_delta(index, Message("assistant", ""))])
        async for event in self.delivery:
            if event is None:
                yield None
                continue
            index, piece, out = event
            logprobs = self._new_logprobs(index, out)
            if piece or logprobs is not None:
                yield self._chunk([_delta(index, Message(content=piece), logprobs)])
            if out.last:
                reason = self.answers[index].completion().finish_reason
                yield self._chunk([_delta(index, Message(), finish_reason=reason)])
        if self.include_usage:
            chunk = self._chunk([])
            chunk.usage = openai.usage(self.answers, len(self.answers))
            yield chunk

    def _new_logprobs(self, index: int, out: TokenOut) -> ChatLogprobs | None:
        if out.logprob is None or not self.asked.logprobs:
            return None
        return ChatLogprobs([openai.token_logprob(self.served.llm.tokenizer, out.logprob)])

    def _chunk(self, choices: list[ChatDelta]) -> ChatChunk:
        chunk = ChatChunk(id=self.id, created=self.created, model=self.served.name, choices=choices)
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
