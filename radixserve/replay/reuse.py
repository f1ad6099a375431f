"""How far apart the uses of a token lie: the distinct tokens touched in between.

That number is the size from which on an LRU cache still has the token (Mattson's stack distance),
so its distribution is the hit rate of LRU over the cache size, for all sizes at once, as long as
every request fits. Within one request what lies nearer to the root counts as touched later: the
order in which a prefix cache lets go.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from radixserve.replay.paths import PathTable
from radixserve.replay.trace import Floats, Ints

_PER_OCTAVE = 8


@dataclass(frozen=True, slots=True)
class ReuseDistances:
    """tokens[k] reused tokens have a distance in (edges[k], edges[k + 1]]."""

    edges: Floats
    tokens: Floats

    def share_within(self, distance: float) -> float:
        """The share of reused tokens whose distance is at most that, between edges by proportion.

        0.0 when nothing is reused.
        """
        total = self.tokens.sum()
        reached = np.concatenate(([0.0], np.cumsum(self.tokens)))
        return float(np.interp(distance, self.edges, reached) / total) if total else 0.0


class _Sums:
    """Sums over a range of counters (a Fenwick tree): O(log n) to add and to ask."""

    def __init__(self, size: int) -> None:
        self._sums = [0] * (size + 1)

    def add(self, at: int, value: int) -> None:
        at += 1
        while at < len(self._sums):
            self._sums[at] += value
            at += at & -at

    def before(self, at: int) -> int:
        total = 0
        while at:
            total += self._sums[at]
            at -= at & -at
        return total


def reuse_spans(paths: PathTable) -> Ints:
    """[k, 3]: request, least distance less one, number of tokens with distances from there on.

    Each row is a run of prompt tokens at distances least + 1, least + 2, ... O(log requests) for
    each run of tokens last used together.
    """
    last = np.full(len(paths.lengths), -1, np.int64)
    sums, total, spans = _Sums(len(paths)), 0, []
    for request in range(len(paths)):
        path, usable = paths.path(request), int(paths.num_usable[request])
        lengths, before = paths.lengths[path], last[path]
        cuts = [0, *(np.flatnonzero(np.diff(before)) + 1).tolist(), len(path)]
        moved = []
        for low, high in pairwise(cuts):
            then, size = int(before[low]), int(lengths[low:high].sum())
            if then >= 0:
                moved.append((then, size))
                count = int(lengths[low : min(high, usable)].sum())
                if count:
                    spans.append((request, total - sums.before(then + 1), count))
        for then, size in moved:
            sums.add(then, -size)
        sums.add(request, int(lengths.sum()))
        total += int(lengths.sum()) - sum(size for _, size in moved)
        last[path] = request
    return np.asarray(spans, np.int64).reshape(-1, 3)


def reuse_distances(spans: Ints) -> ReuseDistances:
    """The distribution in steps of an eighth of an octave."""
    farthest = int((spans[:, 1] + spans[:, 2]).max(initial=1))
    steps = int(np.ceil(np.log2(farthest) * _PER_OCTAVE)) + 1
    edges = np.concatenate(([0.0], 2.0 ** (np.arange(steps + 1) / _PER_OCTAVE)))
    reached = np.zeros(len(edges))
    for low in range(0, len(spans), 4096):
        part = spans[low : low + 4096]
        reached += np.clip(edges[:, None] - part[:, 1], 0, part[:, 2]).sum(1)
    return ReuseDistances(edges, np.diff(reached))
