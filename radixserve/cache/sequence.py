"""`CacheSequence`: the tokens of a sequence and their pages, as both caches have them.

`PageAllocator` allocates pages for all sequences of a cache and evicts cached ones if none is free.

    tokens     [0 ............... committed) [ ... known) [ placeholders ... length)
    pages      [ of the cache, read-only ][ private to this sequence ...           )

A sequence that was acquired has locked its prefix. Its tokens and page ids are read from the cache
when they are first needed: when it grows, or when a caller asks for them.

A placeholder token has a page but no id yet: a step in flight samples it. Placeholders cannot be
committed, so none is ever published.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, Self

import numpy as np

from radixserve.arrays import IntArray
from radixserve.cache.namespace import Namespace
from radixserve.cache.page_pool import PagePool
from radixserve.cache.stats import CacheStats, RecentCounts
from radixserve.cache.tokens import TOKEN_BYTES, TokenIds, as_view, token_bytes
from radixserve.checks import check_int
from radixserve.errors import InvalidRequest, OutOfPages

PageCopy = tuple[int, int, int]  # (source page, destination page, tokens to copy)

_PLACEHOLDER = np.array([-1], np.int32).tobytes()
NO_PAGES = array("i")  # stays empty
_UNUSED = array("i", (0,))  # an entry of `_pages` after those in use
FEW_PAGES = 8  # up to so many at a time come from a reserved run: the sequence grows step by step


class ReturnEstimate(NamedTuple):
    """When a released sequence is expected to be continued, on the cache's clock."""

    return_at: float
    wait_s: float  # from its release to then
    late_at: float  # after that it is not expected any more
    probability: float  # that it is continued at all
    is_regular: bool  # `return_at` is reliable: such sequences come back in that order

    @property
    def is_likely(self) -> bool:
        """Whether it is more probable that the sequence is continued than that it is not."""
        return self.probability >= 0.5

    def seconds_left(self, now: float) -> float:
        """Returns the expected seconds until the sequence is continued. An irregular one is
        expected to wait for `wait_s` more, or as long again as it has waited, if that is longer."""
        idle_s = now - self.return_at + self.wait_s
        return max(0.0, self.return_at - now) if self.is_regular else max(self.wait_s, idle_s)


class NamespaceEntry:
    """One namespace of a cache. Dead after a reset: look-ups do not find it."""

    __slots__ = ("is_dead", "key", "text")

    def __init__(self, key: Namespace, *, is_dead: bool = False) -> None:
        self.key = key
        self.text = str(key)
        self.is_dead = is_dead


class PageOwner(Protocol):
    """The part of a cache that holds published pages: a tree, or a table of blocks."""

    num_pages: int  # published ones
    num_created: int  # nodes or blocks since the start
    now: float  # the clock when a sequence was last acquired or committed
    num_evicted_tokens: int

    @property
    def namespaces(self) -> Mapping[Namespace, NamespaceEntry]:
        """The live ones."""

    @property
    def num_nodes(self) -> int:
        """Nodes or blocks now."""

    @property
    def num_evictable(self) -> int:
        """Pages that `make_room` can free now."""

    def make_room(self, num_pages: int) -> bool:
        """Free `num_pages` pages. Returns False, and frees nothing, if fewer can be freed."""

    def evict(self, num_pages: int) -> int:
        """Free up to `num_pages` pages of live namespaces. Returns how many."""

    def reset(self, key: Namespace | None) -> None:
        """Drop one namespace, or all if None."""


class PageAllocator:
    """Allocates pages for all sequences of one cache, evicting cached ones if none is free. Also
    has the cache's counters, its clock and the set of live sequences."""

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
        self.stats = CacheStats()
        self.live_sequences: set[CacheSequence] = set()
        self._owner = owner
        self._clock = clock
        owner.now = clock()
        self.recent = RecentCounts(self._counters, owner.now)

    def note_time(self) -> float:
        """Set the owner's `now`; to be called before a counter changes. Returns the clock's
        seconds."""
        clock = self._clock  # a method of that name would be looked for first, slowly
        now = self._owner.now = clock()
        if now >= self.recent.due:
            self.recent.read(now)
        return now

    def _counters(self) -> dict[str, int]:
        """Returns the counters whose rates `recent` computes."""
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
        """Returns how many of `wanted` pages `allocate` can take now."""
        return min(wanted, self.num_available)

    @property
    def num_private(self) -> int:
        """Pages that belong to single sequences and are not published."""
        return self.pool.num_pages - self.pool.num_free - self._owner.num_pages

    def allocate(self, count: int, *, may_shrink_locks: bool = True) -> array[int]:
        """Allocate `count` pages, evicting in the policy's order. Raises OutOfPages, and evicts
        nothing, when fewer are available.

        `may_shrink_locks`: when short, make sequences lock no more than they need.
        """
        pool, owner = self.pool, self._owner
        missing = count - pool.num_free
        if missing > 0 and not owner.make_room(missing):
            if may_shrink_locks:
                for sequence in self.live_sequences:
                    sequence.shrink_lock()
            if not owner.make_room(count - pool.num_free):
                raise OutOfPages(
                    f"{count} pages wanted: {pool.num_free} free and "
                    f"{owner.num_evictable} evictable of {pool.num_pages}"
                )
        return pool.allocate(count)

    def free(self, pages: array[int]) -> None:
        """Give private pages back."""
        self.pool.free(pages)

    def free_end(self, pages: array[int]) -> None:
        """Give back the last private pages of a sequence, see `PagePool.free_end`."""
        self.pool.free_end(pages)

    def take_after(self, page: int) -> int:
        """See `PagePool.take_after`. Never evicts."""
        return self.pool.take_after(page)

    def allocate_after(self, page: int, count: int) -> Sequence[int]:
        """Allocate `count` pages for a sequence that ends with `page`, adjacent to it if possible.
        Raises OutOfPages, and evicts nothing, when fewer are available."""
        if count > self.pool.num_free:
            return self.allocate(count)
        return self.pool.allocate_after(page, count)


class CacheSequence(ABC):
    """Grows by `extend`, publishes by `commit`, ends with `release` or as a context manager.

    Not thread-safe: the thread that owns the cache makes every call.

    A subclass implements publishing, cuts and release of the cache's pages, and calls
    `_pages_change` before it replaces pages.

    `_pages` may have room for more than the `_num_pages` page ids in use. `_table` is a view of it,
    and the array is not resized from then on. `_pages` and `_tokens` are shorter than the sequence,
    which ends with a whole page, as long as they are still to be read from the cache, see `_read`.
    """

    __slots__ = (
        "_allocator",
        "_is_open",
        "_namespace",
        "_num_pages",
        "_num_shared",
        "_num_synced",
        "_owns_reserved_run",
        "_pages",
        "_table",
        "_tokens",
        "cached_len",
        "committed_len",
        "cow_copies",
        "expected_return",
        "is_pin",
        "length",
        "num_placeholders",
    )

    def __init__(
        self,
        allocator: PageAllocator,
        namespace: NamespaceEntry,
        length: int,
        held: tuple[bytearray, array[int]] | None,
        copy: PageCopy | None,
    ) -> None:
        """`length` tokens are committed. All whole pages of them belong to the cache, and `copy`
        fills one more.

        `held`: these tokens (int32 bytes) and whole pages, in arrays that the sequence owns from
        now on; None: to be read later.
        """
        self._allocator = allocator
        self._namespace = namespace
        self._tokens, self._pages = (bytearray(), NO_PAGES) if held is None else held
        self._num_shared = length // allocator.page_size  # leading pages that belong to the cache
        self._num_pages = self._num_shared
        # These change by the calls below alone. They are read for every row of every step.
        self.length = length  # tokens with pages, those to be computed included
        self.committed_len = length  # tokens whose K/V is in the pages
        self.cached_len = length
        self.num_placeholders = 0  # placeholder tokens at the end, resolved by `fill`
        self._is_open = True
        self._owns_reserved_run = False  # pages after its last one may be reserved for it
        self.expected_return: ReturnEstimate | None = None  # set by its user before `release`
        self.is_pin = False  # a lock that no request needs, see `PrefixCache.pin`
        self._table: IntArray | None = None  # a view of `_pages`, for `take_page_table_delta`
        self._num_synced = 0  # leading pages that have not changed since its last call
        # (source page, own page, tokens to copy): the runner makes them before the next step
        self.cow_copies: list[PageCopy] = []
        if copy is not None:
            self._add_pages(array("i", copy[1:2]))
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
        if len(self._tokens) < self.length * TOKEN_BYTES:
            self._check_open()  # else the tokens may be gone
            self._tokens = self._read_tokens()
        return np.frombuffer(as_view(self._tokens).toreadonly(), np.int32)

    @property
    def pages(self) -> IntArray:
        """[ceil(length / page_size)] int32 page ids of positions [0, length); a read-only view."""
        return self._page_table()[: self._num_pages]

    @property
    def num_pages(self) -> int:
        """Number of its pages."""
        return self._num_pages

    @property
    def num_private(self) -> int:
        """Pages that belong to this sequence alone."""
        return self._num_pages - self._num_shared

    @property
    def is_released(self) -> bool:
        return not self._is_open

    @property
    def namespace(self) -> str:
        """Its namespace as text."""
        return self._namespace.text

    @property
    def is_stale(self) -> bool:
        """Whether its commits are not cached: its namespace was reset, or it is detached."""
        return self._namespace.is_dead

    @property
    def is_detached(self) -> bool:
        """Whether `detach` was called."""
        return False

    def detach(self) -> bool:
        """Publish no further tokens: they are computed with other weights than those of the cached
        prefix, which stays locked. They leave at `release`. Returns False where the sequence
        cannot: then it must be released."""
        return False

    def take_page_table_delta(self) -> tuple[IntArray, int]:
        """Returns the page ids, as `pages`, and the first index at which they may differ from the
        result of the last call, 0 at the first call.

        The array does not change later. O(1), but for the first call.
        """
        table, first = self._table, self._num_synced
        if table is None:
            table = self._page_table()
        self._num_synced = size = self._num_pages
        return table[:size], first

    def _page_table(self) -> IntArray:
        """[>= num_pages] the page ids in use, then room; a read-only view."""
        if self._table is None:
            if len(self._pages) < self._num_pages:
                self._check_open()
                self._pages = self._read_pages()
            self._table = np.frombuffer(as_view(self._pages).toreadonly(), np.int32)
        return self._table

    def restart_page_table(self) -> None:
        """Make the next `take_page_table_delta` return index 0, for a reader without the earlier
        results."""
        self._num_synced = 0

    # -- growing ------------------------------------------------------------------------------

    def extend(self, tokens: TokenIds) -> None:
        """Append `tokens` and allocate their pages, evicting unused pages when none is free.

        Raises OutOfPages, and changes nothing, when too few are available; InvalidRequest for a
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
        allocator, count = self._allocator, self._num_pages
        length = self.length + len(data) // TOKEN_BYTES
        wanted = -(-length // allocator.page_size) - count
        if wanted > FEW_PAGES or (wanted > 0 and not count):
            self._add_pages(allocator.allocate(wanted))
        elif wanted > 0:
            self._read()
            more = allocator.allocate_after(self._pages[count - 1], wanted)
            self._owns_reserved_run = True
            self._add_pages(array("i", more))
        if len(self._tokens) < self.length * TOKEN_BYTES:
            self._tokens = self._read_tokens(data)
        else:
            try:
                self._tokens += data
            except BufferError:
                self._tokens = self._tokens + data
        self.length = length

    def append_placeholders(self, num_tokens: int) -> None:
        """Append tokens that are not known yet and allocate their pages, as `extend` does.

        Raises OutOfPages, and changes nothing, when too few are available.
        """
        if type(num_tokens) is not int or num_tokens < 1:
            num_tokens = check_int("num_tokens", num_tokens, 1)
        if not self._is_open:
            self._check_open()
        self._append(_PLACEHOLDER * num_tokens)
        self.num_placeholders += num_tokens

    def fill(self, tokens: TokenIds) -> None:
        """Replace the first placeholders by `tokens`. Raises InvalidRequest for more tokens than
        placeholders."""
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
        """Publish the tokens [0, length): their K/V is in the pages, and `cow_copies` were made.

        Look-ups find committed tokens at once; those of a HashBlockCache find whole blocks. If the
        cache has the same tokens already, its pages replace this sequence's own, which are freed:
        whole pages of committed tokens only. Later pages are not replaced: a step in flight may be
        writing them. Raises InvalidRequest for fewer tokens than are committed and for more than
        are known. O(tokens published since the last commit).
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
        """Commit one more token, `token_id`; fills its placeholder first if it was one. Raises
        InvalidRequest if another token follows."""
        start = self.committed_len
        if self.num_placeholders and self.length - self.num_placeholders == start:
            self.fill((token_id,))
        elif start < self.length and self.tokens[start] != token_id:
            raise InvalidRequest(f"the next token is {self.tokens[start]}, not {token_id}")
        self.commit(start + 1)

    # -- branching and rolling back ---------------------------------------------------------------

    @abstractmethod
    def fork(self) -> Self:
        """Returns a second sequence over all committed tokens. Copies at most one page prefix.

        Raises OutOfPages when no page for it is available.
        """

    def copy_from(self, source: CacheSequence) -> int:
        """Continue with copies of the pages of `source`, a sequence of another namespace over the
        same tokens and more, in whole pages. This sequence owns `source` from now on, and is used
        after the copies have been made. Call it before anything is appended.

        Returns the tokens copied. Raises OutOfPages, and changes nothing, when too few pages are
        available; InvalidRequest from a HashBlockCache, which cannot copy.
        """
        del source
        raise InvalidRequest("this cache does not copy between namespaces: use RadixCache")

    def truncate(self, length: int) -> None:
        """Roll back to the first `length` tokens; published pages stay cached.

        A cut inside a page of the cache copies that page's prefix. Raises OutOfPages, and changes
        nothing, when no page for the copy is available.
        """
        self._check_open()
        length = check_int("length", length, 0)
        self._read()
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

    def reserve_rewind(self, num_tokens: int) -> int:
        """Returns how many of the next `num_tokens` tokens `rewind` could take back after the step
        that computes them together with the token before them."""
        return num_tokens

    def rewind(self, length: int) -> None:
        """Take back computed tokens after the first `length`, which are all that are committed:
        drafts that were wrong. Their pages are kept free for it."""
        assert length == self.committed_len, "only drafts are taken back"
        keep = -(-length // self._allocator.page_size)
        if keep < self._num_pages:
            dropped = self._pages[keep : self._num_pages]
            self._pages_change(keep)
            self._num_pages = keep
            self._allocator.free_end(dropped)
            self._owns_reserved_run = True
        self._tokens = self._tokens[: length * TOKEN_BYTES]
        self.length = length

    def release(self) -> None:
        """Unlock published pages, which stay cached, and free the others. Idempotent."""
        if not self._is_open:
            return
        self._is_open = False
        count = self._num_pages
        if self._owns_reserved_run and count:
            self._allocator.pool.release_run(self._pages[count - 1])
        if count > self._num_shared:
            self._allocator.free(self._pages[self._num_shared : count])
        self._release_shared()
        self._allocator.live_sequences.discard(self)

    def note_branch_point(self, length: int) -> None:  # noqa: B027  (only some layers keep it)
        """Note that other sequences may continue after the first `length` tokens."""

    def shrink_lock(self) -> None:  # noqa: B027  (only some caches can)
        """Unlock published pages after this sequence's tokens. Called when pages are short."""

    # -- for a subclass -----------------------------------------------------------------------

    @abstractmethod
    def _publish(self) -> None:
        """Publish the tokens [0, committed_len) in the cache."""

    @abstractmethod
    def _cut(self, length: int, whole: int, extra: int) -> None:
        """Drop all but the pages of the first `length` tokens: `whole` pages and `extra` tokens of
        the next."""

    @abstractmethod
    def _release_shared(self) -> None:
        """Unlock the pages of the cache; private ones are free already."""

    @abstractmethod
    def _read_tokens(self, more: bytes = b"") -> bytearray:
        """Returns its tokens, which are all cached, and `more`. Not once it is released."""

    @abstractmethod
    def _read_pages(self, more: array[int] = NO_PAGES) -> array[int]:
        """Returns its pages, which are all of the cache, and `more`. Not once it is released."""

    def _read(self) -> None:
        """Read the tokens and pages that it was made without."""
        if len(self._tokens) < self.length * TOKEN_BYTES:
            self._tokens = self._read_tokens()
        if len(self._pages) < self._num_pages:
            self._pages = self._read_pages()

    def _add_pages(self, pages: array[int]) -> None:
        """Append page ids, with room for more to a sequence that steps have read, or that grows
        step by step."""
        held, first = self._pages, self._num_pages
        count = first + len(pages)
        if count <= len(held):
            held[first:count] = pages
        else:
            if self._table is not None or len(pages) <= FEW_PAGES:
                pages = pages + _UNUSED * (count // 8 + FEW_PAGES)
            self._pages = held[:first] + pages if len(held) >= first else self._read_pages(pages)
            self._table = None
        self._num_pages = count

    def _set_pages(self, pages: array[int]) -> None:
        """Replace the array of page ids."""
        self._pages, self._table = pages, None

    def _drop_copies(self) -> None:
        """Clear `cow_copies`: they have been made, or are no longer needed."""
        self.cow_copies.clear()

    def _drop_pages(self, keep: int) -> None:
        """Keep the first `keep` pages; private ones after them are freed."""
        dropped = self._pages[max(keep, self._num_shared) : self._num_pages]
        self._allocator.free(dropped)
        self.cow_copies[:] = [copy for copy in self.cow_copies if copy[1] not in dropped]
        self._set_pages(self._pages[:keep])
        self._num_pages, self._num_synced = keep, min(self._num_synced, keep)
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
        """Note for `take_page_table_delta` that pages from index `first` on change. What it has
        returned stays as it is."""
        if first < self._num_synced:
            self._set_pages(self._pages[:])
            self._num_synced = first

    def _check_open(self) -> None:
        if not self._is_open:
            raise InvalidRequest("this sequence was released; acquire a new one")


def append_next(sequences: Sequence[CacheSequence], token_ids: Sequence[int] | None = None) -> None:
    """Extend each sequence by one of `token_ids`, or by a placeholder if that is None. Saves
    several calls per sequence of a decode step. Not with `CacheLayers.needs_each_call`.

    Raises OutOfPages at the first sequence without a page; those before it are extended.
    InvalidRequest for wrong ids: none is extended.
    """
    is_known, data = token_ids is not None, _PLACEHOLDER
    if token_ids is not None:
        if len(token_ids) != len(sequences):
            raise InvalidRequest(f"{len(sequences)} sequences take as many token ids")
        is_valid = min(token_ids, default=0) >= 0 and max(token_ids, default=0) < 1 << 31
        data = array("i", token_ids).tobytes() if is_valid else token_bytes(token_ids)
    for index, sequence in enumerate(sequences):
        token = data[index * TOKEN_BYTES : (index + 1) * TOKEN_BYTES] if is_known else data
        length, allocator, pages = sequence.length, sequence._allocator, sequence._pages
        is_full, page, count = not length % allocator.page_size, -1, sequence._num_pages
        if is_full and 0 < count < len(pages) and sequence._is_open:
            page = allocator.take_after(pages[count - 1])
        if (
            not sequence._is_open
            or (is_full and page < 0)
            or (is_known and sequence.num_placeholders)
        ):
            if token_ids is None:
                sequence.append_placeholders(1)
            else:
                sequence.extend(token_ids[index : index + 1])
            continue
        if is_full:
            pages[count] = page
            sequence._num_pages = count + 1
        try:
            sequence._tokens += token
        except BufferError:
            sequence._tokens = sequence._tokens + token
        sequence._owns_reserved_run = True
        sequence.length = length + 1
        if not is_known:
            sequence.num_placeholders += 1
