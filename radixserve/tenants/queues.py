"""`TenantQueues`: a queue of waiting requests for each tenant.

Each has an order and an overtake bound of its own. Between them the tenant that has been served
least comes first, see `VirtualTimes`.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from radixserve.request import LEAST_PRIORITY
from radixserve.scheduler.queue_order import QueueOrder
from radixserve.scheduler.request_state import RequestState
from radixserve.scheduler.running_requests import RunningRequests
from radixserve.scheduler.waiting_queue import RequestQueue, WaitingQueue
from radixserve.tenants.virtual_time import Tenant, VirtualTimes


class TenantQueue(RequestQueue):
    """The waiting requests of a tenant."""

    tenant: Tenant | None = None  # whose requests it has, or had last

    def __init__(self, order: QueueOrder, max_overtake: int, max_held: int) -> None:
        super().__init__(order, max_overtake, max_held)
        self.num_passed = 0  # starts of other tenants in its turn since it started one itself

    def serve(self, tenant: Tenant) -> None:
        """The queue is empty, and gets the requests of this tenant."""
        if self.tenant is not tenant:
            self.order.restart()
        self.tenant, self.num_passed = tenant, 0

    def note_admitted(self, state: RequestState) -> None:
        self.num_passed = 0
        super().note_admitted(state)


class TenantQueues(WaitingQueue):
    """Gives a request of the tenant that has been served least, with the tokens counted that its
    running requests have still to compute. A tenant of which none could start is passed by others
    at most `max_overtake` times before one of its own starts."""

    def __init__(self, times: VirtualTimes, *settings: Any) -> None:
        """`settings`: the arguments of `WaitingQueue`."""
        super().__init__(*settings)
        self._times = times
        self._by_tenant: dict[Tenant, TenantQueue] = {}  # of tenants with waiting requests
        assert isinstance(self._queue, TenantQueue)
        self._spare: TenantQueue | None = self._queue  # an empty one, the last that was emptied

    def _make_queue(self) -> TenantQueue:
        return TenantQueue(*self._queue_settings())

    def _queue_of(self, state: RequestState) -> TenantQueue:
        queue = self._by_tenant.get(state.share, self._spare)
        assert queue is not None
        return queue

    def _queues(self) -> Sequence[TenantQueue]:
        return list(self._by_tenant.values())

    def __contains__(self, state: RequestState) -> bool:
        queue = self._by_tenant.get(state.share)
        return queue is not None and state in queue

    def add(self, state: RequestState, *, is_returning: bool) -> None:
        """O(log n); where its tenant had no waiting request, O(tenants that have)."""
        tenant: Tenant = state.share
        if tenant not in self._by_tenant:
            self._times.begin_waiting(tenant, self._by_tenant)
            queue = self._make_queue() if self._spare is None else self._spare
            queue.serve(tenant)
            self._spare = None
            self._by_tenant[tenant] = queue
        super().add(state, is_returning=is_returning)

    def remove(self, state: RequestState) -> None:
        super().remove(state)
        tenant: Tenant = state.share
        queue = self._by_tenant[tenant]
        if not queue:
            del self._by_tenant[tenant]
            self._spare = queue
            if not self._by_tenant:
                self._times.end_waiting(tenant)

    def is_first(self, state: RequestState) -> bool:
        return state.share not in self._by_tenant or super().is_first(state)

    def _is_limited(self, queue: RequestQueue) -> bool:
        """Whether one of its requests has reached its bound on waiting, or its tenant the bound on
        starts of others in its turn."""
        assert isinstance(queue, TenantQueue)
        if len(self._by_tenant) > 1 and queue.num_passed >= self._max_overtake:
            return True
        return super()._is_limited(queue)

    # -- turns --------------------------------------------------------------------------------

    def candidates(self, running: RunningRequests | None = None) -> Iterator[RequestState]:
        if len(self._by_tenant) == 1:
            return self._candidates_of(next(iter(self._by_tenant.values())))
        return self._shared_candidates(() if running is None else running)

    def pass_unfitting(self, state: RequestState, may_fit: Callable[[float], bool]) -> None:
        queue = self._by_tenant.get(state.share)
        if queue is not None and self._times.are_shared and not may_fit(queue.min_page_need):
            queue.is_passed = True

    def is_behind(self, virtual_time: float, running: Iterable[RequestState]) -> bool:
        """Whether a tenant waits that has been served less. O(tenants that wait)."""
        ahead = _to_compute(running)
        return any(
            queue.needs and tenant.virtual_time + ahead[tenant] / tenant.weight < virtual_time
            for tenant, queue in self._by_tenant.items()
        )

    def first(self, running: Iterable[RequestState]) -> RequestState | None:
        """The first one that `candidates` would give, of tenants with a request that waits for
        pages alone. O(running requests and tenants that wait)."""
        waiting = [(tenant, queue) for tenant, queue in self._by_tenant.items() if queue.needs]
        if not waiting:
            return None
        ahead = _to_compute(running)
        _, queue = min(waiting, key=lambda item: _turn(item[0], item[1], ahead))
        self._admission.begin_pass()  # the cache has changed since the last one
        unblocked = (state for state in self._candidates_of(queue) if state.page_need is not None)
        return next(unblocked, None)

    def _shared_candidates(self, running: Iterable[RequestState]) -> Iterator[RequestState]:
        ahead = _to_compute(running)
        waiting = list(self._by_tenant.items())
        given = [self._candidates_of(queue) for _, queue in waiting]
        heap = [
            (_turn(tenant, queue, ahead), index) for index, (tenant, queue) in enumerate(waiting)
        ]
        heapq.heapify(heap)
        passed: list[TenantQueue] = []  # whose turn it was, and none started
        while heap:
            _, index = heapq.heappop(heap)
            (tenant, queue), has_started = waiting[index], False
            for state in given[index]:
                yield state
                has_started = state.sequence is not None
                if has_started or queue.is_passed:
                    break
            if has_started:
                for other in passed:
                    other.num_passed += 1
                assert state.sequence is not None
                ahead[tenant] += len(state.tokens) - state.sequence.committed_len
                if queue and not queue.is_passed:
                    heapq.heappush(heap, (_turn(tenant, queue, ahead), index))
            elif queue.needs:
                passed.append(queue)
            if any(other.num_passed >= self._max_overtake for other in passed):
                return


def _to_compute(running: Iterable[RequestState]) -> Counter[Tenant]:
    """Tokens that running requests have still to compute, by tenant."""
    ahead: Counter[Tenant] = Counter()
    for state in running:
        ahead[state.share] += state.tokens.size - state.committed
    return ahead


def _turn(tenant: Tenant, queue: TenantQueue, ahead: Counter[Tenant]) -> tuple[bool, float, int]:
    """The least comes first. Of equal ones that which has less to compute; prefetches last."""
    num_ahead = ahead[tenant]
    is_background = queue.highest_priority <= LEAST_PRIORITY
    return is_background, tenant.virtual_time + num_ahead / tenant.weight, num_ahead
