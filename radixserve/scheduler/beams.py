"""`Beams`: the jobs of beam searches, from one joint step to the next.

Each beam is a job like others: it is planned, waits, follows and is preempted as they are. One that
has drawn waits for the rest of its search. Mostly all draw in one step; where they do not, it is
parked: it runs no more, counts as nobody's slot, and keeps its pages until somebody needs them.
What it drew is kept, so nothing is computed twice for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from radixserve.cache import CacheSequence
from radixserve.errors import OutOfPages
from radixserve.int_buffer import IntBuffer
from radixserve.scheduler.beam_group import BeamGroup, Child
from radixserve.scheduler.job import RequestState
from radixserve.scheduler.leaders import free_followers
from radixserve.scheduler.waiting import WaitingQueue


class Beams:
    """Works on the scheduler's own queues; owns the parked jobs."""

    def __init__(
        self,
        jobs: dict[str, RequestState],
        running: dict[int, RequestState],
        waiting: WaitingQueue,
        requeue: Callable[[RequestState], None],
        num_startable: Callable[[RequestState, int], int],
    ) -> None:
        """requeue(job): it waits for room. num_startable(job, n): how many of n more jobs like
        `job` may run at once."""
        self._jobs = jobs
        self._running = running
        self._waiting = waiting
        self._requeue = requeue
        self._num_startable = num_startable
        self.parked: dict[int, RequestState] = {}  # by arrival, those that have pages

    def begin(self, head: RequestState) -> None:
        """`head` is the first beam of a search: it computes the prompt. The arrivals of as many
        more as the search is wide are its own."""
        head.search = BeamGroup(head.request)
        head.head, head.beams = head, [head]

    def choose(self, head: RequestState) -> list[Child] | None:
        """Beams of the search have drawn: its next beams when all have (an empty list: it is
        over), else None. O(width * candidates)."""
        beams, search = head.beams, head.search
        assert search is not None
        draws = [job.drawn for job in beams if job.drawn is not None]
        if len(draws) < len(beams):
            self._park(beams)
            return None
        return search.advance([job.tokens for job in beams], draws)

    def _park(self, beams: list[RequestState]) -> None:
        for job in beams:
            if job.drawn is not None and job.arrival in self._running:
                self.parked[job.arrival] = self._running.pop(job.arrival)

    def unpark(self, job: RequestState) -> None:
        """Take its pages. What it drew is kept: it waits for nothing but its search."""
        assert job.sequence is not None
        job.sequence.release()
        job.sequence = None
        del self.parked[job.arrival]

    def victim(self, job: RequestState) -> RequestState | None:
        """The parked one that `job` may take pages from: the lowest in rank of those below it and
        those of its own search."""
        head = job.head
        others = [
            one
            for one in self.parked.values()
            if one.rank > job.rank or (head is not None and one.head is head)
        ]
        return max(others, key=lambda one: one.rank, default=None)

    # -- from beams to their children ---------------------------------------------------------

    def replace(self, head: RequestState, children: list[Child]) -> None:
        """A beam's first child keeps its job and its pages, further ones share these by a fork.

        As many run as did, and more where there is room; the others wait like preempted ones.
        """
        parents = head.beams
        num_running = sum(job.arrival in self._running for job in parents)
        wanted = len(children) - num_running
        room = self._num_startable(head, wanted) if wanted > 0 else 0
        continued = {child.parent for child in children}
        spare = [job for at, job in enumerate(parents) if at not in continued]
        for job in spare:
            room += job.arrival in self._running
            self._stop(job)
        is_headless = not any(parents[at] is head for at in continued)
        if is_headless:  # it answers for the search: the first to live again
            spare = [*(job for job in spare if job is not head), head]
        head.beams = self._continue(head, parents, children, spare, room)
        for job in spare:
            if job is not head:
                del self._jobs[job.request.request_id]

    def _continue(
        self,
        head: RequestState,
        parents: list[RequestState],
        children: list[Child],
        spare: list[RequestState],
        room: int,
    ) -> list[RequestState]:
        """The jobs of the children; `spare` ones are used up from its end."""
        length = len(parents[0].tokens)
        beams: list[RequestState] = []
        seen: set[int] = set()
        for child in children:
            parent = parents[child.parent]
            if child.parent in seen:
                job = spare.pop() if spare else self._new_beam(head, [*parents, *beams])
                tokens = parent.tokens.view(0, length)
                job.tokens = IntBuffer(np.append(tokens, np.int32(child.token_id)))
                job.sequence = _fork(parent) if room else None
                room = room - 1 if job.sequence is not None else 0
            else:
                seen.add(child.parent)
                job = parent
                job.drawn = None
                job.tokens.append(child.token_id)
                if job.arrival not in self._running:
                    room = self._resume(job, room)
            beams.append(job)
            if job.sequence is None:
                self._requeue(job)
            else:
                self._running[job.arrival] = job
        return beams

    def _resume(self, job: RequestState, room: int) -> int:
        """It was parked: let it go on with its pages while there is room; returns what is left."""
        if job.sequence is None:
            return room
        if not room:
            self.unpark(job)
            return 0
        del self.parked[job.arrival]
        return room - 1

    def _stop(self, job: RequestState) -> None:
        """The beam has no child: what it computed stays in the tree."""
        job.drawn = None
        if job.sequence is None:
            return
        job.sequence.release()
        job.sequence = None
        if self._running.pop(job.arrival, None) is None:
            del self.parked[job.arrival]
        if job.followers:
            self._waiting.note_freed(free_followers(job))

    def _new_beam(self, head: RequestState, others: list[RequestState]) -> RequestState:
        taken = {job.arrival for job in others}
        assert head.search is not None
        arrivals = range(head.arrival + 1, head.arrival + head.search.width)
        arrival = next(one for one in arrivals if one not in taken)
        request_id = f"#{head.request.request_id}#{arrival - head.arrival}"
        while request_id in self._jobs:  # a name that somebody else has chosen
            request_id += "#"
        request = replace(head.request, request_id=request_id)
        job = RequestState(request, arrival, head.probe, head.queued_at, head.session)
        job.become_beam(head)
        self._jobs[request_id] = job
        return job


def _fork(parent: RequestState) -> CacheSequence | None:
    """Another session of what `parent` computed; None when there is no page for it."""
    if parent.sequence is None:
        return None
    try:
        return parent.sequence.fork()
    except OutOfPages:
        return None
