"""`RunningRequests`: the requests that take part in steps, each with a slot in the page table."""

from __future__ import annotations

from collections.abc import Iterator

from radixserve.scheduler.request_state import RequestState


class RunningRequests:
    """By arrival. Slots are 0 to `max_running_requests` - 1."""

    def __init__(self, max_running_requests: int) -> None:
        self._states: dict[int, RequestState] = {}
        self._free_slots = list(range(max_running_requests))[::-1]

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._states.values())

    def __contains__(self, state: RequestState) -> bool:
        return state.arrival in self._states

    def add(self, state: RequestState) -> None:
        """Assign a slot; the runner's page table has no row of it yet."""
        self._states[state.arrival] = state
        state.req_pool_idx = self._free_slots.pop()
        state.is_in_page_table = False

    def remove(self, state: RequestState) -> None:
        self.free_slot(state)
        del self._states[state.arrival]

    def free_slot(self, state: RequestState) -> None:
        """Its last row was dispatched: another request may use the slot from the next step on."""
        if state.req_pool_idx >= 0:
            self._free_slots.append(state.req_pool_idx)
            state.req_pool_idx = -1
