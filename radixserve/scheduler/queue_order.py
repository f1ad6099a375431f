"""`QueueOrder`: the plug point for the order in which waiting requests are looked at.

The plain orders, by schedule policy:

    lpm         longest cached prefix first
    fcfs        first come, first served
    dfs-weight  along the tree, depth first, the branch with most waiting requests first;
                `TreeOrder` in tree_order.py

A higher priority comes before all of these. `WaitingQueue` keeps the overtake bound under every
order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from importlib import import_module

from sortedcontainers import SortedList

from radixserve.scheduler.request_state import RequestState

OrderKey = tuple[int, ...]


class QueueOrder(ABC):
    """Waiting requests in an order. It may write their `order_key` and nothing else."""

    @abstractmethod
    def add(self, state: RequestState) -> None:
        """O(log n)."""

    @abstractmethod
    def remove(self, state: RequestState) -> None:
        """O(log n)."""

    @abstractmethod
    def update(self, state: RequestState) -> None:
        """The request's match has changed: update its position. O(log n)."""

    @abstractmethod
    def scan(self, *, is_short: bool) -> Iterator[RequestState]:
        """Yields the requests in order, each at least once. The one just given may be removed;
        nothing else may change. `is_short`: `AdmissionPolicy.is_short`, of all waiting requests."""

    @abstractmethod
    def __len__(self) -> int: ...

    def begin_pass(self) -> None:  # noqa: B027  (only some orders care)
        """A pass begins that may hold requests."""

    def note_held(self) -> None:  # noqa: B027
        """The request just given fits and was held by the admission policy."""

    def note_admitted(self, state: RequestState) -> None:  # noqa: B027
        """A request of this order was started. It has been removed."""

    def restart(self) -> None:  # noqa: B027
        """The order is empty and gets the requests of other callers."""

    def check(self, num_requests: int) -> None:
        """Audit: it has all requests. AssertionError otherwise."""
        assert len(self) == num_requests, "a waiting request is not in an order"


class SortedOrder(QueueOrder):
    """In the order of a key, which ends with the arrival and is kept until the next update.
    Requests are sorted in when the order is next read, so one that is not read costs nothing."""

    def __init__(self, key: Callable[[RequestState], OrderKey]) -> None:
        self._key = key
        self._unsorted: dict[int, RequestState] = {}  # by arrival
        self._keys: dict[int, OrderKey] = {}  # by arrival, of the sorted ones
        self._sorted: SortedList = SortedList()  # (key, request)

    def add(self, state: RequestState) -> None:
        self._unsorted[state.arrival] = state

    def remove(self, state: RequestState) -> None:
        if self._unsorted.pop(state.arrival, None) is None:
            self._sorted.remove((self._keys.pop(state.arrival), state))

    def update(self, state: RequestState) -> None:
        if state.arrival in self._keys and self._keys[state.arrival] != self._key(state):
            self.remove(state)
            self.add(state)

    def scan(self, *, is_short: bool = False) -> Iterator[RequestState]:
        del is_short
        for state in self._unsorted.values():
            key = self._keys[state.arrival] = self._key(state)
            self._sorted.add((key, state))
        self._unsorted.clear()
        index = 0
        while index < len(self._sorted):
            state = self._sorted[index][1]
            yield state
            if index < len(self._sorted) and self._sorted[index][1] is state:
                index += 1

    def __len__(self) -> int:
        return len(self._sorted) + len(self._unsorted)


def make_order(policy: str) -> QueueOrder:
    """Returns the order for `schedule_policy`, a name that the config has checked."""
    if policy == "dfs-weight":
        order: QueueOrder = import_module("radixserve.scheduler.tree_order").TreeOrder()
        return order
    return SortedOrder(_match_key if policy == "lpm" else _arrival_key)


def _match_key(state: RequestState) -> OrderKey:
    priority, arrival = state.priority_key
    return priority, -state.prefix_watch.cached_len, arrival


def _arrival_key(state: RequestState) -> OrderKey:
    return state.priority_key
