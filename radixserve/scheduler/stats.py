"""What the scheduler counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from radixserve.cache.recent import RecentCounts, hit_rate
from radixserve.output import Usage


@dataclass(slots=True)
class SchedulerStats:
    """Since the start; tokens of prompts unless the name says otherwise."""

    steps: int = 0
    steps_ahead: int = 0  # steps scheduled while the one before was in flight
    finished: int = 0  # requests
    aborted: int = 0  # requests
    failed: int = 0  # requests
    preemptions: int = 0
    prompted_tokens: int = 0
    reused_tokens: int = 0
    gained_while_waiting_tokens: int = 0  # reused ones that others computed meanwhile
    computed_tokens: int = 0
    recomputed_tokens: int = 0  # computed again after a preemption, not part of the above
    prefilled_tokens: int = 0  # in all prefill rows, recomputed ones included
    decoded_tokens: int = 0  # in all decode rows, those of beams included
    discarded_tokens: int = 0  # in rows whose request had ended when their step was answered
    prefetched_tokens: int = 0  # computed by hints, in none of the prompts' counts
    generated_tokens: int = 0  # in answers; those of a beam search when it ends

    def tokens(self) -> dict[str, int]:
        """What rates are told of."""
        return {
            "prompted_tokens": self.prompted_tokens,
            "reused_tokens": self.reused_tokens,
            "prefilled_tokens": self.prefilled_tokens,
            "decoded_tokens": self.decoded_tokens,
            "generated_tokens": self.generated_tokens,
        }

    def report(self, gains: Mapping[str, float]) -> dict[str, Any]:
        """All counters, "hit_rate" (reused over prompted tokens; both count when their request
        ends), and "last_minute": the same of `gains`, what `tokens` gained in it."""
        recent = {**gains, "hit_rate": hit_rate(gains["reused_tokens"], gains["prompted_tokens"])}
        counters = {name: getattr(self, name) for name in self.__slots__}
        rate = hit_rate(self.reused_tokens, self.prompted_tokens)
        return {**counters, "hit_rate": rate, "last_minute": recent}

    def count_prefill(self, start: int, num_tokens: int, num_prompt_done: int) -> None:
        """A row that is no decode was computed; K/V of num_prompt_done tokens of its prompt had
        been computed or found before."""
        self.prefilled_tokens += num_tokens
        self.recomputed_tokens += max(0, min(start + num_tokens, num_prompt_done) - start)

    def count_finished(
        self, reason: str, usage: Usage, cached_on_arrival: int, *, is_prefetch: bool
    ) -> None:
        """A request ended."""
        if is_prefetch:
            self.prefetched_tokens += usage.computed_tokens
            return
        self.finished += reason in ("stop", "length")
        self.aborted += reason == "abort"
        self.failed += reason == "error"
        self.count_prompt(usage, cached_on_arrival)

    def count_prompt(self, usage: Usage, cached_on_arrival: int) -> None:
        self.prompted_tokens += usage.prompt_tokens
        self.reused_tokens += usage.cached_tokens
        self.computed_tokens += usage.computed_tokens
        self.gained_while_waiting_tokens += max(0, usage.cached_tokens - cached_on_arrival)


class RecentTokens(RecentCounts):
    """What the counters of `SchedulerStats.tokens` gained in the last minute."""

    __slots__ = ()

    def __init__(self, counts: SchedulerStats, now: float) -> None:
        super().__init__(counts.tokens, now)
