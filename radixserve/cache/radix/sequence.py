"""`CachedSequence`: one user of a path in the tree, with its own pages after it.

    tokens     [0 .................... published) [ ... committed) [ ... length)
    pages      [ shared with the tree, read-only ][ private to this sequence   )

`_last_node` is locked: it or its ancestors hold the tokens [0, published). The last shared page may
be partial: then this sequence put it there and is the only one to write after its end.
`published` lags `committed` by less than a page, where the tree held those tokens already.
"""

from __future__ import annotations

from array import array

from radixserve.cache.page_pool import PageAllocator
from radixserve.cache.radix.eviction import PathUse
from radixserve.cache.radix.insertion import Insertion, may_grow, node_covering
from radixserve.cache.radix.node import Node
from radixserve.cache.radix.radix_tree import RadixTree
from radixserve.cache.radix.session_eviction import RadixSession
from radixserve.cache.sequence import CacheSequence, PageCopy
from radixserve.cache.tokens import TOKEN_BYTES


class CachedSequence(CacheSequence):
    """Made by `RadixCache.acquire` or `fork`; ends with `release`. Not thread-safe."""

    __slots__ = (
        "_has_published",
        "_last_node",
        "_priority",
        "_published",
        "_reused",
        "_session",
        "_tree",
    )

    def __init__(
        self,
        allocator: PageAllocator,
        tree: RadixTree,
        node: Node,
        tokens: bytearray,
        shared: array[int],
        copy: PageCopy | None,
        reused: int,
        session: RadixSession | None,
        priority: int,
    ) -> None:
        """`node` covers all of `tokens` (int32 bytes) and is locked for this sequence. `reused`:
        tokens that count as a use of what was cached before."""
        super().__init__(allocator, node.namespace, tokens, shared, copy)
        self._tree = tree
        self._last_node = node
        self._published = self._committed
        self._reused = reused
        self._session = session
        self._priority = priority
        self._has_published = False  # tokens that the tree did not hold

    def fork(self) -> CachedSequence:
        self._check_open()
        tree, size = self._tree, self._tree.page_size
        whole, extra = divmod(self._committed, size)
        page = self._allocator.allocate(1)[0] if extra else -1  # may shrink our own lock
        if self._published < self._committed and not self._owns_tail():
            self._publish()
        copy = (self._tree_page(whole), page, extra) if extra else None
        tree.lock(self._last_node)
        twin = CachedSequence(
            self._allocator,
            tree,
            self._last_node,
            self._tokens[: self._committed * TOKEN_BYTES],
            self._pages[:whole],
            copy,
            0,
            self._session,
            self._priority,
        )
        twin._published = self._published
        return twin

    # -- publishing ---------------------------------------------------------------------------

    def _publish(self) -> None:
        """Make the tree hold [0, committed), walking on from `_last_node`."""
        start, end, leaf, tree = self._published, self._committed, self._last_node, self._tree
        if end <= start:
            return
        size, owns_tail, is_public = tree.page_size, self._owns_tail(), self._session is None
        base = start - start % size
        if (
            leaf.start < base
            and leaf.end == start
            and (
                owns_tail
                or (base == start and leaf.lock_ref == 1 and may_grow(leaf, is_public=is_public))
            )
            and not leaf.children
        ):
            # A leaf with whole pages: after its end nothing can collide with what is appended.
            self._extend_leaf()
            return
        inserted = Insertion(tree, leaf, self._tokens, end, self._pages, is_public=is_public)
        node = node_covering(leaf, base)
        if owns_tail:  # a leaf of one partial page, whose key changes
            if leaf.lock_ref == 1:
                inserted.held, _ = tree.withdraw(leaf)
                self._num_shared -= 1
            else:
                key = inserted.first_page(base)
                if key not in node.children:
                    inserted.drop_prefixes(node, key)
                    self._extend_leaf()
                    return
                if len(key) < size * TOKEN_BYTES:
                    return  # an equal leaf exists: stay behind until the tokens go on
        inserted.walk(node, base)
        self._last_node = inserted.held
        self._replace_pages(base // size, inserted.reused)
        self._published = end
        if inserted.is_new:
            self._num_shared = -(-end // size)
            self._has_published = True

    def _extend_leaf(self) -> None:
        """Append tokens [published, committed) to the last node, and the pages that it lacks."""
        first = -(-self._published // self._tree.page_size)
        last = -(-self._committed // self._tree.page_size)
        tokens = self._tokens[self._published * TOKEN_BYTES : self._committed * TOKEN_BYTES]
        self._tree.extend(self._last_node, tokens, self._pages[first:last])
        self._num_shared = last
        self._published = self._committed
        self._has_published = True

    def _owns_tail(self) -> bool:
        """Whether the last page of the path is partial and this sequence put it there."""
        return self._num_shared * self._tree.page_size > self._published

    def _tree_page(self, index: int) -> int:
        """The tree's page with that index on our path (it may be longer filled than our own)."""
        if index < self._num_shared:
            return self._pages[index]
        size = self._tree.page_size
        node = node_covering(self._last_node, index * size + 1)
        return node.pages[index - node.start // size]

    # -- letting go ---------------------------------------------------------------------------

    def _cut(self, length: int, whole: int, extra: int) -> None:
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
            self._pages.append(copy[1])
            self.cow_copies.append(copy)

    def _release_shared(self) -> None:
        tree, sessions = self._tree, self._tree.session_eviction
        if sessions is not None:
            self._split_at_end()
        node = self._last_node
        if tree.order.tracks_use and not node.namespace.is_dead:
            reused = self._reused - self._reused % tree.page_size
            tree.order.on_path_used(node, PathUse(reused, self._has_published, self._priority))
        if sessions is not None:
            if self._session is not None:
                sessions.add_end(self._session, node)
            else:
                sessions.make_public(node)
        tree.unlock(node)

    def _split_at_end(self) -> None:
        """Where the last node goes on after our end, only our part of it is to be our session's."""
        size, node, refs = self._tree.page_size, self._last_node, self._last_node.session_refs
        end = -(-self._published // size) * size
        if node.end <= end or end <= node.start or node.namespace.is_dead:
            return
        if self._session is None:
            is_ours = refs is None or refs.is_public
        else:
            is_open = self._session.is_open
            is_ours = not is_open or self._session in (refs.sessions if refs else ())
        if not is_ours:
            upper = self._tree.split(node, end - node.start)
            self._last_node = self._tree.move_lock(node, upper)

    def shrink_lock(self) -> None:
        """Stop protecting what the last node holds after our own tokens (memory is short)."""
        if self._owns_tail():
            return  # our own leaf: nothing comes after
        tree, keep = self._tree, self._published
        size = tree.page_size
        end = -(-keep // size) * size
        if end > keep and not self.cow_copies:
            keep = end = keep - keep % size  # we have that page's head in a page of our own
        node = node_covering(self._last_node, keep)
        if node.end > end:
            node = tree.split(node, end - node.start)
        self._published = keep
        self._last_node = tree.move_lock(self._last_node, node)
        tokens = self._tokens[keep * TOKEN_BYTES : self._committed * TOKEN_BYTES]
        if tokens and bytes(tokens) not in node.children:
            # our own page holds that head now: let it be found
            last, is_public = -(-self._committed // size), self._session is None
            pages = self._pages[keep // size : last]
            self._last_node = tree.attach(node, keep, tokens, pages, held=node, is_public=is_public)
            self._num_shared, self._published = last, self._committed
            self._has_published = True
