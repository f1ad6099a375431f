"""`ReturnRate`: how many of the tokens that the pool evicts are asked for again."""

from __future__ import annotations

_ASSUMED = 10, 2000  # tokens that came back, of those that were evicted: added to what is counted


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
        return min(1.0, (returned + _ASSUMED[0]) / (evicted + _ASSUMED[1]))
