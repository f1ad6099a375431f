"""`Twins`: requests with one prompt. The first of them computes it, the others wait beside it.

They are in no queue until the first one draws: then each holds the prompt by a fork, or waits for
room like a preempted one.
"""

from __future__ import annotations

from collections.abc import Callable

from radixserve.errors import OutOfPages
from radixserve.request import Request
from radixserve.scheduler.job import RequestState
from radixserve.scheduler.waiting import WaitingQueue


class Twins:
    """Works on the scheduler's own queues."""

    def __init__(
        self,
        jobs: dict[str, RequestState],
        running: dict[int, RequestState],
        waiting: WaitingQueue,
        requeue: Callable[[RequestState], None],
        num_startable: Callable[[RequestState, int], int],
        clock: Callable[[], float],
    ) -> None:
        """requeue(job): it waits for room. num_startable(job, n): how many of n more jobs like
        `job` may run at once."""
        self._jobs = jobs
        self._running = running
        self._waiting = waiting
        self._requeue = requeue
        self._num_startable = num_startable
        self._clock = clock

    def first_of(self, request: Request) -> RequestState | None:
        """The one whose twin a request is: it has yet to draw, and scores what this one wants."""
        first = self._jobs.get(request.twin_of) if request.twin_of else None
        if first is None or first.twin_of is not None or first.num_output or first.is_drawing:
            return None
        is_search = first.head is not None or request.beams is not None
        return None if is_search or first.request.also_generate != request.also_generate else first

    def join(self, job: RequestState, first: RequestState) -> None:
        assert first.num_prompt == job.num_prompt
        job.twin_of = first
        first.twins.append(job)

    def start(self, firsts: list[RequestState]) -> None:
        """These are about to draw: their twins hold the prompts, too. By arrival, as many run at
        once as there is room for; the others wait like preempted ones."""
        may_start = True
        for job in sorted((t for first in firsts for t in first.twins), key=lambda t: t.arrival):
            assert job.twin_of is not None
            sequence, own = job.twin_of.sequence, None
            may_start = may_start and self._num_startable(job, 1) > 0
            if may_start and sequence is not None:
                try:
                    own = sequence.fork()
                except OutOfPages:
                    may_start = False
            job.admit_twin(own, self._clock())
            if own is not None:
                self._waiting.note_admitted(job)
                self._running[job.arrival] = job
        for first in firsts:
            first.twins = []

    def free(self, first: RequestState) -> None:
        """Its prompt could not be computed to the end: they go on without it."""
        for job in first.twins:
            job.admit_twin(None, self._clock())
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
