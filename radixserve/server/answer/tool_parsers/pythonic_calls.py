"""`PythonicParser`: LFM2's tool calls, `[name(key="value", number=1), other()]`."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from radixserve.server.answer.tool_parsers.base import (
    Call,
    MarkedParser,
    ParsedSpan,
    call_of,
    dump,
    read_json,
)

OPEN, CLOSE = "<|tool_call_start|>", "<|tool_call_end|>"
_NAME = re.compile(r"[\w.:-]{1,128}")
KEY = re.compile(r"[^\s=(),'\"\[\]{}]{1,256}")
_BARE = re.compile(r"[^\s,:()\[\]{}'\"=]+")
_STRING = re.compile(
    r'"""((?:[^\\]|\\.)*?)"""|\'\'\'((?:[^\\]|\\.)*?)\'\'\''
    r'|"((?:[^"\\]|\\.)*)"|\'((?:[^\'\\]|\\.)*)\'',
    re.DOTALL,
)
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|(.))", re.DOTALL)
_ESCAPED = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f", "v": "\v", "a": "\a",
            "0": "\0", "\n": ""}  # fmt: skip
_AS_THEY_ARE = frozenset("\\'\"/")
_CONSTANTS = {"True": True, "False": False, "None": None}
_SURROGATES = re.compile("[\ud800-\udbff][\udc00-\udfff]")


class PythonicParser(MarkedParser):
    """LFM2: `<|tool_call_start|>[name(key="value"), other()]<|tool_call_end|>`.

    Arguments are named, and literals of Python or JSON. Calls may also be JSON objects, which these
    models write when they are asked to. The closing mark may be missing at the end of the text.
    """

    mark = OPEN
    quotes = "\"'"

    def _read(self, inner: str, *, has_mark: bool, is_last: bool) -> ParsedSpan | None:  # noqa: ARG002
        rest = inner.lstrip()
        if not rest:
            return None
        start = len(inner) - len(rest)
        if rest[0] != "[":
            return ParsedSpan(start)
        end = self._find_end(inner, start)
        if end is None:
            return None
        rest = inner[end:].lstrip()
        is_closed = rest.startswith(CLOSE)
        if not is_closed and CLOSE.startswith(rest):
            if not is_last:
                return None
            if rest:  # cut in the mark
                return ParsedSpan(len(inner))
        size = len(inner) - len(rest) + len(CLOSE) if is_closed else end
        return ParsedSpan(size, read_calls(inner[start:end]))


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
        arguments: dict[str, Any] = {}
        for key, value in self._items(")", self._argument):
            if key in arguments:
                raise ValueError("an argument is given twice")
            arguments[key] = value
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
            return dict(self._items("}", self._member))
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
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace("'", "\\'")
        return "'" + escaped.replace("\n", "\\n").replace("\r", "\\r") + "'"
    if value is None or isinstance(value, bool):
        return str(value)
    return dump(value)
