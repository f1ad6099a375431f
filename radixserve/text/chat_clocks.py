"""`ChatClocks`: the date and time at which conversations began; `clock_span`: its tokens in a
prompt.

Some chat templates print the date. If it changed with the day, every open conversation would miss
the cache at midnight, from the date on. Callers send the whole history in each turn, so a
conversation is known by digests of its messages.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timedelta
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from radixserve.arrays import IntArray
from radixserve.cache.diagnosis import common_length

_ENTRIES_PER_CHAT = 8  # each turn leaves two: before its answer and after it
_OTHER_TIME = timedelta(days=4_000, hours=7, minutes=31, seconds=17, microseconds=123_456)


class ChatStart(NamedTuple):
    """When a conversation began, and the digest of its messages up to now."""

    began: datetime
    digest: bytes


class ChatClocks:
    """A bounded table, for any number of threads. The least recently used entry is dropped
    first."""

    def __init__(self, max_conversations: int) -> None:
        self._max_entries = _ENTRIES_PER_CHAT * max_conversations
        self._began: OrderedDict[bytes, datetime] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._began)

    def start_of(
        self,
        namespace: str,
        messages: Sequence[tuple[str, ...]],
        now: datetime | None = None,
        *,
        is_noted: bool = True,
    ) -> ChatStart:
        """Returns the start of a conversation: that of the longest known one that it continues,
        else `now`, the clock's time by default. O(characters).

        messages  (role, text and other members), of the assistant's the text that a client got
        is_noted  remember it for what continues these messages
        """
        digests = [_digest(b"", (namespace,))]
        continued: list[bytes] = []  # digests of what earlier requests and answers may have left
        for message in messages:
            before = digests[-1]
            digests.append(_digest(before, message))
            if message[0] == "assistant":
                continued += [before, digests[-1]]
        with self._lock:
            found = next((key for key in reversed(continued) if key in self._began), None)
            began = (now or datetime.now()) if found is None else self._began[found]
            if is_noted:
                self._note(digests[-1], began)
        return ChatStart(began, digests[-1])

    def note_answer(self, start: ChatStart, answer: str) -> None:
        """Remember a conversation with its answer, which tells it from others that began with the
        same messages."""
        with self._lock:
            self._note(_digest(start.digest, ("assistant", answer)), start.began)

    def _note(self, digest: bytes, began: datetime) -> None:
        self._began[digest] = began
        self._began.move_to_end(digest)
        while len(self._began) > self._max_entries:
            self._began.popitem(last=False)


def clock_span(
    ids: IntArray, now: datetime, encode: Callable[[datetime], Sequence[int]]
) -> tuple[int, int]:
    """Returns (first, end) of the prompt's token ids that depend on the date and time. (n, n) of n
    without any. `encode(now)` renders the same prompt at another time. O(tokens)."""
    other = np.asarray(encode(now - _OTHER_TIME), np.int32)
    first = common_length(ids, other)
    if first == len(ids):
        return first, first
    return first, max(first + 1, len(ids) - common_length(ids[::-1], other[::-1]))


def _digest(before: bytes, texts: Iterable[str]) -> bytes:
    """Returns the digest of a conversation with one more message."""
    digest = blake2b(before, digest_size=16)
    for text in texts:
        data = text.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8))
        digest.update(data)
    return digest.digest()
