"""How often prefixes are used again: `UseCounts` by prefix, `ReturnRate` of evicted tokens."""

from __future__ import annotations

import zlib
from collections import OrderedDict

import numpy as np

from radixserve.arrays import IntArray

_STEP = 64  # tokens: prefixes are counted at multiples of it
_MAX_PREFIXES = 65_536
_ASSUMED_RETURNS = 10, 2000  # returned and evicted tokens that are added to the counted ones


class UseCounts:
    """Counts the uses of prefixes that end at multiples of 64 tokens; the prefixes that were not
    used for longest are forgotten. A prefix is known by its length and a CRC-32, so that two of
    them are very rarely taken for one: nothing may depend on it but what is worth keeping."""

    def __init__(self, min_uses: int) -> None:
        """`min_uses`: of a prefix that `note` is to return."""
        self.min_uses = min_uses
        self._counts: OrderedDict[tuple[int, int], int] = OrderedDict()

    def note(self, tokens: IntArray, namespace: str, start: int = 0) -> int:
        """Count a use of each prefix of `tokens` that is longer than `start`. Returns the length of
        the longest one that was used at least `min_uses` times, this use included; 0 where there is
        none. O(tokens)."""
        longest, counts, begin = 0, self._counts, start - start % _STEP
        if begin + _STEP > len(tokens):
            return 0
        data = np.ascontiguousarray(tokens, np.int32).data.cast("B")
        checksum = zlib.crc32(data[: 4 * begin], zlib.crc32(namespace.encode()))
        for end in range(begin + _STEP, len(tokens) + 1, _STEP):
            checksum = zlib.crc32(data[4 * (end - _STEP) : 4 * end], checksum)
            count = counts[end, checksum] = counts.pop((end, checksum), 0) + 1
            if count >= self.min_uses:
                longest = end
        while len(counts) > _MAX_PREFIXES:
            counts.popitem(last=False)
        return longest

    def clear(self) -> None:
        """Forget all uses."""
        self._counts.clear()


class ReturnRate:
    """The share of evicted tokens that are asked for again. Half of what was counted is forgotten
    whenever a window of tokens has been evicted."""

    def __init__(self, window: int) -> None:
        """`window`: evicted tokens."""
        self._window = window
        self._num_evicted = 0  # forgotten ones
        self._num_returned = 0

    def share(self, num_evicted: int, num_returned: int) -> float:
        """Returns the share, at most 1, of tokens counted since the start."""
        evicted, returned = num_evicted - self._num_evicted, num_returned - self._num_returned
        if evicted > self._window:
            self._num_evicted += evicted // 2
            self._num_returned += returned // 2
        return min(1.0, (returned + _ASSUMED_RETURNS[0]) / (evicted + _ASSUMED_RETURNS[1]))
