"""Page ids: `PagePool`, the free list, and `PageAllocator`, which evicts when pages are short.

A sequence that grows page by page is served from a run: consecutive ids reserved for it, since a
processor reads contiguous K/V about a fifth faster. Reserved pages count as free and may be taken
by any allocation.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from radixserve.arrays import IntArray
from radixserve.cache.recent import RecentCounts
from radixserve.errors import OutOfPages

RUN_PAGES = 16  # kept together: 8 KiB of keys or more for a processor that reads ahead
MAX_RUNS = 1024


class PagePool:
    """Page ids 0 .. num_pages - 1; a page is free or allocated, never both."""

    __slots__ = ("_free", "_num_kept", "_runs", "free", "num_pages")

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        descending = np.arange(num_pages - 1, -1, -1, dtype=np.int32)
        self._free = array("i", descending.tobytes())  # a stack: low ids leave first
        self.free = self._free.extend  # gives the pages of an array back; O(that many)
        self._runs: dict[int, int] = {}  # first id -> end of a run, the least recently used first
        self._num_kept = 0  # pages in runs

    @property
    def num_free(self) -> int:
        return len(self._free) + self._num_kept

    @property
    def num_runs(self) -> int:
        """Runs reserved for growing sequences, at most MAX_RUNS."""
        return len(self._runs)

    def num_missing(self, count: int) -> int:
        """Pages to be freed before `count` can be taken; 0 or less: none."""
        return count - len(self._free) - self._num_kept

    def allocate(self, count: int) -> array[int]:
        """Take `count` pages, or raise OutOfPages and take none. O(count)."""
        cut = len(self._free) - count
        if cut < 0:
            if cut + self._num_kept < 0:
                raise OutOfPages(f"{count} pages wanted, {self.num_free} free of {self.num_pages}")
            while cut < 0:
                cut += self._end_run(next(iter(self._runs)))
        taken = self._free[cut:]
        taken.reverse()
        del self._free[cut:]
        return taken

    def allocate_after(self, page: int, count: int = 1) -> Sequence[int]:
        """Take `count` pages, `page` + 1 and so on where a run is reserved there, else a new run.

        Raises OutOfPages, and takes none, where not as many are free. O(count).
        """
        if count == 1 and (one := self.take_after(page)) >= 0:  # the usual case
            return (one,)
        runs, first = self._runs, page + 1
        if count > len(self._free) + self._num_kept:
            return self.allocate(count)
        taken = array("i")
        while count:
            end = runs.pop(first, 0)
            if not end:
                run = self._begin_run()
                if run is None:
                    taken += self.allocate(1)
                    first = taken[-1] + 1
                    count -= 1
                    continue
                first, end = run
            stop = min(end, first + count)
            taken.extend(range(first, stop))
            self._num_kept -= stop - first
            count -= stop - first
            first = stop
            if stop < end:
                runs[stop] = end
        return taken

    def take_after(self, page: int) -> int:
        """Take a page as `allocate_after` does; -1, and none, where that ends the run of another
        sequence or raises. O(1) amortised."""
        runs, first = self._runs, page + 1
        end = runs.pop(first, 0)
        if not end:
            run = self._begin_run() if self._may_begin_run() else None
            if run is None:
                return self._free.pop() if self._free else -1
            first, end = run
        self._num_kept -= 1
        if first + 1 < end:
            runs[first + 1] = end
        return first

    def release_run(self, page: int) -> None:
        """Return the run reserved after `page` to the free list. O(1)."""
        if page + 1 in self._runs:
            self._end_run(page + 1)

    def free_ids(self) -> list[int]:
        """A copy of the free list, for audits."""
        kept = (page for run in self._runs.items() for page in range(*run))
        return [*self._free, *kept]

    def free_array(self) -> IntArray:
        """The free pages, in no order. O(free pages), fast."""
        kept = [np.arange(*run, dtype=np.int32) for run in self._runs.items()]
        return np.concatenate((np.array(self._free, np.int32), *kept))

    def _may_begin_run(self) -> bool:
        """Whether the pages on top may be consecutive."""
        free = self._free
        return len(free) >= RUN_PAGES and abs(free[-RUN_PAGES] - free[-1]) == RUN_PAGES - 1

    def _begin_run(self) -> tuple[int, int] | None:
        """Put the pages on top aside, if they are consecutive: first and end."""
        if not self._may_begin_run():
            return None
        top = self._free[-RUN_PAGES:]
        first = min(top[0], top[-1])
        run = range(first, first + RUN_PAGES)
        if top != array("i", run if top[0] == first else reversed(run)):
            return None
        del self._free[-RUN_PAGES:]
        self._num_kept += RUN_PAGES
        if len(self._runs) >= MAX_RUNS:
            self._end_run(next(iter(self._runs)))
        return first, first + RUN_PAGES

    def _end_run(self, first: int) -> int:
        """Put the run that begins there back; its length."""
        end = self._runs.pop(first)
        self._free.extend(range(end - 1, first - 1, -1))
        self._num_kept -= end - first
        return end - first


@dataclass(slots=True)
class CacheStats:
    """Tokens since the cache was made."""

    acquired_tokens: int = 0  # passed to `acquire`
    matched_tokens: int = 0  # acquired tokens that were cached
    copied_tokens: int = 0  # matched tokens in page prefixes that were copied
    committed_tokens: int = 0  # tokens published by `commit`
    duplicate_tokens: int = 0  # committed tokens that others had published; whole pages only
    num_acquired: int = 0  # sequences
    num_resets: int = 0


class PageOwner(Protocol):
    """The part of a cache that holds published pages: a tree, or a table of blocks."""

    num_pages: int  # published ones
    now: float  # the clock when a sequence was last acquired or committed
    num_evicted_tokens: int

    @property
    def num_evictable(self) -> int:
        """Pages that `make_room` can free now."""

    def make_room(self, num_pages: int) -> bool:
        """Free that many pages; False, and nothing is freed, where fewer can be."""

    def evict(self, num_pages: int) -> int:
        """Free up to that many pages of live namespaces; returns how many."""

    def reset(self, name: str | None) -> None:
        """Forget one namespace, or all."""


class LockHolder(Protocol):
    """The allocator's interface to a live sequence."""

    def shrink_lock(self) -> None:
        """Lock no more of the published pages than needed: memory is short."""

    def seen_pages(self, window_size: int) -> IntArray:
        """Pages of which it needs the K and V of layers with windows of so many positions."""


class PageAllocator:
    """Shared by all sequences of one cache: pages, counters and the set of live sequences."""

    def __init__(
        self,
        pool: PagePool,
        page_size: int,
        owner: PageOwner,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock`: seconds."""
        self.page_size = page_size
        self.pool = pool
        self.free = pool.free  # private pages go back to the free list
        self.take_after: Callable[[int], int] = pool.take_after  # never evicts
        self.stats = CacheStats()
        self.live_sequences: set[LockHolder] = set()
        self._owner = owner
        self._clock = clock
        owner.now = clock()
        self.recent = RecentCounts(self._counters, owner.now)

    def note_time(self) -> float:
        """The time: something is about to be counted."""
        clock = self._clock  # a method of that name would be looked for first, slowly
        now = self._owner.now = clock()
        if now >= self.recent.due:
            self.recent.read(now)
        return now

    def _counters(self) -> dict[str, int]:
        """What `recent` is about."""
        stats = self.stats
        return {
            "num_acquired": stats.num_acquired,
            "acquired_tokens": stats.acquired_tokens,
            "matched_tokens": stats.matched_tokens,
            "committed_tokens": stats.committed_tokens,
            "evicted_tokens": self._owner.num_evicted_tokens,
        }

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    @property
    def num_available(self) -> int:
        """Pages that are free or evictable."""
        return self.pool.num_free + self._owner.num_evictable

    def num_obtainable(self, wanted: int) -> int:
        """How many of `wanted` pages `allocate` can take now."""
        return min(wanted, self.num_available)

    @property
    def num_private(self) -> int:
        """Pages that belong to sequences."""
        return self.pool.num_pages - self.pool.num_free - self._owner.num_pages

    def allocate(self, count: int, *, may_shrink_locks: bool = True) -> array[int]:
        """`count` pages, evicting as the policy says; OutOfPages, nothing dropped, if too few.

        `may_shrink_locks`: when short, make sequences lock no more than they need.
        """
        pool, owner = self.pool, self._owner
        missing = pool.num_missing(count)
        if missing > 0 and not owner.make_room(missing):
            if may_shrink_locks:
                for sequence in self.live_sequences:
                    sequence.shrink_lock()
            if not owner.make_room(pool.num_missing(count)):
                raise OutOfPages(
                    f"{count} pages wanted: {pool.num_free} free and "
                    f"{owner.num_evictable} evictable of {pool.num_pages}"
                )
        return pool.allocate(count)

    def allocate_after(self, page: int, count: int) -> Sequence[int]:
        """`count` pages for a sequence that ends with `page`, adjacent to it if possible;
        OutOfPages, nothing dropped, if there are too few."""
        if count > self.pool.num_free:
            return self.allocate(count)
        return self.pool.allocate_after(page, count)
