"""`TreeOrder`: the order of the schedule policy dfs-weight. Loaded when that is chosen."""

from __future__ import annotations

from collections.abc import Iterator

from sortedcontainers import SortedDict, SortedKeyList

from radixserve.scheduler.queue_order import QueueOrder
from radixserve.scheduler.request_state import RequestState


class TreeOrder(QueueOrder):
    """dfs-weight: the paths of the waiting requests' matches as a tree of counts.

    A path is the one of the request's last refresh: a node split above it since then is not in it.
    """

    def __init__(self) -> None:
        self._roots: SortedDict = SortedDict()  # priority, high ones first -> _Branch
        self._size = 0

    def add(self, state: RequestState) -> None:
        state.order_key = state.prefix_watch.path()
        self._size += 1
        branch = self._roots.setdefault(state.priority_key[0], _Branch(0))
        for node_id in state.order_key:
            branch = branch.grow(node_id)
        branch.states[state.arrival] = state

    def remove(self, state: RequestState) -> None:
        self._size -= 1
        branch = self._roots[state.priority_key[0]]
        for node_id in state.order_key:
            branch = branch.shrink(node_id)
        del branch.states[state.arrival]

    def update(self, state: RequestState) -> None:
        if state.order_key != state.prefix_watch.path():
            self.remove(state)
            self.add(state)

    def scan(self, *, is_short: bool = False) -> Iterator[RequestState]:
        del is_short
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
