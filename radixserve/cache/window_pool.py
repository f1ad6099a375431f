"""`WindowPool`: pages for the K and V of layers that see a window of positions only.

Such layers (sliding windows, attention chunks) keep their K and V in a memory of their own. A page
of the cache, with the K and V of all other layers, has a window page beside it until that is
dropped: a query needs the window pages of the last positions before it, no others. When window
pages are short, the least recently used ones that no live sequence can still see are dropped; where
sequences began, ended or left what was cached they are used, all others go long before.

    page         0   1   2   3   4   5   6        of a sequence; windows of two pages
    window page  -   8   9   -   -   4   7        it goes on after page 6, others after 2 or 6
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from radixserve.arrays import IntArray
from radixserve.cache.page_pool import PageAllocator, PageOwner, PagePool
from radixserve.checks import check_int
from radixserve.errors import OutOfPages
from radixserve.schedule import WindowLayers, WindowUpdates

_NO_PAGES: IntArray = np.empty(0, np.int32)
NO_PAGE = -1  # instead of a window page
NEVER_USED = 4  # times as many ticks as there are window pages: the age of one that is new
RECLAIM_SHARE = 16  # at least one in so many is dropped at a time: a search costs O(window pages)


class WindowPool:
    """Window pages 0 .. num_pages - 1; each is free, or of one page of the cache."""

    def __init__(self, pool: PagePool, page_size: int, layers: WindowLayers) -> None:
        """Frees the window page of each page that `pool` gets back from now on."""
        self.page_size = page_size
        self.num_pages = check_int("windows.num_pages", layers.num_pages, 1, 2**31 - 1)
        self.window_size = check_int("windows.window_size", layers.window_size, 1)
        self.num_evicted = 0  # window pages, since the start
        self.seen_pages: Callable[[], Iterable[IntArray]] = tuple  # pages whose window pages stay
        self._held = _NO_PAGES  # pages whose window pages stay, too: see `use`
        self._table = np.full(pool.num_pages, NO_PAGE, np.int32)  # page -> window page
        self._owners = np.full(self.num_pages, -1, np.int32)  # window page -> page
        self._last_use = np.zeros(self.num_pages, np.int64)  # of a window page, in `_ticks`
        self._ticks = 0
        self._pool = PagePool(self.num_pages)
        self._changed = array("i")  # pages, see `take_updates`
        self._copies: list[tuple[int, int, int]] = []  # of window pages, in order
        self._free_pages = pool.free
        pool.free = self._free_with_windows

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    def num_obtainable(self, wanted: int, beside: Sequence[int] = ()) -> int:
        """How many of `wanted` window pages `attach` can give now, without those of the pages
        `beside`. O(1) where they are free."""
        missing = self._pool.num_missing(wanted)
        if missing <= 0:
            return wanted
        return wanted - missing + min(missing, len(self._droppable(beside)))

    def attach(self, pages: Sequence[int], after: int = NO_PAGE) -> None:
        """Give each page a window page, dropping others where none is free. They were obtainable.

        `after`: the page before them in their sequence, so that window pages are adjacent, too.
        O(pages), and O(window pages) where some are dropped.
        """
        count, pool, table = len(pages), self._pool, self._table
        if (missing := pool.num_missing(count)) > 0:
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
        self._pool.free(windows.tolist())
        self._changed.extend(index.tolist())

    def move(self, sources: array[int], pages: array[int]) -> None:
        """`pages` hold the same tokens as `sources`, one by one: those without a window page get
        that of their source."""
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
        """Copy the window page of the page `source` before the next step, up to a token. Where it
        has none, neither has the page `destination`, which may have none already."""
        read, written = int(self._table[source]), int(self._table[destination])
        if read == NO_PAGE:
            self.detach((destination,))
        elif written != NO_PAGE:
            self._copies.append((read, written, num_tokens))

    def touch(self, pages: IntArray) -> None:
        """The window pages of these pages are the most recently used ones."""
        windows = self._table[pages]
        windows = windows[windows >= 0]
        self._last_use[windows] = np.arange(self._ticks, self._ticks + len(windows))
        self._ticks += len(windows)

    def use(self, pages: Sequence[int], length: int) -> None:
        """A sequence is about to go on after `length` tokens, whose pages these are: the window
        pages that it sees are the most recently used ones, and none is dropped until `end_use`."""
        self._held = np.array(pages[self.first_seen_page(length) :], np.int32)
        self.touch(self._held)

    def end_use(self) -> None:
        """The sequence of the last `use` is live now, or it failed."""
        self._held = _NO_PAGES

    # -- what a query can see -----------------------------------------------------------------

    def first_seen_page(self, length: int) -> int:
        """Index of the first page that a query after `length` tokens sees."""
        return max(0, length + 1 - self.window_size) // self.page_size

    def has_all(self, pages: IntArray | Sequence[int]) -> bool:
        """Whether each of these pages has a window page."""
        return bool((self._table[np.array(pages, np.int32)] >= 0).all())

    def usable_length(self, runs: Iterable[tuple[int, array[int]]], length: int) -> int:
        """The longest prefix, of at most `length` tokens, whose end a sequence can go on from.

        `runs`: the pages of these tokens from the last ones up to the first, each run with the
        index of its first page. O(pages looked at): those of a window where all are there.
        """
        end = -(-length // self.page_size)  # from there on all that is seen is there
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
        """What has changed since the last call."""
        pages = np.unique(np.array(self._changed, np.int32))
        copies, self._copies, self._changed = self._copies, [], array("i")
        return WindowUpdates(np.stack((pages, self._table[pages]), 1), copies)

    # -- dropping -----------------------------------------------------------------------------

    def _free_with_windows(self, pages: Iterable[int]) -> None:
        pages = array("i", pages)
        self.detach(pages)
        self._free_pages(pages)

    def _droppable(self, beside: Sequence[int] = ()) -> IntArray:
        """Window pages that no live sequence can see, without those of the pages `beside`."""
        is_kept = self._owners < 0  # or free
        for pages in (*self.seen_pages(), self._held, np.array(beside, np.int32)):
            windows = self._table[pages]
            is_kept[windows[windows >= 0]] = True
        return np.flatnonzero(~is_kept).astype(np.int32)

    def _drop_oldest(self, missing: int) -> None:
        found, count = self._droppable(), max(missing, self.num_pages // RECLAIM_SHARE)
        assert missing <= len(found), "window pages were not obtainable"
        if count < len(found):
            found = found[np.argpartition(self._last_use[found], count)[:count]]
        self.num_evicted += len(found)
        self.detach(self._owners[found].tolist())

    # -- audit --------------------------------------------------------------------------------

    def stats(self) -> dict[str, int]:
        """Window pages, and those dropped since the start. O(1)."""
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
            "a window page has not one owner"
        )
        assert (self._table[self._owners[owned]] == owned).all(), "a window page of another page"
        assert np.count_nonzero(self._table >= 0) == len(owned), "pages share a window page"
        free = np.array(list(free_pages), np.int32)
        assert (self._table[free] < 0).all(), "a free page has a window page"


class WindowedAllocator(PageAllocator):
    """A `PageAllocator` whose pages have window pages when they are new."""

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
        self.take_after = self._take_after
        windows.seen_pages = self._seen_pages

    def _seen_pages(self) -> Iterable[IntArray]:
        size = self.windows.window_size
        return (sequence.seen_pages(size) for sequence in self.live_sequences)

    def num_obtainable(self, wanted: int) -> int:
        return self.windows.num_obtainable(super().num_obtainable(wanted))

    def _take_after(self, page: int) -> int:
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
