"""`CrossNamespacePrefixes`: prefixes whose K/V requests of other namespaces may copy."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from radixserve.arrays import IntArray
from radixserve.cache import CacheSequence, PrefixCache
from radixserve.cache.namespace import as_namespace, is_within
from radixserve.errors import OutOfPages
from radixserve.hints.hint import Hint, HintAnswer

MAX_SHARED = 256
NO_PERMISSION = "the key has no permission to share"


class _Shared(NamedTuple):
    namespace: str
    tokens: IntArray  # whole pages
    end: float | None  # on the cache's clock; None: until `remove`


class CrossNamespacePrefixes:
    """Prefixes of a namespace whose K/V requests of other namespaces may copy.

    Namespaces stay separate: a request copies the prefix's K/V into its own pages instead of
    computing it. A prefix can be copied while its own namespace has it cached. Prefixes are in
    order of decreasing length, so the first match is the longest.
    """

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self._shared: list[_Shared] = []
        self.copied_tokens = 0  # since the start

    def __len__(self) -> int:
        return len(self._shared)

    def add(self, hint: Hint, tokens: IntArray, num_cached: int, reason: str) -> HintAnswer:
        """Share cached whole pages. reason: why `tokens` are not all of the hint's; "" if they
        are."""
        if not hint.may_share:
            return HintAnswer("share", "rejected", num_cached, reason=NO_PERMISSION)
        self._expire()
        self._drop(hint.namespace, tokens)
        if len(self._shared) >= MAX_SHARED:
            reason = f"{MAX_SHARED} prefixes are shared already"
            return HintAnswer("share", "rejected", num_cached, reason=reason)
        end = None if hint.seconds is None else self._cache.time() + hint.seconds
        self._shared.append(_Shared(hint.namespace, tokens.copy(), end))
        self._shared.sort(key=lambda shared: -len(shared.tokens))
        answer = "clipped" if reason else "accepted"
        return HintAnswer("share", answer, num_cached, len(tokens), hint.seconds, reason)

    def remove(self, hint: Hint, tokens: IntArray) -> HintAnswer:
        """Stop sharing `tokens` and every shared prefix of them."""
        if not hint.may_share:
            return HintAnswer("share", "rejected", reason=NO_PERMISSION)
        before = len(self._shared)
        mine = [shared for shared in self._shared if shared.namespace == hint.namespace]
        for shared in mine:
            if begins_with(tokens, shared.tokens):
                self._drop(shared.namespace, shared.tokens)
        if len(self._shared) == before:
            return HintAnswer("share", "missing", reason="it is not shared")
        return HintAnswer("share", "accepted", len(tokens), len(tokens), 0.0)

    def forget(self, namespace: str | None) -> None:
        """Forget the prefixes of a namespace that was reset; None: of all namespaces."""
        self._shared = [
            shared for shared in self._shared if not is_within(shared.namespace, namespace)
        ]

    def copy_into(self, sequence: CacheSequence, tokens: IntArray) -> int:
        """Copy the longest shared prefix of `tokens` into a new sequence, where it is longer than
        the prefix cached in the sequence's own namespace. Returns the number of tokens copied, at
        most all but the last.

        O(shared prefixes x tokens) comparisons, O(1) without shared prefixes.
        """
        if not self._shared:
            return 0
        self._expire()
        cache, size = self._cache, self._cache.page_size
        for shared in self._shared:
            length = min(len(shared.tokens), (len(tokens) - 1) // size * size)
            if length <= sequence.length:
                continue
            prefix = shared.tokens[:length]
            if shared.namespace == sequence.namespace or not begins_with(tokens, prefix):
                continue
            if as_namespace(shared.namespace).adapter != as_namespace(sequence.namespace).adapter:
                continue  # other weights computed it
            source = cache.acquire(prefix, shared.namespace, allow_full=True)
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
        self._shared = [shared for shared in self._shared if shared.end is None or shared.end > now]

    def _drop(self, namespace: str, tokens: IntArray) -> None:
        self._shared = [
            shared
            for shared in self._shared
            if shared.namespace != namespace or not np.array_equal(shared.tokens, tokens)
        ]

    def check(self) -> None:
        """Raise AssertionError at the first broken invariant."""
        lens = [len(shared.tokens) for shared in self._shared]
        assert lens == sorted(lens, reverse=True), "shared prefixes are out of order"
        size = self._cache.page_size
        assert not any(length % size or not length for length in lens), "a part of a page is shared"


def begins_with(tokens: IntArray, prefix: IntArray) -> bool:
    size = len(prefix)
    if len(tokens) < size or tokens[size - 1] != prefix[-1]:
        return False
    return bool(np.array_equal(tokens[:size], prefix))
