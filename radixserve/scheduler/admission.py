"""`Admission`: starts waiting requests while there are slots, prefill tokens and pages for them.

`PageBudget` counts available pages; `InBatchSharing` finds the requests that should wait for tokens
that a running request is computing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from radixserve.cache import MESSAGE, PROMPT, CacheSequence, PrefixCache
from radixserve.errors import OutOfPages
from radixserve.scheduler.batch import Batch
from radixserve.scheduler.hints import CrossNamespacePrefixes
from radixserve.scheduler.pricing import PricedAdmission
from radixserve.scheduler.request_state import RequestState
from radixserve.scheduler.running_requests import RunningRequests
from radixserve.scheduler.waiting_queue import WaitingQueue

_MAX_HELD = 4  # requests in a row that are not worth their price: the later ones match less
_HELD_STEPS = 8  # after which held requests are looked at again
_LOOKAHEAD = 8  # tokens reserved for each running request when another is admitted


class PageBudget:
    """Computed from the present state of the scheduler's queues and the cache. Read-only."""

    def __init__(
        self,
        cache: PrefixCache,
        running: RunningRequests,
        waiting: WaitingQueue,
        max_running_requests: int,
    ) -> None:
        self._cache = cache
        self._running = running
        self._waiting = waiting
        self._max_running_requests = max_running_requests
        self._window_pages = self.pages_for(cache.window_size)  # a request takes no more at once

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._cache.page_size)

    def pages_ahead(self, state: RequestState) -> int:
        """Pages that a running request will need soon."""
        assert state.sequence is not None
        tokens = _LOOKAHEAD if state.search is None else 1  # a beam stops after its next token
        ahead = min(len(state.tokens) + tokens, state.request.max_len)
        return max(0, self.pages_for(ahead) - len(state.sequence.pages))

    def num_outstanding(self) -> int:
        """Pages that the running requests will need soon. O(running requests)."""
        return sum(self.pages_ahead(state) for state in self._running)

    def num_fitting(self, state: RequestState, count: int) -> int:
        """Number of the `count` tokens that fit without preemption."""
        sequence, cache = state.sequence, self._cache
        assert sequence is not None
        slack = -sequence.length % cache.page_size
        wanted = self.pages_for(max(0, count - slack))
        return min(count, slack + cache.num_obtainable(wanted) * cache.page_size)

    def num_window_pages(self) -> int:
        """Window pages that a request can take now, at most those of a window; 0 without windows.
        O(window pages) where they are short: once a pass, not once a request."""
        return self._cache.num_obtainable(self._window_pages)

    def fits(self, state: RequestState, num_pages: int, num_window_pages: int) -> bool:
        """Whether `num_pages`, which the running ones do not need, are enough for all tokens of a
        waiting one, and `num_window_pages` for those that it sees at once."""
        if not self._running:
            return True  # alone it fits: checked by `Scheduler.add`
        size = self._cache.page_size
        unlocked = state.prefix_watch.cached_len // size - state.prefix_watch.locked_len // size
        need = self._waiting.page_need(state)
        return need + unlocked <= num_pages and min(need, self._window_pages) <= num_window_pages

    def may_fit_any(self, num_pages: int, num_window_pages: int) -> bool:
        """Whether the smallest queued request may fit."""
        least = self._waiting.min_page_need
        return least <= num_pages and min(least, self._window_pages) <= num_window_pages

    def num_startable(self, state: RequestState, count: int) -> int:
        """Number of the `count` forks of `state` that may run now: limited by slots, pages,
        priority and the overtake bound."""
        waiting = self._waiting
        slots = min(count, self._max_running_requests - len(self._running))
        if slots <= 0 or waiting.admission_limit < state.arrival:
            return 0
        if waiting.highest_priority > state.request.params.priority:
            return 0
        size = 1 if self._cache.page_size == 1 else 2  # the next token's, and a copied page
        spare = self._cache.num_available - self.num_outstanding()
        spare = min(spare, self._cache.num_obtainable(slots * size))
        return max(0, min(slots, spare // size))


class InBatchSharing:
    """The running requests of one scheduling pass, by the tokens that they are about to publish.

    A waiting request whose cached prefix ends at position m waits for a running one (its producer)
    when both agree on [0, m] and the producer still has to compute position m.
    """

    def __init__(
        self,
        running: Iterable[RequestState],
        usable_len: Callable[[RequestState], int] | None = None,
    ) -> None:
        """`usable_len(state)`: tokens of its cached prefix that a request can resume from; None for
        a cache whose prefixes can all be resumed. O(tokens)."""
        self._usable_len = usable_len
        self._prefilling: list[RequestState] = []
        self._decoding: dict[int, list[RequestState]] = {}  # by the position that they compute
        for state in running:
            self.add(state)

    def add(self, state: RequestState) -> None:
        sequence = state.sequence
        assert sequence is not None
        if sequence.is_stale:  # its namespace was reset: no lookup finds its tokens
            return
        if state.is_decoding:
            self._decoding.setdefault(len(state.tokens) - 1, []).append(state)
        else:
            self._prefilling.append(state)

    def must_wait(self, state: RequestState) -> bool:
        """Whether `state` should wait for tokens of a running request; registers it as a waiter.

        It then waits until `wake_waiters` releases it.
        """
        if state.producer is not None:
            return True
        limit = state.num_reusable
        start = state.prefix_watch.cached_len
        if self._usable_len is not None and self._is_computed_again(state, start, limit):
            start = self._usable_len(state)
        if start >= limit:
            return False
        for producer in (*self._prefilling, *self._decoding.get(start, ())):
            agreed = _num_agreed(state, producer, start, limit)
            if agreed > max(start, producer.committed):
                state.producer, state.awaited_len = producer, agreed
                producer.waiters.append(state)
                if producer.sequence is not None:
                    producer.sequence.want_checkpoint(agreed)
                return True
        return False

    def _is_computed_again(self, state: RequestState, cached_len: int, limit: int) -> bool:
        """Whether a producer computes tokens of `state` that are cached."""
        return any(
            (done := producer.committed) < cached_len
            and _num_agreed(state, producer, done, limit) > done
            for producer in self._prefilling
        )


def wake_waiters(producer: RequestState) -> list[RequestState]:
    """Release the waiters whose tokens are committed; all when `producer` has stopped running."""
    if not producer.waiters:
        return []
    reached = math.inf if producer.sequence is None else producer.committed
    woken = [state for state in producer.waiters if state.awaited_len <= reached]
    if woken:
        producer.waiters = [state for state in producer.waiters if state.awaited_len > reached]
        for state in woken:
            state.producer = None
    return woken


def _num_agreed(state: RequestState, producer: RequestState, start: int, limit: int) -> int:
    """Leading tokens that both share, at most `limit`; 0 unless they share more than `start`."""
    if state.request.params.namespace != producer.request.params.namespace:
        return 0
    mine, theirs = state.tokens.view(), producer.tokens.view()
    if len(theirs) <= start or mine[start] != theirs[start]:
        return 0
    size = min(limit, len(theirs))
    differs = mine[:size] != theirs[:size]
    first = int(differs.argmax())
    return first if differs[first] else size


def want_checkpoints(sequence: CacheSequence, turn_starts: Sequence[int]) -> None:
    """Keep the states at which a conversation may be divided: before the generation prompt, after
    system message and tools, and at the ends of other messages."""
    for start in turn_starts:
        is_end = start in (turn_starts[0], turn_starts[-1])
        sequence.want_checkpoint(start, PROMPT if is_end else MESSAGE)


class Admission:
    """Works on the scheduler's own queues; keeps nothing between steps."""

    def __init__(
        self,
        cache: PrefixCache,
        waiting: WaitingQueue,
        running: RunningRequests,
        page_budget: PageBudget,
        shared: CrossNamespacePrefixes,
        max_running_requests: int,
        clock: Callable[[], float],
        pricing: PricedAdmission | None = None,
    ) -> None:
        """`pricing`: also decides whether a request is worth the K/V that it evicts."""
        self._cache = cache
        self._pricing = pricing
        self._held: tuple[int, int] | None = None  # of the last pass that held a request
        self._num_skipped = 0  # passes since
        self._max_held = 4 if waiting.is_by_match else 64
        self._waiting = waiting
        self._running = running
        self._page_budget = page_budget
        self._cross_namespace = shared
        self._max_running_requests = max_running_requests
        self._clock = clock

    def admit(self, batch: Batch) -> None:
        """Start waiting requests in order, looking past those that cannot start now."""
        waiting, page_budget = self._waiting, self._page_budget
        if batch.is_out_of_pages or not waiting or not self.has_slots(batch):
            return
        if self._pricing is not None and self._is_held():
            return
        waiting.refresh()
        outstanding = page_budget.num_outstanding()
        spare = self._cache.num_available - outstanding
        if self.is_blocked(spare):
            return  # no need to scan the queue
        window_pages = page_budget.num_window_pages()
        may_lack_state = self._cache.window_size or self._cache.num_states
        sharing = InBatchSharing(
            self._running if self._cache.sharing_enabled else (),
            self._usable_len if may_lack_state else None,
        )
        pricing, num_held, self._held = self._pricing, 0, None
        if pricing is not None:
            pricing.begin_pass()
        for state in waiting.candidates():
            if self._cache.sharing_enabled and sharing.must_wait(state):
                waiting.mark_blocked(state)
                continue
            if (
                pricing is not None
                and self._running
                and waiting.admission_limit == math.inf
                and not pricing.is_worth(state)
            ):
                num_held += 1
                self._held = waiting.num_changes, len(self._running)
                if num_held == self._max_held:
                    return
                continue
            if page_budget.fits(state, spare, window_pages) and self._start(state, batch):
                if pricing is not None:
                    pricing.begin_pass()
                sharing.add(state)
                if not self.has_slots(batch):
                    return
                outstanding += page_budget.pages_ahead(state)
                spare = self._cache.num_available - outstanding
                window_pages = page_budget.num_window_pages()
            if self._running and not page_budget.may_fit_any(spare, window_pages):
                return  # no later candidate fits either

    def _is_held(self) -> bool:
        """Whether the last pass held requests and nothing has changed since but time, which is
        looked at every few steps."""
        if self._held != (self._waiting.num_changes, len(self._running)) or not self._running:
            self._num_skipped = 0
            return False
        self._num_skipped += 1
        return self._num_skipped % _HELD_STEPS != 0

    def _usable_len(self, state: RequestState) -> int:
        return self._cache.resumable_len(state.prefix_watch)

    def has_slots(self, batch: Batch) -> bool:
        num_running = len(self._running) - batch.num_ending_in_flight
        return batch.token_budget > 0 and num_running < self._max_running_requests

    def _start(self, state: RequestState, batch: Batch) -> bool:
        """Lock its cached prefix, plan its first chunk; False and no change if pages are short."""
        session = state.session if state.session is not None and state.session.is_open else None
        sequence, lookup = self._cache.acquire_watched(
            state.prefix_watch, session=session, priority=state.request.params.priority
        )
        if self._cache.num_states:
            want_checkpoints(sequence, state.request.turn_starts)
        copied = self._cross_namespace.copy_into(sequence, state.match_tokens())
        if state.lookup is None:
            state.cached_on_arrival += copied
        wanted = min(batch.token_budget, len(state.tokens) - sequence.cached_len)
        state.sequence = sequence
        count = max(1, self._page_budget.num_fitting(state, wanted))
        try:
            sequence.extend(state.tokens.view(sequence.length, sequence.length + count))
        except OutOfPages:
            sequence.release()
            state.sequence = None
            return False
        self._waiting.remove(state)
        self._waiting.note_admitted(state)
        self._running.add(state)
        state.admit(sequence, lookup, self._clock())
        if state.search is not None:
            leader = state.search.leader
            leader.num_reused = min(leader.num_reused, state.num_reused)
        batch.add(state, count, is_decode=False)
        return True

    def is_blocked(self, spare: int) -> bool:
        """Whether no queued request fits into `spare` pages. O(preempted requests)."""
        if not self._running or self._waiting.min_page_need <= spare:
            return False
        return self._waiting.admission_limit == math.inf
