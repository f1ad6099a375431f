"""`Admission`: starts waiting requests while there are slots, prefill tokens and pages for them.

`InBatchSharing` finds the requests that should wait for tokens that a running request is computing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from radixserve.cache import PrefixCache
from radixserve.errors import OutOfPages
from radixserve.scheduler.batch import Batch
from radixserve.scheduler.extension import SchedulerExtension
from radixserve.scheduler.page_budget import PageBudget
from radixserve.scheduler.policy import AdmissionPolicy
from radixserve.scheduler.request_state import RequestState
from radixserve.scheduler.running_requests import RunningRequests
from radixserve.scheduler.waiting_queue import WaitingQueue

_HELD_STEPS = 8  # after which held requests are looked at again


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
        is_scored = state.is_scored
        if start >= limit and is_scored:
            return False
        for producer in (*self._prefilling, *self._decoding.get(start, ())):
            most = limit
            if state.scores is not None and not is_scored:
                most = max(limit, state.scores.num_shared(state, producer))
            agreed = _num_agreed(state, producer, start, most)
            # After `limit` logits are needed, so the last of the tokens with scores is computed.
            if agreed > producer.committed and agreed - (agreed > limit) > start:
                state.producer, state.awaited_len = producer, agreed
                producer.waiters.append(state)
                if producer.sequence is not None:
                    producer.sequence.note_branch_point(agreed)
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
    if start >= limit or state.request.namespace != producer.request.namespace:
        return 0
    mine, theirs = state.tokens.view(), producer.tokens.view()
    if len(theirs) <= start or mine[start] != theirs[start]:
        return 0
    size = min(limit, len(theirs))
    differs = mine[:size] != theirs[:size]
    first = int(differs.argmax())
    return first if differs[first] else size


class Admission:
    """Works on the scheduler's own queues. Between passes it keeps when it last held a request."""

    def __init__(
        self,
        cache: PrefixCache,
        waiting: WaitingQueue,
        running: RunningRequests,
        page_budget: PageBudget,
        extensions: Sequence[SchedulerExtension],
        clock: Callable[[], float],
        policy: AdmissionPolicy,
    ) -> None:
        self._cache = cache
        self._policy = policy
        self._held: tuple[int, int] | None = None  # of the last pass that held a request
        self._num_skipped = 0  # passes since
        self._waiting = waiting
        self._running = running
        self._page_budget = page_budget
        self._extensions = extensions
        self._clock = clock

    def admit(self, batch: Batch) -> None:
        """Start waiting requests in order, looking past those that cannot start now."""
        waiting, page_budget = self._waiting, self._page_budget
        if batch.is_out_of_pages or not waiting or not batch.has_slots(self._running):
            return
        if self._policy.holds_requests and self._is_held():
            return
        waiting.refresh()
        outstanding = page_budget.num_outstanding()
        spare = self._cache.num_available - outstanding
        if self._is_blocked(spare):
            return  # no need to scan the queue
        layer_pages = page_budget.num_layer_pages()
        sharing = InBatchSharing(
            self._running if self._cache.sharing_enabled else (),
            None if self._cache.layers is None else self._usable_len,
        )
        policy, self._held = self._policy, None
        if policy.holds_requests:
            policy.begin_pass()
            waiting.begin_pass()

        def may_fit(num_needed: float) -> bool:
            return page_budget.may_fit(num_needed, spare, layer_pages)

        for state in waiting.candidates(self._running):
            if self._cache.sharing_enabled and sharing.must_wait(state):
                waiting.mark_blocked(state)
                continue
            fits = page_budget.fits(state, spare, layer_pages)
            if fits and policy.holds_requests and not self._may_start(state):
                waiting.note_held(state)
                policy.num_held += 1
                self._held = waiting.num_changes, len(self._running)
                continue
            if fits and self._start(state, batch):
                policy.note_started(state)
                sharing.add(state)
                if not batch.has_slots(self._running):
                    return
                outstanding += page_budget.pages_ahead(state)
                spare = self._cache.num_available - outstanding
                layer_pages = page_budget.num_layer_pages()
            elif fits:
                policy.begin_pass()  # the attempt has changed what is evicted next
            if self._running and not may_fit(waiting.min_page_need):
                return  # no later candidate fits either
            waiting.pass_unfitting(state, may_fit)

    def _may_start(self, state: RequestState) -> bool:
        """Whether a request that fits starts: it runs alone, or the policy lets it, or it has
        reached its bound on waiting."""
        waiting = self._waiting
        may_start = not self._running or self._policy.may_start(state, waiting.order_of(state))
        return may_start or waiting.must_start(state)

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

    def _start(self, state: RequestState, batch: Batch) -> bool:
        """Lock its cached prefix, plan its first chunk; False and no change if pages are short."""
        for extension in self._extensions:
            extension.before_start(state)
        session = state.session if state.session is not None and state.session.is_open else None
        sequence, lookup = self._cache.acquire_watched(
            state.prefix_watch, session=session, priority=state.request.params.priority
        )
        if self._cache.layers is not None:
            self._cache.layers.note_turns(sequence, state.request.turn_starts)
        copied = 0
        for extension in self._extensions:
            copied += extension.extend_prefix(sequence, state.match_tokens())
        if state.lookup is None:
            state.cached_on_arrival += copied
        wanted = min(batch.tokens_left(state), len(state.tokens) - sequence.cached_len)
        state.sequence = sequence
        start = sequence.length
        count = state.chunk_len(start, max(1, self._page_budget.num_fitting(state, wanted)))
        try:
            sequence.extend(state.tokens.view(start, start + count))
        except OutOfPages:
            sequence.release()
            state.sequence = None
            return False
        self._waiting.remove(state)
        self._waiting.note_admitted(state)
        self._running.add(state)
        state.admit(sequence, lookup, self._clock())
        batch.add(state, count, is_decode=False)
        return True

    def _is_blocked(self, spare: int) -> bool:
        """Whether no queued request fits into `spare` pages. O(preempted requests)."""
        may_fit = not self._running or self._waiting.min_page_need <= spare
        return not may_fit and not self._waiting.has_limit
