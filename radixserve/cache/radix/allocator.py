"""What all sequences of one cache share: the pool, the tree, the list of sessions, the counters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array

from radixserve.cache.page_pool import PagePool
from radixserve.cache.radix.eviction import EvictionOrder
from radixserve.cache.radix.node import Node
from radixserve.cache.radix.radix_tree import RadixTree
from radixserve.cache.stats import CacheStats
from radixserve.errors import OutOfPages


class OpenSequence(ABC):
    """A live sequence, as far as the store knows it."""

    __slots__ = ()

    @abstractmethod
    def shrink_lock(self) -> None:
        """Protect no more of the tree than needed: memory is short."""


class PageAllocator:
    """Hands out pages, making room by eviction, and takes them back."""

    def __init__(self, num_pages: int, page_size: int, order: EvictionOrder) -> None:
        self.page_size = page_size
        self.pool = PagePool(num_pages)
        self.free = self.pool.free  # private pages go back to the free list
        self.tree = RadixTree(self.pool, page_size, order)
        self.counters = CacheStats()
        self.live_sequences: set[OpenSequence] = set()

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    @property
    def num_available(self) -> int:
        """Pages that are free or evictable."""
        return self.pool.num_free + self.tree.num_evictable

    @property
    def num_private(self) -> int:
        """Pages that belong to sequences."""
        return self.pool.num_pages - self.pool.num_free - self.tree.num_pages

    def allocate(self, count: int, *, may_shrink_locks: bool = True) -> array[int]:
        """`count` pages, evicting the oldest unused ones; OutOfPages, nothing dropped, if too few.

        `may_shrink_locks`: when short, make sequences protect no more than they need.
        """
        pool = self.pool
        missing = count - pool.num_free
        if missing > 0:
            tree = self.tree
            if tree.num_pages - tree.num_locked < missing:
                missing = self._make_room(count, may_shrink_locks=may_shrink_locks)
            if tree.pending_free:
                missing -= tree.free_pending(missing)
            tree.evict(missing)
        return pool.allocate(count)

    def allocate_after(self, page: int, count: int) -> array[int]:
        """`count` pages for whoever holds `page` and grows slowly, close to it if they can be;
        OutOfPages, nothing dropped, if there are too few."""
        pool = self.pool
        if count > pool.num_free:
            return self.allocate(count)
        if count > 1:
            return pool.allocate_some_after(page, count)
        return array("i", (pool.allocate_after(page),))

    def _make_room(self, count: int, *, may_shrink_locks: bool) -> int:
        """The pages still missing for `count` once nobody holds more than it needs; OutOfPages if
        that many cannot be evicted."""
        tree, pool = self.tree, self.pool
        if may_shrink_locks:
            for sequence in self.live_sequences:
                sequence.shrink_lock()
        if self.num_available < count:
            raise OutOfPages(
                f"{count} pages wanted: {pool.num_free} free and "
                f"{tree.num_evictable} evictable of {pool.num_pages}"
            )
        return count - pool.num_free

    def unlock(self, node: Node) -> None:
        """A sequence lets go of its anchor."""
        if node.parent is None:
            node.lock_ref -= 1
            if not node.children:
                self.tree.prune(node.namespace)
            return
        self.tree.unlock(node)
        if node.parent is None:  # it went with the last hold
            self.tree.prune(node.namespace)
