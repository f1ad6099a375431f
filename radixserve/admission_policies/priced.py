"""`PricedAdmission`: holds a request while starting it costs more than it gains.

The price is the time to compute the K/V again that the request would evict; the gain is the time
that its room would otherwise stay unused. Both are in seconds. See docs/priced-admission.md for
the derivation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import NamedTuple

from radixserve.admission_policies.returns import ReturnTimes, waiting_return
from radixserve.cache import ReturnEstimate
from radixserve.scheduler.policy import AdmissionPolicy, SchedulerView
from radixserve.scheduler.queue_order import OrderKey, QueueOrder, SortedOrder, make_order
from radixserve.scheduler.request_state import RequestState

_MAX_BACKLOGS = 16.0  # that a request waits: the time that all waiting requests take to compute
_MAX_UNUSED = 16  # victims that are read to tell whether waiting requests fit
_HELD_BY_WORK = 3  # held requests after which a pass goes on in the plain order
_MARGIN = 1.4  # by which a gain exceeds the price, and by which it may fall short for the oldest


class Victims(NamedTuple):
    """The pages that a request would take: free ones, and those of sessions that come back."""

    pages_found: float
    expected_lost_pages: float  # of victims, by their probability to come back
    victim_pages: float
    think_seconds: float  # until the victims' returns, times their pages


class HeldOrder(QueueOrder):
    """A plain order, changed while requests are held or pages are short.

    - If the last pass held a request, that of the oldest session comes first, and once it has
      started that of the next oldest.
    - With lpm, while pages are short (`PricedAdmission.is_short`), the shortest job comes
      first, see `_work_key`, until three are held: a cached prefix must not wait for small requests
      that are not worth their price.
    """

    def __init__(self, schedule_policy: str) -> None:
        self._order = make_order(schedule_policy)
        self._by_age = SortedOrder(_age_key)
        self._by_work = SortedOrder(_work_key) if schedule_policy == "lpm" else None
        self._held_in_last_pass = False  # whether the last pass held a request
        self._held_in_this_pass = 0  # requests that this pass has held
        self.oldest: RequestState | None = None  # given for the age of its session, in this scan

    def add(self, state: RequestState) -> None:
        self._order.add(state)
        self._by_age.add(state)
        if self._by_work is not None:
            self._by_work.add(state)

    def remove(self, state: RequestState) -> None:
        self._order.remove(state)
        self._by_age.remove(state)
        if self._by_work is not None:
            self._by_work.remove(state)

    def update(self, state: RequestState) -> None:
        self._order.update(state)
        if self._by_work is not None:
            self._by_work.update(state)

    def scan(self, *, is_short: bool) -> Iterator[RequestState]:
        self.oldest = None
        for state in self._by_age.scan() if self._held_in_last_pass else ():
            self.oldest = state
            yield state
            if self.oldest is not None:  # else `note_admitted` has cleared it
                break
        if is_short and self._by_work is not None:
            for state in self._by_work.scan():
                if self._held_in_this_pass >= _HELD_BY_WORK:
                    break
                yield state
            else:
                return
        yield from self._order.scan(is_short=is_short)

    def __len__(self) -> int:
        return len(self._order)

    def begin_pass(self) -> None:
        self._held_in_last_pass, self._held_in_this_pass = self._held_in_this_pass > 0, 0

    def note_held(self) -> None:
        self._held_in_this_pass += 1

    def note_admitted(self, state: RequestState) -> None:
        if state is self.oldest:
            self.oldest = None

    def restart(self) -> None:
        self._held_in_last_pass, self._held_in_this_pass = False, 0

    def check(self, num_requests: int) -> None:
        for order in (self._order, self._by_age, self._by_work):
            assert order is None or len(order) == num_requests, "a waiting request is not in order"


def _work_key(state: RequestState) -> OrderKey:
    """By the tokens to compute, in powers of four; of about equal ones the oldest session first."""
    priority, arrival = state.priority_key
    num_tokens = state.tokens.size - state.prefix_watch.cached_len
    return priority, num_tokens.bit_length() // 2, state.session_arrival, arrival


def _age_key(state: RequestState) -> OrderKey:
    return state.priority_key[0], state.session_arrival, state.arrival


def _is_awaited(expected: ReturnEstimate, now: float) -> bool:
    return expected.is_likely and expected.late_at > now


class PricedAdmission(AdmissionPolicy):
    """Whether a waiting request is worth what it would push out, and what the cache should expect.

    Holds nothing over a cache that does not order evictions by expected returns.
    Within a scheduling pass the victims are read once: `begin_pass`, then `may_start`.
    """

    def __init__(self) -> None:
        self.returns = ReturnTimes()
        self._has_adopted = False  # the cache knows what is expected of what was released before
        self._victims: Iterator[tuple[int, ReturnEstimate | None]] | None = None
        self._known: list[tuple[int, ReturnEstimate | None]] = []  # the first victims, once read
        # Only requests that gain by sharing steps start. Once pages were short, until none waits.
        self._shares_steps = False
        self._growth: int | None = None  # tokens that running requests will add, once counted
        # As of the beginning of a pass: of `returns`, and the time on the cache's clock.
        self._growth_share = 0.0
        self._now = 0.0

    def attach(self, view: SchedulerView) -> None:
        self._cache, self._running, self._num_waiting, self.costs = view
        self.holds_requests = view.cache.tracks_returns

    def make_order(self, schedule_policy: str) -> QueueOrder:
        return HeldOrder(schedule_policy) if self.holds_requests else make_order(schedule_policy)

    # -- what happens -------------------------------------------------------------------------

    def note_arrival(self, state: RequestState) -> None:
        """Its prefix goes last, and its session has come back."""
        if not self.holds_requests:
            return
        now, returns = self._cache.time(), self.returns
        self._shares_steps &= self._num_waiting() > 0
        returns.note_arrival(state, now)
        if not self._has_adopted and (typical := returns.typical(now)) is not None:
            self._has_adopted = True
            self._cache.adopt_returns(typical)
        if not returns.returning_tokens:
            return
        if 2 * self._cache.num_free < self._cache.num_pages:  # else nothing is evicted soon
            watch = state.prefix_watch
            self._cache.expect_return(watch, waiting_return(now, watch.cached_len))

    def note_ended(self, state: RequestState, reason: str) -> None:
        """Its sequence carries when its session comes back."""
        if not self.holds_requests:
            return
        is_finished = reason in ("stop", "length")
        expected = self.returns.note_end(state, self._cache.time(), is_finished=is_finished)
        if state.sequence is not None:
            state.sequence.expected_return = expected

    def note_preempted(self, state: RequestState) -> None:
        if self.returns.returning_tokens and state.sequence is not None:
            length = state.sequence.committed_len
            state.sequence.expected_return = waiting_return(self._cache.time(), length)

    # -- the decision -------------------------------------------------------------------------

    def max_wait_s(self, num_tokens: int) -> float:
        """As long as computing all waiting tokens sixteen times takes; inf until costs are known.
        So requests start before long, however large they and their prices are."""
        if not self.returns.returning_tokens:
            return math.inf
        seconds = _MAX_BACKLOGS * num_tokens * self.costs.prefill_token_s
        return seconds or math.inf

    def begin_pass(self) -> None:
        self._victims, self._known = None, []
        self._growth = None
        self._growth_share = self.returns.growth_share
        self._now = self._cache.time()

    def is_short(self, num_needed: int) -> bool:
        """Whether they exceed the pages that are free or hold K/V that is probably not used again.
        False while no session returns. O(1): reads no more than _MAX_UNUSED victims."""
        if not self.returns.returning_tokens:
            self._shares_steps = False
            return False
        cache, growth = self._cache, self._growth_share
        if num_needed > cache.num_available:
            self._shares_steps = True
            return True
        missing = num_needed - cache.num_free
        # What fits beside its own growth grows: at most a part of the pool.
        to_grow = growth * min(self._growing_pages(), cache.num_pages / (1.0 + growth))
        if missing + to_grow > 0:
            for num_pages, expected in islice(self._read_victims(), _MAX_UNUSED):
                if expected is None or _is_awaited(expected, self._now) or missing + to_grow <= 0:
                    break
                missing -= num_pages
        # While no session is known to return, what was short before holds none.
        self._shares_steps &= self.returns.is_any_known
        # Growth holds none while all that will grow have begun: these may end before.
        self._shares_steps |= missing > 0 or (self.returns.num_new > 0 and missing + to_grow > 0)
        return missing > 0

    def note_started(self, state: RequestState) -> None:
        self._victims, self._known = None, []
        if self._growth is not None:
            self._growth += self._left_to_add((state,))
        if self.holds_requests and state.sequence is not None:
            self.returns.note_started(state, state.sequence.cached_len)

    def note_session_closed(self, name: str) -> None:
        self.returns.note_closed(name)

    def may_start(self, state: RequestState, order: QueueOrder) -> bool:
        """O(victims), and once a pass O(running requests)."""
        is_oldest = isinstance(order, HeldOrder) and order.oldest is state
        return self.is_worth(state, is_oldest=is_oldest)

    def is_worth(self, state: RequestState, *, is_oldest: bool = False) -> bool:
        """Whether the gain exceeds the price, or no session returns. `is_oldest`: the request is
        that of the oldest waiting session."""
        if not self.returns.returning_tokens:
            return True
        size, cached_len = self._cache.page_size, state.prefix_watch.cached_len
        num_output = self.returns.expected_output(state)
        num_tokens = state.tokens.size - cached_len + num_output
        wanted = -(-num_tokens // size)
        reserved = self._reserved_pages(wanted)
        if self._shares_steps:
            turn_tokens = self.returns.mean_turn(state, num_tokens)
            if not self._should_share_steps(turn_tokens, num_output):
                return False
        if self._cache.num_free >= reserved + wanted:
            return True
        victims = self._find_victims(wanted, reserved)
        own_len = cached_len
        if victims.expected_lost_pages:
            # others lose K/V now: the request loses what is not locked, if it waits
            own_len -= state.prefix_watch.locked_len
        victims = self._with_typical(victims, min(wanted, reserved + wanted - victims.pages_found))
        if victims.expected_lost_pages * size <= own_len:
            return True  # what it would lose by waiting is more
        # While the machine prefills, computing again delays others; while not, room saves time.
        share = self.costs.prefill_share
        margin = _MARGIN if is_oldest else 1.0 / _MARGIN
        return self._price(victims) * share <= margin * self._gain(victims) * (1.0 - share)

    def _should_share_steps(self, num_tokens: float, num_output: int) -> bool:
        """Whether all that run and wait end sooner on average if a request that computes so many
        tokens runs beside the others, and not after one of them."""
        tokens_s = num_tokens * self.costs.prefill_token_s
        steps_s = num_output * self.costs.shared_step_s
        num_running = len(self._running)
        num_open = num_running + self._num_waiting()
        return num_running * (num_running + 1) * tokens_s <= num_open * steps_s

    def _reserved_pages(self, wanted: int) -> float:
        """Room for what runs, and for what the sessions that return will still add, when a request
        takes `wanted` pages."""
        if self._growth is None:
            self._growth = self._left_to_add(self._running)
        num_growing = min(self._num_used(wanted), self._growing_pages())
        return -(-self._growth // self._cache.page_size) + self._growth_share * num_growing

    def _num_used(self, wanted: int) -> int:
        return self._cache.num_pages - self._cache.num_free + wanted

    def _growing_pages(self) -> int:
        """Of the sessions that return, in the pool or not."""
        return self.returns.returning_tokens // self._cache.page_size

    def _find_victims(self, wanted: int, reserved: float) -> Victims:
        """Free pages, then those of victims, until `reserved` and `wanted` pages are found."""
        growth, needed = self._growth_share, reserved + wanted
        # Pages in use for whose growth nothing is reserved.
        num_steady = max(0, self._num_used(wanted) - self._growing_pages())
        pages_found, expected_lost_pages = float(self._cache.num_free), 0.0
        victim_pages, think_seconds = 0.0, 0.0
        for num_pages, expected in self._read_victims():
            if pages_found >= needed:
                break
            if expected is None or not _is_awaited(expected, self._now):
                pages_found += num_pages + growth * max(0, num_pages - num_steady)
                num_steady = max(0, num_steady - num_pages)
                continue
            # The part of it that is taken for this request, not for those that run.
            taken = min(pages_found + num_pages, needed) - max(pages_found, reserved)
            pages_found += num_pages
            if taken > 0:
                victim_pages += num_pages
                expected_lost_pages += taken * expected.probability
                think_seconds += num_pages * expected.seconds_left(self._now)
        return Victims(pages_found, expected_lost_pages, victim_pages, think_seconds)

    def _with_typical(self, victims: Victims, missing: float) -> Victims:
        """Adds `missing` pages, room that others will need, as those of typical victims: others
        return as the population does."""
        if missing <= 0:
            return victims
        typical = self.returns.typical(self._now)
        probability = 1.0 if typical is None else typical.probability
        wait_s = 0.0 if typical is None else typical.wait_s
        return Victims(
            victims.pages_found,
            victims.expected_lost_pages + missing * probability,
            victims.victim_pages + missing,
            victims.think_seconds + missing * wait_s,
        )

    def _price(self, victims: Victims) -> float:
        """Seconds that computing the victims' K/V again costs all that run and wait."""
        num_tokens = victims.expected_lost_pages * self._cache.page_size
        num_delayed = 1 + len(self._running) + self._num_waiting()
        return num_tokens * self.costs.prefill_token_s * num_delayed

    def _gain(self, victims: Victims) -> float:
        """Seconds by which a session more among those that fit serves it and all that wait
        sooner."""
        num_locked = self._cache.num_pages - self._cache.num_available
        num_fitting = max(1.0, len(self._running) * self._cache.num_pages / max(num_locked, 1))
        mean_think_s = victims.think_seconds / victims.victim_pages
        return mean_think_s * (1.0 + self._num_waiting() / num_fitting)

    def _left_to_add(self, states: Iterable[RequestState]) -> int:
        """Tokens that running requests will still take room for."""
        total, expected_output = 0, self.returns.expected_output
        for state in states:
            sequence = state.sequence
            length = 0 if sequence is None else sequence.length
            total += state.tokens.size - length + expected_output(state)
        return total

    def _read_victims(self) -> Iterator[tuple[int, ReturnEstimate | None]]:
        yield from self._known
        if self._victims is None:
            self._victims = self._cache.victims()
        for victim in self._victims:
            self._known.append(victim)
            yield victim
