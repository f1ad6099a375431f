"""`WaitingQueue`: waiting requests in a `QueueOrder` and by arrival, with the overtake bound.

A pass costs what changed since the last one: matches are looked up again only where the tree has
changed, and the queue is scanned again only when a change may let a request start.

Tenants have a queue each, with an order and an overtake bound of its own. Between them the one that
has been served least comes first: see `TenantShares`.
"""

from __future__ import annotations

import heapq
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from sortedcontainers import SortedDict, SortedList

from radixserve.cache import PrefixCache, PrefixWatch
from radixserve.request import LEAST_PRIORITY
from radixserve.scheduler.policy import AdmissionPolicy
from radixserve.scheduler.queue_order import QueueOrder
from radixserve.scheduler.request_state import RequestState
from radixserve.scheduler.tenants import Tenant, TenantShares


class _TenantQueue:
    """The waiting requests of a tenant: their order and their overtake bound."""

    def __init__(self, tenant: Tenant, order: QueueOrder, max_overtake: int) -> None:
        self.tenant = tenant  # whose requests it has, or had last
        self._max_overtake = max_overtake
        self.order = order
        self._by_arrival: SortedDict = SortedDict()
        self._returned: SortedDict = SortedDict()  # of these, the preempted ones
        self._admitted: SortedList = SortedList()  # arrivals later than the oldest queued one
        self._priorities: SortedList = SortedList()  # one each
        self.needs: SortedList = SortedList()  # (pages, arrival) of requests without a producer
        self.num_passed = 0  # starts of other tenants in its turn since it started one itself
        self.is_scanned = False  # no further request of it may start in this pass

    def serve(self, tenant: Tenant) -> None:
        """The queue is empty, and gets the requests of this tenant."""
        if self.tenant is not tenant:
            self.order.restart()
        self.tenant, self.num_passed = tenant, 0

    def __len__(self) -> int:
        return len(self._by_arrival)

    def __contains__(self, state: RequestState) -> bool:
        return state.arrival in self._by_arrival

    def add(self, state: RequestState, *, is_returning: bool) -> None:
        """O(log n)."""
        self._by_arrival[state.arrival] = state
        if is_returning:
            self._returned[state.arrival] = state
        self._priorities.add(state.request.params.priority)
        state.admitted_before_enqueue = self._num_later(state)
        self.order.add(state)

    def remove(self, state: RequestState) -> None:
        """O(log n)."""
        state.overtaken = self.overtaken(state)
        del self._by_arrival[state.arrival]
        self._returned.pop(state.arrival, None)
        self._priorities.remove(state.request.params.priority)
        self.order.remove(state)

    def update(self, state: RequestState) -> None:
        """Its match has changed. O(log n)."""
        self.order.update(state)

    def check(self) -> None:
        """Audit: the order has all requests. AssertionError otherwise."""
        self.order.check(len(self))
        assert len(self._priorities) == len(self), "a waiting request has no priority"

    @property
    def highest_priority(self) -> float:
        """O(1)."""
        return self._priorities[-1] if self._priorities else -math.inf

    def overtaken(self, state: RequestState) -> int:
        """How many later requests were admitted while this one waited. O(log n)."""
        return state.overtaken + self._num_later(state) - state.admitted_before_enqueue

    def note_admitted(self, state: RequestState) -> None:
        """`state`, just removed, overtakes all that arrived before it. O(log n) amortised."""
        self.num_passed = 0
        self.order.note_admitted(state)
        self._admitted.add(state.arrival)
        if not self._by_arrival:
            self._admitted.clear()
            return
        oldest = self._by_arrival.keys()[0]
        # these arrived before every queued request
        del self._admitted[: self._admitted.bisect_right(oldest)]

    def admission_limit(self, since: float) -> float:
        """Arrival number after which no request may start: a request up to it has reached the
        overtake bound, or was queued at `since` or before; math.inf if none.

        Of the requests that never ran the oldest has been overtaken most. O(preempted requests).
        """
        bound = self._max_overtake
        states = list(self._returned.values())
        for arrival, state in self._by_arrival.items():
            if arrival not in self._returned:
                states.append(state)
                break
        limited = (
            state.arrival
            for state in states
            if self.overtaken(state) >= bound or state.queued_at <= since
        )
        return min(limited, default=math.inf)

    def candidates(
        self, get_since: Callable[[], float], *, is_short: bool
    ) -> Iterator[RequestState]:
        """Each request once that may start now, in order; the one just given may be removed.

        With an admission limit: only requests up to it, by arrival. `is_short`: see
        `QueueOrder.scan`.
        """
        seen: set[int] = set()
        while True:
            limit = self.admission_limit(get_since())
            if limit < math.inf:
                up_to = self._by_arrival.irange(maximum=limit)
                state = next(
                    (self._by_arrival[arrival] for arrival in up_to if arrival not in seen), None
                )
                if state is None:
                    return
                seen.add(state.arrival)
                yield state
                continue
            for state in self.order.scan(is_short=is_short):
                if state.arrival in seen:
                    continue
                seen.add(state.arrival)
                yield state
                was_admitted = state.arrival not in self._by_arrival
                if was_admitted and self.admission_limit(get_since()) < math.inf:
                    break
            else:
                return

    def _num_later(self, state: RequestState) -> int:
        return len(self._admitted) - int(self._admitted.bisect_right(state.arrival))


class WaitingQueue:
    """Owns the order and the overtake bound; `Scheduler` decides which requests start."""

    def __init__(
        self,
        cache: PrefixCache,
        policy: str,
        max_overtake: int,
        max_wait_s: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
        shares: TenantShares | None = None,
        admission: AdmissionPolicy | None = None,
    ) -> None:
        """`max_wait_s`: None for no bound in seconds; on `clock`."""
        self._cache = cache
        self._policy, self._max_overtake = policy, max_overtake
        self._admission = AdmissionPolicy() if admission is None else admission
        self._max_wait_s, self._clock = max_wait_s, clock
        self._shares = TenantShares() if shares is None else shares
        self._queues: dict[Tenant, _TenantQueue] = {}  # of tenants with waiting requests
        self._spare: _TenantQueue | None = None  # an empty one
        self._by_watch: dict[PrefixWatch, RequestState] = {}
        self.num_tokens = 0  # of all of them
        self.num_changes = 0  # requests added, removed or unblocked since the start
        self._num_needed = 0  # pages: the page needs of all together

    def __len__(self) -> int:
        return len(self._by_watch)

    def __contains__(self, state: RequestState) -> bool:
        queue = self._queues.get(state.tenant)
        return queue is not None and state in queue

    def add(self, state: RequestState, *, is_returning: bool) -> None:
        """O(log n); where its tenant had no waiting request, O(tenants that have)."""
        self.num_changes += 1
        queue = self._queues.get(state.tenant)
        if queue is None:
            self._shares.begin_waiting(state.tenant, self._queues)
            queue = self._spare
            if queue is None:
                order = self._admission.make_order(self._policy)
                queue = _TenantQueue(state.tenant, order, self._max_overtake)
            queue.serve(state.tenant)
            self._spare = None
            self._queues[state.tenant] = queue
        queue.add(state, is_returning=is_returning)
        self.num_tokens += len(state.tokens)
        self._by_watch[state.prefix_watch] = state
        self._note_need(state)

    def check(self) -> None:
        """Audit the queues of all tenants. AssertionError names what is broken. O(tenants)."""
        for queue in self._queues.values():
            queue.check()
        assert sum(map(len, self._queues.values())) == len(self), "a tenant's queue is incomplete"

    def remove(self, state: RequestState) -> None:
        """O(log n)."""
        self.num_changes += 1
        self._forget_need(state)
        queue = self._queues[state.tenant]
        queue.remove(state)
        if not queue:
            del self._queues[state.tenant]
            self._spare = queue
            if not self._queues:
                self._shares.end_waiting(state.tenant)
        self.num_tokens -= len(state.tokens)
        del self._by_watch[state.prefix_watch]
        state.prefix_watch.close()

    def refresh(self) -> None:
        """Move the requests whose match has changed. O(those requests)."""
        for prefix_watch in self._cache.changed_watches():
            state = self._by_watch.get(prefix_watch)
            if state is not None:
                self._queues[state.tenant].update(state)
                self._note_need(state)

    # -- page needs ---------------------------------------------------------------------------

    def page_need(self, state: RequestState) -> int:
        """Pages needed beyond its cached prefix for all its tokens and one more."""
        size = self._cache.page_size
        return -(-(len(state.tokens) + 1) // size) - state.prefix_watch.cached_len // size

    def pages_before(self, time: float) -> int:
        """Available pages that the requests need which were queued before that time, those of their
        cached prefixes included unless they are locked. O(requests)."""
        size = self._cache.page_size
        return sum(
            -(-(len(state.tokens) + 1) // size) - state.prefix_watch.locked_len // size
            for state in self._by_watch.values()
            if state.queued_at < time
        )

    @property
    def min_page_need(self) -> float:
        """Smallest page need of queued requests without a producer; inf if none. O(tenants that
        wait)."""
        needs = (queue.needs[0][0] for queue in self._queues.values() if queue.needs)
        return min(needs, default=math.inf)

    def min_page_need_of(self, tenant: Tenant) -> float:
        """The same of one tenant's. O(1)."""
        queue = self._queues.get(tenant)
        return queue.needs[0][0] if queue is not None and queue.needs else math.inf

    def mark_blocked(self, state: RequestState) -> None:
        """Remove the page need of a request that waits for a producer. O(log n)."""
        self._forget_need(state)

    def mark_unblocked(self, states: Iterable[RequestState]) -> None:
        """Add back the page needs of requests that no longer wait for a producer."""
        for state in states:
            self.num_changes += 1
            self._note_need(state)

    def _note_need(self, state: RequestState) -> None:
        if state.producer is not None:
            return
        need = self.page_need(state)
        if need != state.page_need:
            self._forget_need(state)
            state.page_need = need
            self._num_needed += need
            self._queues[state.tenant].needs.add((need, state.arrival))

    def _forget_need(self, state: RequestState) -> None:
        if state.page_need is not None:
            self._num_needed -= state.page_need
            self._queues[state.tenant].needs.remove((state.page_need, state.arrival))
            state.page_need = None

    # -- order --------------------------------------------------------------------------------

    def overtaken(self, state: RequestState) -> int:
        """How many later requests of its tenant were admitted while it waited. O(log n)."""
        return self._queues[state.tenant].overtaken(state)

    def note_admitted(self, state: RequestState) -> None:
        """`state`, just removed, overtakes those of its tenant that arrived before it. O(log n)
        amortised."""
        queue = self._queues.get(state.tenant, self._spare)  # that which it has emptied
        assert queue is not None
        queue.note_admitted(state)

    @property
    def has_limit(self) -> bool:
        """Whether a request has reached its bound on waiting, or a tenant the bound on starts of
        others in its turn. O(preempted requests and tenants that wait)."""
        return any(map(self._is_limited, self._queues.values()))

    def must_start(self, state: RequestState) -> bool:
        """Whether a request that `candidates` gives is to start at any price: it or an earlier one
        of its tenant has reached its bound on waiting, or its tenant the bound on starts of others.
        """
        return self._is_limited(self._queues[state.tenant])

    def order_of(self, state: RequestState) -> QueueOrder:
        """The order in which `candidates` gives the request."""
        return self._queues[state.tenant].order

    def begin_pass(self) -> None:
        """A pass begins that may hold requests. O(tenants that wait)."""
        for queue in self._queues.values():
            queue.order.begin_pass()

    def is_first(self, arrival: int, tenant: Tenant, priority: int) -> bool:
        """Whether no waiting request of its tenant comes before a request like this."""
        queue = self._queues.get(tenant)
        if queue is None:
            return True
        return queue.admission_limit(self._since()) >= arrival and (
            queue.highest_priority <= priority
        )

    def candidates(self, running: Iterable[RequestState] = ()) -> Iterator[RequestState]:
        """Each request once that may start now, in order; the one just given may be removed.

        Of several tenants the one comes first that has been served least, with the tokens counted
        that its `running` requests have still to compute. A tenant of which none could start is
        passed by others at most `max_overtake` times before one of its own starts.
        """
        if len(self._queues) == 1:
            return self._candidates_of(next(iter(self._queues.values())))
        return self._shared_candidates(running)

    def skip_tenant(self, state: RequestState) -> bool:
        """Have `candidates` give no more requests of its tenant. False where no other one waits."""
        queue = self._queues.get(state.tenant)
        if queue is not None:
            queue.is_scanned = True
        return len(self._queues) > 1

    def is_behind(self, virtual_time: float, running: Iterable[RequestState]) -> bool:
        """Whether a tenant waits that has been served less. O(tenants that wait)."""
        ahead = _to_compute(running)
        return any(
            queue.needs and tenant.virtual_time + ahead[tenant] / tenant.weight < virtual_time
            for tenant, queue in self._queues.items()
        )

    def first(self, running: Iterable[RequestState]) -> RequestState | None:
        """The first one that `candidates` would give, of tenants with a request that waits for
        pages alone. O(running requests and tenants that wait)."""
        queues = [queue for queue in self._queues.values() if queue.needs]
        if not queues:
            return None
        ahead = _to_compute(running)
        queue = min(queues, key=lambda queue: _turn(queue, ahead))
        unblocked = (state for state in self._candidates_of(queue) if state.page_need is not None)
        return next(unblocked, None)

    def _candidates_of(self, queue: _TenantQueue) -> Iterator[RequestState]:
        return queue.candidates(self._since, is_short=self._num_needed > self._cache.num_free)

    def _shared_candidates(self, running: Iterable[RequestState]) -> Iterator[RequestState]:
        ahead = _to_compute(running)
        queues = list(self._queues.values())
        given = [self._candidates_of(queue) for queue in queues]
        heap = [(_turn(queue, ahead), index) for index, queue in enumerate(queues)]
        heapq.heapify(heap)
        passed: list[_TenantQueue] = []  # whose turn it was, and none started
        for queue in queues:
            queue.is_scanned = False
        while heap:
            _, index = heapq.heappop(heap)
            queue, has_started = queues[index], False
            for state in given[index]:
                yield state
                has_started = state.sequence is not None
                if has_started or queue.is_scanned:
                    break
            if has_started:
                for other in passed:
                    other.num_passed += 1
                assert state.sequence is not None
                ahead[queue.tenant] += len(state.tokens) - state.sequence.committed_len
                if queue and not queue.is_scanned:
                    heapq.heappush(heap, (_turn(queue, ahead), index))
            elif queue.needs:
                passed.append(queue)
            if any(other.num_passed >= self._max_overtake for other in passed):
                return

    def _is_limited(self, queue: _TenantQueue) -> bool:
        if len(self._queues) > 1 and queue.num_passed >= self._max_overtake:
            return True
        return queue.admission_limit(self._since()) < math.inf

    def _since(self) -> float:
        """When a request was queued that has reached its bound in seconds."""
        num_tokens = self._num_needed * self._cache.page_size
        max_wait_s = self._admission.max_wait_s(num_tokens)
        if self._max_wait_s is not None:
            max_wait_s = min(max_wait_s, self._max_wait_s)
        return self._clock() - max_wait_s


def _to_compute(running: Iterable[RequestState]) -> Counter[Tenant]:
    """Tokens that running requests have still to compute, by tenant."""
    ahead: Counter[Tenant] = Counter()
    for state in running:
        ahead[state.tenant] += state.tokens.size - state.committed
    return ahead


def _turn(queue: _TenantQueue, ahead: Counter[Tenant]) -> tuple[bool, float, int]:
    """The least comes first. Of equal ones that which has less to compute; prefetches last."""
    tenant = queue.tenant
    num_ahead = ahead[tenant]
    is_background = queue.highest_priority <= LEAST_PRIORITY
    return is_background, tenant.virtual_time + num_ahead / tenant.weight, num_ahead
