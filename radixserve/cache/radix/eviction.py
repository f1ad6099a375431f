"""`EvictionOrder`, the interface of an eviction policy, and `LRU`, the default.

The other policies are in `policies`; `session_eviction` wraps any of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from radixserve.cache.radix.evicted_history import EvictionPoint
from radixserve.cache.radix.node import Node


class PathUse(NamedTuple):
    """How a released sequence used its path."""

    reused: int  # whole pages up to this position were cached before it
    has_published: bool  # it added tokens to the tree
    priority: int


class EvictionOrder(ABC):
    """All unlocked nodes of live namespaces. Only the tree calls it; it writes `policy_key`.

    No operation may cost more than O(log nodes), amortized, whatever the tree's size. The tree adds
    the nodes of a path deepest first, and locks (discards) a node before anything below it changes.
    An order must keep this invariant, by which a victim is always a leaf: in `queues`, a node comes
    before its parent or in an earlier queue.
    """

    initial_key = 0  # of a new node
    tracks_use = False  # whether `on_path_used` is called
    tracks_evictions = False  # whether `on_evicted` is called

    def __init__(self, num_pages: int) -> None:
        """`num_pages`: of the whole pool."""
        self._num_pages = num_pages
        # Read for every node: an instance's own attributes are found faster than its class's.
        self.initial_key = type(self).initial_key
        self.tracks_use = type(self).tracks_use
        self.tracks_evictions = type(self).tracks_evictions

    @abstractmethod
    def add(self, node: Node) -> None:
        """`node` was unlocked just now."""

    @abstractmethod
    def discard(self, node: Node) -> None:
        """`node` was locked or removed; it may be absent."""

    @abstractmethod
    def victim(self) -> Node | None:
        """The leaf to evict next; it stays in the order until it is discarded."""

    def pop(self, num_pages: int) -> Node | None:
        """The victim; it is discarded if it has at most so many pages."""
        node = self.victim()
        if node is not None and len(node.pages) <= num_pages:
            self.discard(node)
        return node

    @abstractmethod
    def preview(self) -> Iterator[tuple[Node, str]]:
        """All nodes in the order in which `victim` would name them if nothing else happened, each
        with the reason. Changes nothing but what time has changed already (leases that ended)."""

    @abstractmethod
    def queues(self) -> list[Iterable[Node]]:
        """All nodes, each queue in its order, for audits."""

    def on_path_used(self, node: Node, use: PathUse) -> None:  # noqa: B027  (only some policies care)
        """Called before the path ending in `node` is unlocked by a sequence."""

    def on_resized(self, node: Node) -> None:  # noqa: B027
        """An unlocked node was cut short, by an eviction or a split."""

    def on_evicted(self, node: Node, point: EvictionPoint, num_pages: int) -> None:  # noqa: B027
        """Eviction takes the last `num_pages` of `node`; they begin at `point`. If these are all of
        its pages, the node was discarded before."""

    def check(self) -> None:  # noqa: B027
        """AssertionError at the first broken invariant of the policy's own records."""


class LRU(EvictionOrder):
    """Least recently used first; every operation is O(1), amortized.

    A path is added deepest first, so a parent is always younger than its children and the oldest
    entry is always a leaf: no heap, no search. Nodes are stored by ascending tick
    (`policy_key`), so nodes of similar age are adjacent in memory.
    """

    _MAX_STEPS = 1_000

    def __init__(self, num_pages: int) -> None:
        super().__init__(num_pages)
        self._nodes: dict[int, Node] = {}  # by tick, ascending
        self._next = 1
        self._oldest = 1  # no tick before it is in use

    def add(self, node: Node) -> None:
        tick = node.policy_key = self._next
        self._next = tick + 1
        self._nodes[tick] = node

    def discard(self, node: Node) -> None:
        nodes, tick = self._nodes, node.policy_key
        if nodes.get(tick) is node:  # a split copies keys
            del nodes[tick]
            if tick == self._oldest:
                self._oldest = tick + 1

    def victim(self) -> Node | None:
        nodes, tick = self._nodes, self._oldest
        node = nodes.get(tick)
        if node is None and nodes:
            last = tick + self._MAX_STEPS
            while node is None:
                tick += 1
                if tick == last:
                    tick = next(iter(nodes))  # a long gap; iteration skips all deleted entries
                node = nodes.get(tick)
            self._oldest = tick
        return node

    def pop(self, num_pages: int) -> Node | None:
        nodes, tick = self._nodes, self._oldest
        node = nodes.get(tick)
        if node is None:
            tick += 1  # usual gap: the parent, which was locked again
            node = nodes.get(tick)
            if node is None:
                node, tick = self.victim(), self._oldest
                if node is None:
                    return None
            self._oldest = tick
        if len(node.pages) <= num_pages:
            del nodes[tick]
            self._oldest = tick + 1
        return node

    def preview(self) -> Iterator[tuple[Node, str]]:
        return ((node, "least recently used") for node in self._nodes.values())

    def queues(self) -> list[Iterable[Node]]:
        return [self._nodes.values()]
