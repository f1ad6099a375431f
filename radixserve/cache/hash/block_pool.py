"""`BlockPool`: the blocks of a `HashBlockCache`, the table that finds them, locks and eviction.

A page is free, owned by a block, or private to a sequence. An unlocked block remains cached until
evicted, in the order of `EvictableBlocks`. Sequences unlock their deepest block first, so eviction
takes chain ends first.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence

import numpy as np

from radixserve.cache.events import ROOT, EventLog, Removed, Reset, Stored
from radixserve.cache.hash.block import Block, BlockNamespace, BlockRun
from radixserve.cache.hash.block_hash import BlockChain, ChainMemo, Digest
from radixserve.cache.namespace import Namespace, is_within
from radixserve.cache.page_pool import PagePool
from radixserve.cache.tokens import TOKEN_BYTES, as_view
from radixserve.cache.watch import WatchRegistry

_SLACK = 4096  # obsolete entries that are kept, in addition to one per block


class EvictableBlocks:
    """Unlocked blocks, least recently used first.

    A release appends its whole chain. A block that was locked again or used later is skipped when
    its turn comes: a block belongs to the batch whose number is its `batch`.
    """

    __slots__ = ("_batches", "_num_blocks", "_num_entries", "_number")

    def __init__(self) -> None:
        self._batches: deque[tuple[int, list[Block]]] = deque()  # each taken from its end
        self._num_entries = 0  # in all batches
        self._num_blocks = 0  # entries that are unlocked blocks and can be found
        self._number = 0  # of the last batch

    def __len__(self) -> int:
        return self._num_blocks

    def __iter__(self) -> Iterator[Block]:
        """Yields the blocks in the order of eviction. O(entries), at most half of which are
        obsolete."""
        for number, blocks in self._batches:
            yield from (block for block in reversed(blocks) if _is_in(block, number))

    def lock(self, blocks: Sequence[Block]) -> None:
        """Add a lock to each block."""
        fresh = 0
        for block in blocks:
            count = block.lock_ref
            block.lock_ref = count + 1
            if not count:
                fresh += 1
        self._num_blocks -= fresh

    def unlock(self, blocks: list[Block]) -> list[Block]:
        """Undo one `lock` of each block, the last block first. This object owns the list from now
        on. Returns the blocks that have no lock left and are not in the table."""
        number = self._number = self._number + 1
        gone: list[Block] = []
        fresh = 0
        for block in reversed(blocks):
            count = block.lock_ref = block.lock_ref - 1
            if not count:
                if block.is_listed:
                    block.batch = number
                    fresh += 1
                else:
                    gone.append(block)
        if fresh:
            self._num_blocks += fresh
            self._num_entries += len(blocks)
            self._batches.append((number, blocks))
            if self._num_entries > 2 * self._num_blocks + _SLACK:
                self._compact()
        return gone

    def take(self, count: int) -> list[Block]:
        """Remove `count` blocks, at most `len(self)`, least recently used first. The caller removes
        them from the table."""
        taken: list[Block] = []
        while len(taken) < count:
            number, blocks = self._batches[0]
            before = len(blocks)
            while blocks and len(taken) < count:
                block = blocks.pop()
                if block.batch == number and not block.lock_ref and block.is_listed:
                    taken.append(block)
            self._num_entries -= before - len(blocks)
            if not blocks:
                self._batches.popleft()
        self._num_blocks -= count
        return taken

    def forget(self, count: int) -> None:
        """Note that `count` unlocked blocks were removed from the table."""
        self._num_blocks -= count

    def _compact(self) -> None:
        """Drop obsolete entries. O(entries), amortised O(1) per entry."""
        kept = [
            (number, [block for block in blocks if _is_in(block, number)])
            for number, blocks in self._batches
        ]
        self._batches = deque(batch for batch in kept if batch[1])
        self._num_entries = sum(len(blocks) for _, blocks in self._batches)


def _is_in(block: Block, number: int) -> bool:
    """Whether a block of that batch is unlocked and was not used later."""
    return block.batch == number and not block.lock_ref and block.is_listed


_LEAST_MEMORY = 4096  # evicted blocks remembered at least; else as many as there are pages


class BlockPool:
    """Shared by all sequences of one cache; counts their locks."""

    def __init__(self, pages: PagePool, block_size: int, digest: Digest) -> None:
        self.block_size = block_size
        self.width = block_size * TOKEN_BYTES  # bytes of a block's tokens
        self.namespaces: dict[Namespace, BlockNamespace] = {}
        self.evictable = EvictableBlocks()
        self.chains = ChainMemo(digest, self.width)
        self.watch_registry = WatchRegistry()
        self.evicted: OrderedDict[bytes, Namespace] = (
            OrderedDict()
        )  # key -> namespace, oldest first
        self.num_pages = 0  # of findable blocks, and of those that only sequences still use
        self.num_evicted_tokens = 0
        self.num_collisions = 0  # equal keys of different prefixes met
        self.now = 0.0  # seconds, see `PageOwner`
        self._max_evicted = max(_LEAST_MEMORY, pages.num_pages)
        self._pages = pages
        self.digest = digest
        self._watched = self.watch_registry.watched
        self.events: EventLog | None = None  # while there is a consumer
        self.num_created = 0  # blocks since the start; the number of one is its id

    @property
    def num_nodes(self) -> int:
        """Blocks: each has a page."""
        return self.num_pages

    @property
    def num_evictable(self) -> int:
        """Pages of unlocked blocks."""
        return len(self.evictable)

    # -- look-up ------------------------------------------------------------------------------

    def chain(self, namespace: Namespace, data: bytes) -> BlockChain:
        """Returns the whole blocks of `data`, int32 bytes, under that namespace."""
        known = self.namespaces.get(namespace)
        root_key = self.chains.root_key(str(namespace)) if known is None else known.root_key
        return self.chains.get(root_key, data)

    def match(
        self,
        namespace: Namespace,
        chain: BlockChain,
        matched: list[Block],
        pages: array[int] | None = None,
    ) -> list[Block]:
        """Append to `matched`, the leading blocks of `chain`, the cached blocks that follow, and
        their pages to `pages`. Returns `matched`. The pool is not changed.

        O(tokens matched) in memcmp, and one hash per run of blocks whose key the chain does not
        know. All tokens are compared, so equal keys of different prefixes are harmless.
        """
        known = self.namespaces.get(namespace)
        if known is None:
            return matched
        blocks, keys, data, width = known.blocks, chain.keys, chain.data, self.width
        while len(matched) < chain.num_blocks:
            start = len(matched) * width
            key = chain.key(len(matched))
            block = blocks.get(key)
            if block is None:
                break
            parent = matched[-1] if matched else None
            if block.parent is not parent or block.tokens != data[start : start + width]:
                self.num_collisions += 1
                break
            run, first = block.run, block.run_index
            assert run is not None
            count = _common_blocks(run.tokens, first * width, data, start, width)
            matched += run.blocks[first : first + count]
            if pages is not None:
                pages += run.pages[first : first + count]
            if len(keys) <= len(matched):
                keys[len(matched) - count + 1 :] = run.keys[first : first + count]
        return matched

    # -- namespaces ---------------------------------------------------------------------------

    def open_namespace(self, key: Namespace) -> BlockNamespace:
        """Returns the live blocks of a namespace; creates their table if there is none."""
        namespace = self.namespaces.get(key)
        if namespace is None:
            root_key = self.chains.root_key(str(key))
            namespace = self.namespaces[key] = BlockNamespace(key, root_key)
        return namespace

    def prune(self, namespace: BlockNamespace) -> None:
        """Delete a namespace if it has neither blocks nor sequences."""
        if not namespace.blocks and not namespace.num_sequences and not namespace.is_dead:
            del self.namespaces[namespace.key]

    # -- eviction -----------------------------------------------------------------------------

    def evict(self, num_pages: int) -> int:
        """Evict up to `num_pages` unlocked blocks, least recently used first. Returns how many.
        O(evicted blocks)."""
        evicted, watched, events = self.evicted, self._watched, self.events
        shorter: dict[BlockRun, int] = {}  # and their new lengths
        taken = self.evictable.take(min(num_pages, len(self.evictable)))
        for block in taken:
            namespace, key = block.namespace, block.key
            del namespace.blocks[key]
            block.is_listed = False
            parent = block.parent
            if parent is not None and parent.last_use < block.last_use:
                parent.last_use = block.last_use
            if block.run is not None:
                shorter[block.run] = block.run_index  # its children went before it
            evicted[key] = namespace.key
            if watched:
                self.watch_registry.notify(key)
            if events is not None:
                events.add(Removed(block.block_id, self.block_size))
            if not namespace.blocks:
                self.prune(namespace)
        for run, count in shorter.items():
            run.cut(count, self.width)
        while len(evicted) > self._max_evicted:
            evicted.popitem(last=False)
        self._free(array("i", [block.page for block in taken]))
        self.num_evicted_tokens += len(taken) * self.block_size
        return len(taken)

    def make_room(self, num_pages: int) -> bool:
        return num_pages <= len(self.evictable) and self.evict(num_pages) >= num_pages

    def reset(self, key: Namespace | None) -> None:
        """Drop a namespace and those below it, or all if None. Blocks in use are freed when they
        are unlocked. O(blocks and remembered evictions)."""
        for block_key in [block for block, own in self.evicted.items() if is_within(own, key)]:
            del self.evicted[block_key]
        for gone in [own for own in self.namespaces if is_within(own, key)]:
            self._forget(self.namespaces.pop(gone))
            if self.events is not None:
                self.events.add(Reset(str(gone)))

    def _forget(self, namespace: BlockNamespace) -> None:
        namespace.is_dead = True
        blocks, namespace.blocks = namespace.blocks, {}
        freed = array("i")
        for key, block in blocks.items():
            block.is_listed, block.run = False, None
            self.watch_registry.notify(key)
            if not block.lock_ref:
                freed.append(block.page)
        self.evictable.forget(len(freed))
        self._free(freed)

    def _free(self, pages: array[int]) -> None:
        """Free the pages of removed blocks."""
        self.num_pages -= len(pages)
        self._pages.free(pages)

    # -- locks --------------------------------------------------------------------------------

    def lock(self, blocks: Sequence[Block]) -> None:
        """Add a lock to each block."""
        self.evictable.lock(blocks)

    def unlock(self, blocks: list[Block]) -> None:
        """Undo one `lock` of each block, the last block first. The pool owns the list from now
        on."""
        gone = self.evictable.unlock(blocks)
        if gone:
            self._free(array("i", [block.page for block in gone]))

    # -- publishing ---------------------------------------------------------------------------

    def adopt(self, namespace: BlockNamespace, page: int) -> Block:
        """Returns a new block without a key, locked once, for a private page with only its first
        tokens filled."""
        self.num_created += 1
        self.num_pages += 1
        return Block(namespace, page, self.num_created)

    def publish(
        self,
        namespace: BlockNamespace,
        parent: Block | None,
        data: bytes,
        pages: array[int],
        partial: Block | None,
    ) -> list[Block]:
        """Returns the blocks of `data` (int32 bytes, whole blocks) after `parent`, each locked
        once.

        A new block takes over its page from the caller; `partial` is the first page's, where the
        caller shares that as a block already. Where another sequence published the same block
        first, that one is returned, and the caller still owns the page or `partial`.
        """
        digest, width, table = self.digest, self.width, namespace.blocks
        key = namespace.root_key if parent is None else parent.key
        is_listed = not namespace.is_dead and (parent is None or parent.is_listed)
        blocks: list[Block] = []
        num_known = num_new = 0  # leading blocks found in the table, and those after them put there
        start = 0
        first_id = block_id = self.num_created
        for page in pages:
            tokens = data[start : start + width]
            key = digest(key + tokens)
            block = table.get(key)
            if block is not None and block.parent is parent and block.tokens == tokens:
                self.lock((block,))
                num_known += 1
            else:
                if block is not None:  # another prefix has that key
                    self.num_collisions += 1
                    is_listed = False
                if partial is None:
                    block_id += 1
                    block = Block(namespace, page, block_id, parent, key, tokens)
                else:
                    block = partial
                    block.parent, block.key, block.tokens = parent, key, tokens
                if is_listed:
                    block.is_listed = True
                    table[key] = block
                    num_new += 1
            blocks.append(block)
            parent, partial = block, None
            start += width
        self.num_created = block_id
        self.num_pages += block_id - first_id
        if num_new:
            end = num_known + num_new
            tokens = data[num_known * width : end * width]
            self._announce(blocks[num_known:end], pages[num_known:end], tokens)
        return blocks

    def _announce(self, blocks: list[Block], pages: array[int], data: bytes) -> None:
        """Add `blocks`, which are in the table now, to their run and tell watches and the event
        log. They follow each other; `data` are their tokens."""
        parent = blocks[0].parent
        run = None if parent is None else parent.run
        if run is None or run.blocks[-1] is not parent:
            run = BlockRun()
        run.extend(blocks, pages, data)
        forget, watched, events = self.evicted.pop, self._watched, self.events
        for block in blocks:
            forget(block.key, None)
            if watched:
                self.watch_registry.notify(block.key)
            if events is not None:
                events.add(stored(block))


def stored(block: Block) -> Stored:
    """Returns the `Stored` event of a findable block."""
    parent = ROOT if block.parent is None else block.parent.block_id
    return Stored(block.block_id, parent, block.namespace.text, block.tokens)


def _common_blocks(tokens: bytearray, start: int, data: bytes, data_start: int, width: int) -> int:
    """Returns how many whole blocks of `data` from byte `data_start` on equal those of `tokens`
    from byte `start` on. The first block is known to be equal."""
    count = min(len(tokens) - start, len(data) - data_start) // width
    size = count * width
    if count == 1 or tokens[start : start + size] == as_view(data)[data_start : data_start + size]:
        return count
    left = np.frombuffer(tokens, np.int32, count * width // TOKEN_BYTES, start)
    right = np.frombuffer(data, np.int32, count * width // TOKEN_BYTES, data_start)
    return int((left != right).argmax()) * TOKEN_BYTES // width
