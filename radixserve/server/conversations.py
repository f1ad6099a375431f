"""`Conversations`: the exact token ids behind the conversations that were answered.

Clients send the whole history as text each time. Tokenised again, what the model said may become
other ids than those that it generated, and nothing after them would be found in the cache.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Collection
from typing import NamedTuple

from sortedcontainers import SortedDict

from radixserve.arrays import IntArray

_MAX_CHARACTERS = 64_000_000


class RenderedChat(NamedTuple):
    """A rendered conversation up to the end of an answer."""

    text: str
    token_ids: IntArray  # of all of it
    answer: str  # its last part, as the client got it


class Conversations:
    """A bounded table, least recently used first out. Owned by the event loop."""

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._by_text: SortedDict = SortedDict()  # (namespace, text) -> RenderedChat
        self._recent: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._num_characters = 0

    def __len__(self) -> int:
        return len(self._recent)

    def note(self, namespace: str, known: RenderedChat) -> None:
        """Remember an answer; one of the same text replaces it. O(log n) comparisons."""
        if not self._max_entries or len(known.text) > _MAX_CHARACTERS:
            return
        key = (namespace, known.text)
        if key not in self._recent:
            self._num_characters += len(known.text)
        self._by_text[key] = known
        self._recent[key] = None
        self._recent.move_to_end(key)
        while len(self._recent) > self._max_entries or self._num_characters > _MAX_CHARACTERS:
            oldest, _ = self._recent.popitem(last=False)
            del self._by_text[oldest]
            self._num_characters -= len(oldest[1])

    def find(self, namespace: str, text: str, answers: Collection[str]) -> RenderedChat | None:
        """The longest one that `text` begins with and whose answer is one of `answers`.

        All beginnings of a text come before it in the order of texts, longer ones after shorter
        ones: each look-up either finds the longest or goes back to what is shared with the text
        before it. O(branches x log n) comparisons.
        """
        while True:
            at = self._by_text.bisect_right((namespace, text)) - 1
            if at < 0:
                return None
            known: RenderedChat
            (space, found), known = self._by_text.peekitem(at)
            if space != namespace:
                return None
            if text.startswith(found):
                if known.answer in answers:
                    self._recent.move_to_end((space, found))
                    return known
                text = text[: len(found) - 1]  # a shorter one
            else:
                text = text[: _common_len(text, found)]

    def forget(self, namespace: str | None) -> None:
        """Drop the conversations of one namespace, or all."""
        for key in [key for key in self._recent if namespace in (None, key[0])]:
            del self._recent[key], self._by_text[key]
            self._num_characters -= len(key[1])


def _common_len(one: str, other: str) -> int:
    """Characters at the beginning that are equal. O(log n) comparisons of slices."""
    lengths = range(1, min(len(one), len(other)) + 1)
    return bisect_left(lengths, True, key=lambda length: not one.startswith(other[:length]))
