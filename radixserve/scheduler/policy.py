"""Schedule policies: the order in which waiting requests are considered.

    lpm         longest cached prefix first
    fcfs        first come, first served
    dfs-weight  along the tree, depth first, the branch with most waiting requests first

A higher priority comes before all of these. The overtake bound is independent of the policy: the
scheduler enforces it under each of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from sortedcontainers import SortedDict, SortedKeyList

from radixserve.scheduler.request_state import RequestState


class PolicyQueue(Protocol):
    """The waiting requests in the order of a policy. Writes their `order_key` and nothing else."""

    def add(self, state: RequestState) -> None:
        """O(log n)."""

    def remove(self, state: RequestState) -> None:
        """O(log n)."""

    def update(self, state: RequestState) -> None:
        """The request's match has changed: update its position. O(log n)."""

    def scan(self) -> Iterator[RequestState]:
        """The requests in order. The one just given may be removed; nothing else may change."""

    def __len__(self) -> int: ...


class SortedQueue:
    """lpm and fcfs."""

    def __init__(self, *, by_match: bool) -> None:
        self._by_match = by_match
        self._requests: SortedKeyList = SortedKeyList(key=_order_key)

    def add(self, state: RequestState) -> None:
        state.queue_entry.order_key = self._key(state)
        self._requests.add(state)

    def remove(self, state: RequestState) -> None:
        self._requests.remove(state)

    def update(self, state: RequestState) -> None:
        if state.queue_entry.order_key != self._key(state):
            self.remove(state)
            self.add(state)

    def scan(self) -> Iterator[RequestState]:
        at = 0
        while at < len(self._requests):
            state = self._requests[at]
            yield state
            if at < len(self._requests) and self._requests[at] is state:
                at += 1

    def __len__(self) -> int:
        return len(self._requests)

    def _key(self, state: RequestState) -> tuple[int, ...]:
        priority, arrival = state.priority_key
        return (priority, -state.prefix_watch.cached_len if self._by_match else 0, arrival)


class TreeQueue:
    """dfs-weight: the paths of the waiting requests' matches as a tree of counts.

    A path is the one of the request's last refresh: a node split above it since then is not in it.
    """

    def __init__(self) -> None:
        self._roots: SortedDict = SortedDict()  # priority, high ones first -> _Branch
        self._size = 0

    def add(self, state: RequestState) -> None:
        state.queue_entry.order_key = state.prefix_watch.path()
        self._size += 1
        branch = self._roots.setdefault(state.priority_key[0], _Branch(0))
        for node_id in state.queue_entry.order_key:
            branch = branch.grow(node_id)
        branch.states[state.arrival] = state

    def remove(self, state: RequestState) -> None:
        self._size -= 1
        branch = self._roots[state.priority_key[0]]
        for node_id in state.queue_entry.order_key:
            branch = branch.shrink(node_id)
        del branch.states[state.arrival]

    def update(self, state: RequestState) -> None:
        if state.queue_entry.order_key != state.prefix_watch.path():
            self.remove(state)
            self.add(state)

    def scan(self) -> Iterator[RequestState]:
        stack = list(reversed(self._roots.values()))
        while stack:
            branch = stack.pop()
            stack.extend(reversed(branch.order))  # as it was when the branch was reached
            yield from list(branch.states.values())

    def __len__(self) -> int:
        return self._size


class _Branch:
    """A node of the tree of paths: the requests that end here, and the branches below by weight."""

    __slots__ = ("below", "count", "node_id", "order", "states")

    def __init__(self, node_id: int) -> None:
        self.node_id = node_id
        self.count = 0  # requests here and below
        self.states: SortedDict = SortedDict()  # by arrival
        self.below: dict[int, _Branch] = {}
        # heaviest first
        self.order = SortedKeyList(key=lambda branch: (-branch.count, branch.node_id))

    def grow(self, node_id: int) -> _Branch:
        """Count one more request in the branch `node_id` and return it."""
        branch = self.below.get(node_id)
        if branch is None:
            branch = self.below[node_id] = _Branch(node_id)
        else:
            self.order.remove(branch)
        branch.count += 1
        self.order.add(branch)
        return branch

    def shrink(self, node_id: int) -> _Branch:
        """Count one request less in the branch `node_id` and return it."""
        branch = self.below[node_id]
        self.order.remove(branch)
        branch.count -= 1
        if branch.count:
            self.order.add(branch)
        else:
            del self.below[node_id]
        return branch


def make_queue(policy: str) -> PolicyQueue:
    """The queue for `schedule_policy`, a name that the config has checked."""
    if policy == "dfs-weight":
        return TreeQueue()
    return SortedQueue(by_match=policy == "lpm")


def _order_key(state: RequestState) -> tuple[int, ...]:
    return state.queue_entry.order_key
