"""Common parts of tool parsers: `ToolParser` is the interface, `MarkedParser` the base of those
whose calls follow a mark."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from radixserve.text.tool_functions import is_deep

_MAX_UNFINISHED = 64  # openings of one answer without an end after which a call is looked for
_CALL_MEMBERS = frozenset("name tool_name arguments parameters id tool_call_id index type".split())
_WORD = re.compile(r"[\w.:-]")


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


class BracketEnd:
    """Finds the end of the object, list or call that begins with a bracket at `start` of a growing
    text."""

    def __init__(
        self, start: int, *, quotes: Sequence[str] = ('"',), stops: Sequence[str] = ()
    ) -> None:
        """`quotes`: the texts that may enclose a string. `stops`: marks that outside of strings
        show that the text ends before its closing bracket."""
        self._position = start
        self._depth = 0
        self._stops = tuple(stops)
        self._long = (*self._stops, *(quote for quote in quotes if len(quote) > 1))
        tokens = sorted({*stops, *quotes}, key=len, reverse=True)
        self._steps = re.compile("|".join([*map(re.escape, tokens), r"[\]\[{}()]"]))
        self._string_steps = {
            quote: re.compile(re.escape(quote) + ("|\\\\" if len(quote) == 1 else ""))
            for quote in quotes
        }
        self._quote = ""  # of the string that the position is in
        self.is_broken = False  # a stop was found

    def find(self, text: str) -> int | None:
        """The position after the closing bracket, or that of a stop; None while both are missing.
        `text` must begin with the text of the last call."""
        held_at = len(text) - partial_mark_len(text, self._long)  # may be the beginning of a mark
        while True:
            steps = self._string_steps[self._quote] if self._quote else self._steps
            step = steps.search(text, self._position)
            if step is None or (held_at <= step.start() and step[0] not in self._long):
                self._position = max(self._position, held_at)
                return None
            if step[0] in self._stops and not self._quote:
                self.is_broken = True
                return step.start()
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
                self._depth += 1 if step[0] in "{[(" else -1
                if self._depth <= 0:
                    return self._position


def read_json(text: str) -> Any:
    """The value of a JSON text. Line breaks in strings are accepted, since models write them.

    Raises ValueError for a text that is not JSON, that gives a member twice, or that is nested more
    than MAX_NESTING deep.
    """
    try:
        value = json.loads(
            text, strict=False, parse_constant=_refuse, object_pairs_hook=unique_members
        )
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if is_deep(value):
        raise ValueError("nested too deeply")
    return value


def unique_members(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """The object with these members. Raises ValueError if a member is given twice."""
    members: dict[str, Any] = {}
    for name, value in pairs:
        if name in members:
            raise ValueError(f"{name} is given twice")
        members[name] = value
    return members


def call_of(value: Any) -> Call | None:
    """The call in `{"name": ..., "arguments": {...}}`; None if `value` is not a call.

    Some models write "tool_name" or "parameters", or the arguments as the text of an object.
    Without arguments they are {}. An object with other members is not a call: they would be lost.
    """
    if not isinstance(value, dict) or not _CALL_MEMBERS.issuperset(value):
        return None
    names = [value[member] for member in ("name", "tool_name") if member in value]
    given = [value[member] for member in ("arguments", "parameters") if member in value]
    if len(names) != 1 or not isinstance(names[0], str) or not names[0] or len(given) > 1:
        return None
    arguments = given[0] if given else {}
    try:
        if isinstance(arguments, str):
            arguments = read_json(arguments)
        if not isinstance(arguments, dict):
            return None
        call_id = value.get("id", value.get("tool_call_id"))
        if call_id == value.get("tool_call_id") and str(call_id).isdigit():
            call_id = None  # its place in the conversation, as Command R counts
        return Call(names[0], dump(arguments), call_id if isinstance(call_id, str) else None)
    except ValueError:  # for example a number that is infinite
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
    """The meaning of the first `size` characters of a text: calls, or text without any."""

    size: int
    calls: tuple[Call, ...] = ()


class MarkedParser(ABC):
    """A tool parser for calls that follow an opening mark. A subclass reads the text from the mark.

    - Text that is not a call is returned together with its mark. Calls are looked for in it, too.
    - Closing marks after a call are removed, however many there are.
    - Some openings need no mark: the beginning of a call of a known function in a form that is
      nothing else, such as `name[ARGS]`.
    """

    starts = False  # whether the answer may begin with a call without an opening

    def __init__(
        self, openings: Sequence[str], closings: Sequence[str] = (), bare: Sequence[str] = ()
    ) -> None:
        """`closings`: the last one closes a block of calls. `bare`: openings without a mark."""
        self._openings = tuple(openings)
        self._beginnings = (*openings, *bare)
        self._closings = tuple(closings)
        patterns = (
            (r"(?<![\w.:-])" if _WORD.match(opening) else "") + re.escape(opening)
            for opening in sorted(self._beginnings, key=len, reverse=True)
        )
        self._opening = re.compile("|".join(patterns))
        self._text = ""  # not returned yet
        self._before = ""  # the last character that was returned as text
        self._mark: str | None = None  # at the start of `_text`; "": without; None: none
        self._follows_call = False  # closing marks are removed
        self._is_in_block = False  # a call was the last thing, and its block is not closed
        self._num_unfinished = 0
        self._held = ""  # marks that are dropped if a call follows at once: they are doubled
        self._bracket_end: BracketEnd | None = None
        self._end: int | None = None
        self._open("" if self.starts else None)

    def feed(self, text: str) -> list[Piece]:
        self._text += text
        return self._pieces(is_last=False)

    def finish(self) -> list[Piece]:
        pieces = self._pieces(is_last=True)
        text, self._text, self._held = self._held + self._text, "", ""
        return [*pieces, text] if text else pieces

    @abstractmethod
    def _read(self, text: str, mark: str, *, is_last: bool) -> ParsedSpan | None:
        """Read the beginning of `text`, which begins with `mark`. None: more text is needed.

        A mark of "": at the beginning of an answer, and after a call where `_continues`.
        """

    def _continues(self) -> bool:
        """Whether a call without an opening may follow, after a call."""
        return False

    def _find_end(self, text: str, start: int, quotes: Sequence[str] = ('"',)) -> int | None:
        """The end of the object, list or call whose bracket is at `start`; None if it is
        incomplete. It `is_broken` if an opening comes first."""
        if self._bracket_end is None:
            self._bracket_end = BracketEnd(start, quotes=quotes, stops=self._openings)
        if self._end is None:
            self._end = self._bracket_end.find(text)
        return self._end

    @property
    def _is_broken(self) -> bool:
        return self._bracket_end is not None and self._bracket_end.is_broken

    def _pieces(self, *, is_last: bool) -> list[Piece]:
        pieces: list[Piece] = []
        while self._text:
            if self._follows_call and not self._drop_closings(is_last=is_last):
                break
            if self._mark is None and not self._find_opening(pieces, is_last=is_last):
                break
            if not self._text:
                break
            assert self._mark is not None
            read = self._read(self._text, self._mark, is_last=is_last)
            if read is None:
                self._num_unfinished += is_last
                if not is_last or self._num_unfinished > _MAX_UNFINISHED:
                    break
                read = ParsedSpan(len(self._mark))
            if read.calls:
                self._take(read.size)
                pieces += read.calls
                self._follows_call, self._held, self._before = True, "", ""
            elif self._mark:
                self._return_text(pieces, read.size)
            self._open(None)
        return pieces

    def _find_opening(self, pieces: list[Piece], *, is_last: bool) -> bool:
        """Return the text before the next opening. Whether there is one."""
        is_word = _WORD.match(self._before) is not None
        match = self._opening.search(self._text)
        if match is not None and match.start() == 0 and is_word and _WORD.match(match[0]):
            match = self._opening.search(self._text, 1)  # the end of a longer name
        if match is None:
            held = 0 if is_last else partial_mark_len(self._text, self._beginnings)
            self._return_text(pieces, len(self._text) - held)
            return False
        self._return_text(pieces, match.start())
        self._open(match[0])
        return True

    def _drop_closings(self, *, is_last: bool) -> bool:
        """Remove closing marks after a call. Whether it is certain that no more follow."""
        while True:
            rest = self._text.lstrip()
            closing = next((mark for mark in self._closings if rest.startswith(mark)), "")
            if closing:
                self._text = rest[len(closing) :]
                self._is_in_block = self._is_in_block and closing != self._closings[-1]
                continue
            if not is_last and any(mark.startswith(rest) for mark in self._closings):
                return False
            self._follows_call = False
            if self._continues():
                self._open("")
            return True

    def _open(self, mark: str | None) -> None:
        self._mark = mark
        self._bracket_end = self._end = None

    def _take(self, size: int) -> str:
        piece, self._text = self._text[:size], self._text[size:]
        return piece

    def _return_text(self, pieces: list[Piece], size: int) -> None:
        """Return the next characters as text. A mark is held until it is certain whether another
        one follows it."""
        piece = self._take(size)
        if piece.strip() in self._openings or (self._held and not piece.strip()):
            self._held += piece
        elif piece:
            pieces.append(self._held + piece)
            self._held = ""
            self._before = piece[-1]
            self._is_in_block = self._is_in_block and not piece.strip()


def skip_space(text: str, start: int) -> int:
    """The position of the first character from `start` on that is not white space."""
    while start < len(text) and text[start].isspace():
        start += 1
    return start


def begins_with_any(text: str, marks: Sequence[str], *, is_last: bool) -> bool | None:
    """Whether `text` begins with one of the marks; None: more text is needed to tell."""
    if text.startswith(tuple(marks)):
        return True
    return None if not is_last and any(mark.startswith(text) for mark in marks) else False


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
