"""`CachedSequence`: one holder of a path in the tree, with its own pages behind it.

    tokens     [0 .................... published) [ ... committed) [ ... length)
    pages      [ shared with the tree, read-only ][ private to this sequence   )

`_node` is the locked anchor: it or its ancestors hold the tokens [0, published). The last shared
page may be partial: then this sequence put it there and is the only one to write behind its end.
`published` lags `committed` by less than a page, where the tree held those tokens already.
"""

from __future__ import annotations

from array import array

import numpy as np

from radixserve.arrays import IntArray
from radixserve.cache.node import TOKEN_BYTES, Node
from radixserve.cache.radix_tree import common_tokens
from radixserve.cache.store import Holder, PageStore
from radixserve.cache.tokens import TokenIds, as_token_ids
from radixserve.checks import check_int
from radixserve.errors import InvalidRequest

PageCopy = tuple[int, int, int]


class CachedSequence(Holder):
    """Made by `RadixCache.acquire` or `fork`; ends with `release`. Not thread-safe."""

    __slots__ = (
        "_committed",
        "_is_open",
        "_node",
        "_num_shared",
        "_pages",
        "_published",
        "_store",
        "_tokens",
        "cached_len",
        "copies",
    )

    def __init__(
        self,
        store: PageStore,
        node: Node,
        tokens: bytearray,
        shared: array[int],
        copy: PageCopy | None,
    ) -> None:
        """`node` covers all of `tokens` (int32 bytes) and is locked for this sequence; it owns
        the arrays from now on. `copy` fills its last page."""
        self._store = store
        self._node = node
        self._tokens = tokens
        self._pages = shared
        self._num_shared = len(shared)  # leading pages that belong to the tree
        self._published = self._committed = len(tokens) // TOKEN_BYTES
        self._is_open = True
        self.cached_len = self._committed  # tokens that were found in the cache
        self.copies: list[PageCopy] = []  # (source page, destination page, tokens of its head)
        if copy is not None:
            self._pages.append(copy[1])
            self.copies.append(copy)
        store.register(self)

    def __repr__(self) -> str:
        state = "" if self._is_open else ", released"
        return f"CachedSequence(length={self.length}, cached_len={self.cached_len}{state})"

    @property
    def tokens(self) -> IntArray:
        """[length] int32 token ids; a view, not to be written."""
        return np.frombuffer(self._tokens, np.int32)

    @property
    def length(self) -> int:
        """Tokens that have room: committed ones and those still to be computed."""
        return len(self._tokens) // TOKEN_BYTES

    @property
    def committed_len(self) -> int:
        """Tokens whose K/V is in the pages."""
        return self._committed

    @property
    def pages(self) -> IntArray:
        """[ceil(length / page_size)] int32 page ids of positions [0, length); a view."""
        return np.frombuffer(self._pages, np.int32)

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
        return self._node.space.is_dead

    def pages_wanted(self, num_tokens: int) -> int:
        """New pages that `extend` by that many tokens would take."""
        return self._store.pages_for(self.length + num_tokens) - len(self._pages)

    # -- growing ------------------------------------------------------------------------------

    def extend(self, tokens: TokenIds) -> None:
        """Room for `tokens` behind the present end, evicting unused pages when none is free.

        Raises OutOfPages, and changes nothing, when there is not enough. O(len(tokens)).
        """
        self._check_open()
        data = as_token_ids(tokens).tobytes()
        length = (len(self._tokens) + len(data)) // TOKEN_BYTES
        wanted = self._store.pages_for(length) - len(self._pages)
        if wanted > 0:
            self._add_pages(self._store.allocate(wanted))
        try:
            self._tokens += data
        except BufferError:  # somebody still looks at a view of the shorter state
            self._tokens = self._tokens + data

    def commit(self, length: int) -> None:
        """Publish: the K/V of [0, length) is in the pages, and the copies have been made.

        Where the tree holds the same tokens already, its pages replace this sequence's own, which
        are freed. O(tokens published since the last commit).
        """
        self._check_open()
        length = check_int("length", length, 0)
        if not self._committed <= length <= self.length:
            raise InvalidRequest(
                f"commit takes a length between {self._committed} (committed already) and "
                f"{self.length}, got {length}"
            )
        self.copies.clear()
        self._store.count_commit(length - self._committed)
        self._committed = length
        if length > self._published:
            self._publish()

    def fork(self) -> CachedSequence:
        """A second holder of everything committed. Copies at most one page head.

        Raises OutOfPages when that page cannot be had.
        """
        self._check_open()
        store, size = self._store, self._store.page_size
        whole, extra = divmod(self._committed, size)
        page = store.allocate(1)[0] if extra else -1  # may narrow our own anchor
        if self._published < self._committed and self._num_shared * size <= self._published:
            self._publish()
        copy = (self._tree_page(whole), page, extra) if extra else None
        store.tree.lock(self._node)
        tokens, shared = self._tokens[: self._committed * TOKEN_BYTES], self._pages[:whole]
        twin = CachedSequence(store, self._node, tokens, shared, copy)
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
        whole, extra = divmod(length, self._store.page_size)
        copy = None
        if extra and whole < self._num_shared and length < self._published:
            copy = (self._pages[whole], self._store.allocate(1)[0], extra)
        self._cut_pages(whole + (1 if extra else 0), copy)
        if extra:  # a copy that is still to be made must not reach behind the cut
            self.copies[:] = [(src, dst, min(n, extra)) for src, dst, n in self.copies]
        self._tokens = self._tokens[: length * TOKEN_BYTES]
        self._committed = min(self._committed, length)
        self._published = min(self._published, length)
        self.cached_len = min(self.cached_len, length)
        if not self.copies:  # a pending copy's source is protected by the old anchor
            self._move_to(self._holder_of(self._published))
        if copy is not None:
            self.copies.append(copy)

    def release(self) -> None:
        """Let go: committed pages stay cached, the rest is freed. A second call does nothing."""
        if not self._is_open:
            return
        self._is_open = False
        if len(self._pages) > self._num_shared:
            self._store.free(self._pages[self._num_shared :])
        self._store.unlock(self._node)
        self._store.unregister(self)

    # -- publishing ---------------------------------------------------------------------------

    def _publish(self) -> None:
        """Make the tree hold [0, committed), walking on from the anchor."""
        size, leaf = self._store.page_size, self._node
        base = self._published - self._published % size
        writes_tail = self._num_shared * size > self._published  # on the tree's last page
        is_alone = writes_tail or (base == self._published and leaf.refs == 1)
        if is_alone and leaf.start < base and leaf.end == self._published and not leaf.children:
            # A leaf with whole pages: behind its end nothing can collide with what we append.
            self._extend_leaf(leaf, self._published)
            return
        node = self._holder_of(base)
        if writes_tail:
            if leaf.refs == 1:
                self._take_back(leaf)
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
        size = self._store.page_size
        data = self._data(pos, self._committed)
        at, width = 0, size * TOKEN_BYTES
        while True:
            offset = pos - node.start
            rest = node.num_tokens - offset
            if rest:
                agreed = common_tokens(node.tokens, data, at, offset * TOKEN_BYTES)
                whole = agreed - agreed % size
                first = offset // size
                self._switch(pos // size, node.pages[first : first + whole // size])
                pos += whole
                at += whole * TOKEN_BYTES
                if pos + agreed - whole == self._committed:
                    self._settle(node)
                    return
                if whole < rest:
                    self._branch(node, pos, is_prefix=agreed == rest)
                    return
            child = node.children.get(data[at : at + width])
            if child is None:
                self._add_child(node, pos, data[at : at + width])
                return
            node = child

    def _branch(self, node: Node, pos: int, *, is_prefix: bool) -> None:
        """`node` goes on differently after `pos`, or ends within the page that begins there."""
        tree = self._store.tree
        mine = node is self._node
        if is_prefix and node.refs == (1 if mine else 0):
            if not mine:
                self._move_to(node)
            self._store.free(array("i", [tree.take_tail_page(node)]))
            self._extend_leaf(node, pos)
            return
        upper = tree.split(node, pos - node.start)
        self._attach(upper, pos)

    def _add_child(self, node: Node, pos: int, key: bytes) -> None:
        """No child of `node`, which ends at `pos`, begins with the page `key`."""
        store, tree = self._store, self._store.tree
        if store.page_size > 1 and node.children:
            if len(key) < store.page_size * TOKEN_BYTES:
                cover = tree.child_covering(node, key)
                if cover is not None:
                    self._settle(cover)
                    return
            self._drop_prefixes(node, key)
        if node is self._node and node.refs == 1 and not node.children and node.parent is not None:
            self._extend_leaf(node, pos)
        else:
            self._attach(node, pos)

    def _drop_prefixes(self, node: Node, key: bytes) -> None:
        """Remove unused leaves whose tokens are a proper head of `key`: they are covered now."""
        for size in range(len(key) - TOKEN_BYTES, 0, -TOKEN_BYTES):
            leaf = node.children.get(key[:size])
            if leaf is None:
                continue
            if leaf.refs == 0:
                self._store.free(self._store.tree.detach(leaf))
            elif leaf is self._node and leaf.refs == 1:
                self._take_back(leaf)

    def _take_back(self, leaf: Node) -> None:
        """Remove the leaf that only this sequence holds; keep its page if it is our own."""
        tree, parent = self._store.tree, leaf.parent
        assert parent is not None
        tree.lock(parent)
        pages = tree.reclaim(leaf)
        self._node = parent
        self._published = parent.end
        if self._num_shared * self._store.page_size > parent.end:
            self._num_shared -= 1
        else:
            self._store.free(pages)

    def _extend_leaf(self, leaf: Node, pos: int) -> None:
        """Append our tokens [pos, committed) and the pages that the leaf lacks."""
        tokens, pages = self._unpublished(
            pos, leaf.start // self._store.page_size + len(leaf.pages)
        )
        self._store.tree.extend(leaf, tokens, pages)
        self._num_shared = self._store.pages_for(self._committed)
        self._published = self._committed

    def _attach(self, parent: Node, pos: int) -> None:
        tokens, pages = self._unpublished(pos, pos // self._store.page_size)
        leaf = self._store.tree.attach(parent, pos, tokens, pages)
        self._num_shared = self._store.pages_for(self._committed)
        self._published = self._committed
        self._move_to(leaf)

    def _unpublished(self, pos: int, first_page: int) -> tuple[bytes, array[int]]:
        last_page = self._store.pages_for(self._committed)
        return self._data(pos, self._committed), self._pages[first_page:last_page]

    def _data(self, start: int, end: int) -> bytes:
        """Tokens [start, end) as int32 bytes."""
        return bytes(self._tokens[start * TOKEN_BYTES : end * TOKEN_BYTES])

    def _settle(self, node: Node) -> None:
        """`node` covers all that is committed; a partial last page stays our own."""
        self._published = self._committed
        self._move_to(node)

    def _switch(self, first: int, pages: array[int]) -> None:
        """Use the tree's `pages` from index `first` on; give our own ones back."""
        if not pages:
            return
        last = first + len(pages)
        own = self._pages[max(first, self._num_shared) : last]
        if own:
            self._store.count_duplicates(len(own) * self._store.page_size)
            self._store.free(own)
        self._pages[first:last] = pages
        self._num_shared = max(self._num_shared, last)

    # -- anchoring ----------------------------------------------------------------------------

    def _holder_of(self, length: int) -> Node:
        """The node on our path that holds the token before `length`; the root for 0."""
        node = self._node
        while node.parent is not None and node.start >= length:
            node = node.parent
        return node

    def _tree_page(self, index: int) -> int:
        """The tree's page with that index on our path (it may be longer filled than our own)."""
        if index < self._num_shared:
            return self._pages[index]
        size = self._store.page_size
        node = self._holder_of(index * size + 1)
        return node.pages[index - node.start // size]

    def _move_to(self, node: Node) -> None:
        if node is not self._node:
            self._store.tree.lock(node)
            self._store.tree.unlock(self._node)
            self._node = node

    def _cut_pages(self, keep: int, copy: PageCopy | None) -> None:
        """Keep the first `keep` pages, the last of them replaced when `copy` is given."""
        if copy is not None:
            keep -= 1
        dropped = self._pages[max(keep, self._num_shared) :]
        self._store.free(dropped)
        self.copies[:] = [c for c in self.copies if c[1] not in dropped]
        self._pages = self._pages[:keep]
        self._num_shared = min(self._num_shared, keep)
        if copy is not None:
            self._pages.append(copy[1])

    def _add_pages(self, pages: array[int]) -> None:
        try:
            self._pages += pages
        except BufferError:  # somebody still looks at a view of the shorter state
            self._pages = self._pages + pages

    def narrow(self) -> None:
        """Stop protecting what lies behind our own tokens in the anchor (memory is short)."""
        size = self._store.page_size
        if self._num_shared * size > self._published:
            return  # our own leaf: nothing lies behind
        keep = self._published
        end = -(-keep // size) * size
        if end > keep and not self.copies:
            keep = end = keep - keep % size  # we have that page's head in a page of our own
        node = self._holder_of(keep)
        if node.end > end:
            node = self._store.tree.split(node, end - node.start)
        self._published = keep
        self._move_to(node)
        if keep < self._committed and self._data(keep, self._committed) not in node.children:
            self._attach(node, keep)  # our own page holds that head now: let others find it

    def _check_open(self) -> None:
        if not self._is_open:
            raise InvalidRequest("this sequence was released; acquire a new one")
