"""`BlockPool`: the blocks of a `HashBlockCache`, the table that finds them, locks and eviction.

A page is free, owned by a block, or private to a sequence. An unlocked block remains cached until
evicted, in `unused` order. Sequences unlock their deepest block first, so eviction takes chain ends
first.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable

from radixserve.cache.hash.block import Block, BlockNamespace
from radixserve.cache.hash.block_hash import BlockChain, ChainMemo, Digest
from radixserve.cache.page_pool import PagePool
from radixserve.cache.tokens import TOKEN_BYTES
from radixserve.cache.watch import WatchRegistry

_LEAST_MEMORY = 4096  # evicted blocks remembered at least; else as many as there are pages


class BlockPool:
    """Shared by all sequences of one cache; counts their locks."""

    def __init__(self, pages: PagePool, block_size: int, digest: Digest) -> None:
        self.block_size = block_size
        self.width = block_size * TOKEN_BYTES  # bytes of a block's tokens
        self.namespaces: dict[str, BlockNamespace] = {}
        self.unused: OrderedDict[Block, None] = OrderedDict()  # least recently used first
        self.chains = ChainMemo(digest, self.width)
        self.watch_registry = WatchRegistry()
        self.evicted: OrderedDict[bytes, str] = OrderedDict()  # key -> namespace, oldest first
        self.num_pages = 0  # of findable blocks, and of those that only sequences still hold
        self.num_evicted_tokens = 0
        self._max_evicted = max(_LEAST_MEMORY, pages.num_pages)
        self._pages = pages
        self.digest = digest
        self._next_id = 0

    @property
    def num_evictable(self) -> int:
        """Pages of unlocked blocks."""
        return len(self.unused)

    # -- look-up ------------------------------------------------------------------------------

    def chain(self, namespace: str, data: bytes) -> BlockChain:
        """The whole blocks of `data`, int32 bytes, under that namespace."""
        known = self.namespaces.get(namespace)
        root_key = self.chains.root_key(namespace) if known is None else known.root_key
        return self.chains.get(root_key, data)

    def match(self, namespace: str, chain: BlockChain, found: list[Block]) -> list[Block]:
        """Append the blocks that follow `found`, the leading ones of `chain`. Read-only.

        O(blocks found): each is hashed, unless the chain knows its key, and compared by token and
        by parent, so that equal keys of different prefixes do no harm.
        """
        known = self.namespaces.get(namespace)
        if known is None:
            return found
        blocks, keys, data = known.blocks, chain.keys, chain.data
        digest, width = self.digest, self.width
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

    def open_namespace(self, name: str) -> BlockNamespace:
        """The living namespace of that name, made when missing."""
        namespace = self.namespaces.get(name)
        if namespace is None:
            root_key = self.chains.root_key(name)
            namespace = self.namespaces[name] = BlockNamespace(name, root_key)
        return namespace

    def prune(self, namespace: BlockNamespace) -> None:
        """Forget a namespace without blocks and sequences."""
        if not namespace.blocks and not namespace.num_sequences and not namespace.is_dead:
            del self.namespaces[namespace.name]

    # -- eviction -----------------------------------------------------------------------------

    def evict(self, num_pages: int) -> int:
        """Forget up to `num_pages` unused blocks, oldest first; returns how many. O(those)."""
        freed = array("i")
        for _ in range(min(num_pages, len(self.unused))):
            block, _ = self.unused.popitem(last=False)
            namespace = block.namespace
            del namespace.blocks[block.key]
            block.is_listed = False
            self.evicted[block.key] = namespace.name
            if len(self.evicted) > self._max_evicted:
                self.evicted.popitem(last=False)
            self.watch_registry.notify(block.key)
            freed.append(block.page)
            if not namespace.blocks:
                self.prune(namespace)
        self._free(freed)
        self.num_evicted_tokens += len(freed) * self.block_size
        return len(freed)

    def make_room(self, num_pages: int) -> bool:
        return num_pages <= len(self.unused) and self.evict(num_pages) >= num_pages

    def reset(self, name: str | None) -> None:
        """Forget a namespace, or all. O(blocks and memories of evicted ones); blocks in use are
        freed when they are unlocked."""
        for key in [key for key, other in self.evicted.items() if name in (None, other)]:
            del self.evicted[key]
        for gone in list(self.namespaces) if name is None else [name]:
            if gone in self.namespaces:
                self._forget(self.namespaces.pop(gone))

    def _forget(self, namespace: BlockNamespace) -> None:
        namespace.is_dead = True
        blocks, namespace.blocks = namespace.blocks, {}
        freed = array("i")
        for key, block in blocks.items():
            block.is_listed = False
            self.watch_registry.notify(key)
            if not block.lock_ref:
                del self.unused[block]
                freed.append(block.page)
        self._free(freed)

    def _free(self, pages: array[int]) -> None:
        """Free the pages of removed blocks."""
        self.num_pages -= len(pages)
        self._pages.free(pages)

    # -- locks --------------------------------------------------------------------------------

    def lock(self, blocks: Iterable[Block]) -> None:
        """One more lock on each."""
        unused = self.unused
        for block in blocks:
            if not block.lock_ref:
                del unused[block]
            block.lock_ref += 1

    def unlock(self, blocks: Iterable[Block]) -> None:
        """Undo one `lock` of each; the deepest must come first."""
        for block in blocks:
            block.lock_ref -= 1
            if not block.lock_ref:
                if block.is_listed:
                    self.unused[block] = None
                else:
                    self._free(array("i", [block.page]))

    # -- publishing ---------------------------------------------------------------------------

    def adopt(self, namespace: BlockNamespace, page: int) -> Block:
        """A block, locked once, for a private page with only its first tokens filled."""
        self._next_id += 1
        self.num_pages += 1
        return Block(namespace, page, self._next_id)

    def publish(
        self,
        namespace: BlockNamespace,
        parent: Block | None,
        data: bytes,
        pages: array[int],
        partial: Block | None,
    ) -> list[Block]:
        """The blocks of `data` (int32 bytes, whole blocks) after `parent`, each locked once.

        A new block takes over its page from the caller; `partial` is the first page's, where the
        caller shares that as a block already. Where another sequence published the same block
        first, that one is returned, and the caller still owns the page or `partial`.
        """
        digest, width, table = self.digest, self.width, namespace.blocks
        key = namespace.root_key if parent is None else parent.key
        is_listed = not namespace.is_dead and (parent is None or parent.is_listed)
        blocks: list[Block] = []
        for index, page in enumerate(pages):
            tokens = data[index * width : (index + 1) * width]
            key = digest(key + tokens)
            block = table.get(key)
            if block is not None and block.parent is parent and block.tokens == tokens:
                self.lock((block,))
            else:
                is_listed = is_listed and block is None  # else another prefix has that key
                block = self.adopt(namespace, page) if partial is None else partial
                block.parent, block.key, block.tokens = parent, key, tokens
                if is_listed:
                    block.is_listed = True
                    table[key] = block
                    self.evicted.pop(key, None)
                    self.watch_registry.notify(key)
            blocks.append(block)
            parent, partial = block, None
        return blocks
