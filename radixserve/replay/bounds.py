"""The best that a cache could do on a trace: the clairvoyant bound, and LRU for every size.

The clairvoyant bound is the number of tokens that a cache which knows the future could reuse. It
has the rules of every cache here. Requests are served one after another in the order of the trace.
While a request is served, all of its tokens are in the cache. Afterwards, these and the tokens that
were in the cache before may be kept or dropped, within the cache's size. A token enters the cache
only when a request that has it is served. A hit is a token of a prompt, except its last one, that
is in the cache when the request arrives. Requests that alone exceed the cache are skipped.

Belady's rule is optimal under these rules: to make room, drop the tokens whose next use is farthest
ahead. A token that the model computes again (in an output, or as a prompt's last token) before it
could be reused is worth nothing until then. No cache of this size can have more hits, whether it
drops early, keeps tokens out, or evicts in any other order:

    Take an optimal cache that keeps y and drops x although x is needed first. Keep x instead. When
    x is needed, that is one hit more; when y is needed later, at most one less, and y comes back
    into the place that the optimal cache reserved for it all the time. If y is computed anyway
    before that, x is dropped then and nothing is lost. So following the rule never costs a hit.

A real cache can use only a prefix. The bound does not need to check that the tokens above a hit are
still cached: a token is used whenever one below it is, so it is never dropped first. The exception
is a token that the model computes again, in an output or as a last token, while a token below it
stays cached. A real cache must spend room on it, the bound does not. So the bound is never too low,
and it is exact if no request recomputes a known token.

The bound does not apply to a scheduler that changes the order of the requests.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from radixserve.replay.paths import PathTable
from radixserve.replay.trace import Bools, Floats, Ints

NEVER = -1
_Slice = tuple[int, int, int]  # (request that used it last, first, end): of `paths.segments`
_STEPS_PER_OCTAVE = 8  # of reuse distances


def clairvoyant_hits(paths: PathTable, num_kept: Ints, cache_tokens: int) -> Ints:
    """[requests] the tokens that each request could reuse at most, with a cache of that size.

    `num_kept`: see `Trace.num_kept`. O(segments on all paths) in numpy; about 0.1 ms per request.
    """
    return _Oracle(paths, num_kept <= cache_tokens, cache_tokens).run()


def next_uses(paths: PathTable, fits: Bools) -> Ints:
    """[paths.segments] for each entry, the next request that reuses the segment; NEVER if there is
    none, or the segment is recomputed before.

    `fits`: [requests] whether each is served.
    """
    upcoming = np.full(len(paths.lengths), NEVER, np.int64)
    uses = np.empty(len(paths.segments), np.int64)
    for request in range(len(paths) - 1, -1, -1):
        path, usable = paths.path(request), paths.num_usable[request]
        uses[paths.bounds[request] : paths.bounds[request + 1]] = upcoming[path]
        if fits[request]:
            upcoming[path[:usable]] = request
            upcoming[path[usable:]] = NEVER
    return uses


class _Oracle:
    """The clairvoyant cache: how many tokens of each segment, from its start, are cached, and
    queues of segments by their next use."""

    def __init__(self, paths: PathTable, fits: Bools, cache_tokens: int) -> None:
        self._paths = paths
        self._fits = fits
        self._free = cache_tokens
        self._cached = np.zeros(len(paths.lengths), np.int64)  # tokens
        self._last = np.full(len(paths.lengths), -1, np.int64)  # the last request of each segment
        self._next = next_uses(paths, fits)
        # By next use, each in order of last use: deeper segments of a path are evicted first.
        self._queues: dict[int, deque[_Slice]] = {NEVER: deque()}
        self._farthest: list[int] = []  # a heap of the negated keys of `_queues`

    def run(self) -> Ints:
        paths, cached, lengths = self._paths, self._cached, self._paths.lengths
        hits = np.zeros(len(paths), np.int64)
        for request in np.flatnonzero(self._fits).tolist():
            path = paths.path(request)
            is_cached = cached[path]
            hits[request] = is_cached[: paths.num_usable[request]].sum()
            self._free -= int(lengths[path].sum() - is_cached.sum())
            self._queues.pop(request, None)
            self._last[path] = request
            cached[path] = lengths[path]
            while self._free < 0:
                self._evict()
            self._enqueue(request)
        return hits

    def _enqueue(self, request: int) -> None:
        """Queue the segments of a request by their next use."""
        first, end = int(self._paths.bounds[request]), int(self._paths.bounds[request + 1])
        keys = self._next[first:end]
        for low, high in _equal_runs(keys):
            key = int(keys[low])
            if key not in self._queues:
                self._queues[key] = deque()
                heapq.heappush(self._farthest, -key)
            self._queues[key].append((request, first + low, first + high))

    def _evict(self) -> None:
        """Drop tokens from the slice whose next use is last, deepest first, until enough is free or
        the slice is empty."""
        queue = self._queues[NEVER]
        while not queue:
            key = -self._farthest[0]
            queue = self._queues.get(key, deque())
            if not queue:
                self._queues.pop(key, None)
                heapq.heappop(self._farthest)
        request, first, end = queue.popleft()
        segments = self._paths.segments[first:end]
        sizes = np.where(self._last[segments] == request, self._cached[segments], 0)
        from_here = np.cumsum(sizes[::-1])[::-1]  # tokens from this segment to the slice's end
        missing = -self._free
        if from_here[0] <= missing:
            self._cached[segments[sizes > 0]] = 0
            self._free += int(from_here[0])
            return
        cut = int(np.flatnonzero(from_here > missing)[-1])  # dropped in part, deeper ones wholly
        gone = segments[cut + 1 :][sizes[cut + 1 :] > 0]
        rest = missing - (int(from_here[cut + 1]) if cut + 1 < len(from_here) else 0)
        self._cached[gone] = 0
        self._cached[segments[cut]] -= rest
        self._free = 0
        queue.appendleft((request, first, first + cut + 1))


@dataclass(frozen=True, slots=True)
class ReuseDistances:
    """The distribution of reuse distances: the distinct tokens used between two uses of a token.

    The distance is the smallest LRU cache that still has the token (Mattson's stack distance), so
    the distribution is the hit rate of LRU for all cache sizes, as long as every request fits.
    Within a request, tokens nearer to the root count as used later, which is the order in which a
    prefix cache evicts.
    """

    edges: Floats  # [k + 1] distances
    tokens: Floats  # [k] reused tokens with a distance in (edges[k], edges[k + 1]]


def reuse_distances(spans: Ints) -> ReuseDistances:
    """The distribution of the spans of `reuse_spans`, in steps of an eighth of an octave."""
    farthest = int((spans[:, 1] + spans[:, 2]).max(initial=1))
    steps = int(np.ceil(np.log2(farthest) * _STEPS_PER_OCTAVE)) + 1
    edges = np.concatenate(([0.0], 2.0 ** (np.arange(steps + 1) / _STEPS_PER_OCTAVE)))
    reached = np.zeros(len(edges))
    for low in range(0, len(spans), 4096):
        part = spans[low : low + 4096]
        reached += np.clip(edges[:, None] - part[:, 1], 0, part[:, 2]).sum(1)
    return ReuseDistances(edges, np.diff(reached))


def reuse_spans(paths: PathTable) -> Ints:
    """[k, 3] the runs of reused prompt tokens: request, start, number of tokens. The tokens of a
    run have the reuse distances start + 1, start + 2, ...

    O(requests) in numpy for each run of tokens that were last used together.
    """
    last = np.full(len(paths.lengths), -1, np.int64)  # by segment: the request that used it last
    used_last = np.zeros(len(paths), np.int64)  # by request: the tokens that it was the last to use
    spans = []
    for request in range(len(paths)):
        path, usable = paths.path(request), int(paths.num_usable[request])
        lengths, before = paths.lengths[path], last[path]
        known = before >= 0
        for low, high in _equal_runs(before):
            count = int(lengths[low : min(high, usable)].sum())
            if known[low] and count:
                spans.append((request, int(used_last[before[low] + 1 : request].sum()), count))
        np.subtract.at(used_last, before[known], lengths[known])
        used_last[request] = lengths.sum()
        last[path] = request
    return np.asarray(spans, np.int64).reshape(-1, 3)


def _equal_runs(values: Ints) -> list[tuple[int, int]]:
    """The bounds [low, high) of each run of equal values."""
    cuts = [0, *(np.flatnonzero(np.diff(values)) + 1).tolist(), len(values)]
    return list(pairwise(cuts))
