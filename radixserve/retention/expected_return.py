"""`ExpectedReturn`: evicts by when a path is expected to be used again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

from sortedcontainers import SortedDict

from radixserve.cache.radix.eviction import LRU, EvictionOrder
from radixserve.cache.radix.node import Node, path
from radixserve.cache.sequence import ReturnEstimate


class _Recency(LRU):
    """LRU that does not use the nodes' `policy_key`."""

    def __init__(self, num_pages: int) -> None:
        super().__init__(num_pages)
        self._ticks: dict[Node, int] = {}

    def __contains__(self, node: Node) -> bool:
        return node in self._ticks

    def add(self, node: Node) -> None:
        tick = self._ticks[node] = self._next
        self._next = tick + 1
        self._nodes[tick] = node

    def discard(self, node: Node) -> None:
        tick = self._ticks.pop(node, 0)
        if tick:
            del self._nodes[tick]
            if tick == self._oldest:
                self._oldest = tick + 1

    def pop(self, num_pages: int) -> Node | None:
        node = super().pop(num_pages)
        if node is not None and len(node.pages) <= num_pages:
            del self._ticks[node]
        return node


class ExpectedReturn(EvictionOrder):
    """LRU, except that paths that are probably used no more go first, and paths of sessions with
    regular think times are ordered by their next use. The scheduler estimates when a released path
    is used again. Three queues, evicted in this order:

        unlikely  least recently used first: paths that are used again with a probability below
                  one half, except prefixes that were reused before
        recency   least recently used first: paths without an expected return, and those whose
                  think times vary so much that recency tells more; also paths whose regular return
                  is overdue, as if used when they became so
        regular   the one that returns last first: sessions that come round in turn do not push
                  each other out, as they do under LRU

    A node's `policy_key` is its `ReturnEstimate`, None if unknown. It joins those of all nodes
    below, see `join_returns`. So no node is evicted before one below it. A node of a regular
    session costs O(log nodes), when the order is next read.
    """

    initial_key: ReturnEstimate | None = None
    tracks_returns = True

    def __init__(self, num_pages: int) -> None:
        super().__init__(num_pages)
        self.clock: Callable[[], float] = time.monotonic  # that of the returns
        self._unlikely, self._recency = _Recency(num_pages), _Recency(num_pages)
        self._regular: SortedDict = SortedDict()  # (-return time, tick) -> node
        self._by_late_at: SortedDict = SortedDict()  # (late time, tick) -> node, the same nodes
        self._keys: dict[Node, tuple[float, float, int]] = {}  # return time, late time, tick
        self._unsorted: dict[Node, None] = {}  # of these, the ones not yet in the two above
        self._tick = 0

    def add(self, node: Node) -> None:
        expected = node.policy_key
        if expected is None or not expected.is_regular:
            is_unlikely = expected is not None and not expected.is_likely
            (self._unlikely if is_unlikely else self._recency).add(node)
            return
        self._tick = tick = self._tick + 1
        self._keys[node] = (expected.return_at, expected.late_at, tick)
        self._unsorted[node] = None  # most are used again before an order is asked for

    def discard(self, node: Node) -> None:
        if node in self._keys:
            self._drop_key(node)
        else:
            (self._recency if node in self._recency else self._unlikely).discard(node)

    def victim(self) -> Node | None:
        victim = self._unlikely.victim() or self._recency.victim()
        if victim is not None:
            return victim
        self._sort()
        victim = self._recency.victim()
        if victim is not None:
            return victim
        regular: Node | None = self._regular.peekitem(0)[1] if self._regular else None
        return regular

    def pop(self, num_pages: int) -> Node | None:
        if not self._keys:
            return self._unlikely.pop(num_pages) or self._recency.pop(num_pages)
        return super().pop(num_pages)

    def preview(self) -> Iterator[tuple[Node, str]]:
        self._sort()
        for node, _ in self._unlikely.preview():
            yield node, "probably not used again"
        yield from self._recency.preview()
        for node in self._regular.values():
            yield node, "expected back after all others"

    def queues(self) -> list[Iterable[Node]]:
        self._sort()
        return [*self._unlikely.queues(), *self._recency.queues(), self._regular.values()]

    def check(self) -> None:
        self._sort()
        assert set(self._keys) == set(self._regular.values()), "regular nodes and keys disagree"
        assert set(self._keys) == set(self._by_late_at.values()), "late times and keys disagree"

    # -- returns ------------------------------------------------------------------------------

    def expected_return(self, node: Node) -> ReturnEstimate | None:
        expected: ReturnEstimate | None = node.policy_key
        return expected

    def note_release(self, node: Node, expected: ReturnEstimate | None, reused: int) -> None:
        """Set the estimates of the locked path to `node`, which is about to be released.
        `expected`: when it is used again; None: unknown. `reused`: its first tokens that were
        cached before, which others may use again. O(depth)."""
        below, child = expected, None
        for ancestor in path(node):
            num_others = len(ancestor.children) - (child is not None)
            if below is not None and not below.is_likely and ancestor.end <= reused:
                below = None
            if num_others or ancestor.lock_ref > 1:
                below = join_returns(ancestor.policy_key, below)
            ancestor.policy_key = below
            child = ancestor

    def expect(self, node: Node, expected: ReturnEstimate) -> None:
        """Join `expected` into the estimates of the path to `node`. It changes the order of a
        locked node once that is released. O(depth)."""
        for ancestor in path(node):
            is_here = (
                ancestor in self._keys or ancestor in self._recency or ancestor in self._unlikely
            )
            if is_here:
                self.discard(ancestor)
            ancestor.policy_key = join_returns(ancestor.policy_key, expected)
            if is_here:
                self.add(ancestor)

    def adopt(self, wait_s: float, late_s: float, probability: float, is_regular: bool) -> None:
        """Set this estimate for all paths without one. O(nodes): to be called once."""
        for node in list(self._recency.queues()[0]):  # children before their parents
            if node.policy_key is None:
                return_at, late_at = node.last_use + wait_s, node.last_use + late_s
                self.expect(
                    node, ReturnEstimate(return_at, wait_s, late_at, probability, is_regular)
                )

    def _sort(self) -> None:
        """Move nodes whose return is overdue to the recency queue, and sort the others that were
        added since the last call into the regular queue. O(log nodes) each."""
        if not self._keys:
            return
        now, late = self.clock(), list[tuple[float, int, Node]]()
        for (late_at, tick), node in self._by_late_at.items():
            if late_at >= now:
                break
            late.append((late_at, tick, node))
        for node in self._unsorted:
            return_at, late_at, tick = self._keys[node]
            if late_at < now:
                late.append((late_at, tick, node))
            else:
                self._regular[-return_at, tick] = self._by_late_at[late_at, tick] = node
        for _, _, node in sorted(late):
            self._drop_key(node)
            self._recency.add(node)
        self._unsorted.clear()

    def _drop_key(self, node: Node) -> None:
        return_at, late_at, tick = self._keys.pop(node)
        if node in self._unsorted:
            del self._unsorted[node]
            return
        del self._regular[-return_at, tick], self._by_late_at[late_at, tick]


def join_returns(
    first: ReturnEstimate | None, second: ReturnEstimate | None
) -> ReturnEstimate | None:
    """Returns the estimate of a node that sequences with both estimates use: the earliest
    `return_at` and the latest `late_at`. An unknown one counts for more than an unlikely one."""
    if first is None or second is None:
        known = first or second
        return known if known is not None and known.is_likely else None
    return ReturnEstimate(
        min(first.return_at, second.return_at),
        min(first.wait_s, second.wait_s),
        max(first.late_at, second.late_at),
        max(first.probability, second.probability),
        first.is_regular or second.is_regular,
    )
