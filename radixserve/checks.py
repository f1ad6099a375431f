"""Checks of arguments: they return a plain value or raise InvalidRequest with the allowed ones."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import math
import numbers
import operator
import reprlib
from array import array
from collections.abc import Iterable
from typing import Any, Self

from radixserve.errors import InvalidRequest

# Most levels of nested brackets, objects and lists in grammars, schemas and arguments.
MAX_NESTING = 128
_REPR = reprlib.Repr()  # shows the beginning of a value, which `shown` cuts further
_REPR.maxlevel, _REPR.maxdict, _REPR.maxlist, _REPR.maxtuple = 6, 40, 40, 40
_REPR.maxstring = _REPR.maxlong = _REPR.maxother = 400


def suggestion(name: str, known: Iterable[str]) -> str:
    """Returns "; did you mean NAME?" with the most similar known name; "" without one."""
    similar = difflib.get_close_matches(name, list(known), 1)
    return f"; did you mean {similar[0]}?" if similar else ""


class StrictFields:
    """Base of keyword-only frozen records. Unknown names raise InvalidRequest with the allowed
    ones."""

    __slots__ = ()

    def __new__(cls, *args: Any, **fields: Any) -> Self:
        allowed = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
        if args:
            raise InvalidRequest(
                f"{cls.__name__} takes keyword arguments only; allowed: {', '.join(allowed)}"
            )
        unknown = sorted(set(fields) - set(allowed))
        if unknown:
            raise InvalidRequest(
                f"unknown {cls.__name__} name {', '.join(map(repr, unknown))}"
                f"{suggestion(unknown[0], allowed)}; allowed: {', '.join(allowed)}"
            )
        return super().__new__(cls)

    def __repr__(self) -> str:
        """Shows the fields that differ from their default, or from the value that other fields
        imply."""
        pairs = (
            (field.name, getattr(self, field.name), field.metadata.get("usual", field.default))
            for field in dataclasses.fields(self)  # type: ignore[arg-type]
        )
        given = (f"{name}={value!r}" for name, value, default in pairs if value != default)
        return f"{type(self).__name__}({', '.join(given)})"

    def _check_ints(self, **ranges: tuple[int, int | None]) -> None:
        """Make each field a plain int in [low, high]; None is kept if it is the default. Raises
        InvalidRequest."""
        for name, (low, high) in ranges.items():
            value = getattr(self, name)
            if value is not None or getattr(type(self), name) is not None:
                object.__setattr__(self, name, check_int(name, value, low, high))

    def _check_floats(self, **ranges: tuple[float, float]) -> None:
        """Make each field a plain float in [low, high]. Raises InvalidRequest."""
        for name, (low, high) in ranges.items():
            value = check_float(name, getattr(self, name), low, high)
            object.__setattr__(self, name, value)

    def _check_bools(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise InvalidRequest(f"{name} must be True or False, got {shown(value)}")


def check_int(name: str, value: object, low: int, high: int | None = None) -> int:
    """Returns `value` as an int in [low, high]. Raises InvalidRequest for other values, bools
    included."""
    is_int = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    number = operator.index(value) if is_int else low  # type: ignore[arg-type]
    if not is_int or number < low or (high is not None and number > high):
        limit = f">= {low}" if high is None else f"between {low} and {high}"
        kind = "" if is_int else "an integer "
        raise InvalidRequest(f"{name} must be {kind}{limit}, got {shown(value)}")
    return number


def check_float(
    name: str, value: object, low: float, high: float, *, open_low: bool = False
) -> float:
    """Returns `value` as a finite float in [low, high], with `open_low` in (low, high]. Raises
    InvalidRequest for other values."""
    number = math.nan
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):
            number = float(value)
    if not math.isfinite(number) or number < low or number > high or (open_low and number == low):
        left = f"above {low:g}" if open_low else f">= {low:g}"
        limit = left if math.isinf(high) else f"{left} and <= {high:g}"
        raise InvalidRequest(f"{name} must be a number {limit}, got {shown(value)}")
    return number


def check_str(name: str, value: object) -> str:
    """Returns `value` if it is a string. Raises InvalidRequest for other values."""
    if not isinstance(value, str):
        raise InvalidRequest(f"{name} must be a string, got {shown(value)}")
    return value


def check_text(name: str, value: object) -> str:
    """Returns `value` if it is a string that can be encoded, without lone surrogates. Raises
    InvalidRequest for other values."""
    text = check_str(name, value)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{name} is not valid Unicode text: {error}") from None
    return text


def shown(value: object) -> str:
    """Returns `value` as text for an error message, cut to 80 characters and a type name. The cost
    is bounded for values of any size."""
    if isinstance(value, array):  # token ids of a request's body
        value = value[: _REPR.maxlist].tolist()
    elif isinstance(value, bytes | bytearray):
        value = value[: _REPR.maxstring]
    try:
        text = _REPR.repr(value) if isinstance(value, str | list | tuple | dict) else repr(value)
    except ValueError:  # an integer too long to print
        text = "a very large number"
    text = text if len(text) <= 80 else text[:77] + "..."
    is_number_or_text = value is None or isinstance(value, bool | int | float | str)
    return text if is_number_or_text else f"{type(value).__name__} {text}"


def check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raise InvalidRequest unless `value` is one of `allowed`."""
    if not isinstance(value, str) or value not in allowed:
        raise InvalidRequest(f"{name} must be one of {', '.join(allowed)}, got {shown(value)}")
