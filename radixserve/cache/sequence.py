"""`PagedSequence`: the tokens of a sequence and their pages, as both caches have them.

    tokens     [ known ...................................... ) [ unknown ... length)

Unknown ones have room and no id yet: a step in flight computes their K/V before anybody on the host
knows them. They cannot be committed, so none is ever published.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array

import numpy as np

from radixserve.arrays import IntArray
from radixserve.cache.tokens import TOKEN_BYTES, TokenIds, as_token_ids
from radixserve.checks import check_int
from radixserve.errors import InvalidRequest

_UNKNOWN = np.array([-1], np.int32).tobytes()
_NO_TABLE: IntArray = np.empty(0, np.int32)


class PagedSequence(ABC):
    """A base: who derives calls `_begin` first, and `_pages_change` where it replaces pages."""

    __slots__ = ("_num_synced", "_num_unknown", "_pages", "_synced_pages", "_tokens")

    def _begin(self, tokens: bytearray, pages: array[int]) -> None:
        self._tokens = tokens  # int32 bytes
        self._pages = pages
        self._num_unknown = 0  # tokens at the end
        self._synced_pages = _NO_TABLE  # the pages as they were told; never a view of `_pages`
        self._num_synced = 0  # leading pages that are what they were then

    @property
    def tokens(self) -> IntArray:
        """[length] int32 token ids, -1 for unknown ones; a view, not to be written."""
        return np.frombuffer(self._tokens, np.int32)

    @property
    def length(self) -> int:
        """Tokens that have room: committed ones and those still to be computed."""
        return len(self._tokens) // TOKEN_BYTES

    @property
    def num_unknown(self) -> int:
        """Tokens at the end that `fill` has to tell."""
        return self._num_unknown

    @property
    def pages(self) -> IntArray:
        """[ceil(length / page_size)] int32 page ids of positions [0, length); a view."""
        return np.frombuffer(self._pages, np.int32)

    def page_table_delta(self) -> tuple[IntArray, int]:
        """The page ids, as `pages`, and the first index that may differ from what the last call
        told, 0 at the first call.

        The array stays as it is until the next call. O(pages that differ), amortised.
        """
        pages, first, table = self._pages, self._num_synced, self._synced_pages
        size = len(pages)
        if first < size:
            if size > len(table):
                table = np.empty(max(16, size * 3 // 2), np.int32)
                table[:first] = self._synced_pages[:first]
                self._synced_pages = table
            if first + 1 == size:
                table[first] = pages[first]
            else:
                table[first:size] = np.frombuffer(pages, np.int32)[first:]
            self._num_synced = size
        return table[:size], first

    def _pages_change(self, first: int) -> None:
        """Pages from index `first` on are about to be replaced or let go."""
        if first < self._num_synced:
            self._num_synced = first

    # -- tokens that are not known yet --------------------------------------------------------

    @abstractmethod
    def extend(self, tokens: TokenIds, num_unknown: int = 0) -> None: ...

    def append_placeholders(self, num_tokens: int) -> None:
        """Room for tokens that are not known yet, as `extend` does for known ones.

        Raises OutOfPages, and changes nothing, when there is not enough.
        """
        if type(num_tokens) is not int or num_tokens < 1:
            num_tokens = check_int("num_tokens", num_tokens, 1)
        before, self._num_unknown = self._num_unknown, 0
        try:
            self.extend(_NO_TABLE, num_tokens)
        except BaseException:
            self._num_unknown = before
            raise
        self._num_unknown = before + num_tokens

    def fill(self, tokens: TokenIds) -> None:
        """Tell the ids of the first unknown tokens. InvalidRequest where there are not as many."""
        data = as_token_ids(tokens).tobytes()
        left = self._num_unknown - len(data) // TOKEN_BYTES
        if left < 0:
            raise InvalidRequest(
                f"fill takes up to {self._num_unknown} tokens, as many as are unknown, "
                f"got {len(data) // TOKEN_BYTES}"
            )
        start = len(self._tokens) - self._num_unknown * TOKEN_BYTES
        self._tokens[start : start + len(data)] = data
        self._num_unknown = left

    def _data_after(self, tokens: TokenIds, num_unknown: int) -> bytes:
        """What `extend` appends, as int32 bytes. Raises InvalidRequest."""
        if type(num_unknown) is not int or num_unknown < 0:
            num_unknown = check_int("num_unknown", num_unknown, 0)
        data = as_token_ids(tokens).tobytes()
        return data + _UNKNOWN * num_unknown if num_unknown else data

    def _refuse_to_extend(self) -> None:
        raise InvalidRequest(
            f"{self._num_unknown} tokens at the end are unknown: fill them before others follow, "
            f"or reserve more"
        )
