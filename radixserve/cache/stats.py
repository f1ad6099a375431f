"""`CacheStats`, the counters of a cache, and `RecentCounts`, what counters gained in a minute."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

RECENT_S = 60.0
_STEP_S = 1.0  # between two readings, and how much of the minute may be missed


@dataclass(slots=True)
class CacheStats:
    """Tokens since the cache was made."""

    acquired_tokens: int = 0  # passed to `acquire`
    matched_tokens: int = 0  # acquired tokens that were cached
    copied_tokens: int = 0  # matched tokens in page prefixes that were copied
    committed_tokens: int = 0  # tokens published by `commit`
    duplicate_tokens: int = 0  # committed tokens published before by other sequences; whole pages
    num_acquired: int = 0  # sequences
    num_resets: int = 0


class RecentCounts:
    """Readings of counters, at most one a second, for the last minute.

    The owner calls `note` with the time before it counts something.
    """

    __slots__ = ("_counters", "_made_at", "_readings", "due")

    def __init__(self, counters: Callable[[], Mapping[str, int]], now: float) -> None:
        """`counters`: returns the current values, which never decrease."""
        self._counters = counters
        self._made_at = self.due = now
        self._readings: deque[tuple[float, Mapping[str, int]]] = deque()  # the oldest first

    def note(self, now: float) -> None:
        """Take a reading if one is due; to be called before a counter changes. O(1), amortised."""
        if now >= self.due:
            self.read(now)

    def read(self, now: float) -> None:
        """Remember the counters, when `due` is reached. O(counters)."""
        self._readings.append((now, self._counters()))
        self.due = now + _STEP_S
        self._forget(now)

    def gains(self, now: float) -> dict[str, float]:
        """Returns {"seconds", and for each counter: name, name_per_s} of the last minute.

        "seconds" is less than 60 where the counters are younger. Amortised O(counters).
        """
        self._forget(now)
        present = self._counters()
        before = self._readings[0][1] if self._readings else present
        seconds = min(RECENT_S, now - self._made_at)
        gained: dict[str, float] = {"seconds": seconds}
        for name, value in present.items():
            gained[name] = value - before[name]
            gained[f"{name}_per_s"] = (value - before[name]) / max(seconds, _STEP_S)
        return gained

    def _forget(self, now: float) -> None:
        """Drop readings from before the last minute. Counters did not change between the end of a
        reading's second and the next reading."""
        while self._readings and self._readings[0][0] < now - RECENT_S:
            self._readings.popleft()


def no_retention() -> dict[str, Any]:
    """Returns what `RetentionPolicy.stats` reports, for a cache without such a policy:

    leases              current leases by deadline: {"session", "tokens", "seconds_left"}, with the
                        tokens from the root to the lease's end node. Leases whose time is over end
                        when statistics are read. O(leases)
    pages_leased        evicted after all others but the retained ones
    pages_retained      evicted after all others
    pages_closed        reached by closed sessions only: evicted first
    retained_evicted_pages  since the start: evicted while they were retained
    superseded_tokens   since the start: left behind by sessions that went on without them
    """
    return {
        "leases": [],
        "pages_leased": 0,
        "pages_retained": 0,
        "pages_closed": 0,
        "retained_evicted_pages": 0,
        "superseded_tokens": 0,
    }


def hit_rate(matched: float, asked: float) -> float:
    """Returns the share of the looked up tokens that were cached, 0.0 if none was looked up."""
    return matched / asked if asked else 0.0
