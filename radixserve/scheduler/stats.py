"""Counters and the audit of the scheduler."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from radixserve.output import Usage
from radixserve.scheduler.request_state import RequestState
from radixserve.scheduler.running_requests import RunningRequests
from radixserve.scheduler.waiting_queue import WaitingQueue


@dataclass(slots=True)
class SchedulerStats:
    """Counters since the start; tokens of prompts unless the name says otherwise."""

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
    decoded_tokens: int = 0  # in all decode rows
    discarded_tokens: int = 0  # in rows whose request had ended when their step was answered
    prefetched_tokens: int = 0  # computed for later requests, in none of the prompts' counts
    generated_tokens: int = 0  # in answers; of joint ones when they end
    drafted_tokens: int = 0  # computed beside a last token, to be verified
    accepted_draft_tokens: int = 0  # of these the ones that were sampled: as many steps saved

    def tokens(self) -> dict[str, int]:
        """The counters of tokens whose rates are reported."""
        return {
            "prompted_tokens": self.prompted_tokens,
            "reused_tokens": self.reused_tokens,
            "prefilled_tokens": self.prefilled_tokens,
            "decoded_tokens": self.decoded_tokens,
            "generated_tokens": self.generated_tokens,
        }

    def counters(self) -> dict[str, int]:
        """All of them by name."""
        return {name: getattr(self, name) for name in self.__slots__}

    def count_prefill(self, start: int, num_tokens: int, num_prompt_done: int) -> None:
        """A prefill row was computed. `num_prompt_done`: tokens of its prompt whose K/V had been
        computed or found in the cache before."""
        self.prefilled_tokens += num_tokens
        self.recomputed_tokens += max(0, min(start + num_tokens, num_prompt_done) - start)

    def count_finished(
        self, reason: str, usage: Usage, cached_on_arrival: int, *, is_prefetch: bool
    ) -> None:
        """A request has ended."""
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


def check_queues(
    requests: Mapping[str, RequestState],
    waiting: WaitingQueue,
    running: RunningRequests,
    parked: Collection[int],
) -> None:
    """Audit the scheduler's queues. `parked`: arrivals of parked requests. O(requests).

    AssertionError names the first broken invariant.
    """
    waiting.check()
    for name, state in requests.items():
        group = state.group
        may_rest = group is not None and group.may_rest(state)
        is_active = state in running or state.arrival in parked
        num_places = (state in waiting) + (state in running) + (state.arrival in parked)
        assert num_places == 1 or (may_rest and not num_places), f"{name} is nowhere or twice"
        assert is_active == (state.sequence is not None), f"{name} has pages and may not, or lacks"
    num_placed = len(waiting) + len(running) + len(parked)
    assert num_placed <= len(requests), "a request that has ended is queued"
    slots = [state.slot for state in running if state.slot >= 0]
    assert len(slots) == len(set(slots)), "two running requests have one slot"
