"""Counters, snapshots and the audit of the scheduler."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from radixserve.cache.snapshot import SnapshotView, page_runs
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
    decoded_tokens: int = 0  # in all decode rows, those of beams included
    discarded_tokens: int = 0  # in rows whose request had ended when their step was answered
    prefetched_tokens: int = 0  # computed by hints, in none of the prompts' counts
    generated_tokens: int = 0  # in answers; those of a beam search when it ends
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


def snapshot_requests(
    requests: Mapping[str, RequestState], view: SnapshotView, now: float
) -> dict[str, Any]:
    """Requests as they run and wait, read only. O(requests).

    {"running", "waiting": how many, "requests": running ones first, up to view.max_requests}.
    Each request has {"id", "namespace", "session", "priority", "state", "waits_for", "awaited_len",
    "prompt_tokens", "cached_tokens", "computed_tokens", "generated_tokens", "age_s", "miss",
    "pages", "num_pages", "num_shared"}:

    state          "prefill", "decode", "queued", "preempted" or "follows": another request,
                   "waits_for", computes tokens that it needs, up to "awaited_len"
    cached_tokens  of a queued request, what it would find cached now
    pages          its page table as runs of consecutive ids, [[first, count], ...]; the first
                   `num_shared` of `num_pages` belong to the cache
    """
    running: list[RequestState] = []
    waiting: list[RequestState] = []
    for state in requests.values():
        if view.shows(state.request.namespace):
            (waiting if state.sequence is None else running).append(state)
    shown = islice((*running, *waiting), view.max_requests)
    return {
        "running": len(running),
        "waiting": len(waiting),
        "requests": [_view(state, now) for state in shown],
    }


def _view(state: RequestState, now: float) -> dict[str, Any]:
    request, sequence, lookup = state.request, state.sequence, state.lookup
    shown: dict[str, Any] = {
        "id": state.request_id,
        "namespace": request.params.namespace,
        "session": request.session,
        "priority": request.params.priority,
        "state": _state(state),
        "waits_for": None if state.producer is None else state.producer.request_id,
        "awaited_len": None if state.producer is None else state.awaited_len,
        "prompt_tokens": state.num_prompt,
        "cached_tokens": state.num_reused,
        "computed_tokens": max(0, state.num_prompt_done - state.num_reused),
        "generated_tokens": state.num_output,
        "age_s": now - state.queued_at,
        "miss": None if lookup is None else {"reason": lookup.reason, "position": lookup.position},
        "pages": [],
        "num_pages": 0,
        "num_shared": 0,
    }
    if sequence is None:
        if state.admitted_at is None:
            shown["cached_tokens"] = min(state.prefix_watch.cached_len, state.num_prompt)
        return shown
    pages = sequence.pages
    shown |= {"pages": page_runs(pages), "num_pages": len(pages)}
    shown["num_shared"] = len(pages) - sequence.num_private
    return shown


def _state(state: RequestState) -> str:
    if state.sequence is not None:
        has_prompt = state.is_decoding or state.committed >= state.num_prompt
        return "decode" if has_prompt else "prefill"
    if state.producer is not None:
        return "follows"
    return "queued" if state.admitted_at is None else "preempted"


def check_queues(
    requests: Mapping[str, RequestState],
    waiting: WaitingQueue,
    running: RunningRequests,
    parked: Collection[int],
) -> None:
    """Audit the scheduler's queues. `parked`: arrivals of parked beams. O(requests).

    AssertionError names the first broken invariant.
    """
    waiting.check()
    for name, state in requests.items():
        search = state.search
        rests = search is not None and (  # sampled, or the leader of a search without its own beam
            state.arrival in search.samples or all(beam is not state for beam in search.beams)
        )
        is_active = state in running or state.arrival in parked
        num_places = (state in waiting) + (state in running) + (state.arrival in parked)
        assert num_places == 1 or (rests and not num_places), f"{name} is nowhere or twice"
        assert is_active == (state.sequence is not None), f"{name} has pages and may not, or lacks"
    num_placed = len(waiting) + len(running) + len(parked)
    assert num_placed <= len(requests), "a request that has ended is queued"
    slots = [state.slot for state in running if state.slot >= 0]
    assert len(slots) == len(set(slots)), "two running requests have one slot"
