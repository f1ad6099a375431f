"""In which order waiting requests are considered.

    lpm         longest cached prefix first
    fcfs        first come, first served
    dfs-weight  along the tree, depth first, the branch with most waiting requests first

A higher priority comes before all of these. The displacement bound is not a policy's concern: the
scheduler keeps it under every one of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Protocol

from sortedcontainers import SortedKeyList

from radixserve.scheduler.job import Job


class WaitingQueue(Protocol):
    """The waiting jobs in the order of a policy. It reads jobs and writes only `order_key`."""

    def add(self, job: Job) -> None: ...

    def remove(self, job: Job) -> None: ...

    def refresh(self, version: int) -> None:
        """The cache is at `version` now: put every job where it belongs."""

    def __iter__(self) -> Iterator[Job]: ...

    def __len__(self) -> int: ...


class SortedQueue:
    """lpm and fcfs: a sorted list in which only jobs whose match changed are moved."""

    def __init__(self, *, by_match: bool) -> None:
        self._by_match = by_match
        self._jobs: SortedKeyList = SortedKeyList(key=_order_key)
        self._version = -1

    def add(self, job: Job) -> None:
        job.order_key = self._key(job)
        self._jobs.add(job)

    def remove(self, job: Job) -> None:
        self._jobs.remove(job)

    def refresh(self, version: int) -> None:
        if not self._by_match or version == self._version:
            return
        self._version = version
        moved = [job for job in self._jobs if job.order_key[1] != -job.probe.cached_len]
        for job in moved:
            self._jobs.remove(job)
            self.add(job)

    def __iter__(self) -> Iterator[Job]:
        return iter(self._jobs)

    def __len__(self) -> int:
        return len(self._jobs)

    def _key(self, job: Job) -> tuple[object, ...]:
        priority, arrival = job.rank
        return (priority, -job.probe.cached_len if self._by_match else 0, arrival)


class TreeQueue:
    """dfs-weight: ordered anew whenever the cache or the queue has changed."""

    def __init__(self) -> None:
        self._jobs: dict[int, Job] = {}
        self._order: list[Job] = []
        self._version = -1

    def add(self, job: Job) -> None:
        self._jobs[job.arrival] = job
        self._version = -1

    def remove(self, job: Job) -> None:
        del self._jobs[job.arrival]
        self._version = -1

    def refresh(self, version: int) -> None:
        if version == self._version:
            return
        self._version = version
        paths = {arrival: job.probe.path() for arrival, job in self._jobs.items()}
        weight = Counter(step for path in paths.values() for step in path)
        for arrival, job in self._jobs.items():
            branches = tuple((-weight[step], step) for step in paths[arrival])
            job.order_key = (job.rank[0], branches, arrival)
        self._order = sorted(self._jobs.values(), key=_order_key)

    def __iter__(self) -> Iterator[Job]:
        return iter(self._order)

    def __len__(self) -> int:
        return len(self._jobs)


def make_queue(policy: str) -> WaitingQueue:
    """The queue for `schedule_policy`, a name that the config has checked."""
    if policy == "dfs-weight":
        return TreeQueue()
    return SortedQueue(by_match=policy == "lpm")


def _order_key(job: Job) -> tuple[object, ...]:
    return job.order_key
