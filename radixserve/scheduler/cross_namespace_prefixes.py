"""`CrossNamespacePrefixes`: prefixes of one namespace that requests of the others may go on from.

Namespaces stay apart: a request of another one copies the K/V of the prefix into pages of its own
instead of computing it, and everything after that is its own. The prefix is available for as long
as it is cached where it was named.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from radixserve.arrays import IntArray
from radixserve.cache import CacheSequence, PrefixCache
from radixserve.errors import OutOfPages
from radixserve.hint import Hint, HintAnswer

MAX_SHARED = 256
NO_PERMISSION = "the key has no permission to share"


class _Shared(NamedTuple):
    namespace: str
    tokens: IntArray  # whole pages
    end: float | None  # on the cache's clock; None: until it is taken back


class CrossNamespacePrefixes:
    """Longest first, so that the first that fits is the best. Only the scheduler calls it."""

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self._shared: list[_Shared] = []
        self.copied_tokens = 0  # since the start

    def __len__(self) -> int:
        return len(self._shared)

    def add(self, hint: Hint, tokens: IntArray, found: int, reason: str) -> HintAnswer:
        """`tokens`: whole pages that are cached; `reason`: why they are not all."""
        if not hint.may_share:
            return HintAnswer("share", "rejected", found, reason=NO_PERMISSION)
        self._expire()
        self._drop(hint.namespace, tokens)
        if len(self._shared) >= MAX_SHARED:
            reason = f"{MAX_SHARED} prefixes are shared already"
            return HintAnswer("share", "rejected", found, reason=reason)
        end = None if hint.seconds is None else self._cache.time() + hint.seconds
        self._shared.append(_Shared(hint.namespace, tokens.copy(), end))
        self._shared.sort(key=lambda one: -len(one.tokens))
        answer = "clipped" if reason else "accepted"
        return HintAnswer("share", answer, found, len(tokens), hint.seconds, reason)

    def remove(self, hint: Hint, tokens: IntArray) -> HintAnswer:
        """Others go on from `tokens`, and from what is shared of them, no more."""
        if not hint.may_share:
            return HintAnswer("share", "rejected", reason=NO_PERMISSION)
        before = len(self._shared)
        mine = [one for one in self._shared if one.namespace == hint.namespace]
        for one in mine:
            if begins_with(tokens, one.tokens):
                self._drop(one.namespace, one.tokens)
        if len(self._shared) == before:
            return HintAnswer("share", "missing", reason="it is not shared")
        return HintAnswer("share", "accepted", len(tokens), len(tokens), 0.0)

    def forget(self, namespace: str | None) -> None:
        """A namespace was reset, or all."""
        self._shared = [one for one in self._shared if namespace not in (None, one.namespace)]

    def copy_into(self, sequence: CacheSequence, tokens: IntArray) -> int:
        """Let a new sequence of `tokens` go on from the longest shared prefix, where that is longer
        than what its own namespace has. All but the last token at most. Returns the tokens copied.

        O(shared prefixes x tokens) comparisons, O(1) where there are none.
        """
        if not self._shared:
            return 0
        self._expire()
        cache, size = self._cache, self._cache.page_size
        for one in self._shared:
            length = min(len(one.tokens), (len(tokens) - 1) // size * size)
            if length <= sequence.length:
                continue
            prefix = one.tokens[:length]
            if one.namespace == sequence.namespace or not begins_with(tokens, prefix):
                continue
            source = cache.acquire(prefix, one.namespace, allow_full=True)
            try:
                copied = 0
                if source.cached_len == length:
                    copied = sequence.copy_from(source)
            except OutOfPages:
                copied = 0
            if copied:
                self.copied_tokens += copied
                return copied
            source.release()
        return 0

    def _expire(self) -> None:
        now = self._cache.time()
        self._shared = [one for one in self._shared if one.end is None or one.end > now]

    def _drop(self, namespace: str, tokens: IntArray) -> None:
        self._shared = [
            one
            for one in self._shared
            if one.namespace != namespace or not np.array_equal(one.tokens, tokens)
        ]

    def check(self) -> None:
        """AssertionError names the first broken invariant."""
        lens = [len(one.tokens) for one in self._shared]
        assert lens == sorted(lens, reverse=True), "shared prefixes are out of order"
        size = self._cache.page_size
        assert not any(length % size or not length for length in lens), "a part of a page is shared"


def begins_with(tokens: IntArray, prefix: IntArray) -> bool:
    size = len(prefix)
    if len(tokens) < size or tokens[size - 1] != prefix[-1]:
        return False
    return bool(np.array_equal(tokens[:size], prefix))
