"""`Admission`: starts waiting requests while there are slots, prefill tokens and pages for them."""

from __future__ import annotations

import math
from collections.abc import Callable

from radixserve.cache import PrefixCache
from radixserve.errors import OutOfPages
from radixserve.scheduler.batch_builder import BatchBuilder
from radixserve.scheduler.cross_namespace_prefixes import CrossNamespacePrefixes
from radixserve.scheduler.in_batch_sharing import InBatchSharing
from radixserve.scheduler.page_budget import PageBudget
from radixserve.scheduler.request_state import RequestState
from radixserve.scheduler.running_requests import RunningRequests
from radixserve.scheduler.waiting_queue import WaitingQueue


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
    ) -> None:
        self._cache = cache
        self._waiting = waiting
        self._running = running
        self._page_budget = page_budget
        self._shared = shared
        self._max_running_requests = max_running_requests
        self._clock = clock

    def admit(self, batch: BatchBuilder) -> None:
        """Start waiting requests in order, looking past those that cannot start now."""
        waiting, page_budget = self._waiting, self._page_budget
        if batch.is_out_of_pages or not waiting or not self.has_slots(batch):
            return
        waiting.refresh()
        outstanding = page_budget.num_outstanding()
        spare = self._cache.num_available - outstanding
        if self.is_short(spare):
            return  # no need to scan the queue
        window_pages = page_budget.num_window_pages()
        forgets = self._cache.window_size or self._cache.num_states
        sharing = InBatchSharing(
            self._running if self._cache.sharing_enabled else (),
            self._usable_len if forgets else None,
        )
        for state in waiting.candidates():
            if self._cache.sharing_enabled and sharing.must_wait(state):
                waiting.note_waits(state)
                continue
            if page_budget.fits(state, spare, window_pages) and self._start(state, batch):
                sharing.add(state)
                if not self.has_slots(batch):
                    return
                outstanding += page_budget.pages_ahead(state)
                spare = self._cache.num_available - outstanding
                window_pages = page_budget.num_window_pages()
            if self._running and not page_budget.may_fit_any(spare, window_pages):
                return  # no later candidate fits either

    def _usable_len(self, state: RequestState) -> int:
        tokens, namespace = state.match_tokens(), state.request.params.namespace
        return self._cache.lookup(tokens, namespace, compare_namespaces=False).cached_len

    def has_slots(self, batch: BatchBuilder) -> bool:
        num_running = len(self._running) - batch.num_ending
        return batch.token_budget > 0 and num_running < self._max_running_requests

    def _start(self, state: RequestState, batch: BatchBuilder) -> bool:
        """Lock its cached prefix, plan its first chunk; False and no change if pages are short."""
        namespace, prefix = state.request.params.namespace, state.match_tokens()
        lookup = self._cache.lookup(prefix, namespace)
        session = state.session if state.session is not None and state.session.is_open else None
        sequence = self._cache.acquire(
            prefix, namespace, session=session, priority=state.request.params.priority
        )
        copied = self._shared.copy_into(sequence, prefix)
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

    def is_short(self, spare: int) -> bool:
        """Whether no queued request fits into `spare` pages. O(preempted requests)."""
        if not self._running or self._waiting.min_page_need <= spare:
            return False
        return self._waiting.admission_limit == math.inf
