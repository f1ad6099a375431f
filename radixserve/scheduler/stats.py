"""What the scheduler counts."""

from __future__ import annotations

from dataclasses import dataclass


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
