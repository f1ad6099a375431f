"""`WaitingQueue`: waiting requests in a `QueueOrder` and by arrival, with the overtake bound.

A pass costs what changed since the last one: matches are looked up again only where the tree has
changed, and the queue is scanned again only when a change may let a request start.

A `WaitingQueue` has one `RequestQueue`; a subclass may keep several, see `Shares` (shares.py).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from sortedcontainers import SortedDict, SortedList

from radixserve.cache import PrefixCache, PrefixWatch
from radixserve.scheduler.policy import AdmissionPolicy
from radixserve.scheduler.queue_order import QueueOrder
from radixserve.scheduler.request_state import RequestState
from radixserve.scheduler.running_requests import RunningRequests

_MAX_HELD = 4  # held requests of a queue after which a pass leaves it: later ones match less
_MAX_HELD_UNMATCHED = 64  # with policies that do not order by match


class RequestQueue:
    """Waiting requests: their order, their page needs, and their overtake bound."""

    def __init__(self, order: QueueOrder, max_overtake: int, max_held: int) -> None:
        """`max_held`: held requests after which a pass leaves the queue."""
        self._max_overtake = max_overtake
        self._max_held = max_held
        self.order = order
        self._by_arrival: SortedDict = SortedDict()
        self._returned: SortedDict = SortedDict()  # of these, the preempted ones
        self._admitted: SortedList = SortedList()  # arrivals later than the oldest queued one
        self._priorities: SortedList = SortedList()  # one each
        self.needs: SortedList = SortedList()  # (pages, arrival) of requests without a producer
        self._num_held = 0  # requests that this pass has held
        self.is_passed = False  # no further request of it may start in this pass

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

    def check(self) -> None:
        """Audit: the order has all requests. AssertionError otherwise."""
        self.order.check(len(self))
        assert len(self._priorities) == len(self), "a waiting request has no priority"

    @property
    def highest_priority(self) -> float:
        """O(1)."""
        return self._priorities[-1] if self._priorities else -math.inf

    @property
    def min_page_need(self) -> float:
        """Smallest page need of its requests without a producer; inf if none. O(1)."""
        return self.needs[0][0] if self.needs else math.inf

    def overtaken(self, state: RequestState) -> int:
        """How many later requests were admitted while this one waited. O(log n)."""
        return state.overtaken + self._num_later(state) - state.admitted_before_enqueue

    def note_admitted(self, state: RequestState) -> None:
        """`state`, just removed, overtakes all that arrived before it. O(log n) amortised."""
        self.order.note_admitted(state)
        self._admitted.add(state.arrival)
        if not self._by_arrival:
            self._admitted.clear()
            return
        oldest = self._by_arrival.keys()[0]
        # these arrived before every queued request
        del self._admitted[: self._admitted.bisect_right(oldest)]

    def begin_pass(self) -> None:
        """A pass begins that may hold requests."""
        self._num_held = 0
        self.order.begin_pass()

    def note_held(self) -> None:
        """The request that was just given fits and was held."""
        self.order.note_held()
        self._num_held += 1
        self.is_passed |= self._num_held == self._max_held

    def admission_limit(self, since: float) -> float:
        """Arrival number after which no request may start: a request up to it has reached the
        overtake bound, or was queued at `since` or before; math.inf if none.

        Of the requests that never ran the oldest has been overtaken most. O(preempted requests).
        """
        bound = self._max_overtake
        states = list(self._returned.values())
        for arrival in self._by_arrival:
            if arrival not in self._returned:
                states.append(self._by_arrival[arrival])
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
        """Each request once that may start now, in order; the one just given may be removed. Ends
        where `is_passed` is set.

        With an admission limit: only requests up to it, by arrival. `is_short`: see
        `QueueOrder.scan`.
        """
        self.is_passed = False
        seen: set[int] = set()
        while not self.is_passed:
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
                if self.is_passed:
                    return
                was_admitted = state.arrival not in self._by_arrival
                if was_admitted and self.admission_limit(get_since()) < math.inf:
                    break
            else:
                return

    def _num_later(self, state: RequestState) -> int:
        return len(self._admitted) - int(self._admitted.bisect_right(state.arrival))


class WaitingQueue:
    """Owns the order and the overtake bound; `Admission` starts requests."""

    def __init__(
        self,
        cache: PrefixCache,
        policy: str,
        max_overtake: int,
        max_wait_s: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
        admission: AdmissionPolicy | None = None,
    ) -> None:
        """`max_wait_s`: None for no bound in seconds; on `clock`."""
        self._cache = cache
        self._policy, self._max_overtake = policy, max_overtake
        self._admission = AdmissionPolicy() if admission is None else admission
        self._max_wait_s, self._clock = max_wait_s, clock
        self._queue = self._make_queue()
        self._by_watch: dict[PrefixWatch, RequestState] = {}
        self.num_tokens = 0  # of all of them
        self.num_changes = 0  # requests added, removed or unblocked since the start
        self._num_needed = 0  # pages: the page needs of all together

    def __len__(self) -> int:
        return len(self._by_watch)

    def __contains__(self, state: RequestState) -> bool:
        return state in self._queue_of(state)

    # -- the queues: with several of them a subclass overrides these ----------------------------

    def _make_queue(self) -> RequestQueue:
        return RequestQueue(*self._queue_settings())

    def _queue_settings(self) -> tuple[QueueOrder, int, int]:
        """Returns the arguments of a new `RequestQueue`."""
        max_held = _MAX_HELD if self._policy == "lpm" else _MAX_HELD_UNMATCHED
        return self._admission.make_order(self._policy), self._max_overtake, max_held

    def _queue_of(self, state: RequestState) -> RequestQueue:
        """Returns the queue of a request: where it is, or would be, or was before it started."""
        del state
        return self._queue

    def _queues(self) -> Sequence[RequestQueue]:
        """Returns the queues that have requests, or may have."""
        return (self._queue,)

    def _is_limited(self, queue: RequestQueue) -> bool:
        """Whether a request of the queue has reached its bound on waiting."""
        return queue.admission_limit(self._since()) < math.inf

    def candidates(self, running: RunningRequests | None = None) -> Iterator[RequestState]:
        """Each request once that may start now, in order; the one just given may be removed.
        `running`: those that run beside them."""
        del running
        return self._candidates_of(self._queue)

    def pass_unfitting(self, state: RequestState, may_fit: Callable[[float], bool]) -> None:
        """The request just given has started, or does not fit. May leave out those of which
        `may_fit(page need)` is false."""

    # -- requests -----------------------------------------------------------------------------

    def add(self, state: RequestState, *, is_returning: bool) -> None:
        """O(log n)."""
        self.num_changes += 1
        self._queue_of(state).add(state, is_returning=is_returning)
        self.num_tokens += len(state.tokens)
        self._by_watch[state.prefix_watch] = state
        self._note_need(state)

    def check(self) -> None:
        """Audit the queues. AssertionError names what is broken. O(queues)."""
        queues = self._queues()
        for queue in queues:
            queue.check()
        assert sum(map(len, queues)) == len(self), "a queue is incomplete"

    def remove(self, state: RequestState) -> None:
        """O(log n)."""
        self.num_changes += 1
        self._forget_need(state)
        self._queue_of(state).remove(state)
        self.num_tokens -= len(state.tokens)
        del self._by_watch[state.prefix_watch]
        state.prefix_watch.close()

    def rewatch(self, state: RequestState) -> None:
        """Watch what a request can reuse now, see `RequestState.match_tokens`. Its place in the
        order stays."""
        del self._by_watch[state.prefix_watch]
        state.prefix_watch.close()
        state.watch_prefix(self._cache)
        self._by_watch[state.prefix_watch] = state

    def refresh(self) -> None:
        """Move the requests whose match has changed. O(those requests)."""
        for prefix_watch in self._cache.changed_watches():
            state = self._by_watch.get(prefix_watch)
            if state is not None:
                self._queue_of(state).order.update(state)
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
        """Smallest page need of queued requests without a producer; inf if none. O(queues)."""
        return min([queue.min_page_need for queue in self._queues()], default=math.inf)

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
            self._queue_of(state).needs.add((need, state.arrival))

    def _forget_need(self, state: RequestState) -> None:
        if state.page_need is not None:
            self._num_needed -= state.page_need
            self._queue_of(state).needs.remove((state.page_need, state.arrival))
            state.page_need = None

    # -- order --------------------------------------------------------------------------------

    def overtaken(self, state: RequestState) -> int:
        """How many later requests of its queue were admitted while it waited. O(log n)."""
        return self._queue_of(state).overtaken(state)

    def note_admitted(self, state: RequestState) -> None:
        """`state`, just removed, overtakes those of its queue that arrived before it. O(log n)
        amortised."""
        self._queue_of(state).note_admitted(state)

    def note_held(self, state: RequestState) -> None:
        """The request that `candidates` has just given fits and was held."""
        self._queue_of(state).note_held()

    @property
    def has_limit(self) -> bool:
        """Whether a request has reached its bound on waiting. O(preempted requests and queues)."""
        return any(map(self._is_limited, self._queues()))

    def must_start(self, state: RequestState) -> bool:
        """Whether a request that `candidates` gives must start if it fits: it or an earlier one of
        its queue has reached its bound on waiting."""
        return self._is_limited(self._queue_of(state))

    def order_of(self, state: RequestState) -> QueueOrder:
        """The order in which `candidates` gives the request."""
        return self._queue_of(state).order

    def begin_pass(self) -> None:
        """A pass begins that may hold requests. O(queues)."""
        for queue in self._queues():
            queue.begin_pass()

    def is_first(self, state: RequestState) -> bool:
        """Whether no waiting request of its queue comes before a request with the arrival and the
        priority of `state`."""
        queue = self._queue_of(state)
        return queue.admission_limit(self._since()) >= state.arrival and (
            queue.highest_priority <= state.request.params.priority
        )

    def _candidates_of(self, queue: RequestQueue) -> Iterator[RequestState]:
        return queue.candidates(self._since, is_short=self._admission.is_short(self._num_needed))

    def _since(self) -> float:
        """When a request was queued that has reached its bound in seconds."""
        num_tokens = self._num_needed * self._cache.page_size
        max_wait_s = self._admission.max_wait_s(num_tokens)
        if self._max_wait_s is not None:
            max_wait_s = min(max_wait_s, self._max_wait_s)
        return self._clock() - max_wait_s
