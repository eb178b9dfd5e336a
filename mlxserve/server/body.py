"""A request's body: from JSON to a struct, with a word for each field that can have no effect."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from mlxserve.report import clip, show_json
from mlxserve.server.problems import Problem

S = TypeVar("S", bound=msgspec.Struct)

IGNORED_HEADER = "x-mlxserve-ignored"
MAX_NAMED = 20
MAX_NAME_CHARS = 45

_HALF = re.compile(rb"(?<!\\)(?:\\\\)*(\\u[dD][89abAB][0-9a-fA-F]{2})(?!\\u[dD][c-fC-F])")
"""The first half of a surrogate pair, without the second."""

_TYPES = {
    "array": "a list",
    "bool": "true or false",
    "float": "a number",
    "int": "a whole number",
    "object": "an object",
    "str": "a string",
}


@dataclass(frozen=True, slots=True)
class Dialect:
    """What is known of a dialect's fields, beside those of the struct that a body becomes.

    Places are written as in `messages[].content[].text`, with `[]` for any item of a list.

    known: fields of the objects at these places; what other objects hold is free. rendered: a
    place whose objects reach the chat template, so that what it mentions is known, too.
    refused: fields that can't be honoured, and what to do instead. harmless: values with which one
    of them, or one that isn't known, asks for what is done anyway.
    """

    known: Mapping[str, Collection[str]]
    refused: Mapping[str, str]
    harmless: Mapping[str, Sequence[Any]]
    rendered: str | None = None


def parse(
    data: bytes, kind: type[S], dialect: Dialect, template_words: Collection[str] = ()
) -> tuple[S, list[str]]:
    """A body as a struct, and where in it is what nobody here knows, each kind of field once.

    Raises Problem for what isn't JSON, values of the wrong type, and fields that can't be honoured.
    """
    try:
        given = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        if half := _HALF.search(data):  # of which the library only says that text is missing
            raise Problem(
                400,
                f"the body has {half[1].decode()}, half of a surrogate pair; send valid Unicode",
            ) from None
        raise Problem(400, f"the body isn't valid JSON: {error}") from None
    except RecursionError:
        raise Problem(400, "the body is nested too deeply; flatten it") from None
    if not isinstance(given, dict):
        raise Problem(400, f"the body is {show_json(given)}; it must be an object")
    walk = _Walk(dialect, {**dialect.known, "": kind.__struct_fields__}, template_words)
    walk.object("", "", given)
    try:
        return msgspec.convert(given, kind), list(walk.unknown.values())
    except msgspec.ValidationError as error:
        raise _wrong_type(str(error), given, kind) from None


class _Walk:
    """Goes through the places that a dialect knows. unknown: by place, the first of each."""

    def __init__(
        self,
        dialect: Dialect,
        known: Mapping[str, Collection[str]],
        template_words: Collection[str],
    ) -> None:
        self._dialect = dialect
        self._known = known
        self._words = template_words
        self.unknown: dict[str, str] = {}

    def object(self, place: str, path: str, value: Mapping[str, Any]) -> None:
        dialect, known = self._dialect, self._known[place]
        words = self._words if place == dialect.rendered else ()
        for name, item in value.items():
            below, at = (f"{place}.{name}", f"{path}.{name}") if place else (name, name)
            if item is None:
                continue
            if name in known:
                self._value(below, at, item)
            elif item in dialect.harmless.get(below, ()) or name in words:
                continue
            elif below in dialect.refused:
                reason = dialect.refused[below]
                raise Problem(400, f"{at} can't be honoured: {reason}", param=at)
            else:
                self.unknown.setdefault(below, at)

    def _value(self, place: str, path: str, value: Any) -> None:
        if isinstance(value, dict) and place in self._known:
            self.object(place, path, value)
        elif isinstance(value, list) and f"{place}[]" in self._known:
            for i, item in enumerate(value):
                self._value(f"{place}[]", f"{path}[{i}]", item)


def ignored_header(ignored: Sequence[str], *, strict: bool) -> dict[str, str]:
    """Tells the client which of its fields had no effect. Raises Problem if strict."""
    if not ignored:
        return {}
    if strict:
        raise Problem(400, f"{clip(ignored[0])} has no effect here; leave it out", param=ignored[0])
    names = [name.encode("ascii", "replace").decode() for name in ignored[:MAX_NAMED]]
    names = [clip(name, MAX_NAME_CHARS) for name in names]
    text = ", ".join("".join(c if c.isprintable() else "?" for c in name) for name in names)
    return {IGNORED_HEADER: text}


# ---- A value of the wrong type: msgspec says where it is and what was expected.


def _wrong_type(text: str, given: Any, kind: Any) -> Problem:
    said, _, place = text.partition(" - at `$")
    value, where = given, ""
    for name, index in re.findall(r"\.(\w+)|\[(\d+|\.\.\.)\]", place):
        kind = _type_below(kind, name)
        if index == "...":  # it doesn't say which
            name = next(key for key, item in value.items() if not _is(item, kind))
        value = value[name] if name else value[int(index)]
        where += f".{name}" if name else f"[{index}]"
    where = where.removeprefix(".")
    if found := re.fullmatch(r"Object missing required field `(\w+)`", said):
        missing = f"{where}.{found[1]}".removeprefix(".")
        return Problem(400, f"{missing} is missing; it must be given", param=missing)
    found = re.fullmatch(r"Expected `(.+)`, got `.+`", said)
    wanted = [_TYPES.get(name, name) for name in found[1].split(" | ")] if found else _choices(kind)
    wanted = [name for name in wanted if name != "null"]
    *rest, last = wanted or [said]
    fix = f"it must be {', '.join(rest)} or {last}" if rest else f"it must be {last}"
    return Problem(400, f"{clip(where)} is {show_json(value)}; {fix}", param=where)


def _type_below(kind: Any, name: str) -> Any:
    """The type of a struct's field, or of what a list or a dict holds."""
    for one in _alternatives(kind):
        if name and isinstance(one, type) and issubclass(one, msgspec.Struct):
            return get_type_hints(one)[name]
        if not name and get_origin(one) in (list, dict):
            return get_args(one)[-1]
    raise TypeError(f"{kind} has no {name or 'items'}")


def _alternatives(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def _choices(kind: Any) -> list[str]:
    """The values of a Literal."""
    return [
        str(value)
        for one in _alternatives(kind)
        if get_origin(one) is Literal
        for value in get_args(one)
    ]


def _is(value: Any, kind: Any) -> bool:
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return False
    return True
