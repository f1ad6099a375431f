"""`Twins`: requests with one prompt. The first of them computes it, the others wait beside it.

They are in no queue until the first one draws: then each holds the prompt by a fork, or waits for
room like a preempted one.
"""

from __future__ import annotations

from collections.abc import Callable

from radixserve.errors import OutOfPages
from radixserve.request import Request
from radixserve.scheduler.request_state import RequestState
from radixserve.scheduler.running_requests import RunningRequests
from radixserve.scheduler.waiting_queue import WaitingQueue


class Twins:
    """Works on the scheduler's own queues."""

    def __init__(
        self,
        states: dict[str, RequestState],
        running: RunningRequests,
        waiting: WaitingQueue,
        requeue: Callable[[RequestState], None],
        num_startable: Callable[[RequestState, int], int],
        clock: Callable[[], float],
    ) -> None:
        """requeue(state): it waits for room. num_startable(state, n): how many of n more like
        `state` may run at once."""
        self._requests = states
        self._running = running
        self._waiting = waiting
        self._requeue = requeue
        self._num_startable = num_startable
        self._clock = clock

    def first_of(self, request: Request) -> RequestState | None:
        """The one whose twin a request is: it has yet to draw, and scores what this one wants."""
        first = self._requests.get(request.twin_of) if request.twin_of else None
        if first is None or first.twin_of is not None or first.num_output or first.is_drawing:
            return None
        is_search = first.head is not None or request.beams is not None
        return None if is_search or first.request.also_generate != request.also_generate else first

    def join(self, state: RequestState, first: RequestState) -> None:
        assert first.num_prompt == state.num_prompt
        state.twin_of = first
        first.twins.append(state)

    def start(self, firsts: list[RequestState]) -> None:
        """These are about to draw: their twins hold the prompts, too. By arrival, as many run at
        once as there is room for; the others wait like preempted ones."""
        may_start = True
        for state in sorted((t for first in firsts for t in first.twins), key=lambda t: t.arrival):
            assert state.twin_of is not None
            sequence, own = state.twin_of.sequence, None
            may_start = may_start and self._num_startable(state, 1) > 0
            if may_start and sequence is not None:
                try:
                    own = sequence.fork()
                except OutOfPages:
                    may_start = False
            state.admit_twin(own, self._clock())
            if own is not None:
                self._waiting.note_admitted(state)
                self._running.add(state)
        for first in firsts:
            first.twins = []

    def free(self, first: RequestState) -> None:
        """Its prompt could not be computed to the end: they go on without it."""
        for state in first.twins:
            state.admit_twin(None, self._clock())
        first.twins = []

    def part(self, first: RequestState) -> None:
        """`first` ends before its prompt was computed: the first of its twins takes its place."""
        if not first.twins:
            return
        heir, *others = first.twins
        heir.take_scores(first)
        heir.twin_of, heir.twins, first.twins = None, others, []
        for other in others:
            other.twin_of = heir
        self._requeue(heir)  # older than the fresh ones behind it
