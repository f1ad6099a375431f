"""The free list: which page ids belong to nobody. Knows nothing of tokens, nodes or sequences."""

from __future__ import annotations

from array import array

from radixserve.errors import OutOfPages


class PagePool:
    """Page ids 0 .. num_pages - 1; a page is free or handed out, never both."""

    __slots__ = ("_free", "num_pages")

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = array("i", range(num_pages - 1, -1, -1))  # a stack: low ids leave first

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> array[int]:
        """Take `count` pages, or raise OutOfPages and take none. O(count)."""
        if count > len(self._free):
            raise OutOfPages(f"{count} pages wanted, {len(self._free)} free of {self.num_pages}")
        cut = len(self._free) - count
        taken = self._free[: cut - 1 : -1] if cut else self._free[::-1]
        del self._free[cut:]
        return taken

    def free(self, page_ids: array[int]) -> None:
        """Give pages back. O(len(page_ids))."""
        self._free.extend(page_ids)

    def free_ids(self) -> list[int]:
        """A copy of the free list, for audits."""
        return self._free.tolist()
