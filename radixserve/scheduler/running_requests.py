"""`RunningRequests`: the requests that take part in steps, each with a slot in the page table.

`Shares` (shares.py) may order them in another way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from radixserve.cache.namespace import is_within
from radixserve.scheduler.request_state import RequestState


class RunningRequests:
    """Slots are 0 to `max_running_requests` - 1."""

    def __init__(self, max_running_requests: int) -> None:
        self._states: dict[int, RequestState] = {}  # by arrival
        self._is_sorted = True  # by priority
        self.max_requests = max_running_requests
        self._free_slots = list(range(max_running_requests))[::-1]

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._states.values())

    def by_priority(self) -> Iterable[RequestState]:
        """The highest first. O(requests), and sorting where one came since that is not the last."""
        if not self._is_sorted:
            states = self._sorted()
            self._states = {state.arrival: state for state in states}
            self._is_sorted = True
        return self._states.values()

    def _sorted(self) -> list[RequestState]:
        return sorted(self._states.values(), key=lambda state: state.priority_key)

    def prefill_order(
        self, prefills: Sequence[RequestState], num_tokens: int
    ) -> Sequence[RequestState]:
        """Returns running requests with tokens left to compute, given by priority, in the order in
        which a step with `num_tokens` for them takes them."""
        del num_tokens
        return prefills

    def __contains__(self, state: RequestState) -> bool:
        return state.arrival in self._states

    def page_tables(self, namespace: str | None = None) -> list[dict[str, Any]]:
        """Their sequences, or those of one namespace, as `PrefixCache.dump` shows them, with
        "request_id"."""
        from radixserve.cache.audit import page_table  # loaded when it is used

        return [
            {"request_id": state.request.request_id, **page_table(state.sequence)}
            for state in self
            if state.sequence is not None and is_within(state.sequence.namespace, namespace)
        ]

    def lowest_below(
        self, state: RequestState, is_spared: Callable[[RequestState], bool]
    ) -> RequestState | None:
        """The lowest in priority below `state` that may be preempted."""
        others = [
            other
            for other in self
            if other.priority_key > state.priority_key and not is_spared(other)
        ]
        return max(others, key=lambda other: other.priority_key, default=None)

    def add(self, state: RequestState) -> None:
        """Assign a slot; the runner's page table has no row of it yet."""
        last = next(reversed(self._states.values()), None)
        self._is_sorted &= last is None or last.priority_key < state.priority_key
        self._states[state.arrival] = state
        state.slot = self._free_slots.pop()
        if state.sequence is not None:
            state.sequence.restart_page_table()

    def remove(self, state: RequestState) -> None:
        self.free_slot(state)
        del self._states[state.arrival]

    def free_slot(self, state: RequestState) -> None:
        """Others may use its slot from the next step on: its last row is in flight, or it is gone.
        Idempotent."""
        if state.slot >= 0:
            self._free_slots.append(state.slot)
            state.slot = -1
