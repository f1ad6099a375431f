"""`ComputeLedger`: was anything computed twice that need not have been?

Tokens are counted by their whole prefix. A token is needed once. Computing it again cannot be
helped in two cases: the last token of a prompt, without which nothing can be drawn, and a token
that was drawn, since nobody knows it before. Everything else that is computed again is repeated
work: it was dropped meanwhile, or two requests computed it at the same time.

    compute-once ratio = (needed + repeated) / needed, 1.0 at best
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from radixserve.replay.paths import PathTable
from radixserve.replay.trace import Trace


@dataclass(slots=True)
class _Entry:
    slots: NDArray[np.int32]  # [kept tokens] the number of each of a request's token prefixes
    num_prompt: int
    reached: int = 0  # tokens that the request itself has computed or found, so far


class ComputeLedger:
    """Counts tokens as they are computed. Memory: a byte a distinct token of the trace."""

    def __init__(self, trace: Trace, paths: PathTable) -> None:
        self._num_prompt = trace.num_prompt
        self._paths = paths
        assert paths.distinct_tokens < 2**31
        self._first_slot = (np.cumsum(paths.lengths) - paths.lengths).astype(np.int32)  # by segment
        self._is_known = np.zeros(paths.distinct_tokens, np.bool_)
        self._entries: dict[int, _Entry] = {}
        self.computed = 0  # tokens in all rows
        self.needed = 0  # of those, the first time
        self.repeated = 0  # of those, again without need

    @property
    def ratio(self) -> float:
        """1.0 when nothing was computed at all."""
        return (self.needed + self.repeated) / self.needed if self.needed else 1.0

    def note(self, request: int, start: int, end: int) -> None:
        """A row has computed the tokens [start, end) of a request. O(end - start)."""
        entry = self._entries.get(request)
        if entry is None:
            entry = self._entries[request] = self._open(request)
        slots = entry.slots[start:end]
        known = self._is_known[slots]
        num_known = int(np.count_nonzero(known))
        self._is_known[slots] = True
        self.computed += end - start
        self.needed += end - start - num_known
        if num_known:
            first_own = max(entry.reached, entry.num_prompt - 1, start)
            excused = np.count_nonzero(known[first_own - start :])
            self.repeated += num_known - int(excused)
        entry.reached = max(entry.reached, end)

    def close(self, request: int) -> None:
        """The request has ended."""
        self._entries.pop(request, None)

    def _open(self, request: int) -> _Entry:
        path = self._paths.path(request)
        firsts, lengths = self._first_slot[path], self._paths.lengths[path]
        shifts = firsts - (np.cumsum(lengths) - lengths).astype(np.int32)
        slots = np.repeat(shifts, lengths) + np.arange(lengths.sum(), dtype=np.int32)
        return _Entry(slots, int(self._num_prompt[request]))
