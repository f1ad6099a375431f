"""The free list: which page ids belong to nobody. Knows nothing of tokens, nodes or sequences."""

from __future__ import annotations

from array import array

import numpy as np

from radixserve.errors import OutOfPages


class PagePool:
    """Page ids 0 .. num_pages - 1; a page is free or handed out, never both."""

    __slots__ = ("_free", "num_pages")

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        descending = np.arange(num_pages - 1, -1, -1, dtype=np.int32)
        self._free = array("i", descending.tobytes())  # a stack: low ids leave first

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> array[int]:
        """Take `count` pages, or raise OutOfPages and take none. O(count)."""
        cut = len(self._free) - count
        if cut < 0:
            raise OutOfPages(f"{count} pages wanted, {len(self._free)} free of {self.num_pages}")
        taken = self._free[cut:]
        taken.reverse()
        del self._free[cut:]
        return taken

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
        return self._free.tolist()
