"""`TextIndex`: equal pieces of a trace's prompts and outputs, whatever stands in front of them."""

from __future__ import annotations

import numpy as np

from radixserve.advice.fingerprints import UInts, mixed_tokens, namespace_salt
from radixserve.arrays import IntArray
from radixserve.replay.paths import PathTable
from radixserve.replay.trace import Ints, Trace

GRAM = 8  # tokens; shorter equal texts are chance
_RATIO = np.uint64(0x9E3779B97F4A7C15)


class TextIndex:
    """Numbers each gram, the GRAM tokens up to a position, by the place where it was computed
    first: equal grams of a namespace have equal numbers.

    The places are the distinct tokens of the trace, in the order in which they were computed first:
    a request's own tokens stand behind those of all requests before it. About 0.2 us and 8 bytes
    for each; 32 bytes while it is made.
    """

    grams: IntArray  # [places] the number of the gram that ends there
    segments: IntArray  # [places] the segment of the path table

    def __init__(self, trace: Trace, paths: PathTable) -> None:
        self._paths, lengths = paths, paths.lengths
        first_users = paths.first_users()
        own = np.bincount(first_users, lengths, len(paths)).astype(np.int64)
        self._bounds: Ints = np.concatenate((np.zeros(1, np.int64), np.cumsum(own)))
        num_known = trace.num_kept - own
        self._firsts = self._bounds[first_users] + paths.starts - num_known[first_users]
        order = np.argsort(self._firsts, kind="stable")
        order = order[lengths[order] > 0]
        self.segments = np.repeat(order.astype(np.int32), lengths[order])
        hashes = np.empty(int(self._bounds[-1]), np.uint64)
        for request in np.flatnonzero(own).tolist():
            start, stop = self._bounds[request : request + 2].tolist()
            known = int(num_known[request])
            tokens = trace.request(request).kept[max(0, known - GRAM + 1) :]
            salt = np.uint64(namespace_salt(trace.namespaces[request]))
            gram_hashes = _gram_hashes(tokens) ^ salt
            num_short = stop - start - len(gram_hashes)  # at the beginning of a sequence
            hashes[start : start + num_short] = np.arange(start, start + num_short)
            hashes[start + num_short : stop] = gram_hashes
        self.grams = _first_places(hashes)

    def own_places(self, request: int) -> slice:
        """The places of the tokens that no earlier request has."""
        return slice(int(self._bounds[request]), int(self._bounds[request + 1]))

    def grams_of(self, request: int) -> IntArray:
        """[tokens] the grams up to each token of a request."""
        path = self._paths.path(request)
        spans = zip(self._firsts[path].tolist(), self._paths.lengths[path].tolist(), strict=True)
        return np.concatenate([self.grams[first : first + count] for first, count in spans])


def _gram_hashes(tokens: IntArray) -> UInts:
    """[n - GRAM + 1] a hash of each GRAM tokens."""
    count = max(0, len(tokens) - GRAM + 1)
    mixed, hashes = mixed_tokens(tokens), np.zeros(count, np.uint64)
    for place in range(GRAM):
        hashes *= _RATIO
        hashes += mixed[place : place + count]
    return hashes


def _first_places(hashes: UInts) -> IntArray:
    """[n] the first place with an equal hash."""
    order = np.argsort(hashes, kind="stable")
    ordered = hashes[order]
    is_first = np.ones(len(order), np.bool_)
    is_first[1:] = ordered[1:] != ordered[:-1]
    places = np.empty(len(order), np.int32)
    places[order] = order[is_first][np.cumsum(is_first) - 1]
    return places
