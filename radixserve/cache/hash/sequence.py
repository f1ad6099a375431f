"""`HashSequence`: one session of a chain of blocks, with its own pages behind it.

    tokens     [0 ............ whole blocks committed) [ .. committed) [ ... length)
    pages      [ blocks, shared and read-only        ][ private to this sequence   )

Every whole block that is committed is published. The page behind the last block stays private
until it is full, unless a fork needs its head: then it is shared as a block without a key.
"""

from __future__ import annotations

from array import array

from radixserve.cache.hash.block import Block, BlockNamespace
from radixserve.cache.hash.block_pool import BlockPool
from radixserve.cache.interface import PageCopy
from radixserve.cache.sequence import PagedSequence
from radixserve.cache.tokens import TOKEN_BYTES, TokenIds
from radixserve.checks import check_int
from radixserve.errors import InvalidRequest


class HashSequence(PagedSequence):
    """Made by `HashBlockCache.acquire` or `fork`; ends with `release`. Not thread-safe."""

    __slots__ = (
        "_blocks",
        "_committed",
        "_is_open",
        "_namespace",
        "_partial",
        "_pool",
        "_source",
        "cached_len",
        "cow_copies",
    )

    def __init__(
        self,
        pool: BlockPool,
        namespace: BlockNamespace,
        tokens: bytearray,
        blocks: list[Block],
        source: Block | None = None,
        page: int = -1,
    ) -> None:
        """`tokens` (int32 bytes) are committed: `blocks` hold the whole ones, and are locked for
        this sequence; the head behind them is to be copied from `source`, locked too, to the
        private `page`. It owns the arrays from now on."""
        self._begin(tokens, array("i", [block.page for block in blocks]))
        self._pool = pool
        self._namespace = namespace
        self._blocks = blocks
        self._partial: Block | None = None  # of the page behind `_blocks`, where that is shared
        self._source = source  # locked until the copy has been made from it
        self._committed = len(tokens) // TOKEN_BYTES
        self._is_open = True
        self.cached_len = self._committed  # tokens that were found in the cache
        self.cow_copies: list[
            PageCopy
        ] = []  # at most one: (source page, own page, tokens of the head)
        if source is not None:
            self._pages.append(page)
            self.cow_copies.append((source.page, page, self._committed % pool.block_size))
        pool.register(self, namespace)

    def __repr__(self) -> str:
        state = "" if self._is_open else ", released"
        return f"HashSequence(length={self.length}, cached_len={self.cached_len}{state})"

    @property
    def committed_len(self) -> int:
        """Tokens whose K/V is in the pages."""
        return self._committed

    @property
    def num_private(self) -> int:
        """Pages that belong to this sequence alone."""
        return len(self._pages) - self._num_shared

    @property
    def is_released(self) -> bool:
        return not self._is_open

    @property
    def is_stale(self) -> bool:
        """Its namespace was reset: what it commits is not found by others."""
        return self._namespace.is_dead

    def pages_wanted(self, num_tokens: int) -> int:
        """New pages that `extend` by that many tokens would take."""
        return self._pool.pages_for(self.length + num_tokens) - len(self._pages)

    @property
    def _num_shared(self) -> int:
        """Leading pages that belong to blocks."""
        return len(self._blocks) + (self._partial is not None)

    # -- growing ------------------------------------------------------------------------------

    def extend(self, tokens: TokenIds, num_unknown: int = 0) -> None:
        """Room for `tokens`, and for so many unknown ones behind them, at the present end, evicting
        unused blocks when no page is free.

        Raises OutOfPages, and changes nothing, when there is not enough. O(tokens).
        """
        self._check_open()
        if self._num_unknown:
            self._refuse_to_extend()
        data = self._data_after(tokens, num_unknown)
        length = (len(self._tokens) + len(data)) // TOKEN_BYTES
        wanted = self._pool.pages_for(length) - len(self._pages)
        if wanted > 0:
            pages = self._pool.allocate(wanted)
            try:
                self._pages += pages
            except BufferError:  # somebody still looks at a view of the shorter state
                self._pages = self._pages + pages
        try:
            self._tokens += data
        except BufferError:
            self._tokens = self._tokens + data
        self._num_unknown = num_unknown

    def commit(self, length: int) -> None:
        """The K/V of [0, length) is in the pages, and the copy has been made: publish whole blocks.

        Where another sequence published the same block first, its page replaces this sequence's
        own, which is freed. What lies behind the whole blocks stays where it is, and may be
        computed at this very moment. O(blocks filled since the last commit), each hashed once.
        """
        self._check_open()
        length = check_int("length", length, 0)
        known = self.length - self._num_unknown
        if not self._committed <= length <= known:
            raise InvalidRequest(
                f"commit takes a length between {self._committed} (committed already) and "
                f"{known}, got {length}"
            )
        self._forget_copy()
        self._pool.counters.committed_tokens += length - self._committed
        self._committed = length
        whole = length // self._pool.block_size
        if whole > len(self._blocks):
            self._publish(whole)

    def _publish(self, whole: int) -> None:
        """Make blocks of the pages up to index `whole`."""
        pool, blocks, partial = self._pool, self._blocks, self._partial
        first = len(blocks)
        pages = self._pages[first:whole]
        data = bytes(self._tokens[first * pool.width : whole * pool.width])
        parent = blocks[-1] if blocks else None
        blocks += pool.publish(self._namespace, parent, data, pages, partial)
        self._partial = None
        own = array("i")  # given back: another sequence was first
        for index, page in enumerate(pages, first):
            if blocks[index].page != page:
                self._pages_change(index)
                self._pages[index] = blocks[index].page
                own.append(page)
        if own:
            pool.counters.duplicate_tokens += len(own) * pool.block_size
            if partial is not None and blocks[first] is not partial:
                own.pop(0)
                pool.unlock((partial,))
            pool.free(own)

    # -- branching ----------------------------------------------------------------------------

    def fork(self) -> HashSequence:
        """A second session of everything committed: shares whole blocks, copies the head behind.

        Raises OutOfPages, and changes nothing, when the page for that head cannot be had.
        O(blocks).
        """
        self._check_open()
        pool, tokens = self._pool, self._tokens[: self._committed * TOKEN_BYTES]
        whole, extra = divmod(self._committed, pool.block_size)
        if not extra:
            pool.lock(self._blocks)
            return HashSequence(pool, self._namespace, tokens, [*self._blocks])
        page = pool.allocate(1)[0]
        source = self._shared_head(whole)
        pool.lock([*self._blocks, source])
        return HashSequence(pool, self._namespace, tokens, [*self._blocks], source, page)

    def _shared_head(self, index: int) -> Block:
        """The block to copy our partial page from: that page's, or where its own head comes from
        as long as that has not been copied."""
        if self._source is not None:
            return self._source
        if self._partial is None:
            self._partial = self._pool.adopt(self._namespace, self._pages[index])
        return self._partial

    def truncate(self, length: int) -> None:
        """Roll back to the first `length` tokens; what was published stays cached.

        A cut inside a shared block copies that block's head. Raises OutOfPages, and changes
        nothing, when the page for it cannot be had.
        """
        self._check_open()
        length = check_int("length", length, 0)
        if length > self.length:
            raise InvalidRequest(f"truncate takes a length up to {self.length}, got {length}")
        whole, extra = divmod(length, self._pool.block_size)
        source = self._head_to_copy(whole, length) if extra else None
        if source is None:
            self._cut(whole, whole + (1 if extra else 0))
        else:
            page = self._pool.allocate(1)
            self._pool.lock((source,))
            self._cut(whole, whole)
            self._pages += page
            self._source = source
            self.cow_copies.append((source.page, page[0], extra))
        self._num_unknown = max(0, length - (self.length - self._num_unknown))
        self._tokens = self._tokens[: length * TOKEN_BYTES]
        self._committed = min(self._committed, length)
        self.cached_len = min(self.cached_len, length)
        extra = self._committed % self._pool.block_size
        self.cow_copies[:] = [(src, dst, extra) for src, dst, _ in self.cow_copies]

    def _head_to_copy(self, index: int, length: int) -> Block | None:
        """The block with that index if others may read behind the cut, where we would write."""
        if index < len(self._blocks):
            return self._blocks[index]
        shared = self._partial if index == len(self._blocks) else None
        if shared is not None and shared.lock_ref > 1 and length < self._committed:
            return shared
        return None

    def _cut(self, num_blocks: int, num_pages: int) -> None:
        """Let go of all but the leading blocks and pages, the deepest first."""
        pool, pages = self._pool, self._pages
        self._pages_change(num_pages)
        self._pages = pages[:num_pages]
        pool.free(pages[max(num_pages, self._num_shared) :])
        if (
            self._source is not None and len(self._blocks) >= num_pages
        ):  # the page that it would fill is gone
            self._forget_copy()
        if self._partial is not None and len(self._blocks) >= num_pages:
            pool.unlock((self._partial,))
            self._partial = None
        pool.unlock(reversed(self._blocks[num_blocks:]))
        del self._blocks[num_blocks:]

    def _forget_copy(self) -> None:
        """The pending copy has been made, or need not be made any more."""
        self.cow_copies.clear()
        if self._source is not None:
            self._pool.unlock((self._source,))
            self._source = None

    def release(self) -> None:
        """Let go: whole committed blocks stay cached, the rest is freed. Twice does nothing."""
        if not self._is_open:
            return
        self._is_open = False
        self._cut(0, 0)
        self._pool.unregister(self, self._namespace)

    def _check_open(self) -> None:
        if not self._is_open:
            raise InvalidRequest("this sequence was released; acquire a new one")
