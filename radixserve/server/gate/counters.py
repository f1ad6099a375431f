"""`ServerCounters`: what the server itself counts and times for /metrics.

`routes/metrics.py` publishes them, and the counters of the engine.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

from radixserve.output import Completion

# Upper bounds of the buckets in seconds: for times of tokens, and for times of whole requests.
FINE = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75,
        1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)  # fmt: skip
COARSE = (0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 60.0,
          120.0, 240.0, 480.0, 960.0)  # fmt: skip


class Histogram:
    """A histogram of times. Owned by the event loop."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self.total_s = 0.0

    def add(self, seconds: float, count: int = 1) -> None:
        """Count the value `seconds`, `count` times. O(log(bounds))."""
        self._counts[bisect_left(self._bounds, seconds)] += count
        self.total_s += seconds * count

    def buckets(self) -> list[tuple[str, float]]:
        """The cumulative buckets: (upper bound, number of values up to it). The last bound is
        "+Inf"."""
        buckets: list[tuple[str, float]] = []
        total = 0
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            buckets.append((bound, total))
        return buckets


class ServerCounters:
    """Counters and histograms of HTTP requests. Owned by the event loop."""

    def __init__(self) -> None:
        self.timings = {
            "ttft": Histogram(FINE),
            "inter_token": Histogram(FINE),
            "total": Histogram(COARSE),
            "queue": Histogram(COARSE),
        }
        self.finished: Counter[str] = Counter()  # completions by finish_reason
        self.rejected: Counter[str] = Counter()  # also failed streams; by error code
        self.statuses: Counter[str] = Counter()  # answers by HTTP status
        self.hints: Counter[tuple[str, str]] = Counter()  # by (verb, answer)
        self.clients_gone = 0
        self.conversation_hits = 0

    def add(self, completions: Sequence[Completion]) -> None:
        """Count completions that have ended, and their times."""
        for completion in completions:
            times, timings = completion.metrics, self.timings
            self.finished[completion.finish_reason] += 1
            timings["total"].add(times.total_s)
            if times.queue_s is not None:
                timings["queue"].add(times.queue_s)
            if times.ttft_s is not None:
                timings["ttft"].add(times.ttft_s)
                gaps = len(completion.token_ids) - 1
                if gaps > 0:
                    timings["inter_token"].add((times.total_s - times.ttft_s) / gaps, gaps)
