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

from sortedcontainers import SortedKeyList

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
    """In the order of a key, which is kept as it was when a request was added or updated."""

    def __init__(self, key: Callable[[RequestState], OrderKey]) -> None:
        self._key = key
        self._keys: dict[int, OrderKey] = {}  # by arrival
        self._requests: SortedKeyList = SortedKeyList(key=lambda state: self._keys[state.arrival])

    def add(self, state: RequestState) -> None:
        self._keys[state.arrival] = self._key(state)
        self._requests.add(state)

    def remove(self, state: RequestState) -> None:
        self._requests.remove(state)
        del self._keys[state.arrival]

    def update(self, state: RequestState) -> None:
        if self._keys[state.arrival] != self._key(state):
            self.remove(state)
            self.add(state)

    def scan(self, *, is_short: bool = False) -> Iterator[RequestState]:
        del is_short
        index = 0
        while index < len(self._requests):
            state = self._requests[index]
            yield state
            if index < len(self._requests) and self._requests[index] is state:
                index += 1

    def __len__(self) -> int:
        return len(self._requests)


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
