"""The clairvoyant bound: how many tokens a cache that knows the future could reuse.

The rules that it shares with every cache here: requests are served one after another in the order
of the trace; while one is served all of its tokens are in the cache; what it has just computed, and
what was there before, may be kept or dropped afterwards, within the cache's size; a token enters
only when a request that has it is served. One hit is one token of a prompt (but its last one) that
is in the cache when the request arrives. Requests that do not fit alone are passed over.

Belady's rule under these: when room is needed, drop the tokens whose next use lies farthest ahead;
a token that is computed again by the model (in an output, or as a prompt's last token) before it
could be reused is worth nothing until then. No cache of this size can have more hits, and dropping
early, keeping out or any order of eviction is included in "no cache":

    Take an optimal cache that keeps y and drops x although x is needed first. Keep x instead. When
    x is needed, that is one hit more; when y is needed later, at most one less, and y comes back
    into the place that the optimal cache held for it all the time. Where y is computed anyway
    before that, x is dropped then and nothing is lost. So following the rule never costs a hit.

Only a prefix is of use to a real cache, and this bound does not ask whether what lies above a token
is still there. It does not need to: a token is used whenever one below it is, so what lies above is
never dropped first. The one exception is a token that the model computes again, in an output or as
a last token, while something below it waits: there a real cache must pay for keeping it, the bound
does not. So the bound is never too low, and exact where no request computes anew what was known.

It is no bound for a scheduler that changes the order of the requests.
"""

from __future__ import annotations

import heapq
from collections import deque
from itertools import pairwise

import numpy as np

from radixserve.replay.paths import PathTable
from radixserve.replay.trace import Bools, Ints

NEVER = -1
_Slice = tuple[int, int, int]  # the request that used them last; first and end in paths.segments


def clairvoyant_hits(paths: PathTable, num_kept: Ints, cache_tokens: int) -> Ints:
    """[requests] tokens that each request could reuse, at most, in a cache of that size.

    O(segments on all paths) in numpy; about 0.1 ms a request.
    """
    fits = num_kept <= cache_tokens
    return _Oracle(paths, fits, cache_tokens).run()


def next_uses(paths: PathTable, fits: Bools) -> Ints:
    """For each entry of `paths.segments`: the next request that reuses the segment.

    NEVER where nobody does, or where it is computed anew before. `fits`: who is served at all.
    """
    upcoming = np.full(len(paths.lengths), NEVER, np.int64)
    found = np.empty(len(paths.segments), np.int64)
    for request in range(len(paths) - 1, -1, -1):
        path, usable = paths.path(request), paths.num_usable[request]
        found[paths.bounds[request] : paths.bounds[request + 1]] = upcoming[path]
        if fits[request]:
            upcoming[path[:usable]] = request
            upcoming[path[usable:]] = NEVER
    return found


class _Oracle:
    """What is cached of each segment (its head), and whose turn it is to go."""

    def __init__(self, paths: PathTable, fits: Bools, cache_tokens: int) -> None:
        self._paths = paths
        self._fits = fits
        self._free = cache_tokens
        self._cached = np.zeros(len(paths.lengths), np.int64)  # tokens
        self._last = np.full(len(paths.lengths), -1, np.int64)  # request that used it last
        self._next = next_uses(paths, fits)
        # By next use, in order of last use: what lies deeper in one path comes first.
        self._turns: dict[int, deque[_Slice]] = {NEVER: deque()}
        self._farthest: list[int] = []  # a heap of the negated keys of `_turns`

    def run(self) -> Ints:
        paths, cached, lengths = self._paths, self._cached, self._paths.lengths
        hits = np.zeros(len(paths), np.int64)
        for request in np.flatnonzero(self._fits).tolist():
            path = paths.path(request)
            found = cached[path]
            hits[request] = found[: paths.num_usable[request]].sum()
            self._free -= int(lengths[path].sum() - found.sum())
            self._turns.pop(request, None)
            self._last[path] = request
            cached[path] = lengths[path]
            while self._free < 0:
                self._evict()
            self._enter(request)
        return hits

    def _enter(self, request: int) -> None:
        """Note when the segments of a request are needed next."""
        first, end = int(self._paths.bounds[request]), int(self._paths.bounds[request + 1])
        keys = self._next[first:end]
        cuts = [0, *(np.flatnonzero(np.diff(keys)) + 1).tolist(), end - first]
        for low, high in pairwise(cuts):
            key = int(keys[low])
            if key not in self._turns:
                self._turns[key] = deque()
                heapq.heappush(self._farthest, -key)
            self._turns[key].append((request, first + low, first + high))

    def _evict(self) -> None:
        """Drop tokens of the slice that is needed last, deepest first, as many as are missing."""
        turn = self._turns[NEVER]
        while not turn:
            key = -self._farthest[0]
            turn = self._turns.get(key, deque())
            if not turn:
                self._turns.pop(key, None)
                heapq.heappop(self._farthest)
        request, first, end = turn.popleft()
        segments = self._paths.segments[first:end]
        sizes = np.where(self._last[segments] == request, self._cached[segments], 0)
        behind = np.cumsum(sizes[::-1])[::-1]  # tokens from this segment to the slice's end
        missing = -self._free
        if behind[0] <= missing:
            self._cached[segments[sizes > 0]] = 0
            self._free += int(behind[0])
            return
        cut = int(np.flatnonzero(behind > missing)[-1])  # this one goes in part, all deeper ones go
        gone = segments[cut + 1 :][sizes[cut + 1 :] > 0]
        rest = missing - (int(behind[cut + 1]) if cut + 1 < len(behind) else 0)
        self._cached[gone] = 0
        self._cached[segments[cut]] -= rest
        self._free = 0
        turn.appendleft((request, first, first + cut + 1))
