"""`ReuseCurve`: the hit rate of an LRU cache of any size, kept while requests arrive.

The reuse distance of a token is the number of tokens that other requests have used since its last
use. A cache that holds more has it still (Mattson's stack distance; `radixserve.replay.bounds` has
it for recorded traffic, exactly). Prefixes are sampled at the ends of blocks, and remembered by
their hashes: the ones used last, at most `most_blocks` of them. Where blocks are large, the first
ones are smaller, so that short prefixes count:

    tokens    16  32  64  128     256              512              768 ...      block_size=256
              |---|---|---|-------|----------------|----------------|---
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise, repeat
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_STEPS_PER_OCTAVE = 8  # of distances, as in replay/bounds.py
_OCTAVES = 48
LEAST_BLOCK = 16  # tokens
_LEAST_EDGE = 8  # octaves: smaller distances are one step
_EDGES = [0.0]
_EDGES += [
    2.0 ** (_LEAST_EDGE + step / _STEPS_PER_OCTAVE)
    for step in range((_OCTAVES - _LEAST_EDGE) * _STEPS_PER_OCTAVE + 1)
]
_MOST_REQUESTS = 1 << 16  # remembered


class Use(NamedTuple):
    """A request as the curve knows it."""

    number: int  # in order of arrival
    num_known: int  # leading blocks that were used before
    last_user: int  # the number of the last request that used the last of these; -1: none
    next_distance: int  # of the token behind these


class ReuseCurve:
    """Reuse distances of blocks. About 0.1 us per block; used by one thread.

    block_size   tokens of a block, a power of two from LEAST_BLOCK on
    most_blocks  remembered at most: about 140 bytes each
    """

    def __init__(self, block_size: int, most_blocks: int) -> None:
        self.block_size = block_size
        self.prompt_tokens = 0
        # The first ends are LEAST_BLOCK, twice that, ..., up to a whole block.
        self._num_small = (block_size // LEAST_BLOCK).bit_length() - 1
        self._most = max(2, most_blocks)
        # By prefix hash: the number of the last request that used the block. Two generations: when
        # the young one is full, the old one is forgotten. A used block becomes young.
        self._young: dict[int, int] = {}
        self._old: dict[int, int] = {}
        self._base = 0  # the number of the first remembered request
        self._turned_at = 0  # the next number when the young generation began
        self._next = 0
        self._used = np.zeros(1024, np.int64)  # [requests] tokens that each was the last to use
        self._ends: NDArray[np.intp] = np.empty(0, np.intp)
        self._tokens = [0] * len(_EDGES)  # reused tokens by distance: up to each edge

    def num_blocks(self, num_tokens: int) -> int:
        """Whole blocks in so many tokens."""
        size = self.block_size
        if num_tokens >= size:
            return self._num_small + num_tokens // size
        return (num_tokens // LEAST_BLOCK).bit_length()

    def end(self, num_blocks: int) -> int:
        """Tokens of so many blocks."""
        if num_blocks > self._num_small:
            return (num_blocks - self._num_small) * self.block_size
        return LEAST_BLOCK << num_blocks - 1 if num_blocks else 0

    def ends(self, num_tokens: int) -> NDArray[np.intp]:
        """[at least `num_blocks`] the tokens up to the end of each block."""
        count = self.num_blocks(num_tokens)
        if len(self._ends) < count:
            self._ends = np.asarray([self.end(n + 1) for n in range(2 * count)], np.intp)
        return self._ends

    def knows(self, block: int) -> bool:
        """Whether a block is remembered."""
        return block in self._young or block in self._old

    def arrive(self, blocks: Sequence[int], num_prompt: int) -> Use:
        """A request arrives. `blocks`: of its prompt without the last token, which is computed
        anyway; `num_prompt`: its tokens."""
        self._make_room()
        number, tokens_to = self._next, self.end
        self._next += 1
        self.prompt_tokens += num_prompt
        users = self._touch(blocks, number)
        num_known = users.index(-1) if -1 in users else len(users)
        if num_known and users.count(users[0]) == num_known:
            runs = [(0, num_known)]
        else:
            cuts = [0, *(n for n in range(1, num_known) if users[n] != users[n - 1]), num_known]
            runs = list(pairwise(cuts)) if num_known else []
        end = 0
        for low, high in runs:
            start = self._distance(users[low])
            end = start + tokens_to(high) - tokens_to(low)
            self._note(start, end)
        for low, high in runs:
            self._used[users[low] - self._base] -= tokens_to(high) - tokens_to(low)
        self._used[number - self._base] += tokens_to(len(users))
        return Use(number, num_known, users[num_known - 1] if num_known else -1, end)

    def match_further(self, use: Use, num_tokens: int) -> None:
        """A request had so many tokens behind its last known block in common with an earlier one:
        fewer than a block, or the next blocks were not remembered."""
        if use.num_known and num_tokens > 0:
            self._note(use.next_distance, use.next_distance + num_tokens)

    def extend(self, number: int, blocks: Sequence[int], first: int) -> None:
        """A request has ended: it used these blocks, too, of its prompt's end and its output.
        `first`: the number of its blocks before them."""
        number = max(number, self._turned_at)  # an older one may be forgotten before its blocks
        for place, user in enumerate(self._touch(blocks, number), first):
            if user >= 0:
                self._used[user - self._base] -= self.end(place + 1) - self.end(place)
        self._used[number - self._base] += self.end(first + len(blocks)) - self.end(first)

    def forget(self) -> None:
        """No block is cached any more. The distances so far are kept."""
        self._young, self._old = {}, {}
        self._used[:] = 0

    def hit_tokens(self, cache_tokens: float) -> float:
        """Prompt tokens that an LRU cache of this size would have reused."""
        place = bisect_left(_EDGES, cache_tokens)
        whole = sum(self._tokens[:place])
        if place >= len(_EDGES) or not place:
            return whole
        low, high = _EDGES[place - 1], _EDGES[place]
        return whole + self._tokens[place] * (cache_tokens - low) / (high - low)

    @property
    def reusable_tokens(self) -> int:
        """Prompt tokens that were used before, as far as that is remembered."""
        return sum(self._tokens)

    def smallest(self, hit_tokens: float) -> float:
        """The smallest cache with so many hits; the largest distance if none has."""
        reached, largest = 0.0, 0.0
        for place in range(1, len(_EDGES)):
            here = self._tokens[place]
            low, high = _EDGES[place - 1], _EDGES[place]
            if here and reached + here >= hit_tokens:
                return low + max(0.0, hit_tokens - reached) / here * (high - low)
            reached += here
            largest = high if here else largest
        return largest

    # -- inside -------------------------------------------------------------------------------

    def _touch(self, blocks: Sequence[int], number: int) -> list[int]:
        """Note that a request uses these blocks. Returns the last request before that did, by
        block; -1 for none."""
        users = list(map(self._young.get, blocks, repeat(-1)))
        if self._old and -1 in users:
            forget = self._old.pop
            for place, user in enumerate(users):
                if user < 0:
                    users[place] = forget(blocks[place], -1)
        self._young.update(dict.fromkeys(blocks, number))
        return users

    def _distance(self, user: int) -> int:
        """Tokens that were used after a request and not since, by another one."""
        between = self._used[user + 1 - self._base : self._next - 1 - self._base]
        return int(np.add.reduce(between))

    def _note(self, start: int, end: int) -> None:
        """Tokens with the distances start + 1, ..., end were reused."""
        place = bisect_left(_EDGES, start + 1)
        while start < end:
            until = min(end, int(_EDGES[place]))
            self._tokens[place] += until - start
            start, place = until, place + 1

    def _make_room(self) -> None:
        """Forget the old generation when the young one is full, or has too many requests."""
        is_full = len(self._young) * 2 >= self._most
        if is_full or (self._next - self._turned_at) * 2 >= _MOST_REQUESTS:
            self._old, self._young = self._young, {}
            self._used = self._used[self._turned_at - self._base :].copy()
            self._base, self._turned_at = self._turned_at, self._next
        if self._next - self._base >= len(self._used):
            self._used = np.concatenate((self._used, np.zeros(len(self._used) + 1024, np.int64)))
