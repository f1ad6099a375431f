"""`BlockPool`: the pages of a `HashBlockCache`, the table that finds blocks, locks and eviction.

A page is free, or a block's, or private to a sequence. A block that nobody holds stays findable
until its page is wanted: `unused` is that order. Sequences let go of their deepest block first, so
a parent is always younger there than its children, and what is dropped is always a chain's end.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable

from radixserve.cache.hash.block import Block, BlockNamespace
from radixserve.cache.hash.block_hash import BlockChain, ChainMemo, Digest
from radixserve.cache.hash.block_watch import EvictedKeys, KeyWatchRegistry
from radixserve.cache.page_pool import PagePool
from radixserve.cache.stats import CacheStats
from radixserve.cache.tokens import TOKEN_BYTES
from radixserve.errors import OutOfPages

_LEAST_MEMORY = 4096  # evicted blocks remembered at least; else as many as there are pages


class BlockPool:
    """Shared by all sequences of one cache. It does not know them, only how often they lock."""

    def __init__(self, num_pages: int, block_size: int, digest: Digest) -> None:
        self.block_size = block_size
        self.width = block_size * TOKEN_BYTES  # bytes of a block's tokens
        self.pages = PagePool(num_pages)
        self.namespaces: dict[str, BlockNamespace] = {}
        self.unused: OrderedDict[Block, None] = OrderedDict()  # least recently used first
        self.chains = ChainMemo(digest, self.width)
        self.watch_registry = KeyWatchRegistry()
        self.evicted = EvictedKeys(max(_LEAST_MEMORY, num_pages))
        self.counters = CacheStats()
        self.live_sequences: set[object] = set()  # sequences
        self.num_blocks = 0  # findable ones, and those that only sequences still hold
        self.num_evicted_tokens = 0
        self._digest = digest
        self._next_id = 0

    @property
    def num_available(self) -> int:
        """Pages that are free or evictable."""
        return self.pages.num_free + len(self.unused)

    @property
    def num_private(self) -> int:
        """Pages that belong to sequences."""
        return self.pages.num_pages - self.pages.num_free - self.num_blocks

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    # -- finding ------------------------------------------------------------------------------

    def chain(self, namespace: str, data: bytes) -> BlockChain:
        """The whole blocks of `data`, int32 bytes, under that namespace."""
        block_namespace = self.namespaces.get(namespace)
        root_key = (
            self.chains.root_key(namespace) if block_namespace is None else block_namespace.root_key
        )
        return self.chains.get(root_key, data)

    def match(self, namespace: str, chain: BlockChain, found: list[Block]) -> list[Block]:
        """Append the blocks that follow `found`, the leading ones of `chain`. Read-only.

        O(blocks found): each is hashed, unless the chain knows its key, and compared by token and
        by parent, so that equal keys of different prefixes do no harm.
        """
        block_namespace = self.namespaces.get(namespace)
        if block_namespace is None:
            return found
        blocks, keys, data = block_namespace.blocks, chain.keys, chain.data
        digest, width = self._digest, self.width
        at = len(found) * width
        parent = found[-1] if found else None
        for index in range(len(found) + 1, chain.num_blocks + 1):
            tokens = data[at : at + width]
            if index == len(keys):
                keys.append(digest(keys[-1] + tokens))
            block = blocks.get(keys[index])
            if block is None or block.parent is not parent or block.tokens != tokens:
                break
            found.append(block)
            parent = block
            at += width
        return found

    # -- namespaces ---------------------------------------------------------------------------

    def namespace(self, name: str) -> BlockNamespace:
        """The living space of that name, made when missing."""
        block_namespace = self.namespaces.get(name)
        if block_namespace is None:
            block_namespace = self.namespaces[name] = BlockNamespace(
                name, self.chains.root_key(name)
            )
        return block_namespace

    def register(self, sequence: object, block_namespace: BlockNamespace) -> None:
        """A sequence begins."""
        self.live_sequences.add(sequence)
        block_namespace.num_sequences += 1

    def unregister(self, sequence: object, block_namespace: BlockNamespace) -> None:
        """A sequence has let go of all that it held."""
        self.live_sequences.discard(sequence)
        block_namespace.num_sequences -= 1
        self._prune(block_namespace)

    def _prune(self, block_namespace: BlockNamespace) -> None:
        """Forget a namespace that holds nothing and that nobody uses."""
        if (
            not block_namespace.blocks
            and not block_namespace.num_sequences
            and not block_namespace.is_dead
        ):
            del self.namespaces[block_namespace.name]

    # -- pages --------------------------------------------------------------------------------

    def allocate(self, count: int) -> array[int]:
        """`count` private pages, evicting the oldest unused blocks when too few are free.

        Raises OutOfPages, nothing dropped, when there are too few of both.
        """
        missing = count - self.pages.num_free
        if missing > 0:
            if missing > len(self.unused):
                raise OutOfPages(
                    f"{count} pages wanted: {self.pages.num_free} free and "
                    f"{len(self.unused)} evictable of {self.pages.num_pages}"
                )
            self.evict(missing)
        return self.pages.allocate(count)

    def free(self, pages: array[int]) -> None:
        """Private pages go back to the free list."""
        self.pages.free(pages)

    def evict(self, num_pages: int) -> int:
        """Forget up to `num_pages` unused blocks, oldest first; returns how many. O(those)."""
        unused, evicted, watch_registry = self.unused, self.evicted, self.watch_registry
        freed = array("i")
        for _ in range(min(num_pages, len(unused))):
            block, _ = unused.popitem(last=False)
            block_namespace = block.namespace
            del block_namespace.blocks[block.key]
            block.is_listed = False
            evicted.remember(block.key, block_namespace.name)
            watch_registry.notify(block.key)
            freed.append(block.page)
            if not block_namespace.blocks:
                self._prune(block_namespace)
        self._free_blocks(freed)
        self.num_evicted_tokens += len(freed) * self.block_size
        return len(freed)

    def reset(self, namespace: str) -> None:
        """Forget a namespace. O(its blocks); those in use are freed when they are let go of."""
        block_namespace = self.namespaces.pop(namespace, None)
        if block_namespace is None:
            return
        block_namespace.is_dead = True
        blocks, block_namespace.blocks = block_namespace.blocks, {}
        freed = array("i")
        for key, block in blocks.items():
            block.is_listed = False
            self.watch_registry.notify(key)
            if not block.lock_ref:
                del self.unused[block]
                freed.append(block.page)
        self._free_blocks(freed)

    def _free_blocks(self, pages: array[int]) -> None:
        """The pages of blocks that are gone."""
        self.num_blocks -= len(pages)
        self.pages.free(pages)

    # -- locks --------------------------------------------------------------------------------

    def lock(self, blocks: Iterable[Block]) -> None:
        """One more session for each."""
        unused = self.unused
        for block in blocks:
            if not block.lock_ref:
                del unused[block]
            block.lock_ref += 1

    def unlock(self, blocks: Iterable[Block]) -> None:
        """Undo one `lock` of each; the deepest must come first."""
        unused = self.unused
        for block in blocks:
            block.lock_ref -= 1
            if not block.lock_ref:
                if block.is_listed:
                    unused[block] = None
                else:
                    self._free_blocks(array("i", [block.page]))

    # -- publishing ---------------------------------------------------------------------------

    def adopt(self, block_namespace: BlockNamespace, page: int) -> Block:
        """A block, locked once, for a private page of which only the head is filled."""
        self._next_id += 1
        self.num_blocks += 1
        return Block(block_namespace, page, self._next_id)

    def publish(
        self,
        block_namespace: BlockNamespace,
        parent: Block | None,
        data: bytes,
        pages: array[int],
        partial: Block | None,
    ) -> list[Block]:
        """The blocks of `data` (int32 bytes, whole blocks) behind `parent`, each locked once.

        A new block takes over its page from the caller; `partial` is the first page's, where the
        caller shares that as a block already. Where another sequence published the same block
        first, that one is returned, and the caller still owns the page or `partial`.
        """
        digest, width, table = self._digest, self.width, block_namespace.blocks
        key = block_namespace.root_key if parent is None else parent.key
        is_listed = not block_namespace.is_dead and (parent is None or parent.is_listed)
        blocks: list[Block] = []
        for index, page in enumerate(pages):
            tokens = data[index * width : (index + 1) * width]
            key = digest(key + tokens)
            block = table.get(key)
            if block is not None and block.parent is parent and block.tokens == tokens:
                self.lock((block,))
            else:
                is_listed = is_listed and block is None  # else another prefix has that key
                block = self.adopt(block_namespace, page) if partial is None else partial
                block.parent, block.key, block.tokens = parent, key, tokens
                if is_listed:
                    self._list(block)
            blocks.append(block)
            parent, partial = block, None
        return blocks

    def _list(self, block: Block) -> None:
        """Let others find it."""
        block.is_listed = True
        block.namespace.blocks[block.key] = block
        self.evicted.discard(block.key)
        self.watch_registry.notify(block.key)
