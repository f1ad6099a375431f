"""`RadixSequence`: a path in the tree, locked, and private pages after it.

    tokens     [0 .................... published) [ ... committed) [ ... length)
    pages      [ shared with the tree, read-only ][ private to this sequence   )

`_last_node` is locked: it or its ancestors hold the tokens [0, published). The last shared page may
be partial: then this sequence put it there and is the only one to write after its end.
`published` lags `committed` by less than a page, where the tree had those tokens already.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from radixserve.cache.interface import CacheSession
from radixserve.cache.radix.child_index import child_covering, covered_children
from radixserve.cache.radix.eviction import PathUse
from radixserve.cache.radix.lookup import common_tokens
from radixserve.cache.radix.node import Node, path_pages, path_tokens
from radixserve.cache.radix.radix_tree import RadixTree
from radixserve.cache.radix.retention import RetentionPolicy
from radixserve.cache.sequence import NO_PAGES, CacheSequence, PageAllocator, PageCopy
from radixserve.cache.tokens import TOKEN_BYTES


class RadixSequence(CacheSequence):
    """Made by `RadixCache.acquire` or `fork`; ends with `release`. Not thread-safe."""

    __slots__ = (
        "_has_published",
        "_is_detached",
        "_last_node",
        "_priority",
        "_published",
        "_reused",
        "_session",
        "_source",
        "_tree",
    )

    def __init__(
        self,
        allocator: PageAllocator,
        tree: RadixTree,
        node: Node,
        length: int,
        held: tuple[bytearray, array[int]] | None,
        copy: PageCopy | None,
        reused: int,
        session: CacheSession | None,
        priority: int,
    ) -> None:
        """`node` covers the `length` tokens and is locked for this sequence. `held`: these tokens
        (int32 bytes) and their whole pages; None: they are read from the path when needed.
        `reused`: tokens that count as a use of what was cached before."""
        self._tree = tree
        self._last_node = node
        CacheSequence.__init__(self, allocator, node.namespace, length, held, copy)
        if copy is not None:
            self._read()  # now: once the copy is made, the lock may end before it
        self._published = self.committed_len
        self._reused = reused
        self._session = session
        self._priority = priority
        self._has_published = False  # tokens that the tree did not hold
        self._is_detached = False
        self._source: CacheSequence | None = None  # locks the pages that are still to be copied

    def _read_tokens(self, more: bytes = b"") -> bytearray:
        return path_tokens(self._last_node, self.length, more)

    def _read_pages(self, more: array[int] = NO_PAGES) -> array[int]:
        return path_pages(self._last_node, self._num_pages, more)

    def copy_from(self, source: CacheSequence) -> int:
        size, start, end = self._tree.page_size, self.committed_len, source.length
        assert self.length == start < end
        assert end % size == 0
        self._append(source.tokens[start:].tobytes())
        first, pages = start // size, source.pages.tolist()
        self.cow_copies[:] = [
            (pages[index], self._pages[index], size) for index in range(first, end // size)
        ]
        self.committed_len = self.cached_len = end
        self._source = source
        stats = self._allocator.stats
        stats.matched_tokens += end - start
        stats.copied_tokens += end - start
        return end - start

    def _drop_copies(self) -> None:
        super()._drop_copies()
        if self._source is not None:
            self._source.release()
            self._source = None

    @property
    def last_node(self) -> Node:
        """The node at which the published tokens end. This sequence has locked it."""
        return self._last_node

    @property
    def is_stale(self) -> bool:
        return self._is_detached or self._namespace.is_dead

    @property
    def is_detached(self) -> bool:
        return self._is_detached

    def detach(self) -> bool:
        if type(self) is not RadixSequence or self._source is not None or self.cow_copies:
            return False  # layers beside K/V look at what is published
        self._is_detached = True
        return True

    def fork(self) -> RadixSequence:
        self._check_open()
        assert not self._is_detached, "what it computes belongs to no tree"
        assert self._source is None, "a copy is still to be made"
        tree, size = self._tree, self._tree.page_size
        whole, extra = divmod(self.committed_len, size)
        page = self._allocator.allocate(1)[0] if extra else -1  # may shrink our own lock
        if self._published < self.committed_len and not self._owns_tail():
            self._publish()
        copy = (self._tree_page(whole), page, extra) if extra else None
        held = None
        if len(self._tokens) == self.length * TOKEN_BYTES:  # else the fork reads the same path
            self._read()
            held = self._tokens[: self.committed_len * TOKEN_BYTES], self._pages[:whole]
        tree.lock(self._last_node)
        forked = type(self)(
            self._allocator,
            tree,
            self._last_node,
            self.committed_len,
            held,
            copy,
            0,
            self._session,
            self._priority,
        )
        forked._published = self._published
        return forked

    # -- publishing ---------------------------------------------------------------------------

    def _publish(self) -> None:
        """Publish [0, committed_len) in the tree, starting from `_last_node`: a private leaf grows
        in place; else the tree is followed and gets a new leaf, see `_walk`."""
        start, end, leaf, tree = self._published, self.committed_len, self._last_node, self._tree
        if end <= start or self._is_detached:
            return
        size = tree.page_size
        owns_tail = self._num_shared * size > start
        base = start - start % size
        if (
            leaf.start < base
            and leaf.start + len(leaf.tokens) // TOKEN_BYTES == start
            and not leaf.children
            and (owns_tail or (base == start and leaf.lock_ref == 1 and self._may_grow(leaf)))
        ):
            # The leaf has a whole page, so its key stays and no sibling collides with the tokens.
            self._extend_leaf(leaf, start)
            return
        node = leaf if leaf.start < base else node_covering(leaf, base)
        if owns_tail:  # a leaf of one partial page, whose key changes
            if leaf.lock_ref == 1:
                self._last_node, _ = tree.withdraw(leaf)
                self._num_shared -= 1
            else:
                key = self._bytes(base, min(base + size, end))
                if key not in node.children:
                    self._drop_prefixes(node, key)
                    self._extend_leaf(leaf, start)
                    return
                if len(key) < size * TOKEN_BYTES:
                    return  # an equal leaf exists: publish when the sequence has more tokens
        self._walk(node, base)

    def _walk(self, node: Node, pos: int) -> None:
        """Follow the tree from `pos`, a page boundary inside or at the end of `node`. Pages with
        the same tokens replace this sequence's own; the tokens after them are inserted."""
        size, tokens, end = self._tree.page_size, self._tokens, self.committed_len
        while True:
            offset = pos - node.start
            rest = len(node.tokens) // TOKEN_BYTES - offset
            if rest:
                agreed = common_tokens(node.tokens, tokens, pos, end, offset)
                whole = agreed - agreed % size
                first = offset // size
                self._replace_pages(pos // size, node.pages[first : first + whole // size])
                pos += whole
                if pos + agreed - whole == end:
                    self._adopt_prefix(node)
                    return
                if whole < rest:
                    self._branch(node, pos, is_prefix=agreed == rest)
                    return
            stop = pos + size
            key = bytes(tokens[pos * TOKEN_BYTES : (stop if stop < end else end) * TOKEN_BYTES])
            child = node.children.get(key)
            if child is None:
                self._add_child(node, pos, key)
                return
            node = child

    def _adopt_prefix(self, node: Node) -> None:
        """End the walk at `node`, which has all committed tokens; a partial last page stays
        private."""
        self._published = self.committed_len
        self._last_node = self._tree.move_lock(self._last_node, node)

    def _branch(self, node: Node, pos: int, *, is_prefix: bool) -> None:
        """Insert our tokens from `pos` on, a page boundary in `node`. The node's tokens differ in
        the page that begins there, or end within it."""
        tree = self._tree
        is_free = node.lock_ref == (1 if node is self._last_node else 0)
        if is_prefix and is_free and self._may_grow(node):
            self._last_node = tree.move_lock(self._last_node, node)
            tree.pool.free(tree.cut(node, len(node.pages) - 1))  # our page has more tokens
            self._extend_leaf(node, pos)
            return
        upper = tree.split(node, pos - node.start)
        key = self._bytes(pos, min(pos + tree.page_size, self.committed_len))
        if is_prefix and is_free:  # what is left below is covered by our first page
            self._drop_prefixes(upper, key)
        self._attach(upper, pos, key)

    def _add_child(self, node: Node, pos: int, key: bytes) -> None:
        """Insert our tokens from `pos` on, where `node` ends and no child begins with the page
        `key`."""
        size = self._tree.page_size
        if size > 1 and node.children:
            if len(key) < size * TOKEN_BYTES:
                cover = child_covering(node, key)
                if cover is not None:
                    self._adopt_prefix(cover)
                    return
            self._drop_prefixes(node, key)
        is_own_leaf = node is self._last_node and node.lock_ref == 1 and not node.children
        if is_own_leaf and node.parent is not None and self._may_grow(node):
            self._extend_leaf(node, pos)
        else:
            self._attach(node, pos, key)

    def _may_grow(self, leaf: Node) -> bool:
        """Whether what we append to `leaf` is kept as the leaf is."""
        retention = self._tree.retention
        if retention is None or leaf.retention is None:
            return self._session is None
        return retention.may_extend(leaf, self._session)

    def _drop_prefixes(self, node: Node, key: bytes) -> None:
        """Remove leaves that no other sequence uses and whose tokens are a proper prefix of `key`:
        our page has the same tokens and more."""
        tree = self._tree
        for leaf in covered_children(node, key):
            if leaf.lock_ref == 0:
                tree.drop(leaf)
            elif leaf is self._last_node and leaf.lock_ref == 1:
                self._last_node, pages = tree.withdraw(leaf)
                tree.pool.free(pages)

    def _extend_leaf(self, leaf: Node, pos: int) -> None:
        """Append our tokens [pos, committed) and the pages that the leaf lacks."""
        size, end = self._tree.page_size, self.committed_len
        first, last = leaf.start // size + len(leaf.pages), -(-end // size)
        tokens = self._tokens[pos * TOKEN_BYTES : end * TOKEN_BYTES]
        self._tree.extend(leaf, tokens, self._pages[first:last])
        self._num_shared, self._published, self._has_published = last, end, True

    def _attach(self, parent: Node, pos: int, key: bytes) -> None:
        """Add our tokens [pos, committed), first page `key`, as a leaf below `parent`, which is on
        our path."""
        size, end = self._tree.page_size, self.committed_len
        last, tokens = -(-end // size), self._tokens[pos * TOKEN_BYTES : end * TOKEN_BYTES]
        pages = self._pages[pos // size : last]
        self._last_node = self._tree.attach(
            parent, pos, key, tokens, pages, self._last_node, self._session
        )
        self._num_shared, self._published, self._has_published = last, end, True

    def _bytes(self, start: int, end: int) -> bytes:
        """Tokens [start, end) as int32 bytes."""
        return bytes(self._tokens[start * TOKEN_BYTES : end * TOKEN_BYTES])

    def _owns_tail(self) -> bool:
        """Whether the last page of the path is partial and this sequence put it there."""
        return self._num_shared * self._tree.page_size > self._published

    def _tree_page(self, index: int) -> int:
        """Returns the tree's page with that index on our path. It may have more tokens than this
        sequence."""
        if index < self._num_shared:
            return self._pages[index]
        size = self._tree.page_size
        node = node_covering(self._last_node, index * size + 1)
        return node.pages[index - node.start // size]

    # -- truncation and release ---------------------------------------------------------------

    def _cut(self, length: int, whole: int, extra: int) -> None:
        assert self._source is None, "a copy is still to be made"
        copy = None
        if extra and whole < self._num_shared and length < self._published:
            copy = (self._pages[whole], self._allocator.allocate(1)[0], extra)
        self._drop_pages(whole + (1 if extra and copy is None else 0))
        self._published = min(self._published, length)
        self._reused = min(self._reused, length)
        if not self.cow_copies:  # a pending copy's source is protected by the present last node
            covering = node_covering(self._last_node, self._published)
            self._last_node = self._tree.move_lock(self._last_node, covering)
        if copy is not None:
            self._add_pages(array("i", copy[1:2]))
            self.cow_copies.append(copy)

    def _release_shared(self) -> None:
        if self._source is not None:
            self._source.release()
            self._source = None
        tree, retention = self._tree, self._tree.retention
        if retention is not None:
            self._split_at_end(retention)
        node = self._last_node
        if tree.order.tracks_use and not node.namespace.is_dead:
            reused = self._reused - self._reused % tree.page_size
            tree.order.on_path_used(node, PathUse(reused, self._has_published, self._priority))
        if tree.order.tracks_returns and not node.namespace.is_dead:
            tree.order.note_release(node, self.expected_return, self._reused)
        if retention is not None:
            retention.on_released(node, self._session)
        tree.unlock(node)

    def _split_at_end(self, retention: RetentionPolicy) -> None:
        """Split `_last_node` at this sequence's end if it extends further and only the used part
        is kept for this sequence."""
        size, node = self._tree.page_size, self._last_node
        end = -(-self._published // size) * size
        if node.end <= end or end <= node.start or node.namespace.is_dead:
            return
        if retention.must_split(node, self._session):
            upper = self._tree.split(node, end - node.start)
            self._last_node = self._tree.move_lock(node, upper)

    def shrink_lock(self) -> None:
        """Unlock the part of `_last_node` after this sequence's tokens, when pages are short."""
        if self._owns_tail() or self._source is not None or self._is_detached:
            return  # our own leaf: no tokens after ours; or the pages after it are not filled yet
        tree, keep = self._tree, self._published
        size = tree.page_size
        end = -(-keep // size) * size
        if end > keep and not self.cow_copies:
            keep = end = keep - keep % size  # a private page has that page's first tokens
        node = node_covering(self._last_node, keep)
        if node.end > end:
            node = tree.split(node, end - node.start)
        self._published = keep
        self._last_node = tree.move_lock(self._last_node, node)
        key = self._bytes(keep, self.committed_len)
        if key and key not in node.children:
            self._attach(node, keep, key)  # publish that private page


def node_covering(node: Node, length: int) -> Node:
    """Returns the node on the path to `node` with the token at position `length` - 1; the root for
    length 0."""
    while node.parent is not None and node.start >= length:
        node = node.parent
    return node


def append_to_leaves(
    allocator: PageAllocator,
    tree: RadixTree,
    sequences: Sequence[RadixSequence],
    token_ids: Sequence[int],
) -> list[tuple[RadixSequence, int]]:
    """`commit_next` for sequences that end in a leaf of whole pages that no other sequence uses, as
    nearly all decoding sequences do. Avoids several calls per row of a decode step.

    Returns the remaining sequences with their tokens; those are unchanged.
    """
    size, has_listeners = tree.page_size, tree.has_listeners
    others: list[tuple[RadixSequence, int]] = []
    grown: list[Node] = []  # by a page
    if len(token_ids) != len(sequences) or min(token_ids, default=0) < 0:  # refused below
        return list(zip(sequences, token_ids, strict=True))
    data = array("i", token_ids).tobytes()
    for index, sequence in enumerate(sequences):
        start, leaf, offset = sequence.committed_len, sequence._last_node, index * TOKEN_BYTES
        num_known, in_page = sequence.length - sequence.num_placeholders, start % size
        token, place = data[offset : offset + TOKEN_BYTES], start * TOKEN_BYTES
        tokens = leaf.tokens
        if (
            leaf.lock_ref != 1
            or leaf.children
            or leaf.start >= start - in_page
            or len(tokens) != (start - leaf.start) * TOKEN_BYTES
            or sequence._published != start
            or sequence.length == start
            or sequence.cow_copies
            or not sequence._is_open
            or sequence._is_detached
            or (in_page and sequence._num_shared * size <= start)
            or (num_known > start and sequence._tokens[place : place + TOKEN_BYTES] != token)
            or (
                (leaf.retention is not None or sequence._session is not None)
                and not sequence._may_grow(leaf)
            )
        ):
            others.append((sequence, token_ids[index]))
            continue
        if num_known == start:
            sequence._tokens[place : place + TOKEN_BYTES] = token
            sequence.num_placeholders -= 1
        tokens += token
        if not in_page:
            index = start // size
            leaf.pages.append(sequence._pages[index])
            sequence._num_shared = index + 1
            grown.append(leaf)
        sequence.committed_len = sequence._published = start + 1
        sequence._has_published = True
        if has_listeners:
            tree.note_appended(leaf, token)
    tree.count_grown(grown)
    allocator.note_time()
    allocator.stats.committed_tokens += len(sequences) - len(others)
    return others
