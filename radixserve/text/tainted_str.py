"""`TaintedStr`: a string that knows which of its characters came from a caller.

The names are those of taint tracking. A template's own strings are plain ones; what a caller gives
is tainted, and so are all strings that are made of it. The taint of a string has one byte for each
character: 0 for the template's own, else who brought it.

Slices, `split`, `strip`, `replace`, `join`, `+` and formatting follow each character. The result of
any other method, such as `translate`, is tainted as a whole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

TEMPLATE, CALLER, ASSISTANT = b"\0", b"\1", b"\2"  # who brought a character
# Characters that stand for each kind of taint while a string is formatted for the second time.
_PLACEHOLDERS = ("\ue000", "\ue001", "\ue002")
_NO_PLACEHOLDERS = dict.fromkeys(map(ord, _PLACEHOLDERS), "?")
_KINDS = {character: kind for kind, character in enumerate(_PLACEHOLDERS)}
_PLAIN = frozenset((str, int, float, bool, type(None)))


class TaintedStr(str):
    """Equal to the plain string, with the same hash. Made by `tainted`."""

    __slots__ = ("_taint",)
    _taint: bytes

    def __str__(self) -> str:
        return self

    def __getitem__(self, index: Any) -> str:
        taint = self._taint[index]
        return _make(str.__getitem__(self, index), bytes([taint]) if type(taint) is int else taint)

    def __iter__(self) -> Iterator[str]:
        return (self[index] for index in range(len(self)))

    def __add__(self, other: str) -> str:
        if not isinstance(other, str):
            return NotImplemented
        return _make(str.__add__(self, other), self._taint + taint_of(other))

    def __radd__(self, other: str) -> str:
        if not isinstance(other, str):
            return NotImplemented
        return _make(str.__add__(other, self), taint_of(other) + self._taint)

    def __mul__(self, count: Any) -> str:
        return _make(str.__mul__(self, count), self._taint * count)

    __rmul__ = __mul__

    def __mod__(self, values: Any) -> str:
        return formatted(self, values)

    def __rmod__(self, template: str) -> str:
        return formatted(template, self)

    def lstrip(self, chars: str | None = None, /) -> str:
        return self[len(self) - len(str.lstrip(self, chars)) :]

    def rstrip(self, chars: str | None = None, /) -> str:
        return self[: len(str.rstrip(self, chars))]

    def strip(self, chars: str | None = None, /) -> str:
        left, length = str.lstrip(self, chars), len(str.strip(self, chars))
        start = len(self) - len(left)
        return self if length == len(self) else self[start : start + length]

    def removeprefix(self, prefix: str, /) -> str:
        return self[len(self) - len(str.removeprefix(self, prefix)) :]

    def removesuffix(self, suffix: str, /) -> str:
        return self[: len(str.removesuffix(self, suffix))]

    def split(self, sep: str | None = None, maxsplit: Any = -1) -> list[str]:
        return self._located(str.split(self, sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: Any = -1) -> list[str]:
        return self._located(str.rsplit(self, sep, maxsplit), sep)

    def _located(self, parts: list[str], sep: str | None) -> list[str]:
        """Returns the parts, in their order with `sep` or white space between them, with their
        taint."""
        start, found = 0, []
        for part in parts:
            start = str.index(self, part, start)
            found.append(self[start : start + len(part)])
            start += len(part) + len(sep or "")
        return found

    def partition(self, sep: str, /) -> tuple[str, str, str]:
        return self._cut(str.partition(self, sep))

    def rpartition(self, sep: str, /) -> tuple[str, str, str]:
        return self._cut(str.rpartition(self, sep))

    def _cut(self, parts: tuple[str, str, str]) -> tuple[str, str, str]:
        start, end = len(parts[0]), len(parts[0]) + len(parts[1])
        return self[:start], self[start:end], self[end:]

    def splitlines(self, keepends: Any = False) -> list[str]:
        start, found = 0, []
        lines = str.splitlines(self, keepends=True)
        for line, kept in zip(lines, str.splitlines(self, keepends), strict=True):
            found.append(self[start : start + len(kept)])
            start += len(line)
        return found

    def join(self, parts: Iterable[str], /) -> str:
        parts = list(parts)
        return _make(str.join(self, parts), self._taint.join(map(taint_of, parts)))

    def replace(self, old: str, new: str, count: Any = -1, /) -> str:
        if not old:
            spread: str = tainted(str.replace(self, old, new, count), CALLER)
            return spread
        return _make(new, taint_of(new)).join(self.split(old, count))

    def mapped(self, text: str) -> str:
        """Returns `text`, in which each character was changed in its place. Where that made it
        longer, for example "ß" in upper case, it is tainted as a whole."""
        return _make(text, self._taint) if len(text) == len(self) else tainted(text, CALLER)

    def upper(self) -> str:
        return self.mapped(str.upper(self))

    def lower(self) -> str:
        return self.mapped(str.lower(self))

    def capitalize(self) -> str:
        return self.mapped(str.capitalize(self))

    def title(self) -> str:
        return self.mapped(str.title(self))

    def swapcase(self) -> str:
        return self.mapped(str.swapcase(self))

    def casefold(self) -> str:
        return self.mapped(str.casefold(self))


def _as_a_whole(name: str) -> Callable[..., str]:
    method = getattr(str, name)

    def tainted_method(self: TaintedStr, *args: Any, **kwargs: Any) -> str:
        text: str = tainted(method(self, *args, **kwargs), CALLER)
        return text

    return tainted_method


for _name in (
    "center",
    "expandtabs",
    "format",
    "format_map",
    "ljust",
    "rjust",
    "translate",
    "zfill",
):
    setattr(TaintedStr, _name, _as_a_whole(_name))


class TaintedInt(int):
    """A caller's integer: its digits are tainted."""

    def __str__(self) -> str:
        return tainted(int.__repr__(self), CALLER)  # type: ignore[no-any-return]


class TaintedFloat(float):
    """A caller's number: its digits are tainted."""

    def __str__(self) -> str:
        return tainted(float.__repr__(self), CALLER)  # type: ignore[no-any-return]


def taint_of(text: str) -> bytes:
    """Returns a byte for each character. Strings of other classes, such as Markup, are not
    followed: all of their characters count as a caller's."""
    if type(text) is TaintedStr:
        return text._taint
    return bytes(len(text)) if type(text) is str else CALLER * len(text)


def concatenated(parts: Iterable[str]) -> str:
    """Returns the joined strings, a plain one of plain ones."""
    parts = list(parts)
    text = "".join(parts)
    if {str}.issuperset(map(type, parts)):
        return text
    taints = [part._taint if type(part) is TaintedStr else taint_of(part) for part in parts]
    return _make(text, b"".join(taints))


def tainted(value: Any, source: bytes, made: dict[str, TaintedStr] | None = None) -> Any:
    """Returns a copy of a caller's value, of JSON's types, with its strings and numbers tainted,
    keys included; those that are tainted stay as they are. Models of pydantic and data classes
    become their members. Values of other types become the name of their type: a template could
    call their methods. `made`: strings of this value, equal ones are made once."""
    made = {} if made is None else made
    kind = type(value)
    if kind is TaintedStr:
        return value
    if kind is str:
        text = made.get(value)
        if text is None:
            text = made[value] = _make(value, source * len(value))
        return text
    if value is None or kind is bool:
        return value
    if kind is dict or isinstance(value, Mapping):
        return {
            tainted(key, source, made): tainted(member, source, made)
            for key, member in value.items()
        }
    if kind is list or kind is tuple:
        return kind([tainted(member, source, made) for member in value])
    if isinstance(value, str):
        return _make(value, source * len(value))
    if isinstance(value, int):
        return TaintedInt(value)
    if isinstance(value, float):
        return TaintedFloat(value)
    return tainted(_of_json(value), source, made)


def _of_json(value: Any) -> Any:
    """Returns a value of another type as one of JSON's types."""
    if isinstance(value, list | tuple):
        return list(value)
    if isinstance(value, np.generic):
        return value.item()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if callable(getattr(value, "model_dump", None)):
        return value.model_dump()
    return f"<{type(value).__name__}>"


def formatted(template: str, values: Any) -> str:
    """Returns `template % values`."""
    if isinstance(values, dict):
        return placed(template, lambda text, _, names: text % names, (), values)
    args = values if isinstance(values, tuple) else (values,)
    return placed(template, lambda text, given, _: text % given, args, {})


def placed(
    template: str,
    place: Callable[[str, tuple[Any, ...], dict[Any, Any]], str],
    args: tuple[Any, ...],
    names: dict[Any, Any],
) -> str:
    """Returns `place(template, args, names)`, which formats its arguments and reads none of them.

    It is called once more with placeholders for their characters, which shows the place of each.
    Where that cannot work, the result is tainted as a whole."""
    is_own, template = not any(taint_of(template)), str.__str__(template)
    text = place(template, args, names)
    kinds = {type(value) for value in (*args, *names.values())}
    if is_own and kinds <= _PLAIN:
        return text
    if is_own and kinds <= {TaintedStr, *_PLAIN}:
        shown = {name: _as_placeholders(value) for name, value in names.items()}
        template = template.translate(_NO_PLACEHOLDERS)
        places = place(template, tuple(map(_as_placeholders, args)), shown)
        if len(places) == len(text):
            return _make(text, bytes(_KINDS.get(character, 0) for character in places))
    return _make(text, CALLER * len(text))


def _as_placeholders(value: Any) -> Any:
    if type(value) is str:
        return value.translate(_NO_PLACEHOLDERS)
    if type(value) is not TaintedStr:
        return value
    return "".join(map(_PLACEHOLDERS.__getitem__, value._taint))


def _make(text: str, taint: bytes) -> TaintedStr:
    made = TaintedStr(text)
    made._taint = taint
    return made
