"""`ServerCounters`: what the server itself counts and times for /metrics.

`routes/metrics.py` publishes them, and the counters of the engine.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

from radixserve.completion import Completion

# Upper bounds of the buckets in seconds: for times of tokens, and for times of whole requests.
FINE = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
COARSE = (
    *(0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0),
)


# Of numbers of tokens.
TOKENS = (*(factor * 10**power for power in range(6) for factor in (1, 2, 5)), 1_000_000)


class Histogram:
    """A histogram of times or of numbers of tokens. Owned by the event loop."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float, count: int = 1) -> None:
        """Count `value`, `count` times. O(log(bounds))."""
        self._counts[bisect_left(self._bounds, value)] += count
        self.total += value * count

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
        self.histograms = {
            "ttft": Histogram(FINE),
            "inter_token": Histogram(FINE),
            "total": Histogram(COARSE),
            "queue": Histogram(COARSE),
            "prefill": Histogram(COARSE),
            "decode": Histogram(COARSE),
            "prompt_tokens": Histogram(TOKENS),
            "generated_tokens": Histogram(TOKENS),
            "most_generated_tokens": Histogram(TOKENS),
        }
        self.finished: Counter[str] = Counter()  # completions by finish_reason
        self.rejected: Counter[str] = Counter()  # also failed streams; by error code or status
        self.statuses: Counter[str] = Counter()  # answers by HTTP status
        self.hints: Counter[tuple[str, str]] = Counter()  # by (verb, answer)
        self.clients_gone = 0
        self.conversation_hits = 0

    def add(self, completions: Sequence[Completion]) -> None:
        """Count the completions of a prompt that have ended, their times and tokens."""
        counts = self.histograms
        for completion in completions:
            times, num_tokens = completion.metrics, completion.usage.completion_tokens
            self.finished[completion.finish_reason] += 1
            counts["total"].add(times.total_s)
            counts["prompt_tokens"].add(completion.usage.prompt_tokens)
            counts["generated_tokens"].add(num_tokens)
            for name, seconds in (
                ("queue", times.queue_s),
                ("ttft", times.ttft_s),
                ("prefill", times.prefill_s),
                ("decode", times.decode_s),
            ):
                if seconds is not None:
                    counts[name].add(seconds)
            if times.decode_s is not None and num_tokens > 1:
                counts["inter_token"].add(times.decode_s / (num_tokens - 1), num_tokens - 1)
        if completions:
            most = max(completion.usage.completion_tokens for completion in completions)
            counts["most_generated_tokens"].add(most)
