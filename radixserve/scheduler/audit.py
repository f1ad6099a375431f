"""The audit of the scheduler's queues."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from radixserve.scheduler.request_state import RequestState
from radixserve.scheduler.running_requests import RunningRequests
from radixserve.scheduler.waiting_queue import WaitingQueue


def check(
    requests: Mapping[str, RequestState],
    waiting: WaitingQueue,
    running: RunningRequests,
    parked: Collection[int],
) -> None:
    """AssertionError names the first broken invariant. `parked`: arrivals. O(requests)."""
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
    slots = [state.req_pool_idx for state in running if state.req_pool_idx >= 0]
    assert len(slots) == len(set(slots)), "two running requests have one slot"
