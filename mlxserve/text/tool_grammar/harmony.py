"""Harmony: channels, of which a call has one of its own; see `parsers.harmony`."""

from mlxserve.grammar import Grammar
from mlxserve.text import lark
from mlxserve.text.parsers.harmony import HarmonyParser
from mlxserve.text.tool_grammar.base import Function, ToolGrammar

_CHANNEL, _BODY = "<|channel|>", "<|message|>"


class Harmony(ToolGrammar):
    """The model may think first, in the channel for that. Its answer is one message after that.

    A call is the last thing in an answer, since the token that ends it ends the answer.
    """

    tool_format = "harmony"
    openings = (None,)

    def calls_within_text(self) -> Grammar:
        """See `ToolGrammar.calls_within_text`. Text before a call is a message, too."""
        final = self._final(self._rules.terminal(self._text()))
        return self._grammar(f"{self._message('commentary')}? calls | {final}")

    def _answer(self, answer: Grammar) -> str:
        return self._final(super()._answer(answer))

    def _thought(self) -> str:
        return f"{self._message('analysis')}?"

    def _call(self, function: Function) -> str:
        # Models put the recipient in either part of the header.
        to, channel = lark.literal(f" to=functions.{function['name']}"), self._rules.mark(_CHANNEL)
        before = f'{to} {channel} "commentary json"'
        after = f'{channel} "commentary" {to} " " {self._rules.mark("<|constrain|>")} "json"'
        body = f"{self._rules.mark(_BODY)} {self._arguments(function)}"
        return f"({before} | {after}) {body}"

    def _rest(self) -> str:
        return "call"

    def _text(self) -> str:
        return lark.without(sorted(HarmonyParser.keeps))

    def _message(self, channel: str) -> str:
        """A whole message, and what begins the next one."""
        body = self._rules.up_to("<|end|>", self._text())
        return f'({self._header(channel)} {body} {self._rules.mark("<|start|>")} "assistant")'

    def _final(self, answer: str) -> str:
        return f"{self._header('final')} {answer}"

    def _header(self, channel: str) -> str:
        return f"{self._rules.mark(_CHANNEL)} {lark.literal(channel)} {self._rules.mark(_BODY)}"
