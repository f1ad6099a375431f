"""`HashSequence`: a chain of locked blocks, and private pages after it.

    tokens     [0 ............ whole blocks committed) [ .. committed) [ ... length)
    pages      [ blocks, shared and read-only        ][ private to this sequence   )

Every whole block that is committed is published. The page after the last block stays private until
it is full, unless a fork needs its tokens: then it is shared as a block without a key.
"""

from __future__ import annotations

from array import array

from radixserve.cache.hash.block import Block, BlockNamespace
from radixserve.cache.hash.block_pool import BlockPool
from radixserve.cache.sequence import NO_PAGES, CacheSequence, PageAllocator
from radixserve.cache.tokens import TOKEN_BYTES


class HashSequence(CacheSequence):
    """Made by `HashBlockCache.acquire` or `fork`; ends with `release`. Not thread-safe.

    `commit` costs O(blocks filled since the last commit), each hashed once.
    """

    __slots__ = ("_blocks", "_partial", "_pool", "_source")
    _namespace: BlockNamespace

    def __init__(
        self,
        allocator: PageAllocator,
        pool: BlockPool,
        namespace: BlockNamespace,
        length: int,
        blocks: list[Block],
        held: tuple[bytearray, array[int]] | None,
        source: Block | None = None,
        page: int = -1,
    ) -> None:
        """`length` tokens are committed. `blocks` have the whole blocks of them; the tokens after
        these are to be copied from `source` to the private `page`. The blocks and `source` are
        locked for this sequence. `held`: see `CacheSequence`; not None where there is a `source`.
        """
        self._pool = pool
        self._blocks = blocks
        copy = None if source is None else (source.page, page, length % pool.block_size)
        super().__init__(allocator, namespace, length, held, copy)
        self._partial: Block | None = None  # of the page after `_blocks`, where that is shared
        self._source = source  # locked until the copy, at most one, has been made from it
        namespace.num_sequences += 1

    def _publish(self) -> None:
        """Make blocks of the whole pages that are committed."""
        pool, blocks, partial, first = self._pool, self._blocks, self._partial, len(self._blocks)
        whole = self.committed_len // pool.block_size
        if whole == first:
            return
        pages = self._pages[first:whole]
        data = bytes(self._tokens[first * pool.width : whole * pool.width])
        parent = blocks[-1] if blocks else None
        blocks += pool.publish(self._namespace, parent, data, pages, partial)
        self._partial = None
        self._num_shared = whole
        if [block.page for block in blocks[first:]] == pages.tolist():
            return
        own = array("i")  # pages to free: another sequence published these blocks first
        for index, page in enumerate(pages, first):
            if blocks[index].page != page:
                self._pages_change(index)
                self._pages[index] = blocks[index].page
                own.append(page)
        if own:
            self._allocator.stats.duplicate_tokens += len(own) * pool.block_size
            if partial is not None and blocks[first] is not partial:
                own.pop(0)
                pool.unlock([partial])
            self._allocator.free(own)

    def fork(self) -> HashSequence:
        """Returns a second sequence over all committed tokens. It shares whole blocks and copies
        the rest.

        Raises OutOfPages, and changes nothing, when no page for that copy is available.
        O(blocks).
        """
        self._check_open()
        pool, length, blocks = self._pool, self.committed_len, [*self._blocks]
        held, source, page = None, None, -1
        if length % pool.block_size:
            page = self._allocator.allocate(1)[0]
            source = self._copy_source()
            pool.lock((source,))
            held = self._tokens[: length * TOKEN_BYTES], self._pages[: len(blocks)]
        pool.lock(blocks)
        return HashSequence(
            self._allocator, pool, self._namespace, length, blocks, held, source, page
        )

    def _read_tokens(self, more: bytes = b"") -> bytearray:
        return bytearray().join([*[block.tokens for block in self._blocks], more])

    def _read_pages(self, more: array[int] = NO_PAGES) -> array[int]:
        return array("i", [block.page for block in self._blocks]) + more

    def _copy_source(self) -> Block:
        """Returns the block to copy the partial page from: its own, or the source of its pending
        copy."""
        if self._source is not None:
            return self._source
        if self._partial is None:
            self._partial = self._pool.adopt(self._namespace, self._pages[len(self._blocks)])
            self._num_shared += 1
        return self._partial

    def _cut(self, length: int, whole: int, extra: int) -> None:
        """Unlock blocks after the cut, the deepest first; a cut inside one copies its start."""
        pool = self._pool
        source = self._cut_source(whole, length) if extra else None
        if source is None:
            self._keep(whole, whole + (1 if extra else 0))
        else:
            page = self._allocator.allocate(1)
            pool.lock((source,))
            self._keep(whole, whole)
            self._add_pages(page)
            self._source = source
            self.cow_copies.append((source.page, page[0], extra))

    def _cut_source(self, index: int, length: int) -> Block | None:
        """Returns the block with that index if others may read the slots after the cut."""
        if index < len(self._blocks):
            return self._blocks[index]
        shared = self._partial if index == len(self._blocks) else None
        if shared is not None and shared.lock_ref > 1 and length < self.committed_len:
            return shared
        return None

    def _keep(self, num_blocks: int, num_pages: int) -> None:
        """Drop all but the leading blocks and pages."""
        self._drop_pages(num_pages)
        self._unlock(num_blocks, num_pages)

    def _unlock(self, num_blocks: int, num_pages: int) -> None:
        """Unlock all but the leading blocks, the deepest first."""
        pool = self._pool
        if len(self._blocks) >= num_pages:  # the partial page is gone, and a copy that fills it
            self._drop_copies()
            if self._partial is not None:
                pool.unlock([self._partial])
                self._partial = None
        pool.unlock(self._blocks[num_blocks:])
        del self._blocks[num_blocks:]

    def _drop_copies(self) -> None:
        super()._drop_copies()
        if self._source is not None:
            self._pool.unlock([self._source])
            self._source = None

    def _release_shared(self) -> None:
        if self._blocks:
            self._blocks[-1].last_use = self._pool.now
        self._unlock(0, 0)
        self._namespace.num_sequences -= 1
        self._pool.prune(self._namespace)
