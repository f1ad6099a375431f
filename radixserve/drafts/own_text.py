"""`OwnText`: what followed when the request's last tokens occurred in it before."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from radixserve.arrays import IntArray
from radixserve.cache.tokens import TOKEN_BYTES
from radixserve.drafts.runs import hash_run, hash_runs
from radixserve.drafts.source import DraftContext, DraftSource
from radixserve.text.token_search import find_last

SHORT_RUN, LONG_RUN = 4, 8  # tokens looked for; what follows the longer run is likelier
SEARCHED_TOKENS = 4096  # before the latest short run, for a long one
_LEAST_BITS = 10  # of the number of places


class OwnText(DraftSource):
    """Drafts from prompt and answer of the request itself."""

    name = "request"

    def draft(self, context: DraftContext, most: int) -> Sequence[int]:
        followed: _FollowedText | None = context.kept.get(self)
        if followed is None:
            followed = context.kept[self] = _FollowedText()
        tokens = context.tokens
        size, place = len(tokens), followed.place
        if place >= 0:  # the text is followed as long as it is right
            end = place + size - followed.size
            is_right = tokens[place:end].tobytes() == tokens[followed.size :].tobytes()
            place = end if is_right else -1
        if place < 0:
            place = followed.find(tokens)
        followed.place, followed.size = place, size
        return tokens[place : place + most].tolist() if place >= 0 else ()


class _FollowedText:
    """A request's text: the place that is followed, and the latest place of each short run.

    A table has the places by hash, 8 to 16 bytes a token of a long text. Of runs with the same hash
    it has the latest one, and a place is compared with the text before it is used.
    """

    __slots__ = ("_num_indexed", "_shift", "_table", "place", "size")

    def __init__(self) -> None:
        self.size = 0  # tokens at the last draft
        self.place = -1  # where that began; -1: nowhere
        self._num_indexed = 0  # leading tokens whose runs are in the table
        self._table, self._shift = array("i"), 64

    def find(self, tokens: IntArray) -> int:
        """Returns the index after an earlier occurrence of the last tokens, -1 without one: the
        latest one of the long run if that is not far, else that of the short one."""
        size = len(tokens)
        if size <= SHORT_RUN:
            return -1
        if self._num_indexed < size - 1 or 2 * size > len(self._table):
            self._index(tokens[:-1])
        run = tokens[-SHORT_RUN:].tolist()
        slot = hash_run(run, 0) >> self._shift
        place = self._table[slot]
        self._table[slot] = self._num_indexed = size
        if not place or tokens[place - SHORT_RUN : place].tolist() != run:
            return -1
        longer = tokens[-LONG_RUN:].tobytes()
        if place < LONG_RUN or tokens[place - LONG_RUN : place].tobytes() == longer:
            return place
        first = max(0, place - SEARCHED_TOKENS)
        end = find_last(tokens[first:place].tobytes(), longer, place - first)
        return place if end < 0 else first + end

    def _index(self, tokens: IntArray) -> None:
        """Add the runs of `tokens` that the table lacks; make it larger for many."""
        size = len(tokens)
        if 2 * size + 2 > len(self._table):
            bits = max(_LEAST_BITS, (2 * size + 2).bit_length())
            self._table, self._shift = array("i", bytes(TOKEN_BYTES << bits)), 64 - bits
            self._num_indexed = 0
        first = max(0, self._num_indexed - SHORT_RUN + 1)
        slots = hash_runs(tokens[first:], SHORT_RUN, 0) >> np.uint64(self._shift)
        np.frombuffer(self._table, np.int32)[slots] = np.arange(first + SHORT_RUN, size + 1)
        self._num_indexed = size
