"""`HarmonyParser`: answers of gpt-oss.

They are messages in the channels `analysis`, `commentary` and `final`.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from radixserve.server.answer.tool_parsers.base import (
    BracketEnd,
    Call,
    Piece,
    Thought,
    partial_mark_len,
    read_json,
    skip_space,
)
from radixserve.server.answer.tool_parsers.json_calls import call_from

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
CONSTRAIN, END, CALL, RETURN = "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"
MARKS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)
_FUNCTIONS = "functions."
_PEOPLE = frozenset(("user", "assistant", "all"))  # recipients of text
_TO = r"(?:\s*\bto=([^\s<]{1,128}))?"
_CHANNELS = ("analysis", "commentary", "final")
_HEADER = re.compile(
    rf"\s*(?:<\|start\|>\s*(?:assistant\b)?)?{_TO}"
    rf"\s*(?:<\|channel\|>\s*(?:({'|'.join(_CHANNELS)})\b)?)?{_TO}"
    r"\s*(?:<\|constrain\|>)?(?:\s*(?:json|code|text)\b)?\s*(?:<\|message\|>)*"
)
_OPENINGS = (START, CHANNEL, MESSAGE, "to=")
_OF_HEADER = (*_OPENINGS, CONSTRAIN, "assistant", *_CHANNELS, "json", "code", "text")
_BODY_ENDS = (END, CALL, RETURN, START, CHANNEL)


class HarmonyParser:
    """Parses one answer, which begins after `<|start|>assistant`.

    - `analysis` is reasoning. `final`, and `commentary` without a recipient, are content. A message
      to a tool is a call with its arguments, if they are a JSON object. If they are not, they are
      content where the recipient is a function, and reasoning where it is not.
    - A header ends with MESSAGE; where that is missing, at the first text that is not of a header.
      A body ends at its closing mark; where that is missing, at the next header.
    - If the answer ends within a message, its text so far counts; a call counts only if its
      arguments are complete.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._text = ""  # not returned yet
        self._has_marks: bool | None = None  # None: not known yet; False: all of it is content
        self._is_header = True  # whether a header is being read, else a body
        self._recipient: str | None = None  # the tool that a body is for; None: it is text
        self._is_thought = False  # whether a body is reasoning, else content
        self._arguments_end: BracketEnd | None = None

    def feed(self, text: str) -> list[Piece]:
        self._text += text
        return self._pieces(is_last=False)

    def finish(self) -> list[Piece]:
        return self._pieces(is_last=True)

    def _pieces(self, *, is_last: bool) -> list[Piece]:
        pieces: list[Piece] = []
        if self._has_marks is None:
            begun = self._text.lstrip()
            if begun.startswith(_OPENINGS):
                self._has_marks = True
            elif is_last or not any(opening.startswith(begun) for opening in _OPENINGS):
                self._has_marks = self._is_header = False
        if self._has_marks is False:
            return [self._take(len(self._text))] if self._text else []
        while self._has_marks:
            if self._is_header:
                if not self._text or not self._read_header(is_last=is_last):
                    break
            elif not self._read_body(pieces, is_last=is_last):
                break
        return pieces

    def _read_header(self, *, is_last: bool) -> bool:
        """Read a message's header. Whether it is complete."""
        header = _HEADER.match(self._text)
        assert header is not None
        rest = self._text[header.end() :]
        following = (MESSAGE,) if header[0].endswith(MESSAGE) else _OF_HEADER
        if not is_last and any(mark.startswith(rest) for mark in following):
            return False
        if header[0].endswith(CHANNEL) and any(name.startswith(rest) for name in _CHANNELS):
            rest = ""  # the answer was cut in the channel's name
        recipient = header[1] or header[3]
        self._recipient = None if recipient in _PEOPLE else recipient
        self._is_thought = header[2] == "analysis"
        self._arguments_end = None
        self._is_header = False
        self._text = rest
        return True

    def _read_body(self, pieces: list[Piece], *, is_last: bool) -> bool:
        """Read the next part of a message's body. Whether there may be more to read."""
        if self._recipient is not None and not self._read_call(pieces, is_last=is_last):
            return False
        places = [(at, mark) for mark in _BODY_ENDS if (at := self._text.find(mark)) >= 0]
        held = 0 if is_last else partial_mark_len(self._text, _BODY_ENDS)
        end, mark = min(places, default=(len(self._text) - held, ""))
        text = self._take(end)
        if text:
            pieces.append(Thought(text) if self._is_thought else text)
        if mark not in (START, CHANNEL):
            self._take(len(mark))
        self._is_header = bool(mark)
        return bool(mark)

    def _read_call(self, pieces: list[Piece], *, is_last: bool) -> bool:
        """Read the arguments of a call. Whether they are complete, or are not arguments."""
        start = skip_space(self._text, 0)
        rest = self._text[start:]
        is_empty = rest.startswith(_BODY_ENDS) or (is_last and not rest)
        if not is_last and any(mark.startswith(rest) for mark in _BODY_ENDS) and not is_empty:
            return False
        if not is_empty and not rest.startswith("{"):
            self._end_call(pieces, None)
            return True
        end: int | None = start
        if not is_empty:
            if self._arguments_end is None:
                self._arguments_end = BracketEnd(start, stops=MARKS)
            end = self._arguments_end.find(self._text)
            if end is None and not is_last:
                return False
        is_broken = self._arguments_end is not None and self._arguments_end.is_broken
        call = None if end is None or is_broken else self._call(self._text[:end])
        if call is not None:
            self._take(end or 0)
        self._end_call(pieces, call)
        return True

    def _end_call(self, pieces: list[Piece], call: Call | None) -> None:
        """Return the call; None: the body is text."""
        assert self._recipient is not None
        if call is not None:
            pieces.append(call)
        else:
            is_function = self._recipient in self._names or self._recipient.startswith(_FUNCTIONS)
            self._is_thought = not is_function
        self._recipient = None

    def _call(self, arguments: str) -> Call | None:
        assert self._recipient is not None
        name = self._recipient.removeprefix(_FUNCTIONS)
        try:
            return call_from(name, None, read_json(arguments) if arguments.strip() else {})
        except ValueError:
            return None

    def _take(self, size: int) -> str:
        piece, self._text = self._text[:size], self._text[size:]
        return piece
