"""`PageBudget`: which requests the available pages are enough for."""

from __future__ import annotations

from radixserve.cache import PrefixCache
from radixserve.scheduler.request_state import RequestState
from radixserve.scheduler.running_requests import RunningRequests
from radixserve.scheduler.waiting_queue import WaitingQueue


class PageBudget:
    """Computed from the present state of the scheduler's queues and the cache. Read-only."""

    def __init__(self, cache: PrefixCache, running: RunningRequests, waiting: WaitingQueue) -> None:
        self._cache = cache
        self._running = running
        self._waiting = waiting
        # of layers beside K/V; a request takes no more at once
        self._layer_pages = 0 if cache.layers is None else cache.layers.pages_at_once

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._cache.page_size)

    def pages_ahead(self, state: RequestState) -> int:
        """Pages that a running request will need soon."""
        assert state.sequence is not None
        ahead = min(state.tokens.size + state.lookahead, state.request.max_len)
        return max(0, self.pages_for(ahead) - state.sequence.num_pages)

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

    def num_layer_pages(self) -> int:
        """Pages of layers beside K/V that a request can take now, at most as many as it uses at
        once. May cost O(those pages): to be called once a pass."""
        return self._cache.num_obtainable(self._layer_pages)

    def fits(self, state: RequestState, num_pages: int, num_layer_pages: int) -> bool:
        """Whether `num_pages`, which the running ones do not need, are enough for all tokens of a
        waiting one, and `num_layer_pages` for those that it sees at once."""
        if not self._running:
            return True  # alone it fits: checked by `Scheduler.add`
        size = self._cache.page_size
        unlocked = state.prefix_watch.cached_len // size - state.prefix_watch.locked_len // size
        need = self._waiting.page_need(state)
        return need + unlocked <= num_pages and min(need, self._layer_pages) <= num_layer_pages

    def may_fit(self, num_needed: float, num_pages: int, num_layer_pages: int) -> bool:
        """Whether a waiting request with that page need may fit, see `fits`; it may still need
        pages of its cached prefix."""
        return num_needed <= num_pages and min(num_needed, self._layer_pages) <= num_layer_pages
