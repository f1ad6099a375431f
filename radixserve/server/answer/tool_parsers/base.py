"""Common parts of tool parsers: `ToolParser` is the interface, `MarkedParser` the base of those
whose calls follow a mark."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from radixserve.text.tool_functions import is_deep


class Call(NamedTuple):
    """A tool call that the model wrote."""

    name: str
    arguments: str  # a JSON object
    id: str | None = None  # None: the model did not give it an id


class Thought(NamedTuple):
    """A piece of reasoning, from a tool parser that also separates reasoning from content."""

    text: str


Piece = str | Call | Thought


class ToolParser(Protocol):
    """Splits one answer, which arrives in pieces, into text and calls.

    Text that may be a part of a call is buffered until that is certain; if it is not, it is
    returned unchanged. O(text) in all.
    """

    def feed(self, text: str) -> list[Piece]:
        """Add the next text of the answer. Returns the pieces that are certain now, in order."""

    def finish(self) -> list[Piece]:
        """The answer has ended. Returns the remaining pieces."""


class JsonEnd:
    """Finds the end of the JSON object or array that begins at `start` of a growing text."""

    def __init__(self, start: int, quotes: str = '"') -> None:
        """`quotes`: the characters that may enclose a string."""
        self._position = start
        self._depth = 0
        self._steps = re.compile(f"[][{{}}{quotes}]")
        self._string_steps = {quote: re.compile(f"[{quote}\\\\]") for quote in quotes}
        self._quote = ""  # of the string that the position is in

    def find(self, text: str) -> int | None:
        """The position after the closing bracket; None while it is missing. `text` must begin with
        the text of the last call."""
        while True:
            steps = self._string_steps[self._quote] if self._quote else self._steps
            step = steps.search(text, self._position)
            if step is None:
                self._position = len(text)
                return None
            if step[0] == "\\":
                if step.end() == len(text):
                    self._position = step.start()
                    return None
                self._position = step.end() + 1
                continue
            self._position = step.end()
            if step[0] in self._string_steps:
                self._quote = "" if self._quote else step[0]
            else:
                self._depth += 1 if step[0] in "{[" else -1
                if self._depth <= 0:
                    return self._position


def read_json(text: str) -> Any:
    """The value of a JSON text. Line breaks in strings are accepted, since models write them.

    Raises ValueError for a text that is not JSON or is nested more than MAX_NESTING deep.
    """
    try:
        value = json.loads(text, strict=False, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if is_deep(value):
        raise ValueError("nested too deeply")
    return value


def call_of(value: Any) -> Call | None:
    """The call in `{"name": ..., "arguments": {...}}`; None if `value` is not a call.

    Instead of "arguments", some models write "parameters". Without either, the arguments are {}.
    """
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
    """The call in a JSON text; None if the text is not a call."""
    try:
        return call_of(read_json(text))
    except ValueError:
        return None


def dump(arguments: Any) -> str:
    """The arguments as JSON in the form that chat templates write. Raises ValueError for numbers
    that JSON does not have."""
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        text = json.dumps(arguments, allow_nan=False)
    return text


def partial_mark_len(text: str, marks: Sequence[str]) -> int:
    """The length of the longest end of `text` that is the beginning of a mark."""
    longest = 0
    for mark in marks:
        position = text.find(mark[0], max(0, len(text) - len(mark) + 1))
        while position >= 0 and len(text) - position > longest:
            if mark.startswith(text[position:]):
                longest = len(text) - position
            position = text.find(mark[0], position + 1)
    return longest


class MarkFilter:
    """Removes marks from a text that arrives in pieces."""

    def __init__(self, marks: Sequence[str]) -> None:
        self._marks = tuple(marks)
        self._pending = ""  # not returned yet: may be the beginning of a mark

    def feed(self, text: str) -> str:
        """Add the next text. Returns the text that is certain now, without marks."""
        if not self._marks:
            return text
        self._pending += text
        texts = []
        while True:
            position, mark = min(
                (
                    (position, mark)
                    for mark in self._marks
                    if (position := self._pending.find(mark)) >= 0
                ),
                default=(len(self._pending) - partial_mark_len(self._pending, self._marks), ""),
            )
            texts.append(self._pending[:position])
            self._pending = self._pending[position + len(mark) :]
            if not mark:
                return "".join(texts)

    def finish(self) -> str:
        """The text has ended. Returns the rest, the beginning of an incomplete mark."""
        text, self._pending = self._pending, ""
        return text


class ParsedSpan(NamedTuple):
    """The meaning of the first `size` characters after a mark: calls, or text without any."""

    size: int
    calls: tuple[Call, ...] = ()


class MarkedParser(ABC):
    """A tool parser for calls that follow a mark. A subclass reads the text after the mark.

    Text that is not a call is returned together with its mark. Each character is read once.
    """

    mark: str
    is_optional = False  # whether a call may lack the mark: at the start and after another call
    quotes = '"'  # the characters that may enclose strings in a call

    def __init__(self) -> None:
        self._text = ""  # not returned yet
        self._head: int | None = None  # length of the mark at the start of `_text`; None: no mark
        self._json: JsonEnd | None = None
        self._json_end: int | None = None
        self._searched = 0  # characters after the mark that `_find` has searched
        self._open(0 if self.is_optional else None)

    def feed(self, text: str) -> list[Piece]:
        self._text += text
        return self._pieces(is_last=False)

    def finish(self) -> list[Piece]:
        pieces = self._pieces(is_last=True)
        text, self._text = self._text, ""
        return [*pieces, text] if text else pieces

    @abstractmethod
    def _read(self, inner: str, *, has_mark: bool, is_last: bool) -> ParsedSpan | None:
        """Read the beginning of `inner`, the text after the mark. None: more text is needed."""

    def _find_end(self, inner: str, start: int) -> int | None:
        """The end of the JSON object or array at `start`; None if it is incomplete."""
        if self._json is None:
            self._json = JsonEnd(start, self.quotes)
        if self._json_end is None:
            self._json_end = self._json.find(inner)
        return self._json_end

    def _pieces(self, *, is_last: bool) -> list[Piece]:
        pieces: list[Piece] = []
        while self._text:
            if self._head is None:
                position = self._text.find(self.mark)
                if position < 0:
                    keeps = 0 if is_last else partial_mark_len(self._text, (self.mark,))
                    pieces.append(self._take(len(self._text) - keeps))
                    break
                pieces.append(self._take(position))
                self._open(len(self.mark))
            assert self._head is not None
            read = self._read(self._text[self._head :], has_mark=self._head > 0, is_last=is_last)
            if read is None:
                break
            text = self._take(self._head + read.size)
            pieces += read.calls or (text,)
            self._open(0 if self.is_optional and read.calls else None)
        return [piece for piece in pieces if piece]

    def _find(self, inner: str, closing: str) -> int:
        """The position of the closing text; -1 while it is missing. O(inner) in all."""
        position = inner.find(closing, self._searched)
        if position < 0:
            self._searched = max(0, len(inner) - len(closing) + 1)
        return position

    def _open(self, head: int | None) -> None:
        self._head = head
        self._json = self._json_end = None
        self._searched = 0

    def _take(self, size: int) -> str:
        piece, self._text = self._text[:size], self._text[size:]
        return piece


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
