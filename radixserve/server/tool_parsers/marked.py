"""`MarkedParser`: calls that come after a mark."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

from radixserve.server.tool_parsers.calls import Call, JsonEnd, Piece, held_len


class Read(NamedTuple):
    """What the first `size` characters after a mark are: calls, or text where there are none."""

    size: int
    calls: tuple[Call, ...] = ()


class MarkedParser(ABC):
    """A subclass says what follows the mark. Text that is no call is returned with its mark, and
    what comes after it is read from its beginning: nothing is read twice."""

    mark: str
    is_optional = False  # calls may come without it: at the start, and after a call

    def __init__(self) -> None:
        self._text = ""  # not returned yet
        self._head: int | None = None  # characters of the mark that `_text` begins with
        self._json: JsonEnd | None = None
        self._json_end: int | None = None
        self._open(0 if self.is_optional else None)

    def feed(self, text: str) -> list[Piece]:
        self._text += text
        return self._pieces(is_last=False)

    def finish(self) -> list[Piece]:
        found = self._pieces(is_last=True)
        text, self._text = self._text, ""
        return [*found, text] if text else found

    @abstractmethod
    def _read(self, inner: str, *, has_mark: bool, is_last: bool) -> Read | None:
        """What `inner`, the text after the mark, begins with; None where more of it is needed."""

    def _find_end(self, inner: str, start: int) -> int | None:
        """Where the JSON object or array at `start` ends; None where that has not come."""
        if self._json is None:
            self._json = JsonEnd(start)
        if self._json_end is None:
            self._json_end = self._json.find(inner)
        return self._json_end

    def _pieces(self, *, is_last: bool) -> list[Piece]:
        found: list[Piece] = []
        while self._text:
            if self._head is None:
                at = self._text.find(self.mark)
                if at < 0:
                    keeps = 0 if is_last else held_len(self._text, (self.mark,))
                    found.append(self._take(len(self._text) - keeps))
                    break
                found.append(self._take(at))
                self._open(len(self.mark))
            assert self._head is not None
            read = self._read(self._text[self._head :], has_mark=self._head > 0, is_last=is_last)
            if read is None:
                break
            text = self._take(self._head + read.size)
            found += read.calls or (text,)
            self._open(0 if self.is_optional and read.calls else None)
        return [piece for piece in found if piece]

    def _open(self, head: int | None) -> None:
        self._head = head
        self._json = self._json_end = None

    def _take(self, size: int) -> str:
        piece, self._text = self._text[:size], self._text[size:]
        return piece
