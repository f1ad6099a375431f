"""`CachedSequence`: one session of a path in the tree, with its own pages behind it.

    tokens     [0 .................... published) [ ... committed) [ ... length)
    pages      [ shared with the tree, read-only ][ private to this sequence   )

`_last_node` is locked: it or its ancestors hold the tokens [0, published). The last shared page may
be partial: then this sequence put it there and is the only one to write after its end.
`published` lags `committed` by less than a page, where the tree held those tokens already.
"""

from __future__ import annotations

from array import array

from radixserve.cache.interface import PageCopy
from radixserve.cache.radix.allocator import OpenSequence, PageAllocator
from radixserve.cache.radix.child_index import child_covering, covered_children
from radixserve.cache.radix.eviction import PathUse
from radixserve.cache.radix.node import Node
from radixserve.cache.radix.radix_tree import common_tokens
from radixserve.cache.radix.session_eviction import RadixSession
from radixserve.cache.sequence import PagedSequence
from radixserve.cache.tokens import TOKEN_BYTES, TokenIds
from radixserve.checks import check_int
from radixserve.errors import InvalidRequest

FEW_PAGES = 8  # taken at a time by a sequence that grows slowly: more of them will follow


class CachedSequence(OpenSequence, PagedSequence):
    """Made by `RadixCache.acquire` or `fork`; ends with `release`. Not thread-safe."""

    __slots__ = (
        "_allocator",
        "_committed",
        "_has_published",
        "_has_run",
        "_is_open",
        "_last_node",
        "_num_shared",
        "_priority",
        "_published",
        "_reused",
        "_session",
        "cached_len",
        "cow_copies",
    )

    def __init__(
        self,
        allocator: PageAllocator,
        node: Node,
        tokens: bytearray,
        shared: array[int],
        copy: PageCopy | None,
        reused: int,
        session: RadixSession | None,
        priority: int,
    ) -> None:
        """`node` covers all of `tokens` (int32 bytes) and is locked for this sequence; it owns
        the arrays from now on. `copy` fills its last page. `reused`: tokens that count as a use of
        what was cached before."""
        self._begin(tokens, shared)
        self._allocator = allocator
        self._last_node = node
        self._num_shared = len(shared)  # leading pages that belong to the tree
        self._published = self._committed = self.cached_len = len(tokens) // TOKEN_BYTES
        self._reused = reused
        self._session = session
        self._priority = priority
        self._has_published = False  # has it published what was not there?
        self._is_open = True
        self._has_run = False  # has it taken pages a few at a time?
        self.cow_copies: list[PageCopy] = []  # (source page, destination page, tokens of its head)
        if copy is not None:
            self._pages.append(copy[1])
            self.cow_copies.append(copy)
        allocator.live_sequences.add(self)

    def __repr__(self) -> str:
        state = "" if self._is_open else ", released"
        return f"CachedSequence(length={self.length}, cached_len={self.cached_len}{state})"

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
        return self._last_node.namespace.is_dead

    def pages_wanted(self, num_tokens: int) -> int:
        """New pages that `extend` by that many tokens would take."""
        return self._allocator.pages_for(self.length + num_tokens) - len(self._pages)

    # -- growing ------------------------------------------------------------------------------

    def extend(self, tokens: TokenIds, num_unknown: int = 0) -> None:
        """Room for `tokens`, and for so many unknown ones behind them, at the present end, evicting
        unused pages when none is free.

        Raises OutOfPages, and changes nothing, when there is not enough. O(tokens).
        """
        if self._num_unknown or not self._is_open:
            self._check_open()
            self._refuse_to_extend()
        data, pages = self._data_after(tokens, num_unknown), self._pages
        length = (len(self._tokens) + len(data)) // TOKEN_BYTES
        wanted = -(-length // self._allocator.page_size) - len(pages)
        if wanted > 0:
            if wanted <= FEW_PAGES and pages:
                more = self._allocator.allocate_after(pages[-1], wanted)
                self._has_run = True
            else:
                more = self._allocator.allocate(wanted)
            try:
                pages += more
            except BufferError:  # somebody still looks at a view of the shorter state
                self._pages = pages + more
        try:
            self._tokens += data
        except BufferError:
            self._tokens = self._tokens + data
        self._num_unknown = num_unknown

    def commit(self, length: int) -> None:
        """Publish: the K/V of [0, length) is in the pages, and the copies have been made.

        Where the tree holds the same tokens already, its pages replace this sequence's own, which
        are freed: whole pages of committed tokens only. What lies behind stays where it is, and may
        be computed at this very moment. O(tokens published since the last commit).
        """
        if not self._is_open:
            self._check_open()
        if type(length) is not int or length < 0:
            length = check_int("length", length, 0)
        known = len(self._tokens) // TOKEN_BYTES - self._num_unknown
        if not self._committed <= length <= known:
            raise InvalidRequest(
                f"commit takes a length between {self._committed} (committed already) and "
                f"{known}, got {length}"
            )
        if self.cow_copies:
            self.cow_copies.clear()
        self._allocator.counters.committed_tokens += length - self._committed
        self._committed = length
        if length > self._published:
            self._publish()

    def fork(self) -> CachedSequence:
        """A second session of everything committed. Copies at most one page head.

        Raises OutOfPages when that page cannot be had.
        """
        self._check_open()
        allocator, size = self._allocator, self._allocator.page_size
        whole, extra = divmod(self._committed, size)
        page = allocator.allocate(1)[0] if extra else -1  # may narrow our own anchor
        if self._published < self._committed and self._num_shared * size <= self._published:
            self._publish()
        copy = (self._tree_page(whole), page, extra) if extra else None
        allocator.tree.lock(self._last_node)
        tokens, shared = self._tokens[: self._committed * TOKEN_BYTES], self._pages[:whole]
        node, session = self._last_node, self._session
        twin = CachedSequence(allocator, node, tokens, shared, copy, 0, session, self._priority)
        twin._published = self._published
        return twin

    def truncate(self, length: int) -> None:
        """Roll back to the first `length` tokens; what was published stays cached.

        A cut inside a page of the tree copies that page's head. Raises OutOfPages, and changes
        nothing, when the page for it cannot be had.
        """
        self._check_open()
        length = check_int("length", length, 0)
        if length > self.length:
            raise InvalidRequest(f"truncate takes a length up to {self.length}, got {length}")
        whole, extra = divmod(length, self._allocator.page_size)
        copy = None
        if extra and whole < self._num_shared and length < self._published:
            copy = (self._pages[whole], self._allocator.allocate(1)[0], extra)
        self._cut_pages(whole + (1 if extra else 0), copy)
        if extra:  # a copy that is still to be made must not reach behind the cut
            last = self._pages[whole]
            self.cow_copies[:] = [
                (src, dst, min(n, extra) if dst == last else n) for src, dst, n in self.cow_copies
            ]
        self._num_unknown = max(0, length - (self.length - self._num_unknown))
        self._tokens = self._tokens[: length * TOKEN_BYTES]
        self._committed = min(self._committed, length)
        self._published = min(self._published, length)
        self.cached_len = min(self.cached_len, length)
        self._reused = min(self._reused, length)
        if not self.cow_copies:  # a pending copy's source is protected by the old anchor
            self._move_lock(self._node_covering(self._published))
        if copy is not None:
            self.cow_copies.append(copy)

    def release(self) -> None:
        """Let go: committed pages stay cached, the rest is freed. A second call does nothing."""
        if not self._is_open:
            return
        self._is_open = False
        allocator, tree = self._allocator, self._allocator.tree
        if self._has_run and self._pages:
            allocator.pool.release_run(self._pages[-1])
        if len(self._pages) > self._num_shared:
            allocator.free(self._pages[self._num_shared :])
        if tree.session_eviction is not None:
            self._split_at_end()
        node = self._last_node
        if tree.order.tracks_use and not node.namespace.is_dead:
            reused = self._reused - self._reused % allocator.page_size
            tree.order.on_path_used(node, PathUse(reused, self._has_published, self._priority))
        if tree.session_eviction is not None:
            if self._session is not None:
                tree.session_eviction.claim(self._session, node)
            else:
                tree.session_eviction.publish(node)
        allocator.unlock(node)
        allocator.live_sequences.discard(self)

    # -- publishing ---------------------------------------------------------------------------

    def _publish(self) -> None:
        """Make the tree hold [0, committed), walking on from the anchor."""
        size, leaf = self._allocator.page_size, self._last_node
        base = self._published - self._published % size
        writes_tail = self._num_shared * size > self._published  # on the tree's last page
        is_alone = writes_tail or (base == self._published and leaf.lock_ref == 1)
        if (
            is_alone
            and leaf.start < base
            and leaf.end == self._published
            and not leaf.children
            and (writes_tail or self._may_grow(leaf))
        ):
            # A leaf with whole pages: behind its end nothing can collide with what we append.
            self._extend_leaf(leaf, self._published)
            return
        node = self._node_covering(base)
        if writes_tail:
            if leaf.lock_ref == 1:
                self._withdraw_leaf(leaf)
            else:
                key = self._data(base, min(base + size, self._committed))
                if key not in node.children:
                    self._drop_prefixes(node, key)
                    self._extend_leaf(leaf, self._published)
                    return
                if len(key) < size * TOKEN_BYTES:
                    return  # an equal leaf exists: stay behind until the tokens go on
        self._walk(node, base)

    def _walk(self, node: Node, pos: int) -> None:
        """Follow the tree from `pos` (a page boundary inside or at the end of `node`), taking over
        its pages, and add what it does not have."""
        size = self._allocator.page_size
        tokens, end = self._tokens, self._committed
        while True:
            offset = pos - node.start
            rest = len(node.tokens) // TOKEN_BYTES - offset
            if rest:
                agreed = common_tokens(node.tokens, tokens, pos, end, offset)
                whole = agreed - agreed % size
                first = offset // size
                self._take_tree_pages(pos // size, node.pages[first : first + whole // size])
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

    def _branch(self, node: Node, pos: int, *, is_prefix: bool) -> None:
        """`node` goes on differently after `pos`, or ends within the page that begins there."""
        tree = self._allocator.tree
        mine = node is self._last_node
        is_free = node.lock_ref == (1 if mine else 0)
        if is_prefix and is_free and self._may_grow(node):
            if not mine:
                self._move_lock(node)
            self._allocator.free(array("i", [tree.take_tail_page(node)]))
            self._extend_leaf(node, pos)
            return
        upper = tree.split(node, pos - node.start)
        key = self._data(pos, min(pos + self._allocator.page_size, self._committed))
        if is_prefix and is_free:  # what is left below is covered by our first page
            self._drop_prefixes(upper, key)
        self._attach(upper, pos, key)

    def _may_grow(self, leaf: Node) -> bool:
        """Whether what we append to `leaf` is reached by the same ones as the leaf."""
        session_refs, is_public = leaf.session_refs, self._session is None
        if session_refs is None:
            return is_public
        return session_refs.is_public == is_public and not session_refs.sessions

    def _add_child(self, node: Node, pos: int, key: bytes) -> None:
        """No child of `node`, which ends at `pos`, begins with the page `key`."""
        size = self._allocator.page_size
        if size > 1 and node.children:
            if len(key) < size * TOKEN_BYTES:
                cover = child_covering(node, key)
                if cover is not None:
                    self._adopt_prefix(cover)
                    return
            self._drop_prefixes(node, key)
        is_leaf = node.parent is not None and not node.children
        if node is self._last_node and node.lock_ref == 1 and is_leaf and self._may_grow(node):
            self._extend_leaf(node, pos)
        else:
            self._attach(node, pos, key)

    def _drop_prefixes(self, node: Node, key: bytes) -> None:
        """Remove unused leaves whose tokens are a proper head of `key`: they are covered now."""
        for leaf in covered_children(node, key):
            if leaf.lock_ref == 0:
                self._allocator.free(self._allocator.tree.detach(leaf))
            elif leaf is self._last_node and leaf.lock_ref == 1:
                self._withdraw_leaf(leaf)

    def _withdraw_leaf(self, leaf: Node) -> None:
        """Remove the leaf that only this sequence holds; keep its page if it is our own."""
        tree, parent = self._allocator.tree, leaf.parent
        assert parent is not None
        tree.lock(parent)
        pages = tree.reclaim(leaf)
        self._last_node = parent
        self._published = parent.end
        if self._num_shared * self._allocator.page_size > parent.end:
            self._num_shared -= 1
        else:
            self._allocator.free(pages)

    def _extend_leaf(self, leaf: Node, pos: int) -> None:
        """Append our tokens [pos, committed) and the pages that the leaf lacks."""
        size, committed = self._allocator.page_size, self._committed
        first, last = leaf.start // size + len(leaf.pages), -(-committed // size)
        tokens = self._tokens[pos * TOKEN_BYTES : committed * TOKEN_BYTES]
        self._allocator.tree.extend(leaf, tokens, self._pages[first:last])
        self._num_shared = last
        self._published = committed
        self._has_published = True

    def _attach(self, parent: Node, pos: int, key: bytes) -> None:
        """Add our tokens [pos, committed), first page `key`, as a leaf below `parent`, which is on
        our path."""
        size, committed, tree = self._allocator.page_size, self._committed, self._allocator.tree
        last = -(-committed // size)
        is_anchor, is_public = parent is self._last_node, self._session is None
        leaf = tree.attach(
            parent,
            pos,
            key,
            self._tokens[pos * TOKEN_BYTES : committed * TOKEN_BYTES],
            self._pages[pos // size : last],
            is_public=is_public,
            takes_hold=is_anchor,
        )
        self._num_shared = last
        self._published = committed
        self._has_published = True
        if is_anchor:
            self._last_node = leaf
        else:
            self._move_lock(leaf)
        if is_public and tree.session_eviction is not None:
            tree.session_eviction.publish(parent)

    def _data(self, start: int, end: int) -> bytes:
        """Tokens [start, end) as int32 bytes."""
        return bytes(self._tokens[start * TOKEN_BYTES : end * TOKEN_BYTES])

    def _adopt_prefix(self, node: Node) -> None:
        """`node` covers all that is committed; a partial last page stays our own."""
        self._published = self._committed
        self._move_lock(node)

    def _take_tree_pages(self, first: int, pages: array[int]) -> None:
        """Use the tree's `pages` from index `first` on; give our own ones back."""
        if not pages:
            return
        self._pages_change(first)
        last = first + len(pages)
        own = self._pages[max(first, self._num_shared) : last]
        if own:
            self._allocator.counters.duplicate_tokens += len(own) * self._allocator.page_size
            self._allocator.free(own)
        self._pages[first:last] = pages
        self._num_shared = max(self._num_shared, last)

    # -- anchoring ----------------------------------------------------------------------------

    def _node_covering(self, length: int) -> Node:
        """The node on our path that holds the token before `length`; the root for 0."""
        node = self._last_node
        while node.parent is not None and node.start >= length:
            node = node.parent
        return node

    def _tree_page(self, index: int) -> int:
        """The tree's page with that index on our path (it may be longer filled than our own)."""
        if index < self._num_shared:
            return self._pages[index]
        size = self._allocator.page_size
        node = self._node_covering(index * size + 1)
        return node.pages[index - node.start // size]

    def _move_lock(self, node: Node) -> None:
        if node is not self._last_node:
            self._allocator.tree.lock(node)
            self._allocator.tree.unlock(self._last_node)
            self._last_node = node

    def _cut_pages(self, keep: int, copy: PageCopy | None) -> None:
        """Keep the first `keep` pages, the last of them replaced when `copy` is given."""
        if copy is not None:
            keep -= 1
        self._pages_change(keep)
        on_evicted = self._pages[max(keep, self._num_shared) :]
        self._allocator.free(on_evicted)
        self.cow_copies[:] = [c for c in self.cow_copies if c[1] not in on_evicted]
        self._pages = self._pages[:keep]
        self._num_shared = min(self._num_shared, keep)
        if copy is not None:
            self._pages.append(copy[1])

    def shrink_lock(self) -> None:
        """Stop protecting what lies behind our own tokens in the anchor (memory is short)."""
        size = self._allocator.page_size
        if self._num_shared * size > self._published:
            return  # our own leaf: nothing lies behind
        keep = self._published
        end = -(-keep // size) * size
        if end > keep and not self.cow_copies:
            keep = end = keep - keep % size  # we have that page's head in a page of our own
        node = self._node_covering(keep)
        if node.end > end:
            node = self._allocator.tree.split(node, end - node.start)
        self._published = keep
        self._move_lock(node)
        if keep < self._committed:
            key = self._data(keep, self._committed)
            if key not in node.children:
                self._attach(node, keep, key)  # our own page holds that head now: let it be found

    def _split_at_end(self) -> None:
        """Where others go on behind our end in the anchor, only our part of it is to be ours."""
        size, node, session_refs = (
            self._allocator.page_size,
            self._last_node,
            self._last_node.session_refs,
        )
        end = -(-self._published // size) * size
        if node.end <= end or end <= node.start or node.namespace.is_dead:
            return
        if self._session is None:
            is_ours = session_refs is None or session_refs.is_public
        else:
            is_ours = not self._session.is_open or self._session in (
                session_refs.sessions if session_refs else ()
            )
        if not is_ours:
            self._move_lock(self._allocator.tree.split(node, end - node.start))

    def _check_open(self) -> None:
        if not self._is_open:
            raise InvalidRequest("this sequence was released; acquire a new one")
