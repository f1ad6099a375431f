"""`CacheSequence`: the tokens of a sequence and their pages, as both caches have them.

    tokens     [0 ............... committed) [ ... known) [ placeholders ... length)
    pages      [ of the cache, read-only ][ private to this sequence ...           )

A placeholder token has a page but no id yet: a step in flight samples it. Placeholders cannot be
committed, so none is ever published.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Sequence
from typing import Self

import numpy as np

from radixserve.arrays import IntArray
from radixserve.cache.namespace import Namespace
from radixserve.cache.page_pool import PageAllocator
from radixserve.cache.tokens import TOKEN_BYTES, TokenIds, as_view, token_bytes
from radixserve.checks import check_int
from radixserve.errors import InvalidRequest

PageCopy = tuple[int, int, int]  # (source page, destination page, tokens to copy)

_PLACEHOLDER = np.array([-1], np.int32).tobytes()
_NO_PAGES: IntArray = np.empty(0, np.int32)
NO_STATE = -1  # instead of a state id
FEW_PAGES = 8  # taken at a time by a sequence that grows slowly: more of them will follow


class CacheSequence(ABC):
    """Grows by `extend`, publishes by `commit`, ends with `release` or as a context manager.

    Not thread-safe: the thread that owns the cache makes every call.

    A subclass implements publishing, cuts and release of the cache's pages, and calls
    `_pages_change` before it replaces pages.
    """

    __slots__ = (
        "_allocator",
        "_has_run",
        "_is_open",
        "_namespace",
        "_num_shared",
        "_num_synced",
        "_pages",
        "_synced_pages",
        "_tokens",
        "cached_len",
        "committed_len",
        "cow_copies",
        "is_pin",
        "length",
        "num_placeholders",
    )

    def __init__(
        self,
        allocator: PageAllocator,
        namespace: Namespace,
        tokens: bytearray,
        shared: array[int],
        copy: PageCopy | None,
    ) -> None:
        """All of `tokens` (int32 bytes) are committed; `shared` are the cache's pages for them, and
        `copy` fills one more. The sequence owns the arrays from now on."""
        self._allocator = allocator
        self._namespace = namespace
        self._tokens = tokens
        self._pages = shared
        self._num_shared = len(shared)  # leading pages that belong to the cache
        # These change by the calls below alone. They are read for every row of every step.
        self.length = len(tokens) // TOKEN_BYTES  # tokens with pages, those to be computed included
        self.committed_len = self.length  # tokens whose K/V is in the pages
        self.cached_len = self.length
        self.num_placeholders = 0  # placeholder tokens at the end, resolved by `fill`
        self._is_open = True
        self._has_run = False  # it has taken pages a few at a time
        self.is_pin = False  # a lock that no request needs, see `PrefixCache.pin`
        self._synced_pages = _NO_PAGES  # what `take_page_table_delta` answered; no view of `_pages`
        self._num_synced = 0  # leading pages that have not changed since
        self.cow_copies: list[PageCopy] = []  # (source page, own page, tokens to copy)
        if copy is not None:
            shared.append(copy[1])
            self.cow_copies.append(copy)
        allocator.live_sequences.add(self)

    def __repr__(self) -> str:
        state = "" if self._is_open else ", released"
        name = type(self).__name__
        return f"{name}(length={self.length}, cached_len={self.cached_len}{state})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    @property
    def tokens(self) -> IntArray:
        """[length] int32 token ids, -1 for placeholders; a read-only view."""
        return np.frombuffer(as_view(self._tokens).toreadonly(), np.int32)

    @property
    def pages(self) -> IntArray:
        """[ceil(length / page_size)] int32 page ids of positions [0, length); a read-only view."""
        return np.frombuffer(as_view(self._pages).toreadonly(), np.int32)

    @property
    def num_private(self) -> int:
        """Pages that belong to this sequence alone."""
        return len(self._pages) - self._num_shared

    @property
    def is_released(self) -> bool:
        return not self._is_open

    @property
    def namespace(self) -> str:
        return self._namespace.name

    @property
    def is_stale(self) -> bool:
        """Its namespace was reset: what it commits is not found by others."""
        return self._namespace.is_dead

    def take_page_table_delta(self) -> tuple[IntArray, int]:
        """The page ids, as `pages`, and the first index that may differ from the last call's
        answer, 0 at the first call.

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

    # -- growing ------------------------------------------------------------------------------

    def extend(self, tokens: TokenIds) -> None:
        """Append `tokens` and allocate their pages, evicting unused pages when none is free.

        Raises OutOfPages, and changes nothing, when there is not enough; InvalidRequest for a
        negative id. O(tokens).
        """
        if self.num_placeholders or not self._is_open:
            self._check_open()
            raise InvalidRequest(
                f"{self.num_placeholders} placeholders at the end: fill them before other tokens "
                f"follow, or append more placeholders"
            )
        self._append(token_bytes(tokens))

    def _append(self, data: bytes) -> None:
        """Append int32 tokens and allocate their pages."""
        pages, allocator = self._pages, self._allocator
        length = self.length + len(data) // TOKEN_BYTES
        wanted = -(-length // allocator.page_size) - len(pages)
        if wanted > 0:
            more: Sequence[int]
            if wanted > FEW_PAGES or not pages:
                more = allocator.allocate(wanted)
            else:
                more, self._has_run = allocator.allocate_after(pages[-1], wanted), True
            try:
                pages.extend(more)
            except BufferError:  # a view of the old buffer is still exported
                self._pages = pages + array("i", more)
        try:
            self._tokens += data
        except BufferError:
            self._tokens = self._tokens + data
        self.length = length

    def append_placeholders(self, num_tokens: int) -> None:
        """Append tokens that are not known yet and allocate their pages, as `extend` does.

        Raises OutOfPages, and changes nothing, when there is not enough.
        """
        if type(num_tokens) is not int or num_tokens < 1:
            num_tokens = check_int("num_tokens", num_tokens, 1)
        if not self._is_open:
            self._check_open()
        self._append(_PLACEHOLDER * num_tokens)
        self.num_placeholders += num_tokens

    def fill(self, tokens: TokenIds) -> None:
        """Replace the first placeholders. InvalidRequest where there are not as many."""
        data = token_bytes(tokens)
        left = self.num_placeholders - len(data) // TOKEN_BYTES
        if left < 0:
            raise InvalidRequest(
                f"fill takes up to {self.num_placeholders} tokens, as many as are placeholders, "
                f"got {len(data) // TOKEN_BYTES}"
            )
        start = len(self._tokens) - self.num_placeholders * TOKEN_BYTES
        self._tokens[start : start + len(data)] = data
        self.num_placeholders = left

    def commit(self, length: int) -> None:
        """Publish: the K/V of [0, length) is in the pages, and the copies have been made.

        Where the cache holds the same tokens already, its pages replace this sequence's own, which
        are freed: whole pages of committed tokens only. Later pages stay where they are: a step in
        flight may be writing them. O(tokens published since the last commit).
        """
        if not self._is_open:
            self._check_open()
        if type(length) is not int or length < 0:
            length = check_int("length", length, 0)
        known = self.length - self.num_placeholders
        if not self.committed_len <= length <= known:
            raise InvalidRequest(
                f"commit takes a length between {self.committed_len} (committed already) and "
                f"{known}, got {length}"
            )
        if self.cow_copies:
            self._drop_copies()
        allocator = self._allocator
        allocator.note_time()
        allocator.stats.committed_tokens += length - self.committed_len
        self.committed_len = length
        self._publish()

    def commit_next(self, token_id: int) -> None:
        """`commit` of one more token: `token_id`, which may have been a placeholder."""
        start = self.committed_len
        if self.num_placeholders and self.length - self.num_placeholders == start:
            self.fill((token_id,))
        self.commit(start + 1)

    # -- recurrent states: of a cache without any these do nothing ---------------------------------

    @property
    def state_id(self) -> int:
        """Its recurrent state, which stands at `length`; NO_STATE where there is none (yet)."""
        return NO_STATE

    def step_states(self, *, is_ahead: bool) -> tuple[int, int]:
        """The states that the step of its last tokens reads and writes; once a step, after all
        `take_checkpoints`. is_ahead: the sequence may turn out to end before its last token."""
        del is_ahead
        return NO_STATE, NO_STATE

    def want_checkpoint(self, length: int) -> None:
        """Others go on from the first `length` tokens: keep the state there."""
        del length

    def take_checkpoints(self, start: int) -> tuple[tuple[int, int], ...]:
        """(length, state id), ascending, of states kept while the tokens [start, self.length) are
        computed, as many as there is room for. `commit` publishes them."""
        del start
        return ()

    # -- branching and rolling back ---------------------------------------------------------------

    @abstractmethod
    def fork(self) -> Self:
        """A second sequence over everything committed. Copies at most one page prefix.

        Raises OutOfPages when no page for it is available.
        """

    def copy_from(self, source: CacheSequence) -> int:
        """Go on with the pages of `source`, a sequence of another namespace over the same tokens
        and more in whole pages, copied before this one is used. `source` belongs to this sequence
        from now on. Only before anything else is appended. Returns the tokens copied; raises
        OutOfPages, and changes nothing, or InvalidRequest where the cache cannot: HashBlockCache.
        """
        del source
        raise InvalidRequest("this cache does not copy between namespaces: use RadixCache")

    def truncate(self, length: int) -> None:
        """Roll back to the first `length` tokens; what was published stays cached.

        A cut inside a page of the cache copies that page's prefix. Raises OutOfPages, and changes
        nothing, when no page for the copy is available.
        """
        self._check_open()
        length = check_int("length", length, 0)
        if length > self.length:
            raise InvalidRequest(f"truncate takes a length up to {self.length}, got {length}")
        whole, extra = divmod(length, self._allocator.page_size)
        self._cut(length, whole, extra)
        if extra and self.cow_copies:  # a copy still to be made must not reach beyond the cut
            last = self._pages[whole]
            self.cow_copies[:] = [
                (src, dst, min(n, extra) if dst == last else n) for src, dst, n in self.cow_copies
            ]
        self.num_placeholders = max(0, length - (self.length - self.num_placeholders))
        self._tokens = self._tokens[: length * TOKEN_BYTES]
        self.length = length
        self.committed_len = min(self.committed_len, length)
        self.cached_len = min(self.cached_len, length)

    def release(self) -> None:
        """Unlock published pages, which stay cached, and free the others. Idempotent."""
        if not self._is_open:
            return
        self._is_open = False
        if self._has_run and self._pages:
            self._allocator.pool.release_run(self._pages[-1])
        if len(self._pages) > self._num_shared:
            self._allocator.free(self._pages[self._num_shared :])
        self._release_shared()
        self._allocator.live_sequences.discard(self)

    def shrink_lock(self) -> None:  # noqa: B027  (only some caches can)
        """Lock no more of the published pages than needed: memory is short."""

    def seen_pages(self, window_size: int) -> IntArray:
        first = max(0, self.committed_len + 1 - window_size) // self._allocator.page_size
        return np.array(self._pages[first:], np.int32)

    # -- for a subclass -----------------------------------------------------------------------

    @abstractmethod
    def _publish(self) -> None:
        """Make the cache hold [0, committed)."""

    @abstractmethod
    def _cut(self, length: int, whole: int, extra: int) -> None:
        """Keep the pages of the first `length` tokens: `whole` pages and `extra` tokens."""

    @abstractmethod
    def _release_shared(self) -> None:
        """Unlock the pages of the cache; private ones are free already."""

    def _drop_copies(self) -> None:
        """The pending copies have been made, or need not be made any more."""
        self.cow_copies.clear()

    def _drop_pages(self, keep: int) -> None:
        """Keep the first `keep` pages; private ones after them are freed."""
        self._pages_change(keep)
        dropped = self._pages[max(keep, self._num_shared) :]
        self._allocator.free(dropped)
        self.cow_copies[:] = [copy for copy in self.cow_copies if copy[1] not in dropped]
        self._pages = self._pages[:keep]
        self._num_shared = min(self._num_shared, keep)

    def _replace_pages(self, first: int, pages: array[int]) -> None:
        """Use the cache's `pages` from index `first` on; free the private ones there."""
        if not pages:
            return
        self._pages_change(first)
        last = first + len(pages)
        own = self._pages[max(first, self._num_shared) : last]
        if own:
            self._allocator.stats.duplicate_tokens += len(own) * self._allocator.page_size
            self._allocator.free(own)
        self._pages[first:last] = pages
        self._num_shared = max(self._num_shared, last)

    def _pages_change(self, first: int) -> None:
        """Pages from index `first` on are about to be replaced or dropped."""
        if first < self._num_synced:
            self._num_synced = first

    def _check_open(self) -> None:
        if not self._is_open:
            raise InvalidRequest("this sequence was released; acquire a new one")


def append_placeholder(sequences: Iterable[CacheSequence]) -> None:
    """`append_placeholders(1)` of each, for a step of hundreds without several calls for each. Not
    for sequences with a recurrent state. Raises OutOfPages; the sequences before have theirs."""
    for sequence in sequences:
        length, allocator, pages = sequence.length, sequence._allocator, sequence._pages
        is_full, page = not length % allocator.page_size, -1
        if is_full and pages and sequence._is_open:
            page = allocator.take_after(pages[-1])
        if not sequence._is_open or (is_full and page < 0):
            sequence.append_placeholders(1)
            continue
        try:
            if is_full:
                pages.append(page)
        except BufferError:  # a view of the old buffer is still exported
            sequence._pages = pages + array("i", (page,))
        try:
            sequence._tokens += _PLACEHOLDER
        except BufferError:
            sequence._tokens = sequence._tokens + _PLACEHOLDER
        sequence._has_run = True
        sequence.length = length + 1
        sequence.num_placeholders += 1
