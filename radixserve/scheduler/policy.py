"""In which order waiting requests are considered.

    lpm         longest cached prefix first
    fcfs        first come, first served
    dfs-weight  along the tree, depth first, the branch with most waiting requests first

A higher priority comes before all of these. The displacement bound is not a policy's concern: the
scheduler keeps it under every one of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from sortedcontainers import SortedDict, SortedKeyList

from radixserve.scheduler.job import RequestState


class PolicyQueue(Protocol):
    """The waiting jobs in the order of a policy. It reads jobs and writes only `order_key`."""

    def add(self, job: RequestState) -> None:
        """O(log n)."""

    def remove(self, job: RequestState) -> None:
        """O(log n)."""

    def update(self, job: RequestState) -> None:
        """The job's match has changed: put it where it belongs. O(log n)."""

    def scan(self) -> Iterator[RequestState]:
        """The jobs in order. The one just given may be removed; nothing else may change."""

    def __len__(self) -> int: ...


class SortedQueue:
    """lpm and fcfs."""

    def __init__(self, *, by_match: bool) -> None:
        self._by_match = by_match
        self._jobs: SortedKeyList = SortedKeyList(key=_order_key)

    def add(self, job: RequestState) -> None:
        job.order_key = self._key(job)
        self._jobs.add(job)

    def remove(self, job: RequestState) -> None:
        self._jobs.remove(job)

    def update(self, job: RequestState) -> None:
        if job.order_key != self._key(job):
            self.remove(job)
            self.add(job)

    def scan(self) -> Iterator[RequestState]:
        at = 0
        while at < len(self._jobs):
            job = self._jobs[at]
            yield job
            if at < len(self._jobs) and self._jobs[at] is job:
                at += 1

    def __len__(self) -> int:
        return len(self._jobs)

    def _key(self, job: RequestState) -> tuple[int, ...]:
        priority, arrival = job.rank
        return (priority, -job.probe.cached_len if self._by_match else 0, arrival)


class TreeQueue:
    """dfs-weight: the paths of the waiting jobs' matches as a tree of counts.

    A path is the one of the job's last refresh: a node split above it since then is not in it.
    """

    def __init__(self) -> None:
        self._roots: SortedDict = SortedDict()  # priority, high ones first -> _Branch
        self._size = 0

    def add(self, job: RequestState) -> None:
        job.order_key = job.probe.path()
        self._size += 1
        branch = self._roots.setdefault(job.rank[0], _Branch(0))
        for serial in job.order_key:
            branch = branch.grow(serial)
        branch.jobs[job.arrival] = job

    def remove(self, job: RequestState) -> None:
        self._size -= 1
        branch = self._roots[job.rank[0]]
        for serial in job.order_key:
            branch = branch.shrink(serial)
        del branch.jobs[job.arrival]

    def update(self, job: RequestState) -> None:
        if job.order_key != job.probe.path():
            self.remove(job)
            self.add(job)

    def scan(self) -> Iterator[RequestState]:
        stack = list(reversed(self._roots.values()))
        while stack:
            branch = stack.pop()
            stack.extend(reversed(branch.order))  # as it was when the branch was reached
            yield from list(branch.jobs.values())

    def __len__(self) -> int:
        return self._size


class _Branch:
    """A node of the tree of paths: the jobs that end here, and the branches below by weight."""

    __slots__ = ("below", "count", "jobs", "order", "serial")

    def __init__(self, serial: int) -> None:
        self.serial = serial
        self.count = 0  # jobs here and below
        self.jobs: SortedDict = SortedDict()  # by arrival
        self.below: dict[int, _Branch] = {}
        self.order: SortedKeyList = SortedKeyList(key=lambda branch: (-branch.count, branch.serial))

    def grow(self, serial: int) -> _Branch:
        """Count one more job in the branch `serial` and return it."""
        branch = self.below.get(serial)
        if branch is None:
            branch = self.below[serial] = _Branch(serial)
        else:
            self.order.remove(branch)
        branch.count += 1
        self.order.add(branch)
        return branch

    def shrink(self, serial: int) -> _Branch:
        """Count one job less in the branch `serial` and return it."""
        branch = self.below[serial]
        self.order.remove(branch)
        branch.count -= 1
        if branch.count:
            self.order.add(branch)
        else:
            del self.below[serial]
        return branch


def make_queue(policy: str) -> PolicyQueue:
    """The queue for `schedule_policy`, a name that the config has checked."""
    if policy == "dfs-weight":
        return TreeQueue()
    return SortedQueue(by_match=policy == "lpm")


def _order_key(job: RequestState) -> tuple[int, ...]:
    return job.order_key
