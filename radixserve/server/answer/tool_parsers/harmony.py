"""`HarmonyParser`: answers of gpt-oss.

They are messages in the channels `analysis`, `commentary` and `final`.
"""

from __future__ import annotations

import re

from radixserve.server.answer.tool_parsers.base import (
    Call,
    Piece,
    Thought,
    partial_mark_len,
    read_json,
)
from radixserve.server.answer.tool_parsers.json_calls import call_from

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
CONSTRAIN, END, CALL, RETURN = "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"
MARKS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
_ENDS = (END, CALL, RETURN, START)
_OPENINGS = (START, CHANNEL, MESSAGE, "to=")


class HarmonyParser:
    """Parses one answer, which begins after `<|start|>assistant`.

    `analysis` is reasoning. `final`, and `commentary` without a recipient, are content. A message
    to `functions.name` is a call with its arguments. If the answer ends within a message, its text
    so far counts; a call counts only if its arguments are complete.
    """

    def __init__(self) -> None:
        self._text = ""  # not returned yet
        self._header: str | None = None  # of the message whose body is being read
        self._has_marks: bool | None = None  # None: not known yet; False: all of it is content

    def feed(self, text: str) -> list[Piece]:
        self._text += text
        return self._pieces(is_last=False)

    def finish(self) -> list[Piece]:
        return self._pieces(is_last=True)

    def _pieces(self, *, is_last: bool) -> list[Piece]:
        pieces: list[Piece] = []
        before = -1
        while self._text and len(self._text) != before:
            before = len(self._text)
            read = self._read_header if self._header is None else self._read_body
            pieces += read(is_last)
        if is_last and self._header is not None and self._is_call():
            pieces += self._take_body(len(self._text))
        return [piece for piece in pieces if piece]

    def _read_header(self, is_last: bool) -> list[Piece]:
        """Read a message's header up to the mark of its body. Without marks, returns all text as
        content."""
        if self._has_marks is None:
            begun = self._text.lstrip()
            if any(begun.startswith(opening) for opening in _OPENINGS):
                self._has_marks = True
            elif is_last or not any(opening.startswith(begun) for opening in _OPENINGS):
                self._has_marks = False
        if self._has_marks is False:
            text, self._text = self._text, ""
            return [text]
        position = self._text.find(MESSAGE)
        if self._has_marks and position >= 0:
            self._header, self._text = self._text[:position], self._text[position + len(MESSAGE) :]
        return []

    def _read_body(self, is_last: bool) -> list[Piece]:
        places = [position for mark in _ENDS if (position := self._text.find(mark)) >= 0]
        if places:
            end = min(places)
            mark = next(mark for mark in _ENDS if self._text.startswith(mark, end))
            pieces = self._take_body(end)
            self._text = self._text[0 if mark == START else len(mark) :]
            self._header = None
            return pieces
        if self._is_call():
            return []
        return self._take_body(
            len(self._text) - (0 if is_last else partial_mark_len(self._text, _ENDS))
        )

    def _is_call(self) -> bool:
        match = _RECIPIENT.search(self._header or "")
        return match is not None and match[1].startswith("functions.")

    def _take_body(self, size: int) -> list[Piece]:
        header = self._header or ""
        text, self._text = self._text[:size], self._text[size:]
        if self._is_call():
            recipient = _RECIPIENT.search(header)
            assert recipient is not None
            call = _call(recipient[1].removeprefix("functions."), text)
            return [text if call is None else call]
        channel = _CHANNEL_NAME.search(header)
        if channel is not None and channel[1] == "analysis":
            return [Thought(text)] if text else []
        return [text]


def _call(name: str, text: str) -> Call | None:
    try:
        return call_from(name, None, read_json(text) if text.strip() else {})
    except ValueError:
        return None
