"""`PricedAdmission`: whether starting a waiting request is worth the K/V that it would evict.

All prices are in seconds. See docs/scheduling.md for the derivation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from radixserve.cache import PrefixCache, ReturnEstimate
from radixserve.scheduler.request_state import RequestState
from radixserve.scheduler.returns import ReturnTimes, waiting_return
from radixserve.scheduler.running_requests import RunningRequests
from radixserve.scheduler.step_costs import StepCosts
from radixserve.scheduler.waiting_queue import WaitingQueue

_MAX_BACKLOGS = 16.0  # that a request waits: the time that all waiting requests take to compute
_MARGIN = 1.4  # by which a gain exceeds the price, and by which it may fall short for the oldest


class PricedAdmission:
    """Whether a waiting request is worth what it would push out, and what the cache should expect.

    Within a scheduling pass the victims are read once: `begin_pass`, then `is_worth`.
    """

    def __init__(
        self,
        cache: PrefixCache,
        running: RunningRequests,
        waiting: WaitingQueue,
        costs: StepCosts,
        clock: Callable[[], float],
    ) -> None:
        """`clock`: the scheduler's; the cache's may be another one."""
        self._cache, self._running, self._waiting = cache, running, waiting
        self._clock = clock
        self.costs = costs
        self.returns = ReturnTimes()
        self.num_held = 0  # decisions to let a request wait, since the start
        self._has_adopted = False  # the cache knows what is expected of what was released before
        self._victims: Iterator[tuple[int, ReturnEstimate | None]] | None = None
        self._known: list[tuple[int, ReturnEstimate | None]] = []  # the first victims, once read
        self._growth: int | None = None  # tokens that running requests will add, once counted
        self._now = 0.0  # on the cache's clock

    # -- what happens -------------------------------------------------------------------------

    def note_arrival(self, state: RequestState) -> None:
        """A request was queued: its prefix goes last, and its session has come back."""
        now, returns = self._cache.time(), self.returns
        returns.note_arrival(state, now)
        if not self._has_adopted and (typical := returns.typical(now)) is not None:
            self._has_adopted = True
            self._cache.adopt_returns(typical)
        watch = state.prefix_watch
        self._cache.expect_return(watch, waiting_return(now, watch.cached_len))

    def note_end(self, state: RequestState, reason: str) -> None:
        """A request is about to be removed; its sequence carries when its session comes back."""
        is_finished = reason in ("stop", "length")
        expected = self.returns.note_end(state, self._cache.time(), is_finished=is_finished)
        if state.sequence is not None:
            state.sequence.expected_return = expected

    def note_preempted(self, state: RequestState) -> None:
        """A running request is about to wait again."""
        if state.sequence is not None:
            length = state.sequence.committed_len
            state.sequence.expected_return = waiting_return(self._cache.time(), length)

    # -- the decision -------------------------------------------------------------------------

    def max_wait_s(self, num_tokens: int) -> float:
        """How long a request may wait at most when so many tokens of waiting requests are to be
        computed; inf until costs are known.

        So they start at any price before long, however large they and their prices are.
        """
        seconds = _MAX_BACKLOGS * num_tokens * self.costs.prefill_token_s
        return seconds or math.inf

    def begin_pass(self) -> None:
        """What runs or is cached has changed. O(1)."""
        self._victims, self._known = None, []
        self._growth = None
        self._now = self._cache.time()

    def note_started(self, state: RequestState) -> None:
        """A request was started within the pass. O(1)."""
        self._victims, self._known = None, []
        if self._growth is not None:
            self._growth += self._left_to_add(state)

    def is_worth(self, state: RequestState, *, is_oldest: bool = False) -> bool:
        """Whether to start `state` beside the running requests; `is_oldest`: that of the oldest
        waiting session. O(victims), and once a pass O(running requests)."""
        if self._growth is None:
            self._growth = sum(map(self._left_to_add, self._running))
        size, cached_len = self._cache.page_size, state.prefix_watch.cached_len
        wanted = -(-(state.tokens.size - cached_len + self.returns.expected_output(state)) // size)
        growth, num_free = self.returns.growth_share, self._cache.num_free
        # Room for what runs, and for what the sessions that are kept will still add.
        reserved = -(-self._growth // size) + growth * (self._cache.num_pages - num_free + wanted)
        if num_free >= reserved + wanted:
            return True
        have, lost, seconds, dear = float(num_free), 0.0, 0.0, 0.0
        for num_pages, expected in self._read_victims():
            if have >= reserved + wanted:
                break
            if expected is None or expected.late_at <= self._now:
                have += num_pages * (1.0 + growth)  # it does not grow
                continue
            # The part of it that is taken for this request, not for those that run.
            taken = min(have + num_pages, reserved + wanted) - max(have, reserved)
            have += num_pages
            if taken > 0:
                dear += num_pages
                lost += taken * expected.probability
                seconds += num_pages * expected.seconds_left(self._now)
        own_len = cached_len
        if lost:  # others lose K/V now: the request loses what is not locked, if it waits
            own_len -= state.prefix_watch.locked_len
        missing = min(wanted, reserved + wanted - have)
        if missing > 0:  # the room that others will need: they return as the population does
            typical = self.returns.typical(self._now)
            lost += missing * (1.0 if typical is None else typical.probability)
            dear += missing
            if typical is not None:
                seconds += missing * typical.wait_s
        if lost * size <= own_len:
            return True  # what it would lose by waiting is more
        costs, num_running, num_waiting = self.costs, len(self._running), len(self._waiting)
        price = lost * size * costs.prefill_token_s * (1 + num_running + num_waiting)
        # A session more among those that fit: all that wait are served so much sooner.
        num_locked = self._cache.num_pages - self._cache.num_available
        num_fitting = max(1.0, num_running * self._cache.num_pages / max(num_locked, 1))
        gain = seconds / dear * (1.0 + num_waiting / num_fitting)
        # While the machine prefills, computing again delays others; while not, room saves time.
        share = costs.prefill_share
        margin = _MARGIN if is_oldest else 1.0 / _MARGIN
        is_worth = price * share <= margin * gain * (1.0 - share)
        self.num_held += not is_worth
        return is_worth

    def _left_to_add(self, state: RequestState) -> int:
        """Tokens that a running request will still take room for."""
        sequence = state.sequence
        length = 0 if sequence is None else sequence.length
        return state.tokens.size - length + self.returns.expected_output(state)

    def _read_victims(self) -> Iterator[tuple[int, ReturnEstimate | None]]:
        yield from self._known
        if self._victims is None:
            self._victims = self._cache.victims()
        for victim in self._victims:
            self._known.append(victim)
            yield victim
