"""`Shares`: the plug point for sharing the machine between callers whose requests compete."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from radixserve.cache import PrefixCache
from radixserve.schedule import SchedulerOutput
from radixserve.scheduler.batch import Batch
from radixserve.scheduler.extension import SchedulerParts
from radixserve.scheduler.policy import AdmissionPolicy
from radixserve.scheduler.request_state import RequestState
from radixserve.scheduler.running_requests import RunningRequests
from radixserve.scheduler.waiting_queue import WaitingQueue


class Shares:
    """Plain: one queue for the requests of all callers, and steps by priority and arrival.

    A subclass makes queues of its own and decides how much of a step each caller gets. It belongs
    to one scheduler, which makes all calls.
    """

    def make_running(self, max_running_requests: int) -> RunningRequests:
        """Called once, before all others."""
        return RunningRequests(max_running_requests)

    def make_waiting(
        self,
        cache: PrefixCache,
        policy: str,
        max_overtake: int,
        max_wait_s: float | None,
        clock: Callable[[], float],
        admission: AdmissionPolicy,
    ) -> WaitingQueue:
        """Called once, after `make_running`."""
        return WaitingQueue(cache, policy, max_overtake, max_wait_s, clock, admission)

    def attach(self, parts: SchedulerParts) -> None:
        """Called once, after the two above."""

    def on_arrival(self, state: RequestState) -> None:
        """A caller's request is about to be queued. May set its `share`."""

    def on_end(self, state: RequestState) -> None:
        """A caller's request has ended."""

    def begin_step(self) -> None:
        """A step is about to be scheduled, and none is in flight. May preempt requests."""

    def may_schedule_ahead(self) -> bool:
        """Whether a step may be scheduled while one is in flight; no request can be preempted
        then."""
        return True

    def step_tokens(self, max_tokens: int) -> int:
        """Returns the prefill tokens that the next step may compute, at most `max_tokens`."""
        return max_tokens

    def tokens_to_keep(self, batch: Batch, prefills: Sequence[RequestState]) -> int:
        """Returns the tokens of the step that running `prefills` leave to waiting requests."""
        del batch, prefills
        return 0

    def note_dispatched(self, batch: Batch, schedule: SchedulerOutput) -> None:
        """A step was dispatched. O(rows)."""
