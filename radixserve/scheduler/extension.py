"""`SchedulerExtension` and `RequestGroup`: the plug points for features beside single requests.

An extension acts between steps and may hold pages; an exception of it ends the engine. A group
decides what follows the samples of requests that continue jointly. test_extension.py has both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from radixserve.arrays import IntArray
from radixserve.cache import CacheSequence, PrefixCache
from radixserve.output import Finish, RequestOutput
from radixserve.schedule import SampleOutput
from radixserve.scheduler.page_budget import PageBudget
from radixserve.scheduler.request_state import RequestState
from radixserve.scheduler.running_requests import RunningRequests
from radixserve.scheduler.stats import SchedulerStats
from radixserve.scheduler.step_costs import StepCosts
from radixserve.scheduler.waiting_queue import WaitingQueue


class Close(Protocol):
    """Ends a request and adds up its numbers."""

    def __call__(
        self, state: RequestState, reason: str, error: BaseException | None = None
    ) -> Finish: ...


class SchedulerParts(NamedTuple):
    """What plugs into a scheduler may use these parts of it, between its calls of the cache."""

    cache: PrefixCache
    requests: dict[str, RequestState]  # all open ones, by id
    running: RunningRequests
    waiting: WaitingQueue
    page_budget: PageBudget
    counts: SchedulerStats
    costs: StepCosts
    clock: Callable[[], float]
    reserve_arrivals: Callable[[int], None]  # keep so many arrival numbers after the last one
    requeue: Callable[[RequestState], None]  # let a request without pages wait for them
    preempt: Callable[[RequestState], None]  # `suspend`, for want of pages
    suspend: Callable[[RequestState], None]  # release a running request's pages and requeue it
    extensions: Sequence[SchedulerExtension]
    remove: Callable[[RequestState], None]  # take a request out of its queue, release its pages
    close: Close  # `remove` the request of a caller, and add up its numbers


class SchedulerExtension:
    """Plugged in by `Scheduler.plug_in`; the scheduler makes all calls, in the order of plugging
    in. Each method does nothing unless it is overridden.

    The order matters where pages are short: extensions are asked one after the other for pages, and
    the next one only if those before gave none. So plug in first what costs least to give up.
    """

    is_due = False  # whether `begin_step` has something to do; it is not called otherwise
    # Requests with pages that take no part in steps, by arrival. They are members of groups.
    parked: Mapping[int, RequestState] = {}

    def attach(self, parts: SchedulerParts) -> None:
        """Called once, when it is plugged in."""

    def on_arrival(self, state: RequestState) -> None:
        """A request is about to be queued. May set its `group`."""

    def begin_step(self) -> None:
        """A step is about to be scheduled, and none is in flight. O(1), amortised."""

    def before_start(self, state: RequestState) -> None:
        """A waiting request is about to take its prefix from the cache."""

    def extend_prefix(self, sequence: CacheSequence, tokens: IntArray) -> int:
        """Returns how many tokens of a request were added to its new sequence without computing
        them. `tokens`: the prompt, and what follows it."""
        del sequence, tokens
        return 0

    def on_scored(self, state: RequestState) -> None:
        """Targets of a running request were scored, and the tokens before them are committed."""

    def on_end(self, state: RequestState) -> None:
        """A request ends, and its pages are about to be released if it has some."""

    def on_epoch(self) -> None:
        """The weights have changed. Gives up what was computed with others."""

    def fill_slots(self) -> None:
        """It has parked requests, and the step that was planned leaves slots free. May release
        pages of parked requests for those that wait; these are looked at again."""

    def make_room(self, state: RequestState | None) -> bool:
        """A running request finds no page, or no request can continue: None. Gives up some of the
        pages that the extension holds. False if it holds none that it would give up for that."""
        del state
        return False

    def stats(self) -> dict[str, Any]:
        """Returns its figures of `Scheduler.stats`."""
        return {}

    def check(self) -> None:
        """AssertionError at the first broken invariant."""


class RequestGroup(ABC):
    """Requests that continue jointly, see `RequestState.group`. The scheduler queues, starts and
    preempts each of them like any other request, but the group takes their samples.
    """

    @property
    @abstractmethod
    def num_output(self) -> int:
        """Tokens of its longest answer so far."""

    @abstractmethod
    def take_sample(self, state: RequestState, sample: SampleOutput) -> None:
        """A member was sampled."""

    @abstractmethod
    def end_step(self) -> None:
        """The samples of the last step in flight were taken, some of this group among them."""

    def advance(self) -> RequestOutput | None:
        """Continue, after `end_step` of all groups. Returns an output for the caller, if any."""
        return None

    @abstractmethod
    def end(self, reason: str, error: BaseException | None = None) -> RequestOutput:
        """End all members: one was to end. Returns the output for the caller."""

    @abstractmethod
    def unpark(self, state: RequestState) -> None:
        """Release the pages of a member that is parked, see `SchedulerExtension.parked`."""

    @abstractmethod
    def may_rest(self, state: RequestState) -> bool:
        """Whether a member may be neither running, waiting nor parked."""
