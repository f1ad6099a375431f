"""`WaitingQueue`: waiting requests in policy order and by arrival, with the overtake bound.

A pass costs what changed since the last one: matches are looked up again only where the tree has
changed, and the queue is scanned again only when a change may let a request start.

Policies:

    lpm         longest cached prefix first
    fcfs        first come, first served
    dfs-weight  along the tree, depth first, the branch with most waiting requests first

A higher priority comes before all of these. The overtake bound holds under each policy.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from sortedcontainers import SortedDict, SortedKeyList, SortedList

from radixserve.cache import PrefixCache, PrefixWatch
from radixserve.scheduler.request_state import RequestState


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
    """lpm and fcfs."""

    def __init__(self, *, by_match: bool) -> None:
        self._by_match = by_match
        self._requests: SortedKeyList = SortedKeyList(key=_order_key)

    def add(self, state: RequestState) -> None:
        state.order_key = self._key(state)
        self._requests.add(state)

    def remove(self, state: RequestState) -> None:
        self._requests.remove(state)

    def update(self, state: RequestState) -> None:
        if state.order_key != self._key(state):
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

    def _key(self, state: RequestState) -> tuple[int, ...]:
        priority, arrival = state.priority_key
        return (priority, -state.prefix_watch.cached_len if self._by_match else 0, arrival)


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
    return SortedQueue(by_match=policy == "lpm")


def _order_key(state: RequestState) -> tuple[int, ...]:
    return state.order_key


class WaitingQueue:
    """Owns the order and the overtake bound; `Scheduler` decides which requests start."""

    def __init__(
        self,
        cache: PrefixCache,
        policy: str,
        max_overtake: int,
        max_wait_s: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`max_wait_s`: None for no bound in seconds; on `clock`."""
        self._cache = cache
        self._max_overtake = max_overtake
        self._max_wait_s, self._clock = max_wait_s, clock
        self._queue = make_queue(policy)
        self.is_by_match = policy == "lpm"
        self._by_arrival: SortedDict = SortedDict()
        self._returned: SortedDict = SortedDict()  # of these, the preempted ones
        self._by_watch: dict[PrefixWatch, RequestState] = {}
        self.num_tokens = 0  # of all of them
        self.num_changes = 0  # requests added, removed or unblocked since the start
        self._admitted: SortedList = SortedList()  # arrivals later than the oldest queued one
        self._priorities: SortedList = SortedList()  # one each
        self._needs: SortedList = SortedList()  # (pages, arrival) of requests without a producer

    def __len__(self) -> int:
        return len(self._by_arrival)

    def __contains__(self, state: RequestState) -> bool:
        return state.arrival in self._by_arrival

    def add(self, state: RequestState, *, is_returning: bool) -> None:
        """O(log n)."""
        self.num_changes += 1
        self._by_arrival[state.arrival] = state
        if is_returning:
            self._returned[state.arrival] = state
        self._priorities.add(state.request.params.priority)
        self.num_tokens += len(state.tokens)
        state.admitted_before_enqueue = self._num_later(state)
        self._by_watch[state.prefix_watch] = state
        self._queue.add(state)
        self._note_need(state)

    def remove(self, state: RequestState) -> None:
        """O(log n)."""
        self.num_changes += 1
        state.overtaken = self.overtaken(state)
        del self._by_arrival[state.arrival]
        self._returned.pop(state.arrival, None)
        self._priorities.remove(state.request.params.priority)
        self.num_tokens -= len(state.tokens)
        del self._by_watch[state.prefix_watch]
        state.prefix_watch.close()
        self._queue.remove(state)
        self._forget_need(state)

    def refresh(self) -> None:
        """Move the requests whose match has changed. O(those requests)."""
        for prefix_watch in self._cache.changed_watches():
            state = self._by_watch.get(prefix_watch)
            if state is not None:
                self._queue.update(state)
                self._note_need(state)

    @property
    def highest_priority(self) -> float:
        """Highest priority of the queued requests. O(1)."""
        return self._priorities[-1] if self._priorities else -math.inf

    # -- page needs ---------------------------------------------------------------------------

    def page_need(self, state: RequestState) -> int:
        """Pages needed beyond its cached prefix for all its tokens and one more."""
        size = self._cache.page_size
        return -(-(len(state.tokens) + 1) // size) - state.prefix_watch.cached_len // size

    @property
    def min_page_need(self) -> float:
        """Smallest page need of queued requests without a producer; inf if none. O(1)."""
        return self._needs[0][0] if self._needs else math.inf

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
            self._needs.add((need, state.arrival))

    def _forget_need(self, state: RequestState) -> None:
        if state.page_need is not None:
            self._needs.remove((state.page_need, state.arrival))
            state.page_need = None

    # -- the overtake bound -------------------------------------------------------------------

    def overtaken(self, state: RequestState) -> int:
        """How many later requests were admitted while this one waited. O(log n)."""
        return state.overtaken + self._num_later(state) - state.admitted_before_enqueue

    def note_admitted(self, state: RequestState) -> None:
        """`state`, just removed, overtakes all that arrived before it. O(log n) amortised."""
        self._admitted.add(state.arrival)
        if not self._by_arrival:
            self._admitted.clear()
            return
        oldest = self._by_arrival.keys()[0]
        # these arrived before every queued request
        del self._admitted[: self._admitted.bisect_right(oldest)]

    @property
    def admission_limit(self) -> float:
        """Arrival number after which no request may start: a request up to it has reached the
        overtake bound, in requests or in seconds; math.inf if none.

        Of the requests that never ran the oldest has been overtaken most. O(preempted requests).
        """
        bound = self._max_overtake
        states = list(self._returned.values())
        for arrival, state in self._by_arrival.items():
            if arrival not in self._returned:
                states.append(state)
                break
        since = -math.inf if self._max_wait_s is None else self._clock() - self._max_wait_s
        limited = (
            state.arrival
            for state in states
            if self.overtaken(state) >= bound or state.queued_at <= since
        )
        return min(limited, default=math.inf)

    def candidates(self) -> Iterator[RequestState]:
        """Each request once that may start now, in order; the one just given may be removed.

        With an admission limit: only requests up to it, by arrival. Else the policy's order.
        """
        seen: set[int] = set()
        while True:
            limit = self.admission_limit
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
            for state in self._queue.scan():
                if state.arrival in seen:
                    continue
                seen.add(state.arrival)
                yield state
                was_admitted = state.arrival not in self._by_arrival
                if was_admitted and self.admission_limit < math.inf:
                    break
            else:
                return

    def _num_later(self, state: RequestState) -> int:
        return len(self._admitted) - int(self._admitted.bisect_right(state.arrival))
