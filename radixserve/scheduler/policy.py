"""`AdmissionPolicy`: the plug point that decides which waiting requests start.

The scheduler finds the requests that fit, in the order of a `QueueOrder`, and asks the policy about
each. A request that has reached its bound on waiting starts, whatever the policy says.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from radixserve.cache import PrefixCache
from radixserve.scheduler.queue_order import QueueOrder, make_order
from radixserve.scheduler.request_state import RequestState
from radixserve.scheduler.running_requests import RunningRequests
from radixserve.scheduler.step_costs import StepCosts


class SchedulerView(NamedTuple):
    """What a policy may read of its scheduler, at any call."""

    cache: PrefixCache
    running: RunningRequests
    num_waiting: Callable[[], int]
    costs: StepCosts


class AdmissionPolicy:
    """Greedy: every waiting request that fits starts. Subclasses hold requests back.

    A policy belongs to one scheduler, which makes all calls. `begin_pass` comes first in each pass
    over the waiting requests and before a look at the first of them, then `may_start` of those that
    fit, and `note_started` of those that start.
    """

    holds_requests = False  # whether `may_start` may be false; if not, it is never called
    num_held = 0  # requests that fitted and were held, in any pass since the start

    def attach(self, view: SchedulerView) -> None:
        """Called once, before all others."""

    def make_order(self, schedule_policy: str) -> QueueOrder:
        """Returns a new, empty order of waiting requests, for one queue. `schedule_policy`: a
        field of `EngineConfig`."""
        return make_order(schedule_policy)

    def max_wait_s(self, num_tokens: int) -> float:
        """Returns the seconds after which a waiting request is not asked about but starts, when so
        many tokens of all waiting requests are to be computed."""
        del num_tokens
        return math.inf

    def is_short(self, num_needed: int) -> bool:
        """Whether pages are short for waiting requests that need so many; orders are told. O(1)."""
        del num_needed
        return False

    def begin_pass(self) -> None:
        """A pass over the waiting requests begins. O(1)."""

    def may_start(self, state: RequestState, order: QueueOrder) -> bool:
        """Whether to start a request that fits, beside the running ones. `order`: the one that gave
        it."""
        del state, order
        return True

    def note_arrival(self, state: RequestState) -> None:
        """A request was queued. O(tokens)."""

    def note_started(self, state: RequestState) -> None:
        """A request was started within a pass. O(1)."""

    def note_preempted(self, state: RequestState) -> None:
        """A running request is about to wait again. It still has its sequence."""

    def note_ended(self, state: RequestState, reason: str) -> None:
        """A request is about to be removed. It still has its sequence, if it had one. `reason`:
        its finish_reason, or "error"."""

    def note_session_closed(self, name: str) -> None:
        """A session was closed: it does not come back."""
