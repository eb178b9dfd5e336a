"""The form that an answer is to have, and which field of a request asks for it: in any dialect."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from mlxserve.errors import RequestError
from mlxserve.grammar import Grammar
from mlxserve.server.problems import Problem


@dataclass(frozen=True, slots=True)
class Form:
    """A grammar, and the field that asks for it."""

    field: str
    grammar: Grammar


Make = Callable[[Any], Grammar | None]
"""From a field's value. Raises RequestError."""


def asked_form(fields: Mapping[str, tuple[Any, Make]]) -> Form | None:
    """The form that one of some fields asks for. Raises RequestError, Problem."""
    forms = []
    for field, (value, make) in fields.items():
        if value is None:
            continue
        with named(field):
            grammar = make(value)
        if grammar is not None:
            forms.append(Form(field, grammar))
    if len(forms) > 1:
        names = " and ".join(form.field for form in forms)
        raise Problem(400, f"{names} can't be asked for at once; choose one", param=forms[-1].field)
    return forms[0] if forms else None


@contextmanager
def named(field: str | None, param: str | None = None) -> Iterator[None]:
    """What is said to be wrong with `param` is told of the field that it came from."""
    try:
        yield
    except RequestError as error:
        if error.param == param:
            error.param = field
        raise
