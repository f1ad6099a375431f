"""`WindowedSequence`: a cached sequence whose layers with windows may have lost early K and V.

A prefix can be used where the window pages of the last positions before its end are there, see
`window_pool.py`; what lies before is needed by the other layers alone.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

import numpy as np

from radixserve.cache.page_pool import PageAllocator
from radixserve.cache.radix.child_index import siblings_with_head
from radixserve.cache.radix.node import Node, path
from radixserve.cache.radix.sequence import CachedSequence, node_covering
from radixserve.cache.sequence import CacheSequence
from radixserve.cache.window_pool import WindowedAllocator, WindowPool
from radixserve.checks import check_int
from radixserve.errors import OutOfPages


class WindowedSequence(CachedSequence):
    """Made by a `RadixCache` with windows."""

    __slots__ = ("_wanted",)

    _wanted: set[int]  # lengths that others go on from

    def __init__(self, *parts: Any, match_len: int = 0) -> None:
        """See `CachedSequence`. `match_len`: where it left the cached tokens, perhaps after what it
        could use: the tree branches there."""
        super().__init__(*parts)
        self._wanted = {match_len} if match_len > self.length else set()

    @property
    def _windows(self) -> WindowPool:
        if TYPE_CHECKING:
            assert isinstance(self._allocator, WindowedAllocator)
        return self._allocator.windows

    def fork(self) -> WindowedSequence:
        forked = super().fork()
        assert isinstance(forked, WindowedSequence)
        whole, extra = divmod(self.committed_len, self._tree.page_size)
        if extra:
            self._windows.copy(self._pages[whole], forked._pages[whole], extra)
        return forked

    def copy_from(self, source: CacheSequence) -> int:
        """Early pages, which no new token sees, get no window page."""
        allocator, num_pages = self._allocator, len(self._pages)
        num_early = max(0, self._windows.first_seen_page(source.length) - num_pages)
        early = PageAllocator.allocate(allocator, num_early)
        self._pages = self._pages + early  # a view of the old array may be exported
        try:
            copied = super().copy_from(source)
        except OutOfPages:
            self._pages = self._pages[:num_pages]
            allocator.free(early)
            raise
        for read, written, num_tokens in self.cow_copies:
            self._windows.copy(read, written, num_tokens)
        return copied

    def truncate(self, length: int) -> None:
        """Roll back to `length`, or before it where K and V of layers with windows were dropped:
        see `length` afterwards."""
        self._check_open()
        windows, length = self._windows, check_int("length", length, 0)
        if length < self.committed_len:
            length = windows.usable_length([(0, self._pages)], length)
            windows.use(self._pages, length)
        try:
            super().truncate(length)
        finally:
            windows.end_use()

    def _cut(self, length: int, whole: int, extra: int) -> None:
        last = self._pages[whole] if extra else -1
        super()._cut(length, whole, extra)
        if extra and self._pages[whole] != last:
            self._windows.copy(last, self._pages[whole], extra)

    def want_checkpoint(self, length: int) -> None:
        """Others go on from there: once that is computed, the window pages before it count as used,
        as do those where a sequence ends."""
        self._wanted.add(length)

    def _publish(self) -> None:
        super()._publish()
        if self._wanted:
            for length in [one for one in self._wanted if one <= self.committed_len]:
                self._wanted.remove(length)
                self._touch_window(length)

    def _touch_window(self, length: int) -> None:
        windows, last = self._windows, self._allocator.pages_for(length)
        pages = self._pages[windows.first_seen_page(length) : last]
        windows.touch(np.array(pages, np.int32))

    def _replace_pages(self, first: int, pages: array[int]) -> None:
        """The tree's pages get our window pages where they lack one."""
        self._windows.move(self._pages[first : first + len(pages)], pages)
        super()._replace_pages(first, pages)

    def release(self) -> None:
        if self._is_open:
            self._touch_window(self.committed_len)
        super().release()


def usable_match(windows: WindowPool, node: Node, length: int) -> tuple[int, Node]:
    """The longest prefix of a match of `length` tokens, whose last one is in `node`, that a
    sequence can go on from; and the node with its last token."""
    if node.parent is None:
        return length, node
    found = []
    for one in siblings_with_head(node, length):  # one of them may have what another has lost
        runs = ((at.start // windows.page_size, at.pages) for at in path(one))
        usable = windows.usable_length(runs, length)
        if usable == length:
            return length, one
        found.append((usable, one))
    usable, node = max(found, key=lambda one: one[0])
    return usable, node_covering(node, usable)
