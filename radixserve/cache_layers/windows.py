"""`WindowedLayers`: window pages, the K and V of layers that see a window of positions only.

Such layers (sliding windows, attention chunks) keep their K and V in a memory of their own. A page
of the cache has the K and V of all other layers. Each page gets a window page when it is allocated
and may lose it later, since a query reads only the window pages of the positions in its window.
When window pages are short, the least recently used ones are dropped that no live sequence can see.
Window pages where sequences began, ended or left the cached tokens count as used; all others are
dropped long before.

    page         0   1   2   3   4   5   6        of a sequence; windows of two pages
    window page  -   8   9   -   -   4   7        it continues after page 6, others after 2 or 6

A prefix can be reused if the window pages of the last positions before its end exist; only the
other layers need earlier positions.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from radixserve.arrays import IntArray
from radixserve.cache.lookup import MissReason
from radixserve.cache.page_pool import PagePool
from radixserve.cache.radix.child_index import siblings_with_head
from radixserve.cache.radix.layers import RadixLayers
from radixserve.cache.radix.node import Match, Node, path, path_pages
from radixserve.cache.radix.radix_tree import RadixTree
from radixserve.cache.radix.sequence import RadixSequence, node_covering
from radixserve.cache.sequence import CacheSequence, PageAllocator, PageOwner
from radixserve.checks import check_int
from radixserve.errors import OutOfPages
from radixserve.schedule import ScheduledRows, WindowLayers, WindowUpdates

_NO_PAGES: IntArray = np.empty(0, np.int32)
NO_PAGE = -1  # in place of a window page's id
NEVER_USED = 4  # age that a new window page begins with, in ticks per window page of the pool
RECLAIM_SHARE = 16  # at least 1 / 16 is dropped at a time, since a search costs O(window pages)


class WindowPool:
    """Window pages 0 .. num_pages - 1; each is free, or of one page of the cache."""

    def __init__(self, num_pages: int, page_size: int, layers: WindowLayers) -> None:
        """`num_pages`: of the cache; a `WindowedPagePool` has them."""
        self.page_size = page_size
        self.num_pages = check_int("windows.num_pages", layers.num_pages, 1, 2**31 - 1)
        self.window_size = check_int("windows.window_size", layers.window_size, 1)
        self.num_evicted = 0  # window pages, since the start
        self.live_sequences: set[CacheSequence] = set()  # the window pages that they see stay
        self._protected = _NO_PAGES  # further pages whose window pages stay: see `use`
        self._table = np.full(num_pages, NO_PAGE, np.int32)  # page -> window page
        self._owners = np.full(self.num_pages, -1, np.int32)  # window page -> page
        self._last_use = np.zeros(self.num_pages, np.int64)  # of a window page, in `_ticks`
        self._ticks = 0
        self._pool = PagePool(self.num_pages)
        self._changed = array("i")  # pages, see `take_updates`
        self._copies: list[tuple[int, int, int]] = []  # of window pages, in order

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    def num_obtainable(self, wanted: int, excluded: Sequence[int] = ()) -> int:
        """Returns how many of `wanted` window pages `attach` can give now without dropping those of
        the pages `excluded`. O(1) if so many are free."""
        missing = wanted - self._pool.num_free
        if missing <= 0:
            return wanted
        return wanted - missing + min(missing, len(self._droppable(excluded)))

    def attach(self, pages: Sequence[int], after: int = NO_PAGE) -> None:
        """Give each page a window page, dropping others where none is free. The caller has checked
        `num_obtainable`.

        `after`: the page before them in their sequence, so that window pages are adjacent, too.
        O(pages), and O(window pages) where some are dropped.
        """
        count, pool, table = len(pages), self._pool, self._table
        if (missing := count - pool.num_free) > 0:
            self._drop_oldest(missing)
        first_tick = self._ticks - NEVER_USED * self.num_pages
        last = NO_PAGE if after == NO_PAGE else int(table[after])
        taken = pool.allocate(count) if last == NO_PAGE else pool.allocate_after(last, count)
        if count == 1:
            page, window = pages[0], taken[0]
            table[page], self._owners[window] = window, page
            self._last_use[window] = first_tick
            self._changed.append(page)
        else:
            windows = np.array(taken, np.int32)
            table[pages], self._owners[windows] = windows, pages
            self._last_use[windows] = np.arange(first_tick, first_tick + count)
            self._changed.extend(pages)
        self._ticks += count

    def detach(self, pages: Sequence[int]) -> None:
        """Free the window pages of these pages, where they have one."""
        index = np.array(pages, np.int32)
        windows = self._table[index]
        windows = windows[windows >= 0]
        self._table[index], self._owners[windows] = NO_PAGE, -1
        self._pool.free(array("i", windows.tobytes()))
        self._changed.extend(index.tolist())

    def move(self, sources: array[int], pages: array[int]) -> None:
        """Give each of `pages` without a window page that of its source. Page i of both has the
        same tokens."""
        source, target = np.array(sources, np.int32), np.array(pages, np.int32)
        moved = (self._table[target] < 0) & (self._table[source] >= 0)
        if moved.any():
            source, target = source[moved], target[moved]
            windows = self._table[source]
            self._table[target], self._table[source] = windows, NO_PAGE
            self._owners[windows] = target
            self._changed.extend(source.tolist())
            self._changed.extend(target.tolist())

    def copy(self, source: int, destination: int, num_tokens: int) -> None:
        """Queue a copy of `source`'s window page, its first `num_tokens`, to `destination`'s. If it
        has none, detach `destination`'s."""
        read, written = int(self._table[source]), int(self._table[destination])
        if read == NO_PAGE:
            self.detach((destination,))
        elif written != NO_PAGE:
            self._copies.append((read, written, num_tokens))

    def touch(self, pages: IntArray) -> None:
        """Mark the window pages of these pages as the most recently used ones."""
        windows = self._table[pages]
        windows = windows[windows >= 0]
        self._last_use[windows] = np.arange(self._ticks, self._ticks + len(windows))
        self._ticks += len(windows)

    def use(self, pages: Sequence[int], length: int) -> None:
        """Protect the window pages that a sequence on `pages` sees when it continues after `length`
        tokens: they become the most recently used ones, and none is dropped until `end_use`."""
        self._protected = np.array(pages[self.first_seen_page(length) :], np.int32)
        self.touch(self._protected)

    def end_use(self) -> None:
        """End the protection of the last `use`: its sequence is live now, or was not made."""
        self._protected = _NO_PAGES

    # -- what a query can see -----------------------------------------------------------------

    def first_seen_page(self, length: int) -> int:
        """Returns the index of the first page that a query after `length` tokens sees."""
        return max(0, length + 1 - self.window_size) // self.page_size

    def has_all(self, pages: IntArray | Sequence[int]) -> bool:
        """Whether each of these pages has a window page."""
        return bool((self._table[np.array(pages, np.int32)] >= 0).all())

    def usable_length(self, runs: Iterable[tuple[int, array[int]]], length: int) -> int:
        """Returns the longest prefix of at most `length` tokens that a sequence can resume.

        `runs`: the pages of these tokens from the last ones up to the first, each run with the
        index of its first page. O(pages visited): those of one window where none is missing.
        """
        end = -(-length // self.page_size)  # no window page seen is missing from this index on
        for first, pages in runs:
            while end > (begin := max(first, self.first_seen_page(length))):
                missing = np.flatnonzero(self._table[pages[begin - first : end - first]] < 0)
                if len(missing):
                    end = begin + int(missing[-1])
                    length = end * self.page_size
                else:
                    end = begin
            if end <= self.first_seen_page(length):
                break
        return length

    # -- for the runner -----------------------------------------------------------------------

    def take_updates(self) -> WindowUpdates:
        """Returns the updates since the last call, for the runner to apply before the next step."""
        pages = np.unique(np.array(self._changed, np.int32))
        copies, self._copies, self._changed = self._copies, [], array("i")
        return WindowUpdates(np.stack((pages, self._table[pages]), 1), copies)

    # -- dropping -----------------------------------------------------------------------------

    def _droppable(self, excluded: Sequence[int] = ()) -> IntArray:
        """Returns the window pages that no live sequence can see, without those of the pages
        `excluded`."""
        is_kept = self._owners < 0  # free window pages cannot be dropped
        seen = [self._seen_pages(sequence) for sequence in self.live_sequences]
        for pages in (*seen, self._protected, np.array(excluded, np.int32)):
            windows = self._table[pages]
            is_kept[windows[windows >= 0]] = True
        return np.flatnonzero(~is_kept).astype(np.int32)

    def _seen_pages(self, sequence: CacheSequence) -> IntArray:
        """Returns the pages that the tokens after the committed ones read."""
        return sequence.pages[self.first_seen_page(sequence.committed_len) :]

    def _drop_oldest(self, missing: int) -> None:
        droppable, count = self._droppable(), max(missing, self.num_pages // RECLAIM_SHARE)
        assert missing <= len(droppable), "window pages were not obtainable"
        if count < len(droppable):
            droppable = droppable[np.argpartition(self._last_use[droppable], count)[:count]]
        self.num_evicted += len(droppable)
        self.detach(self._owners[droppable].tolist())

    # -- audit --------------------------------------------------------------------------------

    def stats(self) -> dict[str, int]:
        """Returns the numbers of window pages, and of those dropped since the start. O(1)."""
        return {
            "window_pages_total": self.num_pages,
            "window_pages_free": self._pool.num_free,
            "window_pages_used": self.num_pages - self._pool.num_free,
            "evicted_window_pages": self.num_evicted,
        }

    def check(self, free_pages: Iterable[int]) -> None:
        """AssertionError unless each window page has one owner. `free_pages`: of the pool."""
        owned = np.flatnonzero(self._owners >= 0)
        assert sorted([*self._pool.free_ids(), *owned.tolist()]) == list(range(self.num_pages)), (
            "a window page needs exactly one owner"
        )
        assert (self._table[self._owners[owned]] == owned).all(), "a window page of another page"
        assert np.count_nonzero(self._table >= 0) == len(owned), "pages share a window page"
        free = np.array(list(free_pages), np.int32)
        assert (self._table[free] < 0).all(), "a free page has a window page"


class WindowedPagePool(PagePool):
    """A `PagePool` whose pages lose their window pages when they are freed."""

    __slots__ = ("_windows",)

    def __init__(self, num_pages: int, windows: WindowPool) -> None:
        super().__init__(num_pages)
        self._windows = windows

    def free(self, pages: array[int]) -> None:
        self._windows.detach(pages)
        super().free(pages)

    def free_end(self, pages: array[int]) -> None:
        self._windows.detach(pages)
        super().free_end(pages)


class WindowedAllocator(PageAllocator):
    """A `PageAllocator` that gives each new page a window page."""

    def __init__(
        self,
        pool: PagePool,
        page_size: int,
        owner: PageOwner,
        clock: Callable[[], float],
        windows: WindowPool,
    ) -> None:
        super().__init__(pool, page_size, owner, clock)
        self.windows = windows
        self.live_sequences = windows.live_sequences

    def num_obtainable(self, wanted: int) -> int:
        return self.windows.num_obtainable(super().num_obtainable(wanted))

    def take_after(self, page: int) -> int:
        if not self.windows.num_free:
            return -1
        taken = self.pool.take_after(page)
        if taken >= 0:
            self.windows.attach((taken,), page)
        return taken

    def allocate(self, count: int, *, may_shrink_locks: bool = True) -> array[int]:
        self._check_obtainable(count)
        pages = super().allocate(count, may_shrink_locks=may_shrink_locks)
        self.windows.attach(pages)
        return pages

    def allocate_after(self, page: int, count: int) -> Sequence[int]:
        if count > self.pool.num_free:
            return self.allocate(count)
        self._check_obtainable(count)
        pages = self.pool.allocate_after(page, count)
        self.windows.attach(pages, page)
        return pages

    def _check_obtainable(self, count: int) -> None:
        if self.windows.num_obtainable(count) < count:
            windows = self.windows
            raise OutOfPages(
                f"{count} window pages wanted: {windows.num_free} of {windows.num_pages} free, and "
                "live sequences see too many of the others"
            )


class WindowedSequence(RadixSequence):
    """Made by `WindowedLayers`."""

    __slots__ = ("_wanted",)

    _wanted: set[int]  # lengths that other sequences continue from

    def __init__(self, *parts: Any, match_len: int = 0) -> None:
        """See `RadixSequence`. `match_len`: where it left the cached tokens, perhaps after what it
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
        """See `CacheSequence.copy_from`. Pages outside the window of the next token get no window
        page."""
        allocator, num_pages = self._allocator, self._num_pages
        num_early = max(0, self._windows.first_seen_page(source.length) - num_pages)
        early = PageAllocator.allocate(allocator, num_early)
        self._add_pages(early)
        try:
            copied = super().copy_from(source)
        except OutOfPages:
            self._num_pages = num_pages
            allocator.free(early)
            raise
        for read, written, num_tokens in self.cow_copies:
            self._windows.copy(read, written, num_tokens)
        return copied

    def truncate(self, length: int) -> None:
        """Roll back to `length` tokens, or to fewer if their window pages were dropped; the
        sequence's `length` is then shorter than asked."""
        self._check_open()
        windows, length = self._windows, check_int("length", length, 0)
        if length < self.committed_len:
            pages = self._pages[: self._num_pages]
            length = windows.usable_length([(0, pages)], length)
            windows.use(pages, length)
        try:
            super().truncate(length)
        finally:
            windows.end_use()

    def _cut(self, length: int, whole: int, extra: int) -> None:
        last = self._pages[whole] if extra else -1
        super()._cut(length, whole, extra)
        if extra and self._pages[whole] != last:
            self._windows.copy(last, self._pages[whole], extra)

    def note_branch_point(self, length: int) -> None:
        """See `CacheSequence.note_branch_point`. Once the first `length` tokens are computed, the
        window pages before that position count as used, like those where a sequence ends."""
        self._wanted.add(length)

    def _publish(self) -> None:
        super()._publish()
        if self._wanted:
            for length in [length for length in self._wanted if length <= self.committed_len]:
                self._wanted.remove(length)
                self._touch_window(length)

    def _touch_window(self, length: int) -> None:
        windows, last = self._windows, self._allocator.pages_for(length)
        pages = self._pages[windows.first_seen_page(length) : last]
        windows.touch(np.array(pages, np.int32))

    def _replace_pages(self, first: int, pages: array[int]) -> None:
        """See `CacheSequence._replace_pages`. The tree's pages without a window page get ours."""
        self._windows.move(self._pages[first : first + len(pages)], pages)
        super()._replace_pages(first, pages)

    def release(self) -> None:
        if self._is_open:
            self._touch_window(self.committed_len)
        super().release()


class WindowedLayers(RadixLayers):
    """Layers that see a window of positions only. `num_pages`, `page_size`: of the cache."""

    missing_reason: MissReason = "window_evicted"

    def __init__(self, num_pages: int, page_size: int, layers: WindowLayers) -> None:
        self.windows = WindowPool(num_pages, page_size, layers)
        self.pages_at_once = -(-layers.window_size // page_size)

    def make_pool(self, num_pages: int) -> PagePool:
        return WindowedPagePool(num_pages, self.windows)

    def make_allocator(
        self, pool: PagePool, page_size: int, tree: RadixTree, clock: Callable[[], float]
    ) -> PageAllocator:
        return WindowedAllocator(pool, page_size, tree, clock, self.windows)

    def resumable_prefix(self, node: Node, length: int, multiple_of: int = 1) -> tuple[int, Node]:
        del multiple_of  # window pages are missing as whole pages
        if node.parent is None:
            return length, node
        windows, candidates = self.windows, []
        for sibling in siblings_with_head(node, length):  # one may have what another has lost
            runs = ((above.start // windows.page_size, above.pages) for above in path(sibling))
            usable = windows.usable_length(runs, length)
            if usable == length:
                return length, sibling
            candidates.append((usable, sibling))
        usable, node = max(candidates, key=lambda sibling: sibling[0])
        return usable, node_covering(node, usable)

    def has_room_for_copy(self, node: Node, length: int) -> bool:
        windows = self.windows
        pages = path_pages(node, length // windows.page_size + 1)
        return windows.num_obtainable(1, pages[windows.first_seen_page(length) :]) > 0

    def begin_sequence(self, match: Match, node: Node, length: int) -> None:
        del match
        self.windows.use(path_pages(node, -(-length // self.windows.page_size)), length)

    def make_sequence(
        self, *parts: Any, match_len: int, limit: int, num_tokens: int
    ) -> WindowedSequence:
        del limit, num_tokens
        sequence = WindowedSequence(*parts, match_len=match_len)
        for copy in sequence.cow_copies:
            self.windows.copy(*copy)
        self.windows.end_use()
        return sequence

    def plan_step(self, sequences: Sequence[CacheSequence], rows: ScheduledRows) -> dict[str, Any]:
        del sequences, rows
        return {"windows": self.windows.take_updates()}

    def stats(self) -> dict[str, int]:
        return self.windows.stats()

    def check(self, pool: PagePool, nodes: list[Node], sequences: list[RadixSequence]) -> None:
        """Each window page is free or of one page in use; sequences have those that they see."""
        del nodes
        windows = self.windows
        windows.check(pool.free_ids())
        for sequence in sequences:
            seen = sequence.pages[windows.first_seen_page(sequence.committed_len) :]
            assert windows.has_all(seen), f"{sequence!r} lacks a window page that it sees"
