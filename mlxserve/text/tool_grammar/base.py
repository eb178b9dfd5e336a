"""What the grammars of all families share: calls alone, calls or an answer, calls within text."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from mlxserve.errors import RequestError
from mlxserve.grammar import Grammar
from mlxserve.text import lark
from mlxserve.text.parsers import TOOL_FORMATS
from mlxserve.text.parsers.base import ReasoningFormat
from mlxserve.text.thinking import OPEN
from mlxserve.text.tokenizer import Tokenizer
from mlxserve.text.tool_grammar.rules import Rules
from mlxserve.text.tool_grammar.schemas import ANY_OBJECT, json_form, parameters_of

MAX_CALLS = 16
Function = Mapping[str, Any]


class ToolGrammar:
    """One request's grammars. A family's class says how it writes a call, and several.

    tool_format: its name. openings: what begins its calls, of which this model uses the first that
    it knows as a token, or else the last; None where nothing marks a call but that the answer is
    one.

    Expressions are Lark's. What they mention stands in `_rules`.
    """

    tool_format: ClassVar[str]
    openings: ClassVar[tuple[str | None, ...]]

    def __init__(
        self,
        functions: Sequence[Function],
        tokenizer: Tokenizer,
        *,
        parallel: bool,
        reasoning: ReasoningFormat | None,
    ) -> None:
        self._functions = functions
        self._reasoning = reasoning
        self._parallel = parallel
        self._rules = Rules(tokenizer)
        self._opening = self._rules.first_known(self.openings)
        self._rules.named["call"] = lark.one_of(self._call(function) for function in functions)
        self._rules.named["rest"] = self._rest()
        opening = self._rules.mark(self._opening) if self._opening else ""
        self._rules.named["calls"] = f"{opening} rest"

    def calls(self) -> Grammar:
        """One call, or, if they may be parallel, one after the other, and nothing else."""
        return self._grammar("calls")

    def calls_or(self, answer: Grammar) -> Grammar:
        """Calls, or an answer of a form of its own. Raises RequestError for a Lark one."""
        return self._grammar(f"calls | {self._answer(answer)}")

    def calls_within_text(self) -> Grammar:
        """Any text, at the end of which there may be calls: what begins like one must be one."""
        text = self._text()
        if not self._opening:
            return self._grammar(f"calls | {self._rules.terminal(text)}")
        return self._grammar(
            f"{self._rules.terminal(text)} | {self._rules.up_to(self._opening, text)} rest"
        )

    # ---- What a family says.

    def _call(self, function: Function) -> str:
        """One call."""
        raise NotImplementedError

    def _rest(self) -> str:
        """What follows the opening, up to the end of all calls; it mentions the rule `call`."""
        raise NotImplementedError

    def _text(self) -> str:
        """A terminal: text in which its parser finds no call, and the matcher no thinking."""
        marks = TOOL_FORMATS[self.tool_format].opens
        return f"({lark.without(marks)} & {lark.without([OPEN])})"

    # ---- Pieces.

    def _grammar(self, start: str) -> Grammar:
        return self._rules.grammar(f"{self._thought()} ({start})")

    def _thought(self) -> str:
        """Reasoning that may come before anything else."""
        if not self._reasoning:
            return ""
        opens, closes = self._reasoning.opens, self._reasoning.closes
        mark = next(filter(opens.startswith, self._reasoning.keeps))
        text = opens.removeprefix(mark)
        head = f"{self._rules.mark(mark)} {lark.literal(text) if text else ''}"
        return f"({head} {self._rules.up_to(closes)})?"

    def _several(self, call: str, between: str) -> str:
        # Weak models would go on for ever.
        return f"{call} ({between} {call}){{0,{MAX_CALLS - 1}}}" if self._parallel else call

    def _arguments(self, function: Function) -> str:
        """All arguments, as a JSON object."""
        where = f"the parameters of {function['name']!r}"
        return self._rules.rule(json_form(where, parameters_of(function)))

    def _object(self, function: Function, key: str, more: str = "") -> str:
        """A call as a JSON object of a name and arguments, in this order, and what may follow them.

        In pieces as JSON has them: a longer one would rule out other JSON that begins like it.
        """
        pieces = ["{", '"name"', ": ", json.dumps(function["name"]), ", ", json.dumps(key), ": "]
        head = " ".join(map(lark.literal, pieces))
        return f'{head} {self._arguments(function)} {more} "}}"'

    def _answer(self, answer: Grammar) -> str:
        match answer.kind:
            case "json_schema":
                return json_form("the JSON schema", json.loads(str(answer.value)))
            case "json_object":
                return json_form("the JSON schema", ANY_OBJECT)
            case "choice":
                return lark.one_of(map(lark.literal, answer.value))
            case "regex":
                return lark.regex(str(answer.value))
        raise RequestError(
            f"a {answer.kind} grammar and tools can't be asked for at once; drop one"
        )
