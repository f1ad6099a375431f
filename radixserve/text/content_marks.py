"""`ContentMarks`: marks special tokens in rendered chats that are not the template's own.

A mark is the noncharacter U+FDD0. `mark` puts it behind the first character of every special token
of which a character came from a caller (see tainted_str.py), so that the token's text is
interrupted; `pieces` tells such text from the template's own special tokens. A U+FDD0 that a text
brings itself is doubled.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from radixserve.text.tainted_str import ASSISTANT, CALLER, TEMPLATE

MARK = "\ufdd0"
_MARKS = re.compile(f"({MARK}{{1,2}})")
# An assistant's message may bring its thoughts in these tags, which templates look for.
THINK_TAGS = ("[THINK]", "[/THINK]")  # of Mistral's models
_REASONING_TAGS = frozenset(("<think>", "</think>", *THINK_TAGS))
_HEAD_LEN = 2  # characters by which a special token is looked for


class SpecialToken(NamedTuple):
    """A special token's text, and whether it takes the white space before and after it."""

    text: str
    lstrip: bool = False
    rstrip: bool = False


class ContentMarks:
    """Marks the special tokens of one tokenizer. May be used from any thread."""

    def __init__(self, tokens: Sequence[SpecialToken]) -> None:
        self._texts = frozenset(token.text for token in tokens if token.text)
        self._longest = max(map(len, self._texts), default=0)
        self._firsts = frozenset(text[0] for text in self._texts)
        lengths: dict[str, set[int]] = {}
        for text in self._texts:
            lengths.setdefault(text[:_HEAD_LEN], set()).add(len(text))
        self._lengths = {head: sorted(known, reverse=True) for head, known in lengths.items()}
        heads = sorted(map(re.escape, lengths), key=len, reverse=True)
        self._head = re.compile("|".join([MARK, *heads]))
        # A token of one character has no place for a mark: beside marked text it is text.
        longest_first = sorted(
            (token for token in tokens if len(token.text) > 1), key=lambda token: -len(token.text)
        )
        self._own = re.compile("|".join(map(_expression, longest_first)) or "(?!)")

    def mark(self, text: str, taint: bytes) -> str:
        """Returns the text with its marks. `taint`: for each character, who brought it. A special
        token stays one if all its characters are the template's; of an assistant's message also
        the tags of thoughts."""
        text = str.__str__(text)  # slices of a plain string take less time
        return _with_marks(text, self._places(text, taint))

    def mark_text(self, text: str, source: bytes = CALLER) -> str:
        """Returns a text of one source with its marks. The beginning of a special token at its end
        is marked too, since it may be joined with other text."""
        places = set(self._places(text, source * len(text)))
        if source != TEMPLATE:
            places.update(self._places_at_end(text))
        return _with_marks(text, sorted(places))

    def _places(self, text: str, taint: bytes) -> Iterator[int]:
        """Yields the positions of marks in `text`, ascending."""
        start = 0
        while head := self._head.search(text, start):
            start = head.start() + 1
            if head[0] == MARK:
                yield start
                continue
            is_cut = False
            for length in self._lengths_at(text, head.start()):
                if self._is_own(text, taint, head.start(), length):
                    start = head.start() + length
                    break
                is_cut = True
            if is_cut:
                yield start

    def _lengths_at(self, text: str, start: int) -> Iterator[int]:
        """Yields the lengths of the special tokens whose texts begin at `start`, descending."""
        head = text[start : start + _HEAD_LEN]
        for length in (*self._lengths.get(head, ()), *self._lengths.get(head[:1], ())):
            if text[start : start + length] in self._texts:
                yield length

    def _is_own(self, text: str, taint: bytes, start: int, length: int) -> bool:
        """Whether the special token at `start` is the template's, or a thought's tag of the
        assistant."""
        sources = taint[start : start + length]
        if not any(sources):
            return True
        is_tag = text[start : start + length] in _REASONING_TAGS
        return is_tag and sources == ASSISTANT * length

    def _places_at_end(self, text: str) -> Iterator[int]:
        """Yields the positions of marks for beginnings of special tokens at the end of `text`."""
        end = len(text.rstrip())
        for start in range(max(0, end - self._longest + 1), end):
            tail = text[start:end]
            if tail[0] in self._firsts and any(token.startswith(tail) for token in self._texts):
                yield start + 1

    def pieces(self, rendered: str) -> Iterator[tuple[str, bool]]:
        """Yields the rendered text in pieces, marks included, and whether each has marks. A piece
        with marks has no special token of the template's own."""
        start = plain_start = 0
        for end, next_start in self._cuts(rendered):
            if MARK in rendered[start:end]:
                if plain_start < start:
                    yield rendered[plain_start:start], False
                yield rendered[start:end], True
                plain_start = end
            start = next_start
        if plain_start < len(rendered):
            yield rendered[plain_start:], False

    def parts(self, text: str) -> Iterator[tuple[str, bool]]:
        """Yields an unmarked text cut at its special tokens, and whether each part is one."""
        start = 0
        for token in self._own.finditer(text):
            if start < token.start():
                yield text[start : token.start()], False
            yield token[0], True
            start = token.end()
        if start < len(text):
            yield text[start:], False

    def _cuts(self, rendered: str) -> Iterator[tuple[int, int]]:
        """Yields (start, end) of each special token of the template, and at last of the text's
        end."""
        for token in self._own.finditer(rendered):
            yield token.span()
        yield len(rendered), len(rendered)


def unmarked(rendered: str) -> str:
    """Returns the text without its marks."""
    if MARK not in rendered:
        return rendered
    return MARK.join(part.replace(MARK, "") for part in rendered.split(MARK * 2))


def split_at_marks(rendered: str) -> list[str]:
    """Returns the text cut at its marks: no part has the whole text of a special token."""
    parts = (part.removeprefix(MARK) for part in _MARKS.split(rendered))
    return [part for part in parts if part]


def _with_marks(text: str, places: Iterable[int]) -> str:
    """Returns the text with a mark at each position. The positions are ascending and above 0."""
    marked, before = io.StringIO(), 0  # a list of the pieces would take 100 bytes a mark
    for place in places:
        marked.write(text[before:place])
        marked.write(MARK)
        before = place
    if not before:
        return text
    marked.write(text[before:])
    return marked.getvalue()


def _expression(token: SpecialToken) -> str:
    left, right = r"\s*" * token.lstrip, r"\s*" * token.rstrip
    return left + re.escape(token.text) + right
