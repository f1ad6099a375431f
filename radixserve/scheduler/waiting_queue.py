"""`WaitingQueue`: waiting requests in policy order and by arrival, with the overtake bound.

A pass costs what changed since the last one: matches are looked up again only where the tree has
changed, and the queue is scanned again only when a change may let a request start.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from sortedcontainers import SortedDict, SortedList

from radixserve.cache import PrefixCache, PrefixWatch
from radixserve.scheduler.policy import make_queue
from radixserve.scheduler.request_state import RequestState


class WaitingQueue:
    """Owns the order and the overtake bound; `Scheduler` decides which requests start."""

    def __init__(self, cache: PrefixCache, policy: str, max_overtake: int) -> None:
        self._cache = cache
        self._max_overtake = max_overtake
        self._queue = make_queue(policy)
        self._by_arrival: SortedDict = SortedDict()
        self._returned: SortedDict = SortedDict()  # of these, the preempted ones
        self._by_watch: dict[PrefixWatch, RequestState] = {}
        self.num_tokens = 0  # of all of them
        self._admitted: SortedList = SortedList()  # arrivals later than the oldest queued one
        self._priorities: SortedList = SortedList()  # one each
        self._needs: SortedList = SortedList()  # (pages, arrival) of requests without a producer

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
        self.num_tokens += len(state.tokens)
        state.queue_entry.bypass_baseline = self._num_later(state)
        self._by_watch[state.prefix_watch] = state
        self._queue.add(state)
        self._note_need(state)

    def remove(self, state: RequestState) -> None:
        """O(log n)."""
        state.queue_entry.overtaken = self.overtaken(state)
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

    def note_waits(self, state: RequestState) -> None:
        """Remove the page need of a request that waits for a producer. O(log n)."""
        self._forget_need(state)

    def note_woken(self, states: Iterable[RequestState]) -> None:
        """Add back the page needs of requests that no longer wait for a producer."""
        for state in states:
            self._note_need(state)

    def _note_need(self, state: RequestState) -> None:
        if state.producer is not None:
            return
        need = self.page_need(state)
        if need != state.queue_entry.page_need:
            self._forget_need(state)
            state.queue_entry.page_need = need
            self._needs.add((need, state.arrival))

    def _forget_need(self, state: RequestState) -> None:
        entry = state.queue_entry
        if entry.page_need is not None:
            self._needs.remove((entry.page_need, state.arrival))
            entry.page_need = None

    # -- the overtake bound -------------------------------------------------------------------

    def overtaken(self, state: RequestState) -> int:
        """How many later requests were admitted while this one waited. O(log n)."""
        entry = state.queue_entry
        return entry.overtaken + self._num_later(state) - entry.bypass_baseline

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
        overtake bound; math.inf if none.

        Of the requests that never ran the oldest has been overtaken most. O(preempted requests).
        """
        bound = self._max_overtake
        fresh = next(
            (state for a, state in self._by_arrival.items() if a not in self._returned), None
        )
        states = [*self._returned.values(), *([] if fresh is None else [fresh])]
        at_bound = (state.arrival for state in states if self.overtaken(state) >= bound)
        return min(at_bound, default=math.inf)

    def candidates(self) -> Iterator[RequestState]:
        """Each request once that may start now, in order; the one just given may be removed.

        With an admission limit: only requests up to it, by arrival. Else the policy's order.
        """
        seen: set[int] = set()
        while True:
            limit = self.admission_limit
            if limit < math.inf:
                up_to = self._by_arrival.irange(maximum=limit)
                state = next((self._by_arrival[a] for a in up_to if a not in seen), None)
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
