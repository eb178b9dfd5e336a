"""A model's turn in a chat, for either dialect: from messages and tools to what it says."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlxserve.answers import Answer
from mlxserve.grammar import Grammar
from mlxserve.server.delivery import Delivery
from mlxserve.server.problems import Problem
from mlxserve.server.service import Service, new_id
from mlxserve.server.tools import Tools, tell_generically
from mlxserve.text.parsers import (
    Content,
    Delta,
    OutputParser,
    Reasoning,
    ToolCall,
    make_parser,
)
from mlxserve.text.tokenizer import Tokenizer
from mlxserve.text.tool_grammar import make_tool_grammar
from mlxserve.types import FinishReason, SamplingParams

OURS = frozenset(inspect.signature(Tokenizer.render_chat).parameters)
"""What no variable of a template may be called: arguments of our own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A chat to answer, in no dialect.

    sampling: the parameters, once the grammar is known; thinking_tokens: at most, where the model's
    marks let that be enforced.
    """

    messages: Sequence[dict[str, Any]]
    tools: Tools
    grammar: Grammar | None
    sampling: Callable[[Grammar | None], SamplingParams]
    variables: Mapping[str, Any]
    options: Mapping[str, Any]
    thinking_tokens: int | None = None


@dataclass(eq=False, slots=True)
class Said:
    """What one answer has said so far."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)


class Turn:
    """The answers to one chat. `said` adds up what `feed` has told."""

    def __init__(
        self, delivery: Delivery, parsers: Sequence[OutputParser], tool_format: str | None
    ) -> None:
        self.delivery = delivery
        self._format = tool_format
        self.said = [Said() for _ in parsers]
        self._parsers = parsers

    @property
    def answers(self) -> Sequence[Answer]:
        """As they stand."""
        return self.delivery.answers

    def feed(self, index: int, piece: str, *, last: bool) -> list[Delta]:
        """What a piece of text adds to an answer; last: no more comes."""
        parser, said = self._parsers[index], self.said[index]
        deltas = parser.feed(piece) if piece else []
        if last:
            deltas += parser.finish()
        for delta in deltas:
            match delta:
                case Content(text):
                    said.content.append(text)
                case Reasoning(text):
                    said.reasoning.append(text)
                case ToolCall():
                    said.calls.append(delta)
        return deltas

    def finish_reason(self, index: int) -> FinishReason | str:
        """Why an answer ended, in OpenAI's words."""
        reason = self.answers[index].finish_reason
        return "tool_calls" if reason == "stop" and self.said[index].calls else reason

    def call_id(self, call: ToolCall, prefix: str) -> str:
        """The model's own, or a new one. Mistral's templates take only nine letters and digits."""
        return call.id or (new_id("")[:9] if self._format == "mistral" else new_id(prefix))

    async def reasoning_tokens(self, served: Service) -> int:
        """Tokens that all answers spent on reasoning. Counted beside the loop: they may be many."""
        texts = ["".join(said.reasoning) for said in self.said if said.reasoning]
        encode = served.llm.tokenizer.encode

        def count() -> int:
            return sum(len(encode(text, add_special_tokens=False)) for text in texts)

        return await served.prepare(count) if texts else 0


def prompt_of(
    served: Service,
    messages: Sequence[dict[str, Any]],
    tools: Tools,
    variables: Mapping[str, Any],
    *,
    max_tokens: int | None = None,
) -> tuple[str, list[int]]:
    """The prompt that a chat becomes, as text and as ids. Raises RequestError, Problem.

    max_tokens: see `Tokenizer.encode`.
    """
    for name in OURS:
        if name in variables:
            raise Problem(
                400,
                f"chat_template_kwargs has {name!r}, which can't be set there; leave it out",
                param="chat_template_kwargs",
            )
    tokenizer = served.llm.tokenizer
    offered: list[dict[str, Any]] | None = list(tools.offered) or None
    if served.formats.generic:
        messages = tell_generically(messages, offered or (), takes_system=tokenizer.takes_system)
        offered = None
    text = tokenizer.render_chat(messages, tools=offered, **variables)
    return text, tokenizer.encode(text, add_special_tokens=False, max_tokens=max_tokens)


def prepare(served: Service, asked: Asked) -> Turn:
    """Everything that can be wrong with a chat is found here. Raises RequestError, Problem."""
    formats, tools = served.formats, asked.tools
    if tools.offered and formats.tools is None:
        raise Problem(
            400,
            "how this model writes tool calls isn't known; start the server with --tool-format",
            param="tools",
        )
    most = served.llm.max_prompt_tokens
    text, ids = prompt_of(served, asked.messages, tools, asked.variables, max_tokens=most)
    params = asked.sampling(_grammar(served, tools, asked.grammar))

    def parser() -> OutputParser:
        tool_format = formats.tools if tools.offered else None
        return make_parser(tool_format, formats.reasoning, tools=tools.offered, prompt=text)

    parsers = [parser() for _ in range(params.drawn)]
    options = {**asked.options, "thinking": formats.budget(asked.thinking_tokens, text)}
    answers = served.llm.prepare(ids, params, chat=True, keep=parsers[0].keeps, **options)
    return Turn(Delivery(served.llm, served.mailbox, answers), parsers, formats.tools)


def _grammar(served: Service, tools: Tools, answer: Grammar | None) -> Grammar | None:
    if not tools.offered or (tools.choice == "auto" and not answer and not tools.strict):
        return answer
    assert served.formats.tools is not None
    build = make_tool_grammar(
        served.formats.tools,
        tools.callable,
        served.llm.tokenizer,
        parallel=tools.parallel,
        reasoning_format=served.formats.reasoning,
    )
    if tools.choice == "required":
        return build.calls()
    return build.calls_or(answer) if answer else build.calls_within_text()
