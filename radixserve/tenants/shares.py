"""`TenantShares`: shares the machine between tenants, by the tokens computed for each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from radixserve.cache import PrefixCache
from radixserve.schedule import SchedulerOutput
from radixserve.scheduler.batch import Batch
from radixserve.scheduler.extension import SchedulerParts
from radixserve.scheduler.policy import AdmissionPolicy
from radixserve.scheduler.request_state import RequestState
from radixserve.scheduler.shares import Shares
from radixserve.tenants.queues import TenantQueues
from radixserve.tenants.running import TenantRunning
from radixserve.tenants.virtual_time import Tenant, VirtualTimes

_PATIENCE = 16  # steps that a tenant without a running request waits before others are preempted


class TenantShares(Shares):
    """A request's `share` is its `Tenant`."""

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        """`weights`: of tenants by name; the others have 1."""
        self.times = VirtualTimes(weights)
        self._starved_since: tuple[RequestState, int] | None = None  # and the step
        self._share_refused_at = -1  # `num_changes` of the queue when tokens were last kept

    def make_running(self, max_running_requests: int) -> TenantRunning:
        self._running = TenantRunning(max_running_requests)
        return self._running

    def make_waiting(
        self,
        cache: PrefixCache,
        policy: str,
        max_overtake: int,
        max_wait_s: float | None,
        clock: Callable[[], float],
        admission: AdmissionPolicy,
    ) -> TenantQueues:
        self._waiting = TenantQueues(
            self.times, cache, policy, max_overtake, max_wait_s, clock, admission
        )
        return self._waiting

    def attach(self, parts: SchedulerParts) -> None:
        self._parts = parts

    def on_arrival(self, state: RequestState) -> None:
        state.share = self.times.enter(state.request.namespace.tenant)

    def on_end(self, state: RequestState) -> None:
        self.times.leave(state.share)

    def note_dispatched(self, batch: Batch, schedule: SchedulerOutput) -> None:
        """Counts the step's tokens as service to the tenants. O(1) with one tenant."""
        if not self._running.are_shared:
            tenant: Tenant = batch.states[0].share
            tenant.charge(schedule.num_prefill_tokens + schedule.num_decode_tokens)
            return
        for state, num_tokens in zip(batch.states, schedule.rows.num_tokens, strict=True):
            state.share.charge(num_tokens)

    # -- the parts of a step ------------------------------------------------------------------

    def step_tokens(self, max_tokens: int) -> int:
        """With requests of several tenants, their chunks take no longer than the decode rows: no
        tenant's prompts hold up another's tokens."""
        if not self.times.are_shared:
            return max_tokens
        return self._parts.costs.tokens_beside_decodes(max_tokens)

    def tokens_to_keep(self, batch: Batch, prefills: Sequence[RequestState]) -> int:
        """Half of them where a tenant waits that has been served less, unless that was in vain
        before."""
        waiting, running = self._waiting, self._running
        if not (self.times.are_shared and waiting and prefills and batch.has_slots(running)):
            return 0
        served = min(state.share.virtual_time for state in prefills)
        if self._share_refused_at == waiting.num_changes or not waiting.is_behind(served, running):
            return 0
        self._share_refused_at = waiting.num_changes
        return batch.token_budget // 2

    # -- tenants that run nothing -------------------------------------------------------------

    def may_schedule_ahead(self) -> bool:
        if not self.times.are_shared:
            self._starved_since = None
            return True
        return self._starved() is None

    def begin_step(self) -> None:
        """Preempt requests of tenants that run several until a starved one finds a slot and pages;
        none where that cannot be enough."""
        if not self.times.are_shared:
            self._starved_since = None
            return
        starved = self._starved()
        if starved is None:
            return
        self._waiting.refresh()
        left = Counter(state.share for state in self._running)
        victims: list[RequestState] = []
        for state in reversed(list(self._running.by_priority())):
            if left[state.share] > 1 and state.group is None:
                left[state.share] -= 1
                victims.append(state)
        num_pages = sum(map(self._pages_soon, victims))
        if not self._can_start(starved, num_pages, len(victims)):
            return
        for state in victims:
            if self._can_start(starved):
                return
            self._parts.preempt(state)

    def _starved(self) -> RequestState | None:
        """The waiting request whose turn it is, where its tenant runs nothing and it has found no
        slot or no pages for _PATIENCE steps, and again after as many. O(running requests)."""
        state = self._waiting.first(self._running)
        if state is None or self._running.num_of(state.share) or self._can_start(state):
            self._starved_since = None
            return None
        step = self._parts.counts.steps
        if self._starved_since is None or self._starved_since[0] is not state:
            self._starved_since = state, step
        num_steps = step - self._starved_since[1]
        return state if num_steps and num_steps % _PATIENCE == 0 else None

    def _can_start(self, state: RequestState, num_pages: int = 0, num_slots: int = 0) -> bool:
        """Whether a slot and pages are free for a waiting request, with `num_pages` and `num_slots`
        more than there are. O(running requests)."""
        if len(self._running) - num_slots >= self._running.max_requests:
            return False
        budget = self._parts.page_budget
        spare = self._parts.cache.num_available + num_pages - budget.num_outstanding()
        return budget.fits(state, spare, budget.num_layer_pages())

    def _pages_soon(self, state: RequestState) -> int:
        """Pages that a running request has, and will need soon."""
        assert state.sequence is not None
        return state.sequence.num_pages + self._parts.page_budget.pages_ahead(state)
