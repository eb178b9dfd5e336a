"""A model's turn in a chat, for either dialect: from messages and tools to what it says."""

from __future__ import annotations

import inspect
import logging
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mlxserve.answers import Answer
from mlxserve.grammar import Grammar
from mlxserve.report import show_json
from mlxserve.server.delivery import Delivery
from mlxserve.server.forms import Form, named
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
from mlxserve.text.stream import StopStrings
from mlxserve.text.tokenizer import Tokenizer
from mlxserve.text.tool_grammar import make_tool_grammar
from mlxserve.types import FinishReason, SamplingParams, TokenOut

logger = logging.getLogger(__name__)

OURS = frozenset(inspect.signature(Tokenizer.render_chat).parameters)
"""What no variable of a template may be called: arguments of our own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A chat to answer, in no dialect.

    form: of the answer; sampling: the parameters, once the grammar is known; thinking_tokens: at
    most, where the model's marks let that be enforced.
    """

    messages: Sequence[dict[str, Any]]
    tools: Tools
    form: Form | None
    sampling: Callable[[Grammar | None], SamplingParams]
    variables: Mapping[str, Any]
    options: Mapping[str, Any]
    thinking_tokens: int | None = None


@dataclass(eq=False, slots=True)
class Said:
    """What one answer has said so far.

    begins: of each of its tokens, how many characters came before; chars: in all. over: whatever
    else comes is none of it.
    """

    stops: StopStrings
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    begins: list[int] = field(default_factory=list)
    chars: int = 0
    over: bool = False


class Turn:
    """The answers to one chat. `said` adds up what `feed` has told.

    parsers: one for each answer. stop: strings that end an answer; they are looked for in its
    content, since reasoning and calls are nothing that a client could mean by them.
    """

    def __init__(
        self,
        delivery: Delivery,
        parsers: Sequence[OutputParser],
        *,
        tool_format: str | None,
        stop: Sequence[str],
        parallel_calls: bool,
    ) -> None:
        self.delivery = delivery
        self.said = [Said(StopStrings(stop)) for _ in parsers]
        self._parsers = parsers
        self._format = tool_format
        self._parallel = parallel_calls

    @property
    def answers(self) -> Sequence[Answer]:
        """As they stand."""
        return self.delivery.answers

    def feed(self, index: int, piece: str, out: TokenOut) -> list[Delta]:
        """What a piece of text, which came with `out`, adds to an answer."""
        parser, said = self._parsers[index], self.said[index]
        if said.over:
            return []
        if out.token_id is not None:
            said.begins.append(said.chars)
        said.chars += len(piece)
        deltas = parser.feed(piece) if piece else []
        if out.last:
            deltas += parser.finish()
        told: list[Delta] = []
        for delta in deltas:
            told += self._take(index, delta)
            if said.over:
                return told
        return told + self._rest(said) if out.last else told

    def _take(self, index: int, delta: Delta) -> list[Delta]:
        """Take in what the parser tells; returns what of it is to be told."""
        said = self.said[index]
        match delta:
            case Content():
                if self._is_lost(index, delta):
                    return []
                text, stopped = said.stops.feed(delta.text)
                if stopped:
                    self._end(index)
                return self._rest(said, text)
            case Reasoning(text):
                if delta.unfinished and self.answers[index].finish_reason == "length":
                    return []  # half the tag that closes it
                said.reasoning.append(text)
                return [delta]
            case ToolCall():
                held = self._rest(said)
                said.calls.append(delta)
                if not self._parallel:
                    self._end(index)
                return [*held, delta]

    def _is_lost(self, index: int, delta: Content) -> bool:
        """Whether this is half a call, or half a tag, of which nothing is told; the log says why it
        is no whole one."""
        if delta.reason is None:
            return False
        answer = self.answers[index]
        lost = delta.unfinished and answer.finish_reason == "length"
        told = "left out, since the answer was cut there" if lost else "told as text"
        logger.warning("%s: markup is %s: %s", answer.request.id, told, delta.reason)
        return lost

    def _rest(self, said: Said, text: str | None = None) -> list[Delta]:
        """Content, if there is any; without a text: what might have become a stop string."""
        text = said.stops.finish() if text is None else text
        if not text:
            return []
        said.content.append(text)
        return [Content(text)]

    def _end(self, index: int) -> None:
        self.said[index].over = True
        self.delivery.stop(index)

    def finish_reason(self, index: int) -> FinishReason | str:
        """Why an answer ended, in OpenAI's words."""
        reason = self.answers[index].finish_reason
        return "tool_calls" if reason == "stop" and self.said[index].calls else reason

    def stop_string(self, index: int) -> str | None:
        """The stop string that ended an answer, if one did."""
        return self.said[index].stops.stop

    def call_id(self, call: ToolCall, prefix: str) -> str:
        """The model's own, or a new one. Mistral's templates take only nine letters and digits."""
        return call.id or (new_id("")[:9] if self._format == "mistral" else new_id(prefix))

    @property
    def reasoning_tokens(self) -> int:
        """Tokens that all answers spent on reasoning: those that begin between its tags."""
        count = 0
        for parser, said in zip(self._parsers, self.said, strict=True):
            for begin, end in parser.reasoned:
                until = said.chars if end is None else end
                count += bisect_left(said.begins, until) - bisect_left(said.begins, begin)
        return count


def unread(served: Service, tools: Tools, variables: Iterable[str]) -> list[str]:
    """Those of some variables that the chat template doesn't read. Raises RequestError."""
    shown = bool(tools.offered) and not served.formats.generic
    read = served.llm.tokenizer.template_of(tools=shown).variables
    return [name for name in variables if name not in read]


def reads_any(served: Service, tools: Tools, variables: Collection[str]) -> bool:
    """Whether the chat template reads one of some variables. Raises RequestError."""
    return len(unread(served, tools, variables)) < len(variables)


def effort_variables(effort: str | None) -> dict[str, Any]:
    """Variables of templates that say how much to think; most know only whether."""
    if effort is None:
        return {}
    return {"reasoning_effort": effort} | ({"enable_thinking": False} if effort == "none" else {})


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
                f"chat_template_kwargs has {show_json(name)}, which can't be set there; leave it "
                "out",
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
    params = asked.sampling(_grammar(served, tools, asked.form))
    most = served.llm.max_prompt_tokens
    with named("messages", "prompt"):
        text, ids = prompt_of(served, asked.messages, tools, asked.variables, max_tokens=most)

    def parser() -> OutputParser:
        tool_format = formats.tools if tools.offered else None
        return make_parser(tool_format, formats.reasoning, tools=tools.offered, prompt=text)

    parsers = [parser() for _ in range(params.drawn)]
    options = {**asked.options, "thinking": formats.budget(asked.thinking_tokens, text)}
    unstopped = replace(params, stop=())
    # What can't be compiled is the form's fault: schemas of tools were tried alone.
    grammar = asked.form.field if asked.form else "tools"
    with named("messages", "prompt"), named(grammar, "grammar"):
        answers = served.llm.prepare(ids, unstopped, chat=True, keep=parsers[0].keeps, **options)
    return Turn(
        Delivery(served.llm, served.mailbox, answers),
        parsers,
        tool_format=formats.tools,
        stop=params.stop,
        parallel_calls=tools.parallel,
    )


def _grammar(served: Service, tools: Tools, form: Form | None) -> Grammar | None:
    enforced = tools.choice == "required" or form is not None or tools.strict
    tools.check_schemas(enforced=enforced)
    if not tools.offered or not enforced:
        return form and form.grammar
    assert served.formats.tools is not None
    with named("tools"):
        build = make_tool_grammar(
            served.formats.tools,
            tools.callable,
            served.llm.tokenizer,
            parallel=tools.parallel,
            reasoning_format=served.formats.reasoning,
        )
    if tools.choice == "required":
        return build.calls()
    if form is None:
        return build.calls_within_text()
    with named(form.field):
        return build.calls_or(form.grammar)
