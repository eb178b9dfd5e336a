"""Mutants: which of them `make test` has, and a module with one line of it changed in place."""

import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest

EACH = 16  # one of so many is in `make test`, where each is compiled; `make test-slow` has all


def params(
    mutants: Iterable[tuple[Any, ...]], name: Callable[..., str], one_in: int = EACH
) -> list[Any]:
    """For `parametrize`: name gives the id of one, which is a tuple. one_in: see EACH."""
    return [
        pytest.param(*each, id=name(*each), marks=() if i % one_in == 0 else pytest.mark.slow)
        for i, each in enumerate(mutants)
    ]


@contextmanager
def mutated(module: ModuleType, old: str, new: str) -> Iterator[None]:
    """Run with `new` where `module` has `old`, which it has once, within a function.

    Whoever imported from the module runs the mutant.
    """
    assert module.__file__ is not None
    source = Path(module.__file__).read_text("utf-8")
    assert source.count(old) == 1, f"{module.__name__} has {old!r} {source.count(old)} times"
    codes = dict(_codes(compile(source.replace(old, new), module.__file__, "exec")))
    functions = list(_functions(module))
    before = [function.__code__ for function in functions]
    for function in functions:
        function.__code__ = codes.get(function.__code__.co_qualname, function.__code__)
    try:
        yield
    finally:
        for function, code in zip(functions, before, strict=True):
            function.__code__ = code


def _codes(code: CodeType) -> Iterator[tuple[str, CodeType]]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant.co_qualname, constant
            yield from _codes(constant)


def _functions(module: ModuleType) -> Iterator[FunctionType]:
    """Of a module and of its classes, properties included."""
    for value in vars(module).values():
        if getattr(value, "__module__", None) != module.__name__:
            continue
        members = vars(value).values() if isinstance(value, type) else (value,)
        for member in members:
            function = member.fget if isinstance(member, property) else member
            if isinstance(function, types.FunctionType) and "<" not in function.__qualname__:
                yield function
