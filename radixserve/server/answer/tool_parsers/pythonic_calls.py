"""`PythonicParser`: tool calls as Python writes them, `name(key="value", number=1)`, of LFM2 and
Olmo 3."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from radixserve.server.answer.tool_parsers.base import (
    Call,
    MarkedParser,
    ParsedSpan,
    begins_with_any,
    call_of,
    dump,
    read_json,
    unique_members,
)

OPEN, CLOSE = "<|tool_call_start|>", "<|tool_call_end|>"
OLMO_OPEN, OLMO_CLOSE = "<function_calls>", "</function_calls>"
_NAME = re.compile(r"[\w.:-]{1,128}")
_HEAD = re.compile(r"[\s,]*([\w.:-]{1,128})\s*\(")
_BEGUN_HEAD = re.compile(r"[\s,]*(?:[\w.:-]{1,128}\s*)?")
KEY = re.compile(r"[^\s=(),'\"\[\]{}]{1,256}")
_BARE = re.compile(r"[^\s,:()\[\]{}'\"=]+")
_STRING = re.compile(
    r'"""((?:[^\\]|\\.)*?)"""|\'\'\'((?:[^\\]|\\.)*?)\'\'\''
    r'|"((?:[^"\\]|\\.)*)"|\'((?:[^\'\\]|\\.)*)\'',
    re.DOTALL,
)
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|(.))", re.DOTALL)
_ESCAPED = {**dict(zip("nrtbfva0", "\n\r\t\b\f\v\a\0", strict=True)), "\n": ""}
_AS_THEY_ARE = frozenset("\\'\"/")
_CONSTANTS = {"True": True, "False": False, "None": None}
_SURROGATES = re.compile("[\ud800-\udbff][\udc00-\udfff]")


class PythonicParser(MarkedParser):
    """LFM2: `<|tool_call_start|>[name(key="value"), other()]<|tool_call_end|>`. Olmo 3: between
    `<function_calls>` and `</function_calls>`, each call in a line.

    Arguments are named, and literals of Python or JSON. Calls may also be JSON objects, which these
    models write when they are asked to. The closing mark may be missing at the end of the text.
    """

    def __init__(self, opening: str, closing: str, *, has_lines: bool) -> None:
        """`has_lines`: calls may stand in lines, without brackets around all of them."""
        super().__init__((opening,), (closing,))
        self._has_lines = has_lines

    def _continues(self) -> bool:
        return self._has_lines and self._is_in_block

    def _read(self, text: str, mark: str, *, is_last: bool) -> ParsedSpan | None:
        rest = text[len(mark) :].lstrip()
        start = len(text) - len(rest)
        if not rest:
            return None
        if rest[0] == "[" and mark:
            return self._read_list(text, start, is_last=is_last)
        if not self._has_lines:
            return ParsedSpan(start)
        head = _HEAD.match(text, len(mark))
        if head is None:
            is_begun = _BEGUN_HEAD.fullmatch(text, len(mark)) is not None
            return None if is_begun and not is_last else ParsedSpan(len(mark))
        end = self._find_end(text, head.end() - 1, "\"'")
        if end is None:
            return None
        calls = () if self._is_broken else read_calls(f"[{text[head.start(1) : end]}]")
        self._is_in_block = bool(calls)
        return ParsedSpan(end if calls else len(mark), calls)

    def _read_list(self, text: str, start: int, *, is_last: bool) -> ParsedSpan | None:
        end = self._find_end(text, start, "\"'")
        if end is None:
            return None
        calls = () if self._is_broken else read_calls(text[start:end])
        is_closed = begins_with_any(text[end:].lstrip(), self._closings, is_last=False)
        if calls and is_closed is None and not is_last:
            return None
        is_cut = calls and is_closed is None and text[end:].strip()  # in the closing mark
        return ParsedSpan(end, () if is_cut else calls)


def read_calls(text: str) -> tuple[Call, ...]:
    """The calls in a list; () for any other text."""
    try:
        return tuple(_Reader(text).read_list())
    except (ValueError, RecursionError):
        return ()


class _Reader:
    """Reads a list of calls. Raises ValueError where the text is not one."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._position = 0

    def read_list(self) -> list[Call]:
        self._expect("[")
        calls = self._items("]", self._call)
        if self._text[self._position :].strip():
            raise ValueError("more follows")
        return calls

    def _call(self) -> Call:
        if self._next() == "{":
            call = call_of(self._value())
            if call is None:
                raise ValueError("an object that is not a call")
            return call
        name = self._match(_NAME)
        self._expect("(")
        arguments = unique_members(self._items(")", self._argument))
        return Call(name, dump(arguments))

    def _argument(self) -> tuple[str, Any]:
        key = self._match(KEY)
        self._expect("=")
        return key, self._value()

    def _member(self) -> tuple[str, Any]:
        key = self._string()
        self._expect(":")
        return key, self._value()

    def _value(self) -> Any:
        first = self._next()
        if first in ("'", '"'):
            return self._string()
        if self._takes("{"):
            return unique_members(self._items("}", self._member))
        if self._takes("["):
            return self._items("]", self._value)
        bare = self._match(_BARE)
        return _CONSTANTS[bare] if bare in _CONSTANTS else read_json(bare)

    def _items(self, closing: str, read: Callable[[], Any]) -> list[Any]:
        items: list[Any] = []
        while not self._takes(closing):
            if items:
                self._expect(",")
                if self._takes(closing):  # a comma at the end, as Python allows
                    break
            items.append(read())
        return items

    def _string(self) -> str:
        self._next()
        match = _STRING.match(self._text, self._position)
        if match is None:
            raise ValueError("a string is missing")
        self._position = match.end()
        text = next(group for group in match.groups() if group is not None)
        return _SURROGATES.sub(_joined, _ESCAPE.sub(_unescaped, text))

    def _match(self, expression: re.Pattern[str]) -> str:
        self._next()
        match = expression.match(self._text, self._position)
        if match is None:
            raise ValueError("a name or a value is missing")
        self._position = match.end()
        return match[0]

    def _next(self) -> str:
        """Skip white space. Returns the character after it without skipping that; "" at the end."""
        while self._text[self._position : self._position + 1].isspace():
            self._position += 1
        return self._text[self._position : self._position + 1]

    def _takes(self, token: str) -> bool:
        is_next = self._next() == token
        self._position += is_next
        return is_next

    def _expect(self, token: str) -> None:
        if not self._takes(token):
            raise ValueError(f"{token} is missing")


def _unescaped(match: re.Match[str]) -> str:
    code = match[1] or match[2]
    if code:
        return chr(int(code, 16))
    character = match[3]
    if character in _AS_THEY_ARE:
        return str(character)
    return _ESCAPED.get(character, "\\" + character)


def _joined(match: re.Match[str]) -> str:
    """The character that a pair of surrogates encodes."""
    return match[0].encode("utf-16", "surrogatepass").decode("utf-16")


def as_pythonic(value: Any) -> str:
    """A constant as LFM2's templates write it: a string in single quotes, True, False or None as in
    Python, another value as JSON."""
    return str(value) if value is None or isinstance(value, bool) else as_olmo(value)


def as_olmo(value: Any) -> str:
    """A constant as Olmo's templates write it: a string in single quotes, another value as JSON."""
    if not isinstance(value, str):
        return dump(value)
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return "'" + escaped.replace("\n", "\\n").replace("\r", "\\r") + "'"
