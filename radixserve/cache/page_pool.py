"""`PagePool`: the ids of free pages.

The pool never evicts: it raises OutOfPages. `PageAllocator` in cache/sequence.py evicts before it
asks. A page's one owner frees it: a sequence its private pages, the tree those of its nodes.

A sequence that grows page by page is served from a run: consecutive ids reserved for it, since a
processor reads contiguous K/V about a fifth faster. Reserved pages count as free and may be taken
by any allocation.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from radixserve.arrays import IntArray
from radixserve.errors import OutOfPages

RUN_PAGES = 16  # kept together: 8 KiB of keys or more for a processor that reads ahead
MAX_RUNS = 1024


class PagePool:
    """Page ids 0 .. num_pages - 1; a page is free or allocated, never both.

    Free pages that belong to no run form a ring, read from `_head` on and written from `_tail` on:
    pages are reused in the order in which they were freed, and none is ever moved.
    """

    __slots__ = ("_head", "_num_reserved", "_ring", "_runs", "_tail", "num_free", "num_pages")

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.num_free = num_pages  # in the ring and in runs
        self._ring = array("i", np.arange(num_pages, dtype=np.int32).tobytes())
        self._head = 0  # index of the page that leaves first
        self._tail = 0  # index at which the next page enters
        self._num_reserved = 0  # in runs
        self._runs: dict[int, int] = {}  # first id -> end of a run, the least recently used first

    @property
    def num_runs(self) -> int:
        """Runs reserved for growing sequences, at most MAX_RUNS."""
        return len(self._runs)

    def allocate(self, count: int) -> array[int]:
        """Take `count` pages, or raise OutOfPages and take none. O(count)."""
        if count > self.num_free - self._num_reserved:
            if count > self.num_free:
                raise OutOfPages(f"{count} pages wanted, {self.num_free} free of {self.num_pages}")
            while count > self.num_free - self._num_reserved:
                self._end_run(next(iter(self._runs)))
        self.num_free -= count
        head = self._head
        end = self._head = head + count
        if end < self.num_pages:
            return self._ring[head:end]
        end = self._head = end - self.num_pages
        return self._ring[head:] + self._ring[:end]

    def free(self, pages: array[int]) -> None:
        """Give pages back. O(pages)."""
        count, tail = len(pages), self._tail
        self.num_free += count
        end = self._tail = tail + count
        if end < self.num_pages:
            self._ring[tail:end] = pages
            return
        left = self.num_pages - tail
        self._ring[tail:] = pages[:left]
        self._ring[: count - left] = pages[left:]
        self._tail = count - left

    def free_end(self, pages: array[int]) -> None:
        """Give back the last pages of a growing sequence. If they are consecutive they are reserved
        for it again. O(pages)."""
        count, first, end = len(pages), pages[0], pages[-1] + 1
        if end - first != count or pages != array("i", range(first, end)):
            self.free(pages)
            return
        self._runs[first] = self._runs.pop(end, end)
        self.num_free += count
        self._num_reserved += count
        if len(self._runs) > MAX_RUNS:
            self._end_run(next(iter(self._runs)))

    def allocate_after(self, page: int, count: int = 1) -> Sequence[int]:
        """Take `count` pages, `page` + 1 and so on where a run is reserved there, else a new run.

        Raises OutOfPages, and takes none, where not as many are free. O(count).
        """
        if count == 1 and (taken_page := self.take_after(page)) >= 0:  # the usual case
            return (taken_page,)
        runs, first = self._runs, page + 1
        if count > self.num_free:
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
            self.num_free -= stop - first
            self._num_reserved -= stop - first
            count -= stop - first
            first = stop
            if stop < end:
                runs[stop] = end
        return taken

    def take_after(self, page: int) -> int:
        """Take one page as `allocate_after` does. Returns -1, and takes none, if that would end the
        run of another sequence or raise OutOfPages. O(1) amortised."""
        runs, first = self._runs, page + 1
        end = runs.pop(first, 0)
        if not end:
            run = self._begin_run()
            if run is None:
                return self.allocate(1)[0] if self.num_free > self._num_reserved else -1
            first, end = run
        self.num_free -= 1
        self._num_reserved -= 1
        if first + 1 < end:
            runs[first + 1] = end
        return first

    def release_run(self, page: int) -> None:
        """Return the run reserved after `page` to the free pages. O(1)."""
        if page + 1 in self._runs:
            self._end_run(page + 1)

    def free_ids(self) -> list[int]:
        """Returns the free pages, for audits."""
        page_ids: list[int] = self.free_array().tolist()
        return page_ids

    def free_array(self) -> IntArray:
        """Returns the free pages, in no order. O(free pages), fast."""
        ring = np.array(self._ring, np.int32)
        indices = (self._head + np.arange(self.num_free - self._num_reserved)) % self.num_pages
        kept = [np.arange(*run, dtype=np.int32) for run in self._runs.items()]
        return np.concatenate((ring[indices], *kept))

    def _begin_run(self) -> tuple[int, int] | None:
        """Reserve the next RUN_PAGES pages of the ring as a run. Returns its (first id, end), or
        None if they are not consecutive."""
        ring, head = self._ring, self._head
        end = head + RUN_PAGES
        if self.num_free - self._num_reserved < RUN_PAGES or end > self.num_pages:
            return None
        left, right = ring[head], ring[end - 1]
        if abs(right - left) != RUN_PAGES - 1:
            return None
        first = min(left, right)
        run = range(first, first + RUN_PAGES)
        if ring[head:end] != array("i", run if left == first else reversed(run)):
            return None
        self._head = end if end < self.num_pages else 0
        self._num_reserved += RUN_PAGES
        if len(self._runs) >= MAX_RUNS:
            self._end_run(next(iter(self._runs)))
        return first, first + RUN_PAGES

    def _end_run(self, first: int) -> int:
        """Put the pages of the run that begins at `first` back at the head of the ring. Returns
        their number."""
        end = self._runs.pop(first)
        count, size = end - first, self.num_pages
        start = self._head - count
        self._head = start if start >= 0 else start + size
        for offset, page in enumerate(range(first, end), start):
            self._ring[offset % size] = page
        self._num_reserved -= count
        return count
