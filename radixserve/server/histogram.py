"""`Histogram`: of seconds; adding costs a bisection."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

FINE = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75,
        1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)  # fmt: skip
COARSE = (0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 60.0,
          120.0, 240.0, 480.0, 960.0)  # fmt: skip


class Histogram:
    """Owned by the event loop."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self.total_s = 0.0

    def add(self, seconds: float, count: int = 1) -> None:
        """`count` times so many seconds."""
        self._counts[bisect_left(self._bounds, seconds)] += count
        self.total_s += seconds * count

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, how many were at most that), the last one of all."""
        found: list[tuple[str, float]] = []
        total = 0
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            found.append((bound, total))
        return found
