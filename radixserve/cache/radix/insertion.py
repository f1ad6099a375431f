"""`Insertion`: makes the tree hold what a sequence has committed, and moves the sequence's lock.

Where the tree holds the tokens already, its pages replace the sequence's; the rest becomes a leaf,
or the end of one. A node is edited in place only where no other lock and no other session is
affected.
"""

from __future__ import annotations

from array import array

from radixserve.cache.radix.child_index import child_covering, covered_children
from radixserve.cache.radix.node import Node
from radixserve.cache.radix.radix_tree import RadixTree, common_tokens
from radixserve.cache.tokens import TOKEN_BYTES


class Insertion:
    """One sequence's tokens [0, end) on their way into the tree."""

    __slots__ = ("_end", "_is_public", "_pages", "_tokens", "_tree", "held", "is_new", "reused")

    def __init__(
        self,
        tree: RadixTree,
        held: Node,
        tokens: bytearray,
        end: int,
        pages: array[int],
        *,
        is_public: bool,
    ) -> None:
        """`held`: the node on the path of `tokens` (int32 bytes) that the sequence has locked.
        `pages`: the sequence's, by index. `is_public`: it has no session."""
        self._tree = tree
        self._tokens = tokens
        self._end = end
        self._pages = pages
        self._is_public = is_public
        self.held = held
        self.reused = array("i")  # the tree's pages from the page on where the walk begins
        self.is_new = False  # whether the later pages, a partial last one too, are the tree's now

    def first_page(self, pos: int) -> bytes:
        """The key of a child that begins at `pos`: at most a page of tokens."""
        stop = min(pos + self._tree.page_size, self._end)
        return bytes(self._tokens[pos * TOKEN_BYTES : stop * TOKEN_BYTES])

    def walk(self, node: Node, pos: int) -> None:
        """Follow the tree from `pos` (a page boundary inside or at the end of `node`), taking over
        its pages, and add what it does not have. O(tokens)."""
        size = self._tree.page_size
        while True:
            offset = pos - node.start
            rest = len(node.tokens) // TOKEN_BYTES - offset
            if rest:
                agreed = common_tokens(node.tokens, self._tokens, pos, self._end, offset)
                whole = agreed - agreed % size
                first = offset // size
                self.reused += node.pages[first : first + whole // size]
                pos += whole
                if pos + agreed - whole == self._end:
                    self._adopt_prefix(node)
                    return
                if whole < rest:
                    self._branch(node, pos, is_prefix=agreed == rest)
                    return
            key = self.first_page(pos)
            child = node.children.get(key)
            if child is None:
                self._add_child(node, pos, key)
                return
            node = child

    def _adopt_prefix(self, node: Node) -> None:
        """`node` covers all that is committed; a partial last page stays the sequence's own."""
        self.held = self._tree.move_lock(self.held, node)

    def _branch(self, node: Node, pos: int, *, is_prefix: bool) -> None:
        """`node` goes on differently after `pos`, or ends within the page that begins there."""
        tree = self._tree
        is_free = node.lock_ref == (1 if node is self.held else 0)
        if is_prefix and is_free and may_grow(node, is_public=self._is_public):
            self.held = tree.move_lock(self.held, node)
            tree.free(tree.cut(node, len(node.pages) - 1))  # the caller's page holds more
            self._extend(node, pos)
            return
        upper = tree.split(node, pos - node.start)
        if is_prefix and is_free:  # what is left below is covered by our first page
            self.drop_prefixes(upper, self.first_page(pos))
        self._attach(upper, pos)

    def _add_child(self, node: Node, pos: int, key: bytes) -> None:
        """No child of `node`, which ends at `pos`, begins with the page `key`."""
        size = self._tree.page_size
        if size > 1 and node.children:
            if len(key) < size * TOKEN_BYTES:
                cover = child_covering(node, key)
                if cover is not None:
                    self._adopt_prefix(cover)
                    return
            self.drop_prefixes(node, key)
        is_own_leaf = node is self.held and node.lock_ref == 1 and not node.children
        if is_own_leaf and node.parent is not None and may_grow(node, is_public=self._is_public):
            self._extend(node, pos)
        else:
            self._attach(node, pos)

    def drop_prefixes(self, node: Node, key: bytes) -> None:
        """Remove leaves that no other sequence uses and whose tokens are a proper head of `key`:
        they are covered now."""
        tree = self._tree
        for leaf in covered_children(node, key):
            if leaf.lock_ref == 0:
                tree.free(tree.remove(leaf))
            elif leaf is self.held and leaf.lock_ref == 1:
                self.held, pages = tree.withdraw(leaf)
                tree.free(pages)

    def _extend(self, leaf: Node, pos: int) -> None:
        """Append tokens [pos, end) and the pages that the leaf lacks."""
        size = self._tree.page_size
        first = leaf.start // size + len(leaf.pages)
        self._tree.extend(leaf, self._tokens_after(pos), self._pages[first : -(-self._end // size)])
        self.is_new = True

    def _attach(self, parent: Node, pos: int) -> None:
        """Add tokens [pos, end) as a leaf below `parent`, which is on their path."""
        size = self._tree.page_size
        self.held = self._tree.attach(
            parent,
            pos,
            self._tokens_after(pos),
            self._pages[pos // size : -(-self._end // size)],
            held=self.held,
            is_public=self._is_public,
        )
        self.is_new = True

    def _tokens_after(self, pos: int) -> bytearray:
        return self._tokens[pos * TOKEN_BYTES : self._end * TOKEN_BYTES]


def may_grow(leaf: Node, *, is_public: bool) -> bool:
    """Whether what a sequence appends to `leaf` is reached by the same sessions as the leaf."""
    refs = leaf.session_refs
    if refs is None:
        return is_public
    return refs.is_public == is_public and not refs.sessions


def node_covering(node: Node, length: int) -> Node:
    """The node on the path to `node` that holds the token before `length`; the root for 0."""
    while node.parent is not None and node.start >= length:
        node = node.parent
    return node
