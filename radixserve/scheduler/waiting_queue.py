"""`WaitingQueue`: waiting requests in policy order and by arrival, with the overtake bound.

A pass costs what changed since the last one: matches are looked up again only where the tree has
changed, and the queue is scanned again only when a change may let a request start.

Policies:

    lpm         longest cached prefix first
    fcfs        first come, first served
    dfs-weight  along the tree, depth first, the branch with most waiting requests first

A higher priority comes before all of these. The overtake bound holds under each policy.

With priced admission and lpm, the shortest job comes first while the waiting requests do not fit
into the free pages: see `_work_key`. And while requests are held, that of the oldest waiting
session comes before all.

Tenants have a queue each, with an order and an overtake bound of its own. Between them the one that
has been served least comes first: see `TenantShares`.
"""

from __future__ import annotations

import heapq
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from sortedcontainers import SortedDict, SortedKeyList, SortedList

from radixserve.cache import PrefixCache, PrefixWatch
from radixserve.request import LEAST_PRIORITY
from radixserve.scheduler.request_state import RequestState
from radixserve.scheduler.tenants import Tenant, TenantShares

_HELD_BY_WORK = 3  # held requests after which a pass goes on in the policy's order

OrderKey = tuple[int, ...]


class PolicyQueue(Protocol):
    """The waiting requests in the order of a policy. Writes their `order_key` and nothing else."""

    def add(self, state: RequestState) -> None:
        """O(log n)."""

    def remove(self, state: RequestState) -> None:
        """O(log n)."""

    def update(self, state: RequestState) -> None:
        """The request's match has changed: update its position. O(log n)."""

    def scan(self) -> Iterator[RequestState]:
        """The requests in order. The one just given may be removed; nothing else may change."""

    def __len__(self) -> int: ...


class SortedQueue:
    """In the order of a key, which is kept as it was when a request was added or updated."""

    def __init__(self, key: Callable[[RequestState], OrderKey]) -> None:
        self._key = key
        self._keys: dict[int, OrderKey] = {}  # by arrival
        self._requests: SortedKeyList = SortedKeyList(key=lambda state: self._keys[state.arrival])

    def add(self, state: RequestState) -> None:
        self._keys[state.arrival] = self._key(state)
        self._requests.add(state)

    def remove(self, state: RequestState) -> None:
        self._requests.remove(state)
        del self._keys[state.arrival]

    def update(self, state: RequestState) -> None:
        if self._keys[state.arrival] != self._key(state):
            self.remove(state)
            self.add(state)

    def scan(self) -> Iterator[RequestState]:
        index = 0
        while index < len(self._requests):
            state = self._requests[index]
            yield state
            if index < len(self._requests) and self._requests[index] is state:
                index += 1

    def __len__(self) -> int:
        return len(self._requests)


class TreeQueue:
    """dfs-weight: the paths of the waiting requests' matches as a tree of counts.

    A path is the one of the request's last refresh: a node split above it since then is not in it.
    """

    def __init__(self) -> None:
        self._roots: SortedDict = SortedDict()  # priority, high ones first -> _Branch
        self._size = 0

    def add(self, state: RequestState) -> None:
        state.order_key = state.prefix_watch.path()
        self._size += 1
        branch = self._roots.setdefault(state.priority_key[0], _Branch(0))
        for node_id in state.order_key:
            branch = branch.grow(node_id)
        branch.states[state.arrival] = state

    def remove(self, state: RequestState) -> None:
        self._size -= 1
        branch = self._roots[state.priority_key[0]]
        for node_id in state.order_key:
            branch = branch.shrink(node_id)
        del branch.states[state.arrival]

    def update(self, state: RequestState) -> None:
        if state.order_key != state.prefix_watch.path():
            self.remove(state)
            self.add(state)

    def scan(self) -> Iterator[RequestState]:
        stack = list(reversed(self._roots.values()))
        while stack:
            branch = stack.pop()
            stack.extend(reversed(branch.order))  # as it was when the branch was reached
            yield from list(branch.states.values())

    def __len__(self) -> int:
        return self._size


class _Branch:
    """A node of the tree of paths: the requests that end here, and the branches below by weight."""

    __slots__ = ("below", "count", "node_id", "order", "states")

    def __init__(self, node_id: int) -> None:
        self.node_id = node_id
        self.count = 0  # requests here and below
        self.states: SortedDict = SortedDict()  # by arrival
        self.below: dict[int, _Branch] = {}
        # heaviest first
        self.order = SortedKeyList(key=lambda branch: (-branch.count, branch.node_id))

    def grow(self, node_id: int) -> _Branch:
        """Count one more request in the branch `node_id` and return it."""
        branch = self.below.get(node_id)
        if branch is None:
            branch = self.below[node_id] = _Branch(node_id)
        else:
            self.order.remove(branch)
        branch.count += 1
        self.order.add(branch)
        return branch

    def shrink(self, node_id: int) -> _Branch:
        """Count one request less in the branch `node_id` and return it."""
        branch = self.below[node_id]
        self.order.remove(branch)
        branch.count -= 1
        if branch.count:
            self.order.add(branch)
        else:
            del self.below[node_id]
        return branch


def make_queue(policy: str) -> PolicyQueue:
    """The queue for `schedule_policy`, a name that the config has checked."""
    if policy == "dfs-weight":
        return TreeQueue()
    return SortedQueue(_match_key if policy == "lpm" else _arrival_key)


def _match_key(state: RequestState) -> OrderKey:
    priority, arrival = state.priority_key
    return priority, -state.prefix_watch.cached_len, arrival


def _arrival_key(state: RequestState) -> OrderKey:
    return state.priority_key


def _work_key(state: RequestState) -> OrderKey:
    """By the tokens to compute, in powers of four; of about equal ones the oldest session first."""
    priority, arrival = state.priority_key
    num_tokens = state.tokens.size - state.prefix_watch.cached_len
    return priority, num_tokens.bit_length() // 2, state.session_arrival, arrival


class _TenantQueue:
    """The waiting requests of a tenant: their order and their overtake bound."""

    def __init__(
        self, tenant: Tenant, policy: str, max_overtake: int, *, is_priced: bool = False
    ) -> None:
        """`is_priced`: for priced admission."""
        self.tenant = tenant  # whose requests it has, or had last
        self._max_overtake = max_overtake
        # With priced admission: by priority and age of the session, and by work.
        self._by_age: SortedDict | None = SortedDict() if is_priced else None
        self._by_work: SortedQueue | None = None
        if is_priced and policy == "lpm":
            self._by_work = SortedQueue(_work_key)
        self.was_held = False  # whether the last pass held a request
        self.num_held = 0  # requests that this pass has held
        self.oldest: RequestState | None = None  # given first by `candidates`, out of the order
        self._queue = make_queue(policy)
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
            self.was_held, self.num_held = False, 0
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
        if self._by_age is not None:
            self._by_age[_age_key(state)] = state
        if self._by_work is not None:
            self._by_work.add(state)
        self._priorities.add(state.request.params.priority)
        state.admitted_before_enqueue = self._num_later(state)
        self._queue.add(state)

    def remove(self, state: RequestState) -> None:
        """O(log n)."""
        state.overtaken = self.overtaken(state)
        del self._by_arrival[state.arrival]
        self._returned.pop(state.arrival, None)
        if self._by_age is not None:
            del self._by_age[_age_key(state)]
        if self._by_work is not None:
            self._by_work.remove(state)
        self._priorities.remove(state.request.params.priority)
        self._queue.remove(state)

    def update(self, state: RequestState) -> None:
        """Its match has changed. O(log n)."""
        self._queue.update(state)
        if self._by_work is not None:
            self._by_work.update(state)

    def check(self) -> None:
        """Audit: each order has all requests. AssertionError otherwise."""
        for order in (self._queue, self._by_age, self._by_work, self._priorities):
            assert order is None or len(order) == len(self), "a waiting request is not in an order"

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
        if state is self.oldest:
            self.oldest = None
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
        self, get_since: Callable[[], float], *, by_work: bool
    ) -> Iterator[RequestState]:
        """Each request once that may start now, in order; the one just given may be removed.

        With an admission limit: only requests up to it, by arrival. Else the policy's order; before
        that, `by_work`, the shortest jobs until _HELD_BY_WORK are held: a cached prefix must not
        wait for small requests that are not worth their price. If the last pass held a request,
        that of the oldest session comes first, and once it has started that of the next oldest.
        """
        seen: set[int] = set()
        self.oldest = None
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
            if self.was_held and self.oldest is None and self._by_age:
                self.oldest = oldest = self._by_age.peekitem(0)[1]
                if oldest.arrival not in seen:
                    seen.add(oldest.arrival)
                    yield oldest
                    continue
            shortest = self._by_work if by_work and self.num_held < _HELD_BY_WORK else None
            for state in (self._queue if shortest is None else shortest).scan():
                if state.arrival in seen:
                    continue
                seen.add(state.arrival)
                yield state
                was_admitted = state.arrival not in self._by_arrival
                if was_admitted and self.admission_limit(get_since()) < math.inf:
                    break
                if shortest is not None and self.num_held >= _HELD_BY_WORK:
                    break
            else:
                return

    def _num_later(self, state: RequestState) -> int:
        return len(self._admitted) - int(self._admitted.bisect_right(state.arrival))


def _age_key(state: RequestState) -> tuple[int, int, int]:
    return state.priority_key[0], state.session_arrival, state.arrival


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
    ) -> None:
        """`max_wait_s`: None for no bound in seconds; on `clock`."""
        self._cache = cache
        self._policy, self._max_overtake = policy, max_overtake
        self.is_by_match = policy == "lpm"
        self._max_wait_s, self._clock = max_wait_s, clock
        self._shares = TenantShares() if shares is None else shares
        self._queues: dict[Tenant, _TenantQueue] = {}  # of tenants with waiting requests
        self._spare: _TenantQueue | None = None  # an empty one
        self._by_watch: dict[PrefixWatch, RequestState] = {}
        self.num_tokens = 0  # of all of them
        self.num_changes = 0  # requests added, removed or unblocked since the start
        self._num_needed = 0  # pages: the page needs of all together
        self.backlog_bound: Callable[[int], float] | None = None  # seconds, by tokens to compute
        self.is_priced = False  # for priced admission: set before requests are added

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
                queue = _TenantQueue(
                    state.tenant,
                    self._policy,
                    self._max_overtake,
                    is_priced=self.is_priced,
                )
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

    def is_oldest(self, state: RequestState) -> bool:
        """Whether `candidates` has given it for the age of its session."""
        return state is self._queues[state.tenant].oldest

    def begin_pass(self) -> None:
        """With priced admission: a pass begins that may hold requests. O(tenants that wait)."""
        for queue in self._queues.values():
            queue.was_held, queue.num_held = queue.num_held > 0, 0

    def note_held(self, state: RequestState) -> None:
        """A request that fits was not started, because of its price."""
        self._queues[state.tenant].num_held += 1

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
        return queue.candidates(self._since, by_work=self._num_needed > self._cache.num_free)

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
        max_wait_s = math.inf if self._max_wait_s is None else self._max_wait_s
        if self.backlog_bound is not None:
            num_tokens = self._num_needed * self._cache.page_size
            max_wait_s = min(max_wait_s, self.backlog_bound(num_tokens))
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
