"""`BeamSearches`: the requests that compute the beams of searches, from one joint step to the next.

Each beam is scheduled, waits and is preempted like any other request. A sampled beam waits until
all beams of its search have sampled, mostly in the same step. Until then it is parked: it is not
scheduled and uses no slot; its pages may be reclaimed. Its sampled candidates are kept, so none is
computed twice. The continuations are chosen above the scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from radixserve.arrays import IntBuffer
from radixserve.cache import CacheSequence
from radixserve.errors import OutOfPages
from radixserve.schedule import SampleOutput
from radixserve.scheduler.admission import wake_waiters
from radixserve.scheduler.extension import SchedulerExtension
from radixserve.scheduler.request_state import BeamSearch, RequestState
from radixserve.scheduler.running_requests import RunningRequests
from radixserve.scheduler.stats import SchedulerStats
from radixserve.scheduler.waiting_queue import WaitingQueue


class Child(Protocol):
    """A beam of the next step: one more token after one of this step's beams."""

    @property
    def parent(self) -> int: ...  # index of that beam

    @property
    def token_id(self) -> int: ...


class BeamSearches(SchedulerExtension):
    """Works on the scheduler's own queues; owns the parked requests."""

    def __init__(
        self,
        states: dict[str, RequestState],
        running: RunningRequests,
        waiting: WaitingQueue,
        requeue: Callable[[RequestState], None],
        num_startable: Callable[[RequestState, int], int],
        counts: SchedulerStats,
    ) -> None:
        """requeue(state): it waits for pages. num_startable(state, n): how many of n more like
        `state` may run at once."""
        self._requests = states
        self._running = running
        self._waiting = waiting
        self._requeue = requeue
        self._num_startable = num_startable
        self._counts = counts
        self.parked: dict[int, RequestState] = {}  # by arrival, those that have pages

    def begin(self, state: RequestState) -> None:
        """`state` is the first beam of a search: it computes the prompt. The next `width` - 1
        arrivals belong to the search, too."""
        state.search = BeamSearch(state)

    def note_sample(self, state: RequestState, sampled: SampleOutput) -> tuple[SampleOutput, ...]:
        """A beam was sampled: the samples of all beams of its search, once it has all of them."""
        search = state.search
        assert search is not None
        search.samples[state.arrival] = sampled
        if len(search.samples) < len(search.beams):
            return ()
        samples = tuple(search.samples[beam.arrival] for beam in search.beams)
        search.samples = {}
        return samples

    def park_sampled(self, search: BeamSearch) -> None:
        """Park the beams that wait for the other beams of their search."""
        for state in search.beams:
            if state.arrival in search.samples and state in self._running:
                self._running.remove(state)
                self.parked[state.arrival] = state

    def unpark(self, state: RequestState) -> None:
        """Release the pages of a parked beam. Its sample is kept."""
        assert state.sequence is not None
        state.sequence.release()
        state.sequence = None
        del self.parked[state.arrival]

    def unpark_out_of_turn(self) -> None:
        """Release the pages of parked beams while other beams of their search wait for pages.

        O(parked beams and the beams of their searches).
        """
        searches = {id(state.search): state.search for state in self.parked.values()}
        short = {
            key
            for key, search in searches.items()
            if search is not None and any(beam in self._waiting for beam in search.beams)
        }
        for state in list(self.parked.values()):
            if id(state.search) in short:
                self.unpark(state)

    def make_room(self) -> bool:
        """Release the pages of the parked beam that is lowest in priority."""
        if not self.parked:
            return False
        self.preempt(max(self.parked.values(), key=lambda state: state.priority_key))
        return True

    def preempt(self, state: RequestState) -> None:
        """`unpark`, counted as a preemption."""
        self.unpark(state)
        self._counts.preemptions += 1

    def victim(self, state: RequestState) -> RequestState | None:
        """The parked beam from which `state` may take pages: the lowest in priority among those
        below it and those of its own search. Another tenant's priority does not count, its arrival
        does."""
        search = state.search
        others = [
            other
            for other in self.parked.values()
            if (
                other.priority_key > state.priority_key
                if other.tenant is state.tenant
                else other.arrival > state.arrival
            )
            or (search is not None and other.search is search)
        ]
        return max(others, key=lambda other: other.priority_key, default=None)

    # -- from beams to their children ---------------------------------------------------------

    def replace(self, search: BeamSearch, children: Sequence[Child]) -> None:
        """A beam's first child keeps its request and its pages, further ones share these by a fork.

        As many children run as beams ran, and more where there is room; the others wait like
        preempted requests.
        """
        leader, parents = search.leader, search.beams
        num_running = sum(state in self._running for state in parents)
        wanted = len(children) - num_running
        room = self._num_startable(leader, wanted) if wanted > 0 else 0
        continued = {child.parent for child in children}
        spare = [state for index, state in enumerate(parents) if index not in continued]
        for state in spare:
            room += state in self._running
            self._stop(state)
        if leader in spare or leader not in parents:
            # The leader's request is used again first; it need not have been a beam.
            spare = [state for state in spare if state is not leader]
            spare.append(leader)
        search.beams = self._continue(search, children, spare, room)
        for state in spare:
            if state is not leader:
                del self._requests[state.request.request_id]

    def _continue(
        self, search: BeamSearch, children: Sequence[Child], spare: list[RequestState], room: int
    ) -> list[RequestState]:
        """The requests of the children; `spare` ones are used up from its end."""
        parents = search.beams
        length = len(parents[0].tokens)
        beams: list[RequestState] = []
        seen: set[int] = set()
        for child in children:
            parent = parents[child.parent]
            if child.parent in seen:
                state = spare.pop() if spare else self._new_beam(search, [*parents, *beams])
                tokens = parent.tokens.view(0, length)
                state.tokens = IntBuffer(np.append(tokens, np.int32(child.token_id)))
                state.sequence = _fork(parent) if room else None
                state.matcher = None if parent.matcher is None else parent.matcher.fork()
                room = room - 1 if state.sequence is not None else 0
            else:
                seen.add(child.parent)
                state = parent
                state.tokens.append(child.token_id)
                if state not in self._running:
                    room = self._resume(state, room)
            beams.append(state)
            if state.sequence is None:
                self._requeue(state)
            elif state not in self._running:
                self._running.add(state)
        return beams

    def _resume(self, state: RequestState, room: int) -> int:
        """Continue a parked beam with its pages while there is room; returns the room left."""
        if state.sequence is None:
            return room
        if not room:
            self.unpark(state)
            return 0
        del self.parked[state.arrival]
        return room - 1

    def _stop(self, state: RequestState) -> None:
        """End a beam without children; its computed K/V stays cached."""
        if state.sequence is None:
            return
        state.sequence.release()
        state.sequence = None
        if state in self._running:
            self._running.remove(state)
        else:
            del self.parked[state.arrival]
        if state.waiters:
            self._waiting.mark_unblocked(wake_waiters(state))

    def _new_beam(self, search: BeamSearch, others: list[RequestState]) -> RequestState:
        leader, taken = search.leader, {state.arrival for state in others}
        arrivals = range(leader.arrival + 1, leader.arrival + search.width)
        arrival = next(number for number in arrivals if number not in taken)
        request_id = f"#{leader.request.request_id}#{arrival - leader.arrival}"
        while request_id in self._requests:  # a name that a caller has chosen
            request_id += "#"
        request = replace(leader.request, request_id=request_id)
        state = RequestState(
            request, arrival, leader.prefix_watch, leader.queued_at, leader.tenant, leader.session
        )
        state.become_beam(search)
        self._requests[request_id] = state
        return state


def _fork(parent: RequestState) -> CacheSequence | None:
    """A second sequence over the tokens that `parent` computed; None when no page is free."""
    if parent.sequence is None:
        return None
    try:
        return parent.sequence.fork()
    except OutOfPages:
        return None
