"""A tool call in a model's text: where its JSON ends, and whether it is one."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

MAX_NESTING = 128  # of arguments and of their schemas
_STEPS = re.compile(r'[][{}"]')
_STRING_STEPS = re.compile(r'["\\]')


class Call(NamedTuple):
    """What the model wants to call."""

    name: str
    arguments: str  # a JSON object
    id: str | None = None  # where the model gave it one


Piece = str | Call


class ToolParser(Protocol):
    """Splits one answer, which comes piece by piece, into text and calls.

    Text that may turn out to be a part of a call is held back; what turns out to be none is
    returned as it is. O(text) in all.
    """

    def feed(self, text: str) -> list[Piece]:
        """The parts that became certain with this text, in order."""

    def finish(self) -> list[Piece]:
        """The rest, after the last text."""


class JsonEnd:
    """Finds where the JSON object or array ends that begins at `start` of a growing text."""

    def __init__(self, start: int) -> None:
        self._at = start
        self._depth = 0
        self._is_in_string = False

    def find(self, text: str) -> int | None:
        """The place after its last bracket; None where it has not come. `text` may be longer than
        at the last call, and is else the same."""
        while True:
            step = (_STRING_STEPS if self._is_in_string else _STEPS).search(text, self._at)
            if step is None:
                self._at = len(text)
                return None
            if step[0] == "\\":
                if step.end() == len(text):
                    self._at = step.start()
                    return None
                self._at = step.end() + 1
                continue
            self._at = step.end()
            if step[0] == '"':
                self._is_in_string = not self._is_in_string
            else:
                self._depth += 1 if step[0] in "{[" else -1
                if self._depth <= 0:
                    return self._at


def read_json(text: str) -> Any:
    """Raises ValueError for what is no JSON, and where it is nested more than MAX_NESTING deep.
    Line breaks in strings are taken: models write them."""
    try:
        found = json.loads(text, strict=False, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if is_deep(found):
        raise ValueError("nested too deeply")
    return found


def is_deep(value: Any) -> bool:
    """Whether objects and lists stand in one another more than MAX_NESTING deep."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_NESTING):
        inner = [one.values() if isinstance(one, dict) else one for one in level]
        level = [one for several in inner for one in several if isinstance(one, dict | list)]
    return bool(level)


def call_of(value: Any) -> Call | None:
    """The call that `{"name": ..., "arguments": {...}}` is; also with "parameters", as some models
    write. Without arguments there are none. None for anything else."""
    if not isinstance(value, dict):
        return None
    name = value.get("name")
    arguments = value.get("arguments", value.get("parameters", {}))
    call_id = value.get("id")
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    try:
        return Call(name, dump(arguments), call_id if isinstance(call_id, str) else None)
    except ValueError:  # a number that is infinite
        return None


def read_call(text: str) -> Call | None:
    """The call that a JSON text is; None for any other text."""
    try:
        return call_of(read_json(text))
    except ValueError:
        return None


def dump(arguments: Any) -> str:
    """Valid JSON, as templates write it. Raises ValueError for numbers that JSON does not have."""
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        text = json.dumps(arguments, allow_nan=False)
    return text


def held_len(text: str, marks: Sequence[str]) -> int:
    """How many of the last characters may be the beginning of a mark."""
    longest = 0
    for mark in marks:
        at = text.find(mark[0], max(0, len(text) - len(mark) + 1))
        while at >= 0 and len(text) - at > longest:
            if mark.startswith(text[at:]):
                longest = len(text) - at
            at = text.find(mark[0], at + 1)
    return longest


class MarkFilter:
    """Leaves marks out of a text that comes piece by piece."""

    def __init__(self, marks: Sequence[str]) -> None:
        self._marks = tuple(marks)
        self._held = ""

    def feed(self, text: str) -> str:
        if not self._marks:
            return text
        self._held += text
        found = []
        while True:
            at, mark = min(
                ((at, mark) for mark in self._marks if (at := self._held.find(mark)) >= 0),
                default=(len(self._held) - held_len(self._held, self._marks), ""),
            )
            found.append(self._held[:at])
            self._held = self._held[at + len(mark) :]
            if not mark:
                return "".join(found)

    def finish(self) -> str:
        """The rest: the beginning of a mark that did not come."""
        text, self._held = self._held, ""
        return text


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
