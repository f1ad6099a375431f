"""The tree: nodes, their tokens and pages, locks and the order of eviction.

It owns every page that holds published K/V. It does not know sequences; it never allocates.

A node's edge holds `tokens` (int32 bytes) from position `start`, and one page id for every page
they touch. Starts are multiples of the page size P. Interior nodes end on a page boundary; a leaf
may end inside a page. Children are keyed by the bytes of their first page (fewer for a leaf
shorter than a page), so siblings may share the head of a page but never a whole one:

    root ── [0 ........ 32) ─┬─ [32 ..... 48) ── [48 .. 53)      P = 16; the last page holds 5
                             └─ [32 .. 41)                       tokens, the sibling's 9
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from sortedcontainers import SortedList

from radixserve.cache.eviction import LRU, GhostList
from radixserve.cache.node import NOBODY, TOKEN_BYTES, Node, Space, Watcher
from radixserve.cache.page_pool import PagePool

_LINEAR_CHILDREN = 8  # up to this many children a scan is faster than a sorted index


class Match(NamedTuple):
    """Where a walk stopped: `length` tokens agree, the last of them in `node`.

    `resume` is the deepest node whose tokens agree from its start on whole pages; it differs
    from `node` when only the head of a child's first page agrees.
    """

    length: int
    node: Node
    resume: Node


class RadixTree:
    """All namespaces' trees over one page pool."""

    def __init__(self, pool: PagePool, page_size: int) -> None:
        self.page_size = page_size
        self.spaces: dict[str, Space] = {}
        self.order = LRU()
        self.ghosts = GhostList()
        self.num_pages = 0  # in nodes, dead ones included
        self.num_locked = 0  # of those, in locked nodes
        self.num_dead = 0  # of those, unlocked in a dead space: as good as free
        self.num_nodes = 0
        self.num_splits = 0
        self.num_evicted_tokens = 0
        self.changed: set[Watcher] = set()  # those to be told, until somebody takes them
        self.changed_spaces: set[str] = set()  # names made or reset since then
        self.watching: dict[str, set[Watcher]] = {}  # by namespace
        self._pool = pool
        self._key_bytes = page_size * TOKEN_BYTES
        self._graveyard: list[Node] = []  # subtrees of dead spaces still to be taken apart
        self._next_serial = 0

    # -- finding ------------------------------------------------------------------------------

    def space(self, name: str) -> Space:
        """The living space of that name, made when missing."""
        found = self.spaces.get(name)
        if found is None:
            found = self.spaces[name] = Space(name)
            self.changed_spaces.add(name)
        return found

    def match(self, space: Space, data: bytes) -> Match:
        """Longest common prefix of `data` (int32 bytes) with anything in `space`. Read-only.

        O(tokens matched) in memcmp, plus O(log children) a node at page sizes above 1.
        """
        node, pos, width = space.root, 0, self._key_bytes
        while pos < len(data):
            child = node.children.get(data[pos : pos + width])
            if child is None:
                break
            edge = child.tokens
            if not data.startswith(edge, pos):
                length = common_tokens(edge, data, pos)
                return Match(pos // TOKEN_BYTES + length, child, child)
            node, pos = child, pos + len(edge)
            if pos % width:
                return Match(pos // TOKEN_BYTES, node, node)
        length = pos // TOKEN_BYTES
        if self.page_size > 1 and pos < len(data):
            head, agreed = self.closest_child(node, data[pos : pos + width])
            if head is not None:
                return Match(length + agreed, head, node)
        return Match(length, node, node)

    def closest_child(self, node: Node, key: bytes) -> tuple[Node | None, int]:
        """The child that shares most leading tokens with `key`, and how many (None, 0 if none).

        Neighbours in byte order share the longest prefix, so an index needs two comparisons.
        """
        if node.keys is None:
            candidates: Iterable[bytes] = node.children
        else:
            at = node.keys.bisect_left(key)
            candidates = node.keys[max(0, at - 1) : at + 1]
        best, most = None, 0
        for candidate in candidates:
            agreed = common_head(candidate, key)
            if agreed > most:
                best, most = candidate, agreed
        return (None, 0) if best is None else (node.children[best], most)

    def child_covering(self, node: Node, head: bytes) -> Node | None:
        """A child whose first page begins with all of `head` (shorter than a page)."""
        child, agreed = self.closest_child(node, head)
        return child if agreed * TOKEN_BYTES == len(head) else None

    # -- locks --------------------------------------------------------------------------------

    def lock(self, node: Node) -> None:
        """Protect `node` and all above it. Climbs only to the first node already protected."""
        while True:
            node.refs += 1
            parent = node.parent
            if node.refs > 1 or parent is None:
                return
            self.order.discard(node)
            self._shift_locked(node, len(node.pages))
            node = parent

    def unlock(self, node: Node) -> None:
        """Undo one `lock`. What nobody protects any more becomes evictable, youngest last."""
        while True:
            node.refs -= 1
            parent = node.parent
            if node.refs or parent is None:
                return
            self._shift_locked(node, -len(node.pages))
            if node.space.is_dead or self._is_redundant(node):
                self._graveyard.extend(node.children.values())
                self._remove(node)
            else:
                self.order.add(node)
            node = parent

    def prune(self, space: Space) -> None:
        """Forget a namespace that holds nothing and that nobody holds."""
        is_empty = not space.root.refs and not space.root.children
        if is_empty and self.spaces.get(space.name) is space:
            del self.spaces[space.name]

    def _shift_locked(self, node: Node, pages: int) -> None:
        self.num_locked += pages
        node.space.num_locked += pages
        if node.space.is_dead:
            self.num_dead -= pages

    def _is_redundant(self, node: Node) -> bool:
        """Whether a sibling holds all of this leaf, which is shorter than a page, and more."""
        if len(node.tokens) >= self._key_bytes or node.parent is None:
            return False
        key, parent = bytes(node.tokens), node.parent
        if parent.keys is None:
            return any(len(k) > len(key) and k.startswith(key) for k in parent.children)
        at = parent.keys.bisect_right(key)
        return at < len(parent.keys) and bool(parent.keys[at].startswith(key))

    # -- changing -----------------------------------------------------------------------------

    def attach(self, parent: Node, start: int, tokens: bytes, pages: array[int]) -> Node:
        """A new unlocked leaf that now owns `pages`. The caller locks it before anything else."""
        leaf = self._new_node(parent.space, parent, start, bytearray(tokens), pages)
        self._link(parent, leaf)
        self._count_pages(leaf, len(pages))
        self.touch(parent, tokens[:TOKEN_BYTES])
        return leaf

    def split(self, node: Node, at: int) -> Node:
        """Cut `node` after `at` tokens (whole pages, 0 < at < its length); returns the upper part.

        `node` stays the lower part with its holders and its place in the order. An unlocked
        upper part is in no order yet: the caller locks it before anything else.
        """
        parent, cut, pages = node.parent, at * TOKEN_BYTES, at // self.page_size
        assert parent is not None
        assert 0 < at < node.num_tokens
        assert at % self.page_size == 0
        upper = self._new_node(
            node.space, parent, node.start, node.tokens[:cut], node.pages[:pages]
        )
        self._relink(parent, self.key(node), upper)
        del node.tokens[:cut]
        del node.pages[:pages]
        node.start += at
        node.parent = upper
        self._link(upper, node)
        upper.refs = 1 if node.refs else 0
        self.num_splits += 1
        self.touch(node)
        self.touch(upper)
        return upper

    def extend(self, leaf: Node, tokens: bytes, pages: array[int]) -> None:
        """Append to a locked leaf in place; its key follows when it was shorter than a page."""
        old_key = self.key(leaf)
        leaf.tokens += tokens
        leaf.pages += pages
        self._count_pages(leaf, len(pages))
        if len(old_key) < self._key_bytes and leaf.parent is not None:
            self._unlink(leaf.parent, old_key, leaf)
            self._link(leaf.parent, leaf)
            self.touch(leaf.parent, old_key[:TOKEN_BYTES])
        self.touch(leaf, tokens[:TOKEN_BYTES])

    def take_tail_page(self, leaf: Node) -> int:
        """Cut the partial last page off a leaf that has whole pages too; the caller owns it now."""
        extra = leaf.num_tokens % self.page_size
        assert extra
        assert not leaf.children
        page = leaf.pages.pop()
        del leaf.tokens[-extra * TOKEN_BYTES :]
        self._count_pages(leaf, -1)
        self.touch(leaf)
        return page

    def detach(self, leaf: Node) -> array[int]:
        """Take an unlocked leaf out of the tree; the caller owns its pages now."""
        assert leaf.refs == 0
        assert not leaf.children
        assert leaf.parent is not None
        pages, leaf.pages = leaf.pages, array("i")
        self._count_pages(leaf, -len(pages))
        self.order.discard(leaf)
        self._unlink(leaf.parent, self.key(leaf), leaf)
        self._bury(leaf)
        return pages

    def reclaim(self, leaf: Node) -> array[int]:
        """The only holder of a leaf takes it out of the tree; its hold is gone with it."""
        assert leaf.refs == 1
        assert not leaf.children
        parent = leaf.parent
        assert parent is not None
        pages, leaf.pages = leaf.pages, array("i")
        self._count_pages(leaf, -len(pages))
        self._unlink(parent, self.key(leaf), leaf)
        self._bury(leaf)
        self.unlock(parent)
        return pages

    def touch(self, node: Node, token: bytes | None = None) -> None:
        """Matches that end in `node` may end elsewhere; with `token`, only those that it continues.

        O(the watchers concerned).
        """
        if not node.watchers:
            return
        if token is not None:
            self.changed |= node.watchers.get(token, set())
            return
        for watchers in node.watchers.values():
            self.changed |= watchers

    def watch(self, node: Node, token: bytes, watcher: Watcher) -> None:
        """`watcher`, which looks for `token` next, is put into `changed` when it may find more."""
        if node.watchers is NOBODY:
            node.watchers = {}
        node.watchers.setdefault(token, set()).add(watcher)

    def unwatch(self, node: Node, token: bytes, watcher: Watcher) -> None:
        watchers = node.watchers.get(token)
        if watchers is not None:
            watchers.discard(watcher)
            if not watchers:
                del node.watchers[token]
                if not node.watchers:
                    node.watchers = NOBODY

    def _count_pages(self, node: Node, pages: int) -> None:
        self.num_pages += pages
        node.space.num_pages += pages
        if node.refs:
            self.num_locked += pages
            node.space.num_locked += pages
        elif node.space.is_dead:
            self.num_dead += pages

    def key(self, node: Node) -> bytes:
        return bytes(node.tokens[: self._key_bytes])

    # -- letting go ---------------------------------------------------------------------------

    @property
    def num_evictable(self) -> int:
        """Pages that eviction could free now."""
        return self.num_pages - self.num_locked

    def evict(self, num_pages: int) -> int:
        """Free up to `num_pages` pages of living spaces, leaves in order, each from its tail.

        Returns the pages freed. Cost: O(pages freed + nodes removed), however large the tree.
        """
        freed = 0
        while freed < num_pages:
            leaf = self.order.victim()
            if leaf is None:
                break
            if leaf.space.is_dead:  # counts as free already
                self._remove(leaf)
                continue
            take = min(len(leaf.pages), num_pages - freed)
            self._trim(leaf, take)
            freed += take
            self.prune(leaf.space)
        return freed

    def reset(self, name: str) -> None:
        """Forget a namespace in O(1): its pages count as free, taken apart when needed."""
        space = self.spaces.pop(name, None)
        if space is None:
            return
        space.is_dead = True
        self.num_dead += space.num_pages - space.num_locked
        self.changed_spaces.add(name)
        self._graveyard.append(space.root)

    def graveyard(self) -> list[Node]:
        """Roots of the dead subtrees not yet taken apart, for audits."""
        return list(self._graveyard)

    def _trim(self, leaf: Node, num_pages: int) -> None:
        """Free the last `num_pages` pages of an unlocked leaf of a living space."""
        keep = len(leaf.pages) - num_pages
        self.num_evicted_tokens += leaf.num_tokens - keep * self.page_size
        assert leaf.parent is not None
        if keep == 0:
            self.ghosts.remember(leaf.parent.serial, leaf.start, self.key(leaf))
            self._remove(leaf)
            return
        cut = keep * self._key_bytes
        first = bytes(leaf.tokens[cut : cut + self._key_bytes])
        self._pool.free(leaf.pages[keep:])
        del leaf.pages[keep:]
        del leaf.tokens[cut:]
        self._count_pages(leaf, -num_pages)
        self.ghosts.remember(leaf.serial, leaf.end, first)
        self.touch(leaf)

    def reap(self, num_pages: int) -> int:
        """Take dead subtrees apart until at least `num_pages` pages are free or none is left."""
        freed = 0
        while freed < num_pages and self._graveyard:
            node = self._graveyard.pop()
            self._graveyard.extend(node.children.values())
            if node.refs or node.parent is None:  # held, a root, or gone already
                continue
            freed += len(node.pages)
            self._remove(node)
        return freed

    def _remove(self, node: Node) -> None:
        """Take an unlocked node out and free its pages. Its children are the caller's concern."""
        self._count_pages(node, -len(node.pages))
        self._pool.free(node.pages)
        self.order.discard(node)
        assert node.parent is not None
        self._unlink(node.parent, self.key(node), node)
        self._bury(node)

    def _bury(self, node: Node) -> None:
        """Leave nothing that a stale reference could mistake for a living node."""
        self.touch(node)
        self.num_nodes -= 1
        for child in node.children.values():
            child.parent = child.space.root  # still to be taken apart, unreachable from above
        node.children = {}
        node.keys = None
        node.pages = array("i")
        node.parent = None

    # -- children -----------------------------------------------------------------------------

    def _new_node(
        self, space: Space, parent: Node, start: int, tokens: bytearray, pages: array[int]
    ) -> Node:
        self._next_serial += 1
        self.num_nodes += 1
        return Node(space, parent, start, tokens, pages, self._next_serial)

    def _link(self, parent: Node, child: Node) -> None:
        key = self.key(child)
        assert key not in parent.children
        parent.children[key] = child
        if parent.keys is not None:
            parent.keys.add(key)
        elif self.page_size > 1 and len(parent.children) > _LINEAR_CHILDREN:
            parent.keys = SortedList(parent.children)

    def _relink(self, parent: Node, key: bytes, child: Node) -> None:
        """Put `child` in the place of the one that has `key`; the first pages are the same."""
        assert key in parent.children
        parent.children[key] = child

    def _unlink(self, parent: Node, key: bytes, child: Node) -> None:
        if parent.children.get(key) is child:
            del parent.children[key]
            if parent.keys is not None:
                parent.keys.remove(key)


def common_tokens(edge: bytes | bytearray, data: bytes, pos: int, at: int = 0) -> int:
    """Leading tokens that `edge` from byte `at` and `data` from byte `pos` have in common."""
    count = min(len(edge) - at, len(data) - pos) // TOKEN_BYTES
    left = np.frombuffer(edge, np.int32, count, at) if count else None
    if left is None:
        return 0
    differs = left != np.frombuffer(data, np.int32, count, pos)
    first = int(differs.argmax())
    return first if differs[first] else count


def common_head(left: bytes, right: bytes) -> int:
    """Leading tokens that two keys (at most a page each) have in common."""
    size = min(len(left), len(right))
    differs = int.from_bytes(left[:size], "little") ^ int.from_bytes(right[:size], "little")
    if not differs:
        return size // TOKEN_BYTES
    return ((differs & -differs).bit_length() - 1) // (8 * TOKEN_BYTES)
