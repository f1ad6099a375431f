"""Eviction policies besides LRU: LFU, priority, FIFO, SLRU and ARC. Loaded when one is chosen."""

from __future__ import annotations

from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Iterator

from sortedcontainers import SortedDict

from radixserve.cache.radix.eviction import EvictionOrder, EvictionPoint, PathUse
from radixserve.cache.radix.node import Node, path
from radixserve.cache.tokens import TOKEN_BYTES


class RankedEviction(EvictionOrder):
    """Lowest key first, least recently used among equals. O(log nodes)."""

    tracks_use = True

    def __init__(self, num_pages: int) -> None:
        super().__init__(num_pages)
        self._tick = 0
        self._nodes: SortedDict = SortedDict()  # rank -> node
        self._ranks: dict[Node, tuple[int, ...]] = {}

    def add(self, node: Node) -> None:
        self._tick += 1
        rank = self._ranks[node] = self.rank(node, self._tick)
        self._nodes[rank] = node

    def discard(self, node: Node) -> None:
        rank = self._ranks.pop(node, None)
        if rank is not None:
            del self._nodes[rank]

    def victim(self) -> Node | None:
        if not self._nodes:
            return None
        node: Node = self._nodes.peekitem(0)[1]
        return node

    def preview(self) -> Iterator[tuple[Node, str]]:
        return ((node, self.reason(node)) for node in self._nodes.values())

    def queues(self) -> list[Iterable[Node]]:
        return [self._nodes.values()]

    @abstractmethod
    def reason(self, node: Node) -> str:
        """Why the node is evicted before later ones."""

    def rank(self, node: Node, tick: int) -> tuple[int, ...]:
        return (node.policy_key, tick)

    @abstractmethod
    def on_path_used(self, node: Node, use: PathUse) -> None:
        """Update the policy keys of the path."""


class LFU(RankedEviction):
    """Least often reused first. The count is of sequences that found the node in the cache.

    Counts do not age: a node stays until others have been reused more often.
    """

    def reason(self, node: Node) -> str:
        return f"least often reused: {node.policy_key} times"

    def on_path_used(self, node: Node, use: PathUse) -> None:
        for ancestor in path(node):
            if ancestor.start < use.reused:
                ancestor.policy_key += 1


class Priority(RankedEviction):
    """Lowest priority first: that of the most important sequence that ever reached the node."""

    initial_key = -(2**63)

    def reason(self, node: Node) -> str:
        return f"lowest priority: {node.policy_key}"

    def on_path_used(self, node: Node, use: PathUse) -> None:
        for ancestor in path(node):
            if ancestor.policy_key >= use.priority:
                return  # so have its ancestors
            ancestor.policy_key = use.priority


class FIFO(RankedEviction):
    """Oldest publication first: the time at which tokens were last published in a node or below it.
    Reuse does not count.

    O(depth) per sequence that published tokens.
    """

    def __init__(self, num_pages: int) -> None:
        super().__init__(num_pages)
        self._stamp = 0

    def reason(self, _: Node) -> str:
        return "published first"

    def on_path_used(self, node: Node, use: PathUse) -> None:
        if use.has_published:
            for ancestor in path(node):
                self._stamp += 1
                ancestor.policy_key = self._stamp

    def rank(self, node: Node, tick: int) -> tuple[int, ...]:
        return (node.policy_key, -node.start, tick)  # a split gives both parts one stamp


_ONCE, _AGAIN = "not reused since it was computed", "reused, but longest ago"


def _below(node: Node) -> Iterable[Node]:
    return node.children.values()


class _Segment:
    """Nodes in order of recency, and the pages in them."""

    __slots__ = ("num_pages", "sizes")

    def __init__(self) -> None:
        self.sizes: OrderedDict[Node, int] = OrderedDict()  # oldest first, with their pages
        self.num_pages = 0

    def add(self, node: Node) -> None:
        size = self.sizes[node] = len(node.pages)
        self.num_pages += size

    def discard(self, node: Node) -> None:
        self.num_pages -= self.sizes.pop(node, 0)

    def resize(self, node: Node) -> None:
        if node in self.sizes:
            size = len(node.pages)
            self.num_pages += size - self.sizes[node]
            self.sizes[node] = size

    def oldest(self) -> Node | None:
        return next(iter(self.sizes), None)


class _Segmented(EvictionOrder):
    """Two segments: seen once, and seen again (policy_key 1). O(1)."""

    tracks_use = True

    def __init__(self, num_pages: int) -> None:
        super().__init__(num_pages)
        self._once = _Segment()
        self._again = _Segment()

    def add(self, node: Node) -> None:
        (self._again if node.policy_key else self._once).add(node)

    def discard(self, node: Node) -> None:
        self._once.discard(node)
        self._again.discard(node)

    def on_resized(self, node: Node) -> None:
        self._once.resize(node)
        self._again.resize(node)

    def preview(self) -> Iterator[tuple[Node, str]]:
        for node in self._once.sizes:
            yield node, _ONCE
        for node in self._again.sizes:
            yield node, _AGAIN

    def queues(self) -> list[Iterable[Node]]:
        return [self._once.sizes, self._again.sizes]

    def on_path_used(self, node: Node, use: PathUse) -> None:
        for ancestor in path(node):
            if ancestor.start < use.reused:
                if ancestor.policy_key:
                    return  # so have its ancestors
                ancestor.policy_key = 1


class SLRU(_Segmented):
    """Segmented LRU: reused nodes are protected, up to a share of the pool.

    Beyond it the oldest protected nodes become the youngest unprotected ones.
    """

    _PROTECTED_SHARE = 0.8

    def __init__(self, num_pages: int) -> None:
        super().__init__(num_pages)
        self._max_protected = int(num_pages * self._PROTECTED_SHARE)

    def add(self, node: Node) -> None:
        if node.policy_key and node.parent is not None:
            node.parent.policy_key = 1  # it may have been demoted while this one was locked
        super().add(node)
        while self._again.num_pages > self._max_protected:
            oldest = self._again.oldest()
            assert oldest is not None
            self._again.discard(oldest)
            oldest.policy_key = 0
            self._once.add(oldest)

    def victim(self) -> Node | None:
        return self._once.oldest() or self._again.oldest()


class ARC(_Segmented):
    """Adaptive replacement (Megiddo and Modha, FAST 2003), counted in pages.

    Two LRU lists, seen once and seen again, and for each a ghost list of what was evicted from it.
    A hit in a ghost list enlarges that list's share of the pool.
    """

    tracks_evictions = True
    _MAX_POINTS = 1 << 16  # points remembered of each list

    def __init__(self, num_pages: int) -> None:
        super().__init__(num_pages)
        self.once_share = 0.0  # pages that the nodes seen once may fill
        self._evicted_once = _EvictedPoints(num_pages, self._MAX_POINTS)
        self._evicted_again = _EvictedPoints(num_pages, self._MAX_POINTS)

    def victim(self) -> Node | None:
        once, again = self._once.oldest(), self._again.oldest()
        if once is None or again is None:
            return once or again
        if self._once.num_pages > self.once_share or again.children:
            return once
        return again

    def preview(self) -> Iterator[tuple[Node, str]]:
        gone: set[Node] = set()
        once, again = list(self._once.sizes)[::-1], list(self._again.sizes)[::-1]
        num_once = self._once.num_pages
        while once or again:
            is_once = bool(once) and (
                not again or num_once > self.once_share or not gone.issuperset(_below(again[-1]))
            )
            node = (once if is_once else again).pop()
            num_once -= len(node.pages) if is_once else 0
            gone.add(node)
            yield node, _ONCE if is_once else _AGAIN

    def on_path_used(self, node: Node, use: PathUse) -> None:
        raised: set[Node] = set()
        for ancestor in path(node):
            assert ancestor.parent is not None
            if ancestor.start >= use.reused:  # new, or evicted before
                token = bytes(ancestor.tokens[:TOKEN_BYTES])
                if (
                    self._take_evicted((ancestor.parent.node_id, ancestor.start, token))
                    and not ancestor.policy_key
                ):
                    ancestor.policy_key = 1
                    raised.add(ancestor)
                continue
            cut = (use.reused - ancestor.start) * TOKEN_BYTES  # where it had been cut short
            if cut < len(ancestor.tokens):
                self._take_evicted(
                    (ancestor.node_id, use.reused, bytes(ancestor.tokens[cut : cut + TOKEN_BYTES]))
                )
            break
        super().on_path_used(node, use)
        if raised:
            self._raise_ancestors(node, raised)

    def on_evicted(self, node: Node, point: EvictionPoint, num_pages: int) -> None:
        lost = self._evicted_again if node.policy_key else self._evicted_once
        lost.remember(node.node_id, point, num_pages)

    def check(self) -> None:
        for evicted in (self._evicted_once, self._evicted_again):
            evicted.check()

    def _raise_ancestors(self, node: Node, raised: set[Node]) -> None:
        """Set the policy key of all ancestors of nodes that were `raised` just now."""
        again = 0
        for ancestor in path(node):
            if ancestor.policy_key and again and ancestor not in raised:
                return
            again = ancestor.policy_key = again or ancestor.policy_key

    def _take_evicted(self, point: EvictionPoint) -> bool:
        """Forget an evicted point and adapt `once_share`. Returns whether it was remembered."""
        once, again = self._evicted_once, self._evicted_again
        in_once, in_again = max(1, once.num_pages), max(1, again.num_pages)
        pages = once.forget(point)
        if pages:
            more = pages * max(1.0, in_again / in_once)
            self.once_share = min(float(self._num_pages), self.once_share + more)
            return True
        pages = again.forget(point)
        if pages:
            less = pages * max(1.0, in_once / in_again)
            self.once_share = max(0.0, self.once_share - less)
        return bool(pages)


class _EvictedPoints:
    """Points where pages were evicted, oldest first, up to a number of pages and of points."""

    __slots__ = ("_max_pages", "_max_points", "_pages", "_tails", "num_pages")

    def __init__(self, max_pages: int, max_points: int) -> None:
        self._max_pages = max_pages
        self._max_points = max_points
        self._pages: OrderedDict[EvictionPoint, int] = OrderedDict()
        self._tails: dict[int | str, EvictionPoint] = {}  # node_id -> where its tail was cut off
        self.num_pages = 0

    def remember(self, node_id: int | str, point: EvictionPoint, num_pages: int) -> None:
        """Remember that `num_pages` of the node `node_id` were evicted from `point` on, and its
        tail before."""
        tail = self._tails.get(node_id)
        if tail is not None:
            num_pages += self.forget(tail)
        self.forget(point)
        self._pages[point] = num_pages
        self.num_pages += num_pages
        if point[0] == node_id:
            self._tails[node_id] = point
        while self.num_pages > self._max_pages or len(self._pages) > self._max_points:
            self.forget(next(iter(self._pages)))

    def forget(self, point: EvictionPoint) -> int:
        """Forget a point. Returns the pages evicted from there on, 0 if it is not remembered."""
        pages = self._pages.pop(point, 0)
        self.num_pages -= pages
        if pages and self._tails.get(point[0]) == point:
            del self._tails[point[0]]
        return pages

    def check(self) -> None:
        """AssertionError unless the remembered points are counted and bounded."""
        assert self.num_pages == sum(self._pages.values()), "evicted pages miscounted"
        assert self.num_pages <= self._max_pages, "too many evicted pages remembered"
        assert len(self._pages) <= self._max_points, "too many evicted points remembered"
        assert set(self._tails.values()) <= set(self._pages), "a tail that is not remembered"
