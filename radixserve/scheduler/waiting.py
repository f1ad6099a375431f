"""`WaitingQueue`: the waiting jobs, in policy order and in order of arrival, and who may pass whom.

A pass costs what changed since the last one: matches are looked up again only where the tree has
changed, and a queue in which nobody could start is not walked again before somebody might.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from sortedcontainers import SortedDict, SortedList

from radixserve.cache import PrefixCache, PrefixWatch
from radixserve.scheduler.job import RequestState
from radixserve.scheduler.policy import make_queue


class WaitingQueue:
    """Owns the order and the displacement bound; `Scheduler` decides who starts."""

    def __init__(self, cache: PrefixCache, policy: str, max_overtake: int) -> None:
        self._cache = cache
        self._max_overtake = max_overtake
        self._queue = make_queue(policy)
        self._by_arrival: SortedDict = SortedDict()
        self._returned: SortedDict = SortedDict()  # those of them that ran before
        self._by_probe: dict[PrefixWatch, RequestState] = {}
        self._admitted: SortedList = SortedList()  # arrivals, as far as they still count
        self._priorities: SortedList = SortedList()  # one each
        self._needs: SortedList = SortedList()  # (pages, arrival) of those that follow nobody

    def __len__(self) -> int:
        return len(self._by_arrival)

    def __contains__(self, job: RequestState) -> bool:
        return job.arrival in self._by_arrival

    def add(self, job: RequestState, *, is_returning: bool) -> None:
        """O(log n)."""
        self._by_arrival[job.arrival] = job
        if is_returning:
            self._returned[job.arrival] = job
        self._priorities.add(job.request.params.priority)
        job.bypass_baseline = self._num_later(job)
        self._by_probe[job.probe] = job
        self._queue.add(job)
        self._note_need(job)

    def remove(self, job: RequestState) -> None:
        """O(log n)."""
        job.overtaken = self.overtaken(job)
        del self._by_arrival[job.arrival]
        self._returned.pop(job.arrival, None)
        self._priorities.remove(job.request.params.priority)
        del self._by_probe[job.probe]
        job.probe.close()
        self._queue.remove(job)
        self._forget_need(job)

    def refresh(self) -> None:
        """Move the jobs whose match has changed. O(those jobs)."""
        for probe in self._cache.changed_watches():
            job = self._by_probe.get(probe)
            if job is not None:
                self._queue.update(job)
                self._note_need(job)

    @property
    def highest_priority(self) -> float:
        """Of anybody here. O(1)."""
        return self._priorities[-1] if self._priorities else -math.inf

    # -- room ---------------------------------------------------------------------------------

    def need(self, job: RequestState) -> int:
        """Pages to take beyond its cached prefix for all its tokens and one more."""
        size = self._cache.page_size
        return -(-(len(job.tokens) + 1) // size) - job.probe.cached_len // size

    @property
    def least_need(self) -> float:
        """Nobody but followers needs fewer new pages than this. O(1)."""
        return self._needs[0][0] if self._needs else math.inf

    def note_follows(self, job: RequestState) -> None:
        """It waits for somebody's tokens: what it will need is open. O(log n)."""
        self._forget_need(job)

    def note_freed(self, jobs: Iterable[RequestState]) -> None:
        """These follow nobody any more."""
        for job in jobs:
            self._note_need(job)

    def _note_need(self, job: RequestState) -> None:
        if job.follows is not None:
            return
        need = self.need(job)
        if need != job.queued_page_need:
            self._forget_need(job)
            job.queued_page_need = need
            self._needs.add((need, job.arrival))

    def _forget_need(self, job: RequestState) -> None:
        if job.queued_page_need is not None:
            self._needs.remove((job.queued_page_need, job.arrival))
            job.queued_page_need = None

    # -- the displacement bound ---------------------------------------------------------------

    def overtaken(self, job: RequestState) -> int:
        """How many later requests were admitted while this one waited. O(log n)."""
        return job.overtaken + self._num_later(job) - job.bypass_baseline

    def note_admitted(self, job: RequestState) -> None:
        """`job`, which has been removed, passes all that arrived before it. O(log n) amortised."""
        self._admitted.add(job.arrival)
        if not self._by_arrival:
            self._admitted.clear()
            return
        oldest = self._by_arrival.keys()[0]
        del self._admitted[: self._admitted.bisect_right(oldest)]  # later than nobody here

    @property
    def barrier(self) -> float:
        """Who arrived after this may not start: somebody was overtaken as often as is allowed.

        Of those that never ran the oldest has been overtaken most. O(1) and the returned ones.
        """
        bound = self._max_overtake
        fresh = next((job for a, job in self._by_arrival.items() if a not in self._returned), None)
        jobs = [*self._returned.values(), *([] if fresh is None else [fresh])]
        late = (job.arrival for job in jobs if self.overtaken(job) >= bound)
        return min(late, default=math.inf)

    def candidates(self) -> Iterator[RequestState]:
        """Each job once that may start now, in order; the one just given may be removed.

        Behind a barrier: only those up to it, by arrival. Else the policy's order.
        """
        seen: set[int] = set()
        while True:
            barrier = self.barrier
            if barrier < math.inf:
                up_to = self._by_arrival.irange(maximum=barrier)
                job = next((self._by_arrival[a] for a in up_to if a not in seen), None)
                if job is None:
                    return
                seen.add(job.arrival)
                yield job
                continue
            for job in self._queue.scan():
                if job.arrival in seen:
                    continue
                seen.add(job.arrival)
                yield job
                was_admitted = job.arrival not in self._by_arrival
                if was_admitted and self.barrier < math.inf:
                    break
            else:
                return

    def _num_later(self, job: RequestState) -> int:
        return len(self._admitted) - int(self._admitted.bisect_right(job.arrival))
