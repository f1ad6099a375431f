"""What the scheduler counts."""

from __future__ import annotations

from dataclasses import dataclass

from radixserve.output import Usage
from radixserve.schedule import ScheduledRequest


@dataclass(slots=True)
class SchedulerStats:
    """Since the start; tokens of prompts unless the name says otherwise."""

    steps: int = 0
    steps_ahead: int = 0  # of those, scheduled while the one before was in flight
    finished: int = 0  # requests
    aborted: int = 0  # requests
    failed: int = 0  # requests
    preemptions: int = 0
    prompted_tokens: int = 0
    reused_tokens: int = 0
    gained_while_waiting_tokens: int = 0  # of those, computed by others after it had arrived
    computed_tokens: int = 0
    recomputed_tokens: int = 0  # computed again after a preemption, not part of the above
    prefilled_tokens: int = 0  # in all prefill rows, recomputed ones included
    decoded_tokens: int = 0  # in all decode rows, those of beams included
    discarded_tokens: int = 0  # in rows whose request had ended when their step was answered
    generated_tokens: int = 0  # in answers; those of a beam search when it ends

    def count_row(self, row: ScheduledRequest, num_prompt: int, num_prompt_done: int) -> None:
        """A row was computed, of a request with so many prompt tokens; K/V of num_prompt_done of
        them had been computed or found before."""
        num_tokens = len(row.token_ids)
        if num_tokens == 1 and row.start >= num_prompt:
            self.decoded_tokens += 1
            return
        self.prefilled_tokens += num_tokens
        self.recomputed_tokens += max(0, min(row.end, num_prompt_done) - row.start)

    def count_finished(self, reason: str, usage: Usage, cached_on_arrival: int) -> None:
        """A request ended."""
        self.finished += reason in ("stop", "length")
        self.aborted += reason == "abort"
        self.failed += reason == "error"
        self.count_prompt(usage.prompt_tokens, usage.cached_tokens, cached_on_arrival)
        self.computed_tokens += usage.computed_tokens

    def count_prompt(self, num_prompt: int, num_cached: int, cached_on_arrival: int) -> None:
        """A prompt of which num_cached tokens were not computed by its request."""
        self.prompted_tokens += num_prompt
        self.reused_tokens += num_cached
        self.gained_while_waiting_tokens += max(0, num_cached - cached_on_arrival)
