"""What an answer must look like, as a value: JSON Schema, a regex, a list of texts, Lark."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from mlxserve.errors import RequestError
from mlxserve.report import show

Kind = Literal["json_schema", "json_object", "regex", "choice", "lark"]

MAX_BYTES = 256 << 10
MAX_DEPTH = 100  # of a schema's JSON


@dataclass(frozen=True, slots=True)
class Grammar:
    """The form that an answer must have: each of its tokens is drawn among those that keep to it.

    Made by `json_schema`, `json_object`, `regex`, `choice` or `lark`; kind and value can be carried
    as JSON. value: a schema as text, a regex, texts, a Lark grammar; "" for json_object.

    An answer ends where its grammar does. One that max_tokens or a stop string cuts off before is
    incomplete. Where the model thinks, it may do so first: what follows `</think>` has the form.

    Raises RequestError for what is no such value, and for one that is too large.
    """

    kind: Kind
    value: str | tuple[str, ...] = ""

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            kinds = ", ".join(get_args(Kind))
            raise RequestError(f"a grammar's kind is {show(self.kind)}; there are {kinds}")
        if self.kind == "choice":
            object.__setattr__(self, "value", _choices(self.value))
        elif not isinstance(self.value, str):
            raise RequestError(f"a {self.kind} grammar is {show(self.value)}; it must be a string")
        elif (self.kind == "json_object") != (self.value == ""):
            fix = "leave it empty" if self.kind == "json_object" else "write what is to match"
            raise RequestError(f"a {self.kind} grammar is {show(self.value)}; {fix}")
        self._check_text()
        if self.kind == "json_schema":
            _check_schema(str(self.value))
        if self.kind == "regex":
            _check_regex(str(self.value))

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str) -> "Grammar":
        """JSON that satisfies a schema (Draft 2020-12), given as a mapping or as JSON.

        Properties come in the schema's order. What can't be enforced is refused by name when the
        request is made; unknown keywords are annotations, as the standard has it.
        """
        if isinstance(schema, str):
            return cls("json_schema", schema)
        if not isinstance(schema, Mapping):
            raise RequestError(f"a JSON schema is {show(schema)}; it must be an object")
        try:
            return cls("json_schema", json.dumps(schema, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            if isinstance(error, RequestError):
                raise
            raise RequestError(f"the JSON schema is no JSON ({error}); use plain values") from None

    @classmethod
    def json_object(cls) -> "Grammar":
        """Any JSON object."""
        return cls("json_object")

    @classmethod
    def regex(cls, pattern: str) -> "Grammar":
        r"""Text that a regex matches as a whole, in Rust's syntax.

        As in JSON Schema, \d and \w are ASCII. There is no look-around and no back reference.
        """
        return cls("regex", pattern)

    @classmethod
    def choice(cls, texts: Iterable[str]) -> "Grammar":
        """One of some texts."""
        return cls("choice", tuple(texts))

    @classmethod
    def lark(cls, grammar: str) -> "Grammar":
        """Text that a context-free grammar derives from `start`, in llguidance's form of Lark."""
        return cls("lark", grammar)

    def _check_text(self) -> None:
        texts = (self.value,) if isinstance(self.value, str) else self.value
        try:
            size = sum(len(text.encode()) for text in texts)
        except UnicodeEncodeError:
            raise RequestError(
                f"a {self.kind} grammar has half of a surrogate pair in it; send valid Unicode"
            ) from None
        if size > MAX_BYTES:
            raise RequestError(
                f"a {self.kind} grammar has {size} bytes; at most {MAX_BYTES} are taken"
            )


def _choices(value: Any) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise RequestError(f"a choice is {show(value)}; it must be a list of texts")
    texts = tuple(value)
    for text in texts:
        if not isinstance(text, str):
            raise RequestError(f"a choice has {show(text)} among its texts; give strings")
    if not any(texts):
        raise RequestError("a choice has no text to choose; give at least one")
    return texts


def _check_regex(pattern: str) -> None:
    """What the compiler would pass over."""
    if (len(pattern) - len(pattern.rstrip("\\"))) % 2:
        raise RequestError(f"the regex {show(pattern)} ends in a backslash alone; write two")


def _check_schema(text: str) -> None:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the JSON schema is no JSON ({error}); mend it") from None
    if not isinstance(schema, dict):
        raise RequestError(f"a JSON schema is {show(schema)}; it must be an object")
    if "x-guidance" in schema:
        raise RequestError("the JSON schema has x-guidance, which isn't taken here; leave it out")
    if (depth := _depth(schema)) > MAX_DEPTH:
        raise RequestError(
            f"the JSON schema is {depth} levels deep; at most {MAX_DEPTH} are taken, and $ref "
            "makes one flatter"
        )


def _depth(value: Any) -> int:
    """Levels of objects and arrays."""
    level, depth = [value], 0
    while level := [
        child
        for node in level
        if isinstance(node, dict | list)
        for child in (node.values() if isinstance(node, dict) else node)
    ]:
        depth += 1
    return depth
