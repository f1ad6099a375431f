"""`EvictionOrder`: the plug point for what is evicted next, and LRU, the default.

A policy orders the unlocked nodes; a node with `lock_ref` > 0 is in no order, see
`RadixTree.lock`. The policy sets a node's `policy_key`: a tick, a count, a priority, a stamp, a
segment or an expected return. Along a path keys never rise towards the leaves, so every victim is a
leaf. `EvictedHistory` remembers where tokens were evicted. A `RetentionPolicy` (retention.py) wraps
any policy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from typing import Any, NamedTuple

from radixserve.cache.radix.node import Node
from radixserve.cache.sequence import ReturnEstimate

EvictionPoint = tuple[int | str, int, bytes]  # node id, position, first token (int32) after it


class EvictedHistory:
    """Remembers where evicted branches began; the oldest are forgotten, half of them at a time.

    The value of a point is the first page of what was dropped there, from which a later look-up
    computes how far it would have matched. O(1).
    """

    __slots__ = ("_max_recent", "_older", "_recent")

    def __init__(self, capacity: int = 8192) -> None:
        self._max_recent = capacity // 2
        self._recent: dict[EvictionPoint, bytes] = {}
        self._older: dict[EvictionPoint, bytes] = {}

    def remember(self, point: EvictionPoint, page: bytes) -> None:
        """Remember an eviction. `page`: int32 bytes of the first tokens evicted there, at most a
        page."""
        recent = self._recent
        recent[point] = page
        if len(recent) > self._max_recent:
            self._older, self._recent = recent, {}

    def forget(self, node_id: int | str) -> None:
        """Delete the points of that node. O(capacity)."""
        for points in (self._recent, self._older):
            for point in [point for point in points if point[0] == node_id]:
                del points[point]

    def find(self, point: EvictionPoint) -> bytes:
        """Returns the first page evicted at that point, or b""."""
        return self._recent.get(point) or self._older.get(point, b"")


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

    initial_key: Any = 0  # `policy_key` of a new node
    tracks_use = False  # whether `on_path_used` is called
    tracks_evictions = False  # whether `on_evicted` is called
    tracks_returns = False  # whether it uses `ReturnEstimate`s
    clock: Callable[[], float]  # the cache's, in seconds

    def __init__(self, num_pages: int) -> None:
        """`num_pages`: of the whole pool."""
        self._num_pages = num_pages
        # Read for every node: an instance's own attributes are found faster than its class's.
        self.initial_key = type(self).initial_key
        self.tracks_use = type(self).tracks_use
        self.tracks_evictions = type(self).tracks_evictions
        self.tracks_returns = type(self).tracks_returns

    @abstractmethod
    def add(self, node: Node) -> None:
        """Add `node`, which was unlocked just now."""

    @abstractmethod
    def discard(self, node: Node) -> None:
        """Remove `node`, which was locked or removed, if it is in the order."""

    @abstractmethod
    def victim(self) -> Node | None:
        """Returns the leaf to evict next; it stays in the order until it is discarded."""

    def pop(self, num_pages: int) -> Node | None:
        """Returns the victim; it is discarded if it has at most so many pages."""
        node = self.victim()
        if node is not None and len(node.pages) <= num_pages:
            self.discard(node)
        return node

    @abstractmethod
    def preview(self) -> Iterator[tuple[Node, str]]:
        """Yields all nodes in the order in which `victim` would return them if nothing else
        happened, each with the reason. May end what has run out of time; changes nothing else."""

    @abstractmethod
    def queues(self) -> list[Iterable[Node]]:
        """Returns all nodes as queues, each in its order, for audits."""

    def on_path_used(self, node: Node, use: PathUse) -> None:  # noqa: B027  (only some policies care)
        """Called before the path ending in `node` is unlocked by a sequence."""

    def note_release(  # noqa: B027
        self, node: Node, expected: ReturnEstimate | None, reused: int
    ) -> None:
        """With `tracks_returns`: the locked path to `node` is about to be released. `expected`:
        when it is used again; None: unknown. `reused`: its first tokens that were cached before."""

    def expect(self, node: Node, expected: ReturnEstimate) -> None:  # noqa: B027
        """Note when the path to `node` is used again."""

    def adopt(  # noqa: B027
        self, wait_s: float, late_s: float, probability: float, is_regular: bool
    ) -> None:
        """Set this estimate for all paths without one."""

    def expected_return(self, node: Node) -> ReturnEstimate | None:
        """Returns when a path through an unlocked node is used again; None: unknown."""
        del node
        return None

    def on_resized(self, node: Node) -> None:  # noqa: B027
        """Note that an unlocked node has fewer tokens now, after an eviction or a split."""

    def on_evicted(self, node: Node, point: EvictionPoint, num_pages: int) -> None:  # noqa: B027
        """Note that the last `num_pages` of `node` are being evicted; they begin at `point`. If
        these are all of its pages, the node was discarded before."""

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


_HOME = "radixserve.cache.radix.eviction_policies"
POLICIES: dict[str, type[EvictionOrder] | str] = {  # by the names of `EngineConfig.eviction`
    "lru": LRU,
    # "module:class", loaded when it is used
    "arc": f"{_HOME}:ARC",
    "lfu": f"{_HOME}:LFU",
    "fifo": f"{_HOME}:FIFO",
    "slru": f"{_HOME}:SLRU",
    "priority": f"{_HOME}:Priority",
    "expected-return": "radixserve.retention.expected_return:ExpectedReturn",
}


def make_order(policy: str, num_pages: int, clock: Callable[[], float]) -> EvictionOrder:
    """Returns the eviction order of that policy. `clock`: the cache's, in seconds."""
    order = policy_class(policy)(num_pages)
    order.clock = clock
    return order


def policy_class(policy: str) -> type[EvictionOrder]:
    """Returns the class of that policy."""
    home = POLICIES[policy]
    if not isinstance(home, str):
        return home
    module, _, name = home.partition(":")
    loaded: type[EvictionOrder] = getattr(import_module(module), name)
    return loaded
