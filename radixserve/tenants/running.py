"""`TenantRunning`: running requests in the order in which tenants take turns."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence

from radixserve.scheduler.request_state import RequestState
from radixserve.scheduler.running_requests import RunningRequests
from radixserve.tenants.virtual_time import Tenant


class TenantRunning(RunningRequests):
    """Running requests by their number within their tenant, over its weight; those of one tenant
    by priority. With one tenant as without tenants, at the same cost."""

    def __init__(self, max_running_requests: int) -> None:
        super().__init__(max_running_requests)
        self._num_of: Counter[Tenant] = Counter()  # requests of each tenant
        self.are_shared = False  # whether they belong to more than one tenant

    def num_of(self, tenant: Tenant) -> int:
        """Requests of a tenant."""
        return self._num_of.get(tenant, 0)

    def add(self, state: RequestState) -> None:
        super().add(state)
        self._num_of[state.share] += 1
        self.are_shared = len(self._num_of) > 1
        self._is_sorted &= not self.are_shared

    def remove(self, state: RequestState) -> None:
        super().remove(state)
        self._is_sorted &= not self.are_shared
        self._num_of[state.share] -= 1
        if not self._num_of[state.share]:
            del self._num_of[state.share]
            self.are_shared = len(self._num_of) > 1

    def lowest_below(
        self, state: RequestState, is_spared: Callable[[RequestState], bool]
    ) -> RequestState | None:
        if not self.are_shared:
            return super().lowest_below(state, is_spared)
        order = list(self.by_priority())
        below = order[order.index(state) + 1 :]
        return next((other for other in reversed(below) if not is_spared(other)), None)

    def prefill_order(
        self, prefills: Sequence[RequestState], num_tokens: int
    ) -> Sequence[RequestState]:
        if not self.are_shared:
            return prefills
        live = [state for state in prefills if state.sequence is not None]
        return by_least_served_tenant(live, num_tokens)

    def _sorted(self) -> list[RequestState]:
        states = super()._sorted()
        if not self.are_shared:
            return states
        count: defaultdict[Tenant, int] = defaultdict(int)
        keys = []
        for state in states:
            tenant: Tenant = state.share
            rank = count[tenant] / tenant.weight
            count[tenant] += 1
            keys.append((state.request.is_prefetch, rank, state.arrival, state))
        return [state for *_, state in sorted(keys, key=lambda key: key[:3])]


def by_least_served_tenant(states: Sequence[RequestState], num_tokens: int) -> list[RequestState]:
    """Returns them in the order in which a step with `num_tokens` for them takes them: the next one
    is always of the tenant that has been served least."""
    queues: dict[Tenant, deque[RequestState]] = {}
    for state in states:
        queues.setdefault(state.share, deque()).append(state)
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
