"""JSON in and out, and values that are written without their type."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from mlxserve.errors import RequestError

MAX_DEPTH = 64


class Malformed(Exception):  # noqa: N818 (never leaves this package)
    """Markup that isn't what its family writes. The words are the reason, for a log."""


class TooDeep(Malformed):
    """A call that is nested over MAX_DEPTH levels deep."""

    def __init__(self) -> None:
        super().__init__(f"a call is nested over {MAX_DEPTH} levels deep")


class NotACall(Malformed):
    """Ordinary text that merely looked like the beginning of a call."""


def load_json(text: str) -> Any:
    """A value from JSON. Raises Malformed. Models write line breaks in strings: they may stay."""
    try:
        value = json.loads(text, strict=False, parse_constant=_refuse)
    except ValueError as error:
        raise Malformed(f"a call isn't valid JSON: {error}") from error
    except RecursionError:
        raise TooDeep from None
    if text.count("[") + text.count("{") > MAX_DEPTH:
        _check_depth(value, MAX_DEPTH)
    return value


def _check_depth(value: object, allowed: int) -> None:
    if isinstance(value, list | dict):
        if not allowed:
            raise TooDeep
        for item in value.values() if isinstance(value, dict) else value:
            _check_depth(item, allowed - 1)


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def dump_json(value: object) -> str:
    """JSON text. Raises Malformed for what JSON can't say: infinities, half a surrogate pair."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except ValueError as error:  # UnicodeEncodeError is one
        raise Malformed(f"a call can't be written as JSON: {error}") from error
    return text


class Tools:
    """The tools a request offers, by name.

    tools: as in OpenAI's API, `{"type": "function", "function": {"name", "parameters"}}`.
    Raises RequestError for a tool without a name.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self._parameters: dict[str, Any] = {}
        for i, tool in enumerate(tools):
            function = tool.get("function")
            if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
                raise RequestError(
                    f"tools[{i}] has no function with a name; "
                    "give {'type': 'function', 'function': {'name', 'parameters'}}"
                )
            self._parameters[function["name"]] = function.get("parameters")

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self._parameters

    def value(self, name: str, key: str, text: str) -> Any:
        """A value from its bare text, by the tool's JSON schema.

        What the schema says is a string stays one; anything else is read as JSON, where the text is
        that (or Python's True, False, None, which templates write for them), and else is a string.
        """
        if self.is_text(name, key):
            return text
        value, kinds = _bare_value(text), self._kinds(name, key)
        if "string" in kinds and _kind(value) not in kinds:
            return text
        return value

    def is_text(self, name: str, key: str) -> bool:
        """Whether a value can be nothing but a string, by the tool's JSON schema."""
        return self._kinds(name, key) == {"string"}

    def _kinds(self, name: str, key: str) -> set[str]:
        schema = self._parameters.get(name)
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        return kinds_of(properties.get(key) if isinstance(properties, Mapping) else None)


_CONSTANTS = {"True": True, "False": False, "None": None}


def _bare_value(text: str) -> Any:
    word = text.strip()
    if word in _CONSTANTS:
        return _CONSTANTS[word]
    try:
        return load_json(word)
    except TooDeep:
        raise
    except Malformed:
        return text


def kinds_of(schema: object, depth: int = 0) -> set[str]:
    """The JSON types that a schema lets through, as far as it names them."""
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
        return set()
    named = schema.get("type")
    kinds = {named} if isinstance(named, str) else set(filter(_is_name, _items(named)))
    kinds = kinds or {_kind(value) for value in _items(schema.get("enum"))}
    for key in ("anyOf", "oneOf"):
        for choice in _items(schema.get(key)):
            kinds |= kinds_of(choice, depth + 1)
    return kinds | {"number"} if "integer" in kinds else kinds


def _items(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _is_name(value: object) -> bool:
    return isinstance(value, str)


def _kind(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"
