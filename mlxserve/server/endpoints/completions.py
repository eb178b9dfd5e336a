"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from mlxserve.answers import Answer, chosen
from mlxserve.checks import checked_integer
from mlxserve.errors import RequestError
from mlxserve.server import openai
from mlxserve.server.body import parse
from mlxserve.server.delivery import Delivery
from mlxserve.server.exchange import DONE, Event, Exchange, answer
from mlxserve.server.forms import named
from mlxserve.server.problems import Problem
from mlxserve.server.schema import (
    CompletionRequest,
    TextChoice,
    TextLogprobs,
    TextReply,
    UsageReply,
)
from mlxserve.server.service import Service, new_id, now
from mlxserve.text.stream import StreamDecoder
from mlxserve.text.tokenizer import Tokenizer
from mlxserve.types import MAX_TOP_LOGPROBS, FinishReason, Logprob, SamplingParams, TokenOut

MAX_PROMPTS = 128
DEFAULT_MAX_TOKENS = 16  # OpenAI's, for this endpoint


async def completions(request: Request) -> Response:
    """Continue one or several texts, at once or as a stream."""
    return await answer(request, _prepare)


def _prepare(served: Service, data: bytes, tenant: str) -> tuple[_Texts, list[str]]:
    asked, ignored = parse(data, CompletionRequest, openai.DIALECT)
    served.check_model(asked.model)
    include_usage = openai.includes_usage(asked)
    prompts = _prompts(asked.prompt)
    options = openai.request_options(asked, tenant)
    form = openai.answer_form(asked)
    more: dict[str, Any] = {"grammar": form and form.grammar}
    if asked.max_tokens is None:
        more["max_tokens"] = served.config.sampling.get("max_tokens", DEFAULT_MAX_TOKENS)
    if asked.logprobs is not None:
        top = checked_integer("logprobs", asked.logprobs, 0, MAX_TOP_LOGPROBS)
        more |= {"logprobs": True, "top_logprobs": top}
        if asked.echo:
            options["prompt_logprobs"] = top
    if asked.max_tokens == 0 and asked.echo:  # the prompt is read, and nothing is drawn
        more |= {"max_tokens": 1, "best_of": None}
        options = {"prompt_logprobs": 0, **options, "score": True}
    elif asked.best_of is not None:
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
            param="prompt",
        )
    answers, told = [], []
    for prompt in prompts:
        ids = served.llm.encode(prompt, max_tokens=served.llm.max_prompt_tokens)
        with named(form and form.field, "grammar"):
            answers += served.llm.prepare(ids, params, **options)
        if asked.echo:
            told += [_Prompt.of(served.llm.tokenizer, ids, prompt)] * params.drawn
    delivery = Delivery(served.llm, served.mailbox, answers)
    return _Texts(served, asked, delivery, params, include_usage, told), ignored


def _prompts(given: str | list[Any]) -> list[Any]:
    """One or several prompts, text or ids each. Raises RequestError, Problem."""
    if isinstance(given, str):
        return [given]
    if not given:
        raise RequestError("the prompt is empty; give at least one token", param="prompt")
    several = [isinstance(one, str | list) for one in given]
    if any(several) and not all(several):
        raise Problem(400, "prompt mixes token ids with texts; send one kind", param="prompt")
    prompts = given if all(several) else [given]
    if any(isinstance(part, dict) for prompt in prompts for part in prompt[:1]):
        raise Problem(
            400, "prompt has messages; send those to /v1/chat/completions", param="prompt"
        )
    return prompts


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A prompt that is echoed: its text, and where in it each of its tokens begins."""

    ids: Sequence[int]
    text: str
    offsets: Sequence[int]

    @classmethod
    def of(cls, tokenizer: Tokenizer, ids: Sequence[int], given: str | list[int]) -> _Prompt:
        """Special tokens are text where the client wrote them, but not those put before a text."""
        added = len(tokenizer.prefix_ids) if isinstance(given, str) else 0
        decoder = StreamDecoder(tokenizer, keep=tokenizer.special_texts)
        offsets, pieces, chars = [0] * added, [], 0
        for token in ids[added:]:
            offsets.append(chars)
            pieces.append(decoder.feed(token))
            chars += len(pieces[-1])
        return cls(ids, "".join(pieces) + decoder.finish(), offsets)


@dataclass(eq=False)
class _Texts(Exchange[CompletionRequest]):
    """Texts under way, and how they are told. Answers to one prompt lie side by side.

    prompts: of each answer, if it is echoed.
    """

    params: SamplingParams
    include_usage: bool
    prompts: Sequence[_Prompt]
    id: str = field(default_factory=lambda: new_id("cmpl-"))
    created: int = field(default_factory=now)
    prompt_logprobs: dict[int, list[Logprob]] = field(default_factory=dict)

    @property
    def answers(self) -> list[Answer]:
        return list(self.delivery.answers)

    def finish_reason(self, index: int) -> str:
        """See `Exchange`."""
        return self.delivery.answers[index].finish_reason

    def take(self, index: int, piece: str, out: TokenOut) -> None:
        """See `Exchange`."""
        self.prompt_logprobs.setdefault(index, []).extend(out.prompt_logprobs)

    def reply(self) -> TextReply:
        choices = []
        drawn = self.params.drawn
        for at in range(0, len(self.answers), drawn):
            group = self.answers[at : at + drawn]
            for done in chosen(group, self.params):
                logprobs, text = done.logprobs, done.text
                if self.prompts:
                    text = self.prompts[at].text + text
                choices.append(
                    TextChoice(
                        index=len(choices),
                        text=text,
                        logprobs=None if logprobs is None else self._logprobs(at, logprobs),
                        finish_reason=self._reason(group[0], done.finish_reason),
                    )
                )
        return self._reply(choices, openai.usage(self.answers, drawn))

    def _reason(self, answer: Answer, reason: FinishReason) -> FinishReason:
        return "length" if answer.request.score else reason

    def _report(self, index: int) -> _Logprobs:
        prompt = self.prompts[index] if self.prompts else None
        return _Logprobs(self.served.llm.tokenizer, prompt)

    def _logprobs(self, index: int, found: tuple[Logprob, ...]) -> TextLogprobs:
        logprobs = self._report(index)
        logprobs.add_of_prompt(self.prompt_logprobs.get(index, ()))
        logprobs.add(found)
        return logprobs.told

    async def events(self) -> AsyncGenerator[Event | None]:
        streams = [self._report(index) for index in range(len(self.answers))]
        begun = set()
        async for event in self.delivery:
            if event is None:
                yield None
                continue
            index, piece, out = event
            one, stream = self.answers[index], streams[index]
            if self.prompts and index not in begun:
                piece = self.prompts[index].text + piece
            begun.add(index)
            stream.add_of_prompt(out.prompt_logprobs)
            if out.logprob is not None:
                stream.add([out.logprob])
            reason = self._reason(one, one.finish_reason) if out.last else None
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
    """The report of a text's tokens: where each begins, in characters, and how likely it was.

    A token that begins within a character begins where that does. prompt: what the text begins
    with; nothing predicts its first token.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: _Prompt | None) -> None:
        self._tokenizer = tokenizer
        self._decoder = StreamDecoder(tokenizer, at_start=False)
        self._offset = len(prompt.text) if prompt else 0
        self._of_prompt = iter(prompt.offsets if prompt else ())
        self.told = TextLogprobs([], [], [], [])
        if prompt:
            self._add(prompt.ids[0], None, None, next(self._of_prompt))

    def add_of_prompt(self, found: Iterable[Logprob]) -> None:
        """The next tokens of the prompt."""
        for one in found:
            self._add(one.token_id, one.logprob, self._top(one), next(self._of_prompt))

    def add(self, found: Iterable[Logprob]) -> None:
        """The next tokens of the answer."""
        for one in found:
            self._add(one.token_id, one.logprob, self._top(one), self._offset)
            if one.token_id < self._tokenizer.vocab_size:
                self._offset += len(self._decoder.feed(one.token_id))

    def _top(self, one: Logprob) -> dict[str, float]:
        """The likeliest tokens; where two are one text, the likelier."""
        top: dict[str, float] = {}
        for token, value in one.top:
            top.setdefault(_name(self._tokenizer, token), value)
        return top

    def _add(
        self, token: int, logprob: float | None, top: dict[str, float] | None, offset: int
    ) -> None:
        self.told.tokens.append(_name(self._tokenizer, token))
        self.told.token_logprobs.append(logprob)
        self.told.top_logprobs.append(top)
        self.told.text_offset.append(offset)

    def take(self) -> TextLogprobs:
        """What is new since the last time."""
        taken, self.told = self.told, TextLogprobs([], [], [], [])
        return taken


def _name(tokenizer: Tokenizer, token: int) -> str:
    """A token as text, or, where it is none by itself, its bytes as OpenAI writes them."""
    text, data = openai.token_text(tokenizer, token)
    if "\ufffd" not in text:
        return text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
