"""`Admission`: starts waiting requests while there are slots, prefill tokens and pages for them.

`PageBudget` counts available pages; `InBatchSharing` finds the requests that should wait for tokens
that a running request is computing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from radixserve.cache import PrefixCache
from radixserve.errors import OutOfPages
from radixserve.scheduler.batch import Batch
from radixserve.scheduler.extension import SchedulerExtension
from radixserve.scheduler.policy import AdmissionPolicy
from radixserve.scheduler.request_state import RequestState
from radixserve.scheduler.running_requests import RunningRequests
from radixserve.scheduler.tenants import Tenant, TenantShares
from radixserve.scheduler.waiting_queue import WaitingQueue

_HELD_STEPS = 8  # after which held requests are looked at again
_PATIENCE = 16  # steps that a tenant without a running request waits before others are preempted
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
        # of layers beside K/V; a request takes no more at once
        self._layer_pages = 0 if cache.layers is None else cache.layers.pages_at_once

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._cache.page_size)

    def pages_ahead(self, state: RequestState) -> int:
        """Pages that a running request will need soon."""
        assert state.sequence is not None
        tokens = _LOOKAHEAD if state.search is None else 1  # a beam stops after its next token
        ahead = min(len(state.tokens) + tokens, state.request.max_len)
        return max(0, self.pages_for(ahead) - state.sequence.num_pages)

    def pages_soon(self, state: RequestState) -> int:
        """Pages that a running request has, and will need soon."""
        assert state.sequence is not None
        return state.sequence.num_pages + self.pages_ahead(state)

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

    def may_fit_any(
        self, num_pages: int, num_layer_pages: int, tenant: Tenant | None = None
    ) -> bool:
        """Whether the smallest queued request, of all or of one tenant, may fit."""
        waiting = self._waiting
        least = waiting.min_page_need if tenant is None else waiting.min_page_need_of(tenant)
        return least <= num_pages and min(least, self._layer_pages) <= num_layer_pages

    def num_startable(self, state: RequestState, count: int) -> int:
        """Number of the `count` forks of `state` that may run now: limited by slots, pages,
        priority and the overtake bound."""
        slots = min(count, self._max_running_requests - len(self._running))
        priority = state.request.params.priority
        if slots <= 0 or not self._waiting.is_first(state.arrival, state.tenant, priority):
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
    if state.request.namespace != producer.request.namespace:
        return 0
    mine, theirs = state.tokens.view(), producer.tokens.view()
    if len(theirs) <= start or mine[start] != theirs[start]:
        return 0
    size = min(limit, len(theirs))
    differs = mine[:size] != theirs[:size]
    first = int(differs.argmax())
    return first if differs[first] else size


class Admission:
    """Works on the scheduler's own queues; keeps nothing between steps."""

    def __init__(
        self,
        cache: PrefixCache,
        waiting: WaitingQueue,
        running: RunningRequests,
        page_budget: PageBudget,
        extensions: Sequence[SchedulerExtension],
        max_running_requests: int,
        clock: Callable[[], float],
        shares: TenantShares,
        policy: AdmissionPolicy,
        max_held: int,
    ) -> None:
        """`max_held`: held requests of a tenant after which a pass skips it."""
        self._cache = cache
        self._policy = policy
        self._max_held = max_held
        self._held: tuple[int, int] | None = None  # of the last pass that held a request
        self._num_skipped = 0  # passes since
        self._waiting = waiting
        self._running = running
        self._page_budget = page_budget
        self._extensions = extensions
        self._max_running_requests = max_running_requests
        self._clock = clock
        self._shares = shares
        self._starving: tuple[RequestState, int] | None = None  # and the step since when
        self._kept_for = -1  # state of the queue when a share of a step was last kept in vain

    def admit(self, batch: Batch) -> None:
        """Start waiting requests in order, looking past those that cannot start now."""
        waiting, page_budget = self._waiting, self._page_budget
        if batch.is_out_of_pages or not waiting or not self.has_slots(batch):
            return
        if self._policy.holds_requests and self._is_held():
            return
        waiting.refresh()
        outstanding = page_budget.num_outstanding()
        spare = self._cache.num_available - outstanding
        if self.is_blocked(spare):
            return  # no need to scan the queue
        layer_pages = page_budget.num_layer_pages()
        sharing = InBatchSharing(
            self._running if self._cache.sharing_enabled else (),
            None if self._cache.layers is None else self._usable_len,
        )
        policy, self._held = self._policy, None
        num_held: Counter[Tenant] = Counter()
        if policy.holds_requests:
            policy.begin_pass()
            waiting.begin_pass()
        for state in waiting.candidates(self._running):
            if self._cache.sharing_enabled and sharing.must_wait(state):
                waiting.mark_blocked(state)
                continue
            fits = page_budget.fits(state, spare, layer_pages)
            if fits and policy.holds_requests and not self._may_start(state):
                num_held[state.tenant] += 1
                waiting.order_of(state).note_held()
                self._held = waiting.num_changes, len(self._running)
                if num_held[state.tenant] == self._max_held and not waiting.skip_tenant(state):
                    return
                continue
            if fits and self._start(state, batch):
                policy.note_started(state)
                sharing.add(state)
                if not self.has_slots(batch):
                    return
                outstanding += page_budget.pages_ahead(state)
                spare = self._cache.num_available - outstanding
                layer_pages = page_budget.num_layer_pages()
            if self._running and not page_budget.may_fit_any(spare, layer_pages):
                return  # no later candidate fits either
            if self._shares.are_shared and not page_budget.may_fit_any(
                spare, layer_pages, state.tenant
            ):
                waiting.skip_tenant(state)

    def _may_start(self, state: RequestState) -> bool:
        """Whether the policy lets a request start that fits. It is not asked about one that runs
        alone, or has reached its bound on waiting."""
        if not self._running or self._waiting.must_start(state):
            return True
        return self._policy.may_start(state, self._waiting.order_of(state))

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

    def tokens_to_keep(self, batch: Batch, prefills: Sequence[RequestState]) -> int:
        """Tokens of the step that running `prefills` leave to waiting requests: half of them where
        a tenant waits that has been served less, unless that was in vain before."""
        waiting = self._waiting
        if not (self._shares.are_shared and waiting and prefills and self.has_slots(batch)):
            return 0
        served = min(state.tenant.virtual_time for state in prefills)
        if self._kept_for == waiting.num_changes or not waiting.is_behind(served, self._running):
            return 0
        self._kept_for = waiting.num_changes
        return batch.token_budget // 2

    def starved(self, step: int) -> RequestState | None:
        """The waiting request whose turn it is, where its tenant runs nothing and it has found no
        slot or no pages for _PATIENCE steps, and again after as many. O(running requests)."""
        state = self._waiting.first(self._running) if self._shares.are_shared else None
        if state is None or self._running.num_of(state.tenant) or self.can_start(state):
            self._starving = None
            return None
        if self._starving is None or self._starving[0] is not state:
            self._starving = state, step
        num_steps = step - self._starving[1]
        return state if num_steps and num_steps % _PATIENCE == 0 else None

    def can_start(self, state: RequestState, num_pages: int = 0, num_slots: int = 0) -> bool:
        """Whether a slot and pages are free for a waiting request, with `num_pages` and `num_slots`
        more than there are. O(running requests)."""
        if len(self._running) - num_slots >= self._max_running_requests:
            return False
        page_budget = self._page_budget
        spare = self._cache.num_available + num_pages - page_budget.num_outstanding()
        return page_budget.fits(state, spare, page_budget.num_layer_pages())

    def has_slots(self, batch: Batch) -> bool:
        num_running = len(self._running) - batch.num_ending_in_flight
        return batch.token_budget > 0 and num_running < self._max_running_requests

    def _start(self, state: RequestState, batch: Batch) -> bool:
        """Lock its cached prefix, plan its first chunk; False and no change if pages are short."""
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
        return not self._waiting.has_limit
