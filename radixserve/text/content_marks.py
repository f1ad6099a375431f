"""`ContentMarks`: marks special tokens in messages, so that they stay text in the rendered prompt.

A mark is the noncharacter U+FDD0. `mark` puts it behind the first character of every special
token's text in a message, where no template that trims, splits or joins content can lose it. In
the rendered text a special token without a mark is the template's own; `pieces` tells both apart.
A U+FDD0 that a message brings itself is doubled.
"""

from __future__ import annotations

import heapq
import io
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

MARK = "\ufdd0"
_MARKS = re.compile(f"({MARK}{{1,2}})")
# An assistant's message may bring its thoughts in these tags, which templates look for.
THINK_TAGS = ("[THINK]", "[/THINK]")  # of Mistral's models
REASONING_TAGS = frozenset(("<think>", "</think>", *THINK_TAGS))


class SpecialToken(NamedTuple):
    """A special token's text, and whether it takes the white space before and after it."""

    text: str
    lstrip: bool = False
    rstrip: bool = False


class ContentMarks:
    """Marks the special tokens of one tokenizer. May be used from any thread."""

    def __init__(self, tokens: Sequence[SpecialToken], kept: Collection[str] = ()) -> None:
        """`kept`: texts of special tokens that are not marked."""
        self._texts = tuple(token.text for token in tokens if token.text not in kept)
        self._longest = max(map(len, self._texts), default=0)
        first_characters = "".join({re.escape(text[0]) for text in self._texts})
        self._first = re.compile(f"[{MARK}{first_characters}]")
        heads = sorted({re.escape(text[:2]) for text in self._texts})
        self._head = re.compile("|".join([MARK, *heads]))
        longest_first = sorted(tokens, key=lambda token: -len(token.text))
        self._own = re.compile("|".join(map(_expression, longest_first)) or "(?!)")

    def mark(self, value: Any) -> Any:
        """Returns a copy of a message's JSON value with its strings marked, keys included."""
        if isinstance(value, str):
            return self.mark_text(value)
        if type(value) is dict:
            return {self.mark(name): self.mark(member) for name, member in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self.mark(member) for member in value)
        return value

    def mark_text(self, text: str) -> str:
        """Returns the text with marks. The beginning of a special token at its end is marked too,
        since a template may join it with other content."""
        if not self._first.search(text):
            return text
        marked, before = io.StringIO(), 0  # a list of the pieces would take 100 bytes a mark
        for place in heapq.merge(self._places(text), self._places_at_end(text)):
            if place > before:
                marked.write(text[before:place])
                marked.write(MARK)
                before = place
        marked.write(text[before:])
        return marked.getvalue()

    def _places(self, text: str) -> Iterator[int]:
        """Yields the positions of marks in `text`, ascending."""
        start = 0
        while head := self._head.search(text, start):
            start = head.start() + 1
            if head[0] == MARK or text.startswith(self._texts, head.start()):
                yield start

    def _places_at_end(self, text: str) -> Iterator[int]:
        """Yields the positions of marks for beginnings of special tokens at the end of `text`."""
        end = len(text.rstrip())
        for first in self._first.finditer(text, max(0, end - self._longest + 1), end):
            tail = text[first.start() : end]
            if any(token.startswith(tail) for token in self._texts):
                yield first.end()

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


def mark_messages(
    marks: ContentMarks, answer_marks: ContentMarks, messages: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Returns copies of the messages with their strings marked, those of the assistant by
    `answer_marks`."""
    return [
        (answer_marks if message.get("role") == "assistant" else marks).mark(dict(message))
        for message in messages
    ]


def _expression(token: SpecialToken) -> str:
    left, right = r"\s*" * token.lstrip, r"\s*" * token.rstrip
    return left + re.escape(token.text) + right
