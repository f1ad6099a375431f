"""`ServerCounters`: what the server counts itself, for /metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from radixserve.output import Completion
from radixserve.server.histogram import COARSE, FINE, Histogram


class ServerCounters:
    """Owned by the event loop."""

    def __init__(self) -> None:
        self.timings = {
            "ttft": Histogram(FINE),
            "inter_token": Histogram(FINE),
            "total": Histogram(COARSE),
            "queue": Histogram(COARSE),
        }
        self.finished: Counter[str] = Counter()  # completions by finish_reason
        self.rejected: Counter[str] = Counter()  # requests by the code of their error
        self.statuses: Counter[str] = Counter()  # answers by status
        self.hints: Counter[tuple[str, str]] = Counter()  # by verb and answer
        self.clients_gone = 0
        self.conversation_hits = 0

    def add(self, completions: Sequence[Completion]) -> None:
        """They have ended."""
        for one in completions:
            times, timings = one.metrics, self.timings
            self.finished[one.finish_reason] += 1
            timings["total"].add(times.total_s)
            if times.queue_s is not None:
                timings["queue"].add(times.queue_s)
            if times.ttft_s is not None:
                timings["ttft"].add(times.ttft_s)
                gaps = len(one.token_ids) - 1
                if gaps > 0:
                    timings["inter_token"].add((times.total_s - times.ttft_s) / gaps, gaps)
