"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from mlxserve.answers import Answer, chosen
from mlxserve.checks import checked_integer
from mlxserve.errors import RequestError
from mlxserve.server import openai
from mlxserve.server.delivery import Delivery
from mlxserve.server.exchange import DONE, Event, answer
from mlxserve.server.problems import Problem
from mlxserve.server.schema import (
    CompletionRequest,
    TextChoice,
    TextLogprobs,
    TextReply,
    UsageReply,
)
from mlxserve.server.service import Service, new_id, now, parse
from mlxserve.types import MAX_TOP_LOGPROBS, Logprob, SamplingParams, TokenOut

MAX_PROMPTS = 128
DEFAULT_MAX_TOKENS = 16  # OpenAI's, for this endpoint


async def completions(request: Request) -> Response:
    """Continue one or several texts, at once or as a stream."""
    return await answer(request, _prepare)


def _prepare(served: Service, data: bytes, tenant: str) -> tuple[_Texts, list[str]]:
    asked, unknown = parse(data, CompletionRequest, openai.DIALECT, strict=served.config.strict)
    served.check_model(asked.model)
    include_usage = openai.includes_usage(asked)
    prompts = _prompts(asked.prompt)
    options = openai.request_options(asked, tenant)
    more: dict[str, Any] = {"grammar": openai.answer_grammar(asked)}
    if asked.max_tokens is None:
        more["max_tokens"] = served.config.sampling.get("max_tokens", DEFAULT_MAX_TOKENS)
    if asked.logprobs is not None:
        top = checked_integer("logprobs", asked.logprobs, 0, MAX_TOP_LOGPROBS)
        more |= {"logprobs": True, "top_logprobs": top}
        if asked.echo:
            options["prompt_logprobs"] = top
    if asked.best_of is not None:
        if asked.stream and asked.best_of > (asked.n or 1):
            raise Problem(
                400, "best_of can't be streamed, since all answers must be there first",
                param="best_of",
            )  # fmt: skip
        more["best_of"] = asked.best_of
    params = openai.sampling_params(asked, served.config, **more)
    if len(prompts) * params.drawn > MAX_PROMPTS:
        raise Problem(
            400,
            f"{len(prompts)} prompts with {params.drawn} answers each are over {MAX_PROMPTS}; "
            "send fewer",
        )
    answers = []
    for prompt in prompts:
        ids = served.llm.encode(prompt, max_tokens=served.llm.max_prompt_tokens)
        answers += served.llm.prepare(ids, params, **options)
    delivery = Delivery(served.llm, served.mailbox, answers)
    return _Texts(served, asked, params, delivery, include_usage), unknown


def _prompts(given: str | list[Any]) -> list[Any]:
    """One or several prompts, text or ids each. Raises RequestError, Problem."""
    if isinstance(given, str):
        return [given]
    if not given:
        raise RequestError("the prompt is empty; give at least one token")
    several = [isinstance(one, str | list) for one in given]
    if any(several) and not all(several):
        raise Problem(400, "prompt mixes token ids with texts; send one kind", param="prompt")
    prompts = given if all(several) else [given]
    if any(isinstance(part, dict) for prompt in prompts for part in prompt[:1]):
        raise Problem(
            400, "prompt has messages; send those to /v1/chat/completions", param="prompt"
        )
    return prompts


@dataclass(eq=False)
class _Texts:
    """Texts under way, and how they are told. Answers to one prompt lie side by side."""

    served: Service
    asked: CompletionRequest
    params: SamplingParams
    delivery: Delivery
    include_usage: bool
    id: str = field(default_factory=lambda: new_id("cmpl-"))
    created: int = field(default_factory=now)
    prompt_logprobs: dict[int, list[Logprob]] = field(default_factory=dict)

    @property
    def answers(self) -> list[Answer]:
        return list(self.delivery.answers)

    @property
    def streams(self) -> bool:
        return bool(self.asked.stream)

    @property
    def model(self) -> str:
        return self.served.name_of(self.asked.model)

    def finish_reason(self, index: int) -> str:
        """See `Exchange`."""
        return self.delivery.answers[index].finish_reason

    def take(self, index: int, piece: str, out: TokenOut) -> None:
        """See `Exchange`."""
        self.prompt_logprobs.setdefault(index, []).extend(out.prompt_logprobs)

    async def reply(self) -> TextReply:
        choices = []
        drawn = self.params.drawn
        for at in range(0, len(self.answers), drawn):
            group = self.answers[at : at + drawn]
            for done in chosen(group, self.params):
                logprobs, text = done.logprobs, done.text
                if self.asked.echo:
                    text = self._prompt_text(at) + text
                choices.append(
                    TextChoice(
                        index=len(choices),
                        text=text,
                        logprobs=None if logprobs is None else self._logprobs(at, logprobs),
                        finish_reason=done.finish_reason,
                    )
                )
        return self._reply(choices, openai.usage(self.answers, drawn))

    def _prompt_text(self, index: int) -> str:
        return self.served.llm.tokenizer.decode(self.answers[index].request.prompt_ids)

    def _logprobs(self, index: int, found: tuple[Logprob, ...]) -> TextLogprobs:
        logprobs = _Logprobs(self.served)
        if self.asked.echo:
            logprobs.add_first(self.answers[index].request.prompt_ids[0])
            logprobs.add(self.prompt_logprobs.get(index, ()))
        logprobs.add(found)
        return logprobs.told

    async def events(self) -> AsyncGenerator[Event | None]:
        streams = [_Logprobs(self.served) for _ in self.answers]
        begun = set()
        async for event in self.delivery:
            if event is None:
                yield None
                continue
            index, piece, out = event
            one, stream = self.answers[index], streams[index]
            if self.asked.echo and index not in begun:
                piece = self._prompt_text(index) + piece
                stream.add_first(one.request.prompt_ids[0])
            begun.add(index)
            stream.add(out.prompt_logprobs)
            if out.logprob is not None:
                stream.add([out.logprob])
            reason = one.finish_reason if out.last else None
            logprobs = None if self.asked.logprobs is None else stream.take()
            if piece or out.last or (logprobs and logprobs.tokens):
                choice = TextChoice(
                    index=index, text=piece, logprobs=logprobs, finish_reason=reason
                )
                yield self._reply([choice])
        if self.include_usage:
            yield self._reply([], openai.usage(self.answers, self.params.drawn))
        yield DONE

    def _reply(self, choices: list[TextChoice], usage: UsageReply | None = None) -> TextReply:
        reply = TextReply(id=self.id, created=self.created, model=self.model, choices=choices)
        if usage is not None or self.include_usage:
            reply.usage = usage
        return reply


class _Logprobs:
    """The report of a text's tokens: where each begins, in characters, and how likely it was."""

    def __init__(self, served: Service) -> None:
        self._tokenizer = served.llm.tokenizer
        self._offset = 0
        self.told = TextLogprobs([], [], [], [])

    def add_first(self, token: int) -> None:
        """The first token of a prompt, which nothing predicts."""
        self._add(token, None, None)

    def add(self, found: Any) -> None:
        for one in found:
            top = {openai.token_text(self._tokenizer, t)[0]: value for t, value in one.top}
            self._add(one.token_id, one.logprob, top)

    def _add(self, token: int, logprob: float | None, top: dict[str, float] | None) -> None:
        text, _ = openai.token_text(self._tokenizer, token)
        self.told.tokens.append(text)
        self.told.token_logprobs.append(logprob)
        self.told.top_logprobs.append(top)
        self.told.text_offset.append(self._offset)
        self._offset += len(text)

    def take(self) -> TextLogprobs:
        """What is new since the last time."""
        taken, self.told = self.told, TextLogprobs([], [], [], [])
        return taken
