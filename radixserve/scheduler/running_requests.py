"""`RunningRequests`: the requests that take part in steps, each with a slot in the page table."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from radixserve.cache.audit import page_table
from radixserve.scheduler.request_state import RequestState
from radixserve.scheduler.tenants import Tenant


class RunningRequests:
    """Slots are 0 to `max_running_requests` - 1."""

    def __init__(self, max_running_requests: int) -> None:
        self._states: dict[int, RequestState] = {}  # by arrival
        self._is_sorted = True  # by priority
        self._num_of: Counter[Tenant] = Counter()  # requests of each tenant
        self.are_shared = False  # whether they belong to more than one tenant
        self._free_slots = list(range(max_running_requests))[::-1]

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._states.values())

    def num_of(self, tenant: Tenant) -> int:
        """Requests of a tenant."""
        return self._num_of.get(tenant, 0)

    def by_priority(self) -> Iterable[RequestState]:
        """The highest first. O(requests), and sorting where one came since that is not the last.

        Of several tenants: the first of each, then by their number within the tenant over its
        weight.
        """
        if not self._is_sorted:
            states = sorted(self._states.values(), key=lambda state: state.priority_key)
            if self.are_shared:
                states = _by_share(states)
            self._states = {state.arrival: state for state in states}
            self._is_sorted = True
        return self._states.values()

    def __contains__(self, state: RequestState) -> bool:
        return state.arrival in self._states

    def page_tables(self, namespace: str | None = None) -> list[dict[str, Any]]:
        """Their sequences, or those of one namespace, as `PrefixCache.dump` shows them, with
        "request_id"."""
        return [
            {"request_id": state.request.request_id, **page_table(state.sequence)}
            for state in self
            if state.sequence is not None and namespace in (None, state.sequence.namespace)
        ]

    def lowest_below(
        self, state: RequestState, is_spared: Callable[[RequestState], bool]
    ) -> RequestState | None:
        """The lowest in priority below `state` that may be preempted."""
        if self.are_shared:
            order = list(self.by_priority())
            below = order[order.index(state) + 1 :]
            return next((other for other in reversed(below) if not is_spared(other)), None)
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
        self._num_of[state.tenant] += 1
        self.are_shared = len(self._num_of) > 1
        self._is_sorted &= not self.are_shared
        state.slot = self._free_slots.pop()
        if state.sequence is not None:
            state.sequence.restart_page_table()

    def remove(self, state: RequestState) -> None:
        self.free_slot(state)
        del self._states[state.arrival]
        self._is_sorted &= not self.are_shared
        self._num_of[state.tenant] -= 1
        if not self._num_of[state.tenant]:
            del self._num_of[state.tenant]
            self.are_shared = len(self._num_of) > 1

    def free_slot(self, state: RequestState) -> None:
        """Others may use its slot from the next step on: its last row is in flight, or it is gone.
        Idempotent."""
        if state.slot >= 0:
            self._free_slots.append(state.slot)
            state.slot = -1


def _by_share(states: Iterable[RequestState]) -> list[RequestState]:
    """Requests of several tenants, given by priority: see `RunningRequests.by_priority`."""
    count: defaultdict[Tenant, int] = defaultdict(int)
    keys = []
    for state in states:
        rank = count[state.tenant] / state.tenant.weight
        count[state.tenant] += 1
        keys.append((state.request.is_prefetch, rank, state.arrival, state))
    return [state for *_, state in sorted(keys, key=lambda key: key[:3])]


def in_turn(states: Sequence[RequestState], num_tokens: int) -> Sequence[RequestState]:
    """Requests with tokens left to compute, in the order in which a step of `num_tokens` takes
    them: the next of the tenant that has been served least."""
    queues: dict[Tenant, deque[RequestState]] = {}
    for state in states:
        queues.setdefault(state.tenant, deque()).append(state)
    if len(queues) <= 1:
        return states
    order: list[RequestState] = []
    heap = [(tenant.virtual_time, index, tenant) for index, tenant in enumerate(queues)]
    heapq.heapify(heap)
    while heap:
        served, index, tenant = heapq.heappop(heap)
        state = queues[tenant].popleft()
        order.append(state)
        assert state.sequence is not None
        count = min(num_tokens, state.tokens.size - state.sequence.length)
        num_tokens -= count
        if queues[tenant]:
            heapq.heappush(heap, (served + count / tenant.weight, index, tenant))
    return order
