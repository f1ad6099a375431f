"""In which order unused nodes are dropped, and a bounded memory of what was dropped."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from radixserve.cache.node import Node


class LRU:
    """Least recently used first, over all unlocked nodes; every operation is O(1).

    The tree adds the nodes of a path deepest first, so a parent is always younger than its
    children and the oldest entry is always a leaf: no heap, no search.
    """

    __slots__ = ("_nodes",)

    def __init__(self) -> None:
        self._nodes: OrderedDict[Node, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, node: Node) -> bool:
        return node in self._nodes

    def __iter__(self) -> Iterator[Node]:
        """Oldest first."""
        return iter(self._nodes)

    def add(self, node: Node) -> None:
        """`node` was unlocked just now: it becomes the youngest."""
        self._nodes[node] = None

    def discard(self, node: Node) -> None:
        """`node` was locked or is gone."""
        self._nodes.pop(node, None)

    def victim(self) -> Node | None:
        """The leaf to drop next; it stays in the order until it is discarded."""
        return next(iter(self._nodes), None)


class GhostList:
    """Remembers where evicted branches began, oldest forgotten first.

    An entry is the place (node serial, position) and the first token of what was dropped there; its
    value is the first page of it, so that a later look-up can tell how far it would have matched.
    """

    __slots__ = ("_capacity", "_entries")

    def __init__(self, capacity: int = 4096) -> None:
        self._capacity = capacity
        self._entries: OrderedDict[tuple[int | str, int, bytes], bytes] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def remember(self, place: int | str, position: int, page: bytes) -> None:
        """`page`: the int32 bytes of the first tokens dropped at `position` below `place`."""
        self._entries[place, position, page[:4]] = page
        if len(self._entries) > self._capacity:
            self._entries.popitem(last=False)

    def find(self, place: int | str, position: int, token: bytes) -> bytes:
        """The first page dropped at that place that began with `token`, or b""."""
        return self._entries.get((place, position, token), b"")
