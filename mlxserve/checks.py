"""Checks of values that callers give, in their own words."""

import difflib
import math
from dataclasses import fields
from numbers import Integral, Real
from typing import Any, TypeVar

from mlxserve.errors import RequestError
from mlxserve.report import show

T = TypeVar("T")


def checked_number(
    name: str, value: Any, low: float, high: float, *, param: str | None = None
) -> float:
    """A number of Python's or NumPy's, as a float. Raises RequestError that names it.

    param: the parameter that it is, where that has another name.
    """
    param = param or name
    if isinstance(value, bool) or not isinstance(value, Real):
        raise RequestError(f"{name} is {show(value)}; it must be a number", param=param)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not low <= number <= high:  # neither is NaN
        raise RequestError(
            f"{name} is {number}; it must be between {low:g} and {high:g}", param=param
        )
    return number


def checked_integer(
    name: str, value: Any, low: int, high: int | None = None, *, param: str | None = None
) -> int:
    """A whole number of Python's or NumPy's, as an int; as `checked_number`."""
    param = param or name
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise RequestError(f"{name} is {show(value)}; it must be a whole number", param=param)
    number = int(value)
    if number < low or (high is not None and number > high):
        bounds = f"at least {low}" if high is None else f"between {low} and {high}"
        raise RequestError(f"{name} is {show(number)}; it must be {bounds}", param=param)
    return number


def checked_tuple(name: str, value: Any) -> tuple[Any, ...]:
    """The items of a list or set; none of None. Raises RequestError that names it."""
    if value is None:
        return ()
    if not isinstance(value, list | tuple | set | frozenset):
        raise RequestError(f"{name} is {show(value)}; it must be a list", param=name)
    return tuple(value)


def from_names(cls: type[T], what: str, values: dict[str, Any]) -> T:
    """A dataclass from keyword arguments; an unknown name is a RequestError that guesses at it."""
    known = [f.name for f in fields(cls)]  # type: ignore[arg-type]
    for name in values:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
            raise RequestError(f"unknown {what} {name!r}; {hint}")
    return cls(**values)
