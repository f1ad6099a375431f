"""`PageBudget`: page availability for running and waiting requests."""

from __future__ import annotations

from radixserve.cache import PrefixCache
from radixserve.scheduler.request_state import RequestState
from radixserve.scheduler.running_requests import RunningRequests
from radixserve.scheduler.waiting_queue import WaitingQueue

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
