"""How families write calls whose arguments are JSON, JSON between tags, or Python's."""

import re

from mlxserve.text import lark
from mlxserve.text.parsers.deepseek import ALL_BEGIN, ALL_END, BEGIN, END, SEPARATOR
from mlxserve.text.parsers.values import kinds_of
from mlxserve.text.tool_grammar.base import Function, ToolGrammar
from mlxserve.text.tool_grammar.rules import Rules
from mlxserve.text.tool_grammar.schemas import (
    ANY_BOOLEAN,
    Parameter,
    is_plain,
    json_form,
    parameters,
    refused,
    text_form,
)

_MISTRAL_ID = "/[a-zA-Z0-9]{9}/"
_SPACE = r"\s\x1c-\x1f"  # as Python's \s, in a class
_SINGLE_QUOTED = r"/'([^'\\\x00-\x1f\x7f]|\\['\\nrt])*'/"


class Hermes(ToolGrammar):
    """See `parsers.hermes`."""

    tool_format = "hermes"
    openings = ("<tool_call>",)

    def _call(self, function: Function) -> str:
        return self._object(function, "arguments")

    def _rest(self) -> str:
        call = f'"\\n" call "\\n" {self._rules.mark("</tool_call>")}'
        return self._several(call, f'"\\n" {self._rules.mark("<tool_call>")}')


class Llama3Json(ToolGrammar):
    """See `parsers.llama3_json`. A call is all of an answer."""

    tool_format = "llama3_json"
    openings = (None,)

    def _call(self, function: Function) -> str:
        return self._object(function, "parameters")

    def _rest(self) -> str:
        return self._several("call", '"; "')

    def _text(self) -> str:
        # A call begins with name, type, function, parameters or arguments.
        begin = rf"\{{[{_SPACE}]*"
        other = rf'{begin}([^"{_SPACE}][^\n]*|"([^ntfpa\n][^\n]*)?)'
        return f"({super()._text()} & {_lines('{', other, begin, bare=True)})"


class Mistral(ToolGrammar):
    """See `parsers.mistral`. Which of the two forms a model was taught, it knows itself."""

    tool_format = "mistral"
    openings = ("[TOOL_CALLS]",)

    def _call(self, function: Function) -> str:
        return self._object(function, "arguments", rf'(", \"id\": \"" {_MISTRAL_ID} "\"")?')

    def _rest(self) -> str:
        id_ = f"({self._rules.mark('[CALL_ID]')} {_MISTRAL_ID})?"
        self._rules.named["named"] = lark.one_of(
            f"{lark.literal(function['name'])} {id_} {self._rules.mark('[ARGS]')} "
            f"{self._arguments(function)}"
            for function in self._functions
        )
        in_list = f'"[" {self._several("call", lark.literal(", "))} "]"'
        return f"{in_list} | {self._several('named', self._rules.mark('[TOOL_CALLS]'))}"


class DeepSeek(ToolGrammar):
    """See `parsers.deepseek`. Which of the two forms a model was taught, it knows itself."""

    tool_format = "deepseek"
    openings = (ALL_BEGIN,)

    def _call(self, function: Function) -> str:
        name, arguments = lark.literal(function["name"]), self._arguments(function)
        separator = self._rules.mark(SEPARATOR)
        fenced = f'"function" {separator} {name} "\\n```json\\n" {arguments} "\\n```"'
        return f"({name} {separator} {arguments} | {fenced})"

    def _rest(self) -> str:
        call = f"{self._rules.mark(BEGIN)} call {self._rules.mark(END)}"
        calls = self._several(call, lark.literal("\n") + "?")
        return f"{calls} {self._rules.mark(ALL_END)}?"


class _Tagged(ToolGrammar):
    """For families that put each argument between tags."""

    def _value(self, parameter: Parameter, closing: str, before: str = "") -> str:
        """A value and the tag that closes it: a string's own text, or JSON, as the parser reads it.

        before: what stands before the tag.
        """
        if kinds_of(parameter.schema) == {"string"}:
            text = text_form(parameter.where, parameter.schema, closing)
            return self._rules.up_to(closing, text, before)
        value = json_form(parameter.where, parameter.schema)
        if is_plain(parameter.schema, "boolean"):
            value = ANY_BOOLEAN
        return f"{value} {lark.literal(before) if before else ''} {self._rules.mark(closing)}"


class Qwen3Coder(_Tagged):
    """See `parsers.qwen3_coder`."""

    tool_format = "qwen3_coder"
    openings = ("<tool_call>",)

    def _call(self, function: Function) -> str:
        parts = [lark.literal(f"<function={function['name']}>\n")]
        for parameter in parameters(function):
            _check_name(parameter, ">" not in parameter.name)
            value = self._value(parameter, "</parameter>", before="\n")
            part = f'{lark.literal(f"<parameter={parameter.name}>" + chr(10))} {value} "\\n"'
            parts.append(part if parameter.required else f"({part})?")
        return " ".join([*parts, '"</function>"'])

    def _rest(self) -> str:
        call = f'"\\n" call "\\n" {self._rules.mark("</tool_call>")}'
        return self._several(call, f'"\\n" {self._rules.mark("<tool_call>")}')


class Glm(_Tagged):
    """See `parsers.glm`. Whether to break lines between tags, a model knows itself."""

    tool_format = "glm"
    openings = ("<tool_call>",)

    def _call(self, function: Function) -> str:
        parts = [lark.literal(function["name"])]
        for parameter in parameters(function):
            name = parameter.name
            _check_name(parameter, name == name.strip() and "</arg_key>" not in name)
            value = self._value(parameter, "</arg_value>")
            part = (
                f'"\\n"? {self._rules.mark("<arg_key>")} {lark.literal(name)} '
                f'{self._rules.mark("</arg_key>")} "\\n"? {self._rules.mark("<arg_value>")} {value}'
            )
            parts.append(part if parameter.required else f"({part})?")
        return " ".join([*parts, '"\\n"?'])

    def _rest(self) -> str:
        call = f"call {self._rules.mark('</tool_call>')}"
        return self._several(call, f'"\\n"? {self._rules.mark("<tool_call>")}')


class Pythonic(ToolGrammar):
    """See `parsers.pythonic`."""

    tool_format = "pythonic"
    openings = ("<|tool_call_start|>", None)

    def _call(self, function: Function) -> str:
        return python_call(self._rules, function)

    def _rest(self) -> str:
        closing = self._rules.mark("<|tool_call_end|>") if self._opening else ""
        return f'"[" {self._several("call", lark.literal(", "))} "]" {closing}'

    def _text(self) -> str:
        # Its parser takes calls without tags, too.
        begin, word = rf"\[[{_SPACE}]*", r"a-zA-Z0-9_.+\-"
        other = rf"{begin}([^{word}{_SPACE}(][^\n]*|[{word}]+([^{word}(\n][^\n]*)?)"
        lines = _lines("[", other, f"{begin}[{word}]*", bare=not self._opening)
        return f"({super()._text()} & {lines})"


class ToolCode(ToolGrammar):
    """See `parsers.pythonic`."""

    tool_format = "tool_code"
    openings = ("```tool_code\n",)

    def _call(self, function: Function) -> str:
        return python_call(self._rules, function)

    def _rest(self) -> str:
        return f'{self._several("call", lark.literal(chr(10)))} "\\n```"'


def python_call(rules: Rules, function: Function) -> str:
    """`name(key=value, ...)`."""
    items = []
    for parameter in parameters(function):
        _check_name(parameter, re.fullmatch(r"[\w.:/-]{1,256}", parameter.name) is not None)
        item = f"{lark.literal(parameter.name + '=')} {python_form(parameter)}"
        items.append((rules.rule(item), parameter.required))
    return f'{lark.literal(function["name"] + "(")} {rules.listed(items, ", ")} ")"'


def python_form(parameter: Parameter) -> str:
    """JSON, which the parser takes for Python's; also what models write in its place."""
    schema, json = parameter.schema, json_form(parameter.where, parameter.schema)
    if is_plain(schema, "boolean"):
        return ANY_BOOLEAN
    if is_plain(schema, "string"):
        return f"({json} | {_SINGLE_QUOTED})"
    if isinstance(schema, dict) and is_plain(schema, "string", "enum"):
        texts = [lark.literal(repr(each)) for each in schema["enum"] if isinstance(each, str)]
        return lark.one_of([json, *texts])
    if is_plain(schema, "array", "items") and is_plain(schema["items"], "string"):
        item = f"({json_form(parameter.where, schema['items'])} | {_SINGLE_QUOTED})"
        return f'"[" ({item} (", " {item})*)? "]"'
    return json


def _lines(bracket: str, other: str, end: str, *, bare: bool) -> str:
    """A terminal: lines none of which begins like a call.

    bracket: what a call begins with. other, end: regexes of a line that begins so but is none, and
    of one that nothing follows. bare: this model's calls begin so. Then a text doesn't begin with
    the bracket at all, since the two couldn't be told apart in time.
    """
    free = rf"[^{_SPACE}\{bracket}][^\n]*"
    first = free if bare else f"{free}|{other}"
    line = rf"([^\n\{bracket}][^\n]*)?|{other}"
    return rf"/[{_SPACE}]*(({first})(\n({line}))*(\n{end})?)?/"


def _check_name(parameter: Parameter, can_be_written: bool) -> None:
    if not can_be_written:
        raise refused(f"the name {parameter.where}")
