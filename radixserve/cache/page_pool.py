"""The free list: which page ids belong to nobody. Knows nothing of tokens, nodes or sequences.

Sequences that grow token by token take turns. If each took the page on top, the pages of one would
lie apart, and a processor reads such keys and values a fifth more slowly than those that lie side
by side. So who takes one page behind another gets it from a run of consecutive ids that is kept for
the next such call. Kept pages are free pages: whoever needs them gets them.
"""

from __future__ import annotations

from array import array

import numpy as np

from radixserve.errors import OutOfPages

RUN_PAGES = 16  # kept together: 8 KiB of keys or more for a processor that reads ahead
MAX_RUNS = 1024


class PagePool:
    """Page ids 0 .. num_pages - 1; a page is free or handed out, never both."""

    __slots__ = ("_free", "_num_kept", "_runs", "num_pages")

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        descending = np.arange(num_pages - 1, -1, -1, dtype=np.int32)
        self._free = array("i", descending.tobytes())  # a stack: low ids leave first
        self._runs: dict[int, int] = {}  # first id -> end of a run, the least recently used first
        self._num_kept = 0  # pages in runs

    @property
    def num_free(self) -> int:
        return len(self._free) + self._num_kept

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

    def allocate_after(self, page: int) -> int:
        """Take one page: `page` + 1 if the one who took `page` is likely to be who asks. O(1).

        Raises OutOfPages where none is free.
        """
        first = page + 1
        end = self._runs.pop(first, 0)
        if not end:
            run = self._begin_run()
            if run is None:
                return self.allocate(1)[0]
            first, end = run
        self._num_kept -= 1
        if first + 1 < end:
            self._runs[first + 1] = end
        return first

    def allocate_some_after(self, page: int, count: int) -> array[int]:
        """Take `count` pages, each as `allocate_after` the one before; OutOfPages, and none is
        taken, where not as many are free. O(count)."""
        if count > self.num_free:
            return self.allocate(count)
        taken = array("i")
        for _ in range(count):
            page = self.allocate_after(page)
            taken.append(page)
        return taken

    def release_run(self, page: int) -> None:
        """Nobody will ask for a page behind `page` any more: what is kept for that is not. O(1)."""
        if page + 1 in self._runs:
            self._end_run(page + 1)

    def free(self, page_ids: array[int]) -> None:
        """Give pages back. O(len(page_ids))."""
        self._free.extend(page_ids)

    def free_all(self, pieces: list[array[int]]) -> int:
        """Give the pages of all `pieces` back; returns how many. O(that many)."""
        before = len(self._free)
        self._free.frombytes(b"".join(pieces))
        return len(self._free) - before

    def free_ids(self) -> list[int]:
        """A copy of the free list, for audits."""
        kept = (page for run in self._runs.items() for page in range(*run))
        return [*self._free, *kept]

    def _begin_run(self) -> tuple[int, int] | None:
        """Put the pages on top aside, if they are consecutive: first and end."""
        top = self._free[-RUN_PAGES:]
        if len(top) < RUN_PAGES or abs(top[0] - top[-1]) != RUN_PAGES - 1:
            return None
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
