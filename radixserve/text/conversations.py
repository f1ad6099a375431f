"""`Answer` and `ConversationTable`: keep the exact token ids of answers in conversations.

Clients send a conversation back as text in each turn. If its answers were tokenised again, their
ids could differ from the generated ones, and the cache would miss everything after them.
`ChatFormat` has the answers of its one conversation and keeps their ids also where the template
changes earlier turns. `ConversationTable` finds the answers of a server's clients by their text and
tokenises only what follows: 1 ms for a conversation of 15,000 tokens, where `ChatFormat` without
the ids of an earlier call takes 15.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sortedcontainers import SortedDict

from radixserve.arrays import IntArray
from radixserve.cache.namespace import is_within
from radixserve.text.content_marks import unmarked
from radixserve.text.tokenizer import Tokenizer

_MAX_CHARACTERS = 64_000_000
_LONGEST_CUT = 64  # tokens


@dataclass(frozen=True, slots=True)
class Answer:
    """The model's answer in one turn."""

    text: str
    token_ids: tuple[int, ...]  # as generated
    has_end: bool  # the last of them is an end token, which is not part of the text

    @property
    def said_ids(self) -> tuple[int, ...]:
        """The generated ids without the end token."""
        return self.token_ids[:-1] if self.has_end else self.token_ids

    def exact_ids(self, tokenizer: Tokenizer, context: Sequence[int]) -> tuple[list[int], str]:
        """Returns the most generated ids whose text after `context` begins the answer, and that
        text.

        These are usually all ids except an end token; fewer if a stop string has cut the text, none
        if it cut more than 64 tokens. Decodes up to 64 times."""
        start = len(tokenizer.decode(context))
        ids = list(self.token_ids)
        for _ in range(min(len(ids), _LONGEST_CUT)):
            text = tokenizer.decode([*context, *ids])[start:]
            if self.text.startswith(text):
                has_end = self.has_end and len(ids) == len(self.token_ids)
                return (ids[:-1] if has_end else ids), text
            ids.pop()
        return [], ""

    def ids_as_rendered(self, tokenizer: Tokenizer, rendered: str) -> Sequence[int]:
        """Returns the ids of the answer, or of the part of it that a template renders: generated
        ids as far as their text agrees."""
        ids, text = self.said_ids, unmarked(rendered)
        decoded = tokenizer.decode(ids)
        if is_same(decoded, text):
            return ids
        is_whole = is_same(self.text, text)
        wanted = self.text if is_whole else text
        is_head = is_whole and decoded.startswith(wanted)  # cut by a stop string
        start = 0 if is_head else decoded.rfind(wanted)
        first = _num_ids_within(tokenizer, ids, start) if start >= 0 else 0
        if start < 0 or tokenizer.decode(ids[:first]) != decoded[:start]:
            return tokenizer.encode_rendered(rendered)
        end = start + len(wanted)
        last = _num_ids_within(tokenizer, ids, end)
        while last > first and not decoded[:end].startswith(tokenizer.decode(ids[:last])):
            last -= 1  # inside a character
        rest = decoded[len(tokenizer.decode(ids[:last])) : end]
        return [*ids[first:last], *(tokenizer.encode_answer(rest) if rest else [])]


class AnsweredChat(NamedTuple):
    """A rendered conversation up to the end of an answer."""

    text: str  # as `Tokenizer.render_chat` returns it
    token_ids: IntArray  # of the whole text
    answer: str  # the answer, as the client got it


class ConversationTable:
    """A bounded table of rendered conversations, for clients that send the whole history as text.
    The least recently used one is dropped first. Only the event loop uses it."""

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._by_text: SortedDict = SortedDict()  # (namespace, text) -> AnsweredChat
        self._recent: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._num_characters = 0

    def __len__(self) -> int:
        return len(self._recent)

    def note(self, namespace: str, known: AnsweredChat) -> None:
        """Remember a conversation; it replaces one of the same text. O(log n) comparisons."""
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

    def find(self, namespace: str, text: str, answers: Collection[str]) -> AnsweredChat | None:
        """Returns the longest remembered conversation that `text` begins with and whose answer is
        one of `answers`; None without one.

        In sorted order all prefixes of a text come before it, longer ones after shorter ones. Each
        look-up finds the longest prefix, or continues with what `text` shares with the text before
        it. O(branches x log n) comparisons.
        """
        while True:
            index = self._by_text.bisect_right((namespace, text)) - 1
            if index < 0:
                return None
            known: AnsweredChat
            (space, known_text), known = self._by_text.peekitem(index)
            if space != namespace:
                return None
            if text.startswith(known_text):
                if known.answer in answers:
                    self._recent.move_to_end((space, known_text))
                    return known
                text = text[: len(known_text) - 1]  # a shorter one
            else:
                text = text[: _common_len(text, known_text)]

    def forget(self, namespace: str | None) -> None:
        """Drop the conversations of one namespace and those below it, or all."""
        for key in [key for key in self._recent if is_within(key[0], namespace)]:
            del self._recent[key], self._by_text[key]
            self._num_characters -= len(key[1])


def is_same(text: str, rendered: str) -> bool:
    """Whether a text and its rendering are equal except for white space at both ends."""
    return text.strip() == rendered.strip()


def _num_ids_within(tokenizer: Tokenizer, ids: Sequence[int], length: int) -> int:
    """Returns how many leading ids have a text of at most `length` characters. O(log n)
    decodings."""
    counts = range(1, len(ids) + 1)
    return bisect_right(counts, length, key=lambda count: len(tokenizer.decode(ids[:count])))


def _common_len(text: str, other: str) -> int:
    """Returns the length of the common prefix of two texts. O(log n) comparisons of slices."""
    lengths = range(1, min(len(text), len(other)) + 1)
    return bisect_left(lengths, True, key=lambda length: not text.startswith(other[:length]))
