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
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from radixserve.cache.child_index import add_key, closest_child, has_longer, remove_key
from radixserve.cache.eviction import EvictionOrder
from radixserve.cache.ghosts import GhostList
from radixserve.cache.node import TOKEN_BYTES, Claims, Node, Space
from radixserve.cache.page_pool import PagePool
from radixserve.cache.retention import Retention
from radixserve.cache.watches import Watches


class Match(NamedTuple):
    """Where a walk stopped: `length` tokens agree, the last of them in `node`.

    `resume` is the deepest node whose tokens agree from its start on whole pages; it differs
    from `node` when only the head of a child's first page agrees.
    """

    length: int
    node: Node
    resume: Node


_match: Callable[[tuple[int, Node, Node]], Match] = partial(tuple.__new__, Match)  # 0.1 us less


class RadixTree:
    """All namespaces' trees over one page pool."""

    def __init__(self, pool: PagePool, page_size: int, order: EvictionOrder) -> None:
        self.page_size = page_size
        self.spaces: dict[str, Space] = {}
        self.order = order  # of the unlocked nodes
        self.retention: Retention | None = None  # the same, once there are holders
        self.ghosts = GhostList()
        self.watches = Watches()
        self.num_pages = 0  # in nodes, dead ones included
        self.num_locked = 0  # of those, in locked nodes
        self.num_dead = 0  # of those, unlocked in a dead space: as good as free
        self.num_nodes = 0
        self.num_splits = 0
        self.num_evicted_tokens = 0
        self._pool = pool
        self._key_bytes = page_size * TOKEN_BYTES
        self._graveyard: list[Node] = []  # subtrees of dead spaces still to be taken apart
        self._next_serial = 0

    def retain(self, retention: Retention) -> None:
        """From now on there are holders; `retention` takes over the order."""
        self.order = self.retention = retention

    # -- finding ------------------------------------------------------------------------------

    def space(self, name: str) -> Space:
        """The living space of that name, made when missing."""
        found = self.spaces.get(name)
        if found is None:
            found = self.spaces[name] = Space(name)
            self.watches.touch_space(name)
        return found

    def match(self, space: Space, data: bytes, limit: int) -> Match:
        """Longest common prefix of the first `limit` tokens of `data` (int32 bytes) with anything
        in `space`. Read-only.

        O(tokens matched) in memcmp, plus O(log children) a node at page sizes above 1.
        """
        node, pos, width, size = space.root, 0, self._key_bytes, limit * TOKEN_BYTES
        while pos < size:
            child = node.children.get(data[pos : min(pos + width, size)])
            if child is None:
                break
            edge = child.tokens
            if not data.startswith(edge, pos, size):
                if len(edge) > size - pos and edge.startswith(data[pos:size]):
                    return _match((limit, child, child))
                length = common_tokens(edge, data, pos, size)
                return _match((pos // TOKEN_BYTES + length, child, child))
            node, pos = child, pos + len(edge)
            if pos % width:
                return _match((pos // TOKEN_BYTES, node, node))
        length = pos // TOKEN_BYTES
        if width > TOKEN_BYTES and pos < size:
            head, agreed = closest_child(node, data[pos : min(pos + width, size)])
            if head is not None:
                return _match((length + agreed, head, node))
        return _match((length, node, node))

    def misses(self, space: Space, first_page: bytes) -> bool:
        """Whether nothing in `space` begins like a prompt's first page (a shorter prompt whole)."""
        root = space.root
        if first_page in root.children:
            return False
        return self.page_size == 1 or closest_child(root, first_page)[0] is None

    # -- locks --------------------------------------------------------------------------------

    def lock(self, node: Node) -> None:
        """Protect `node` and all above it. Climbs only to the first node already protected."""
        while True:
            node.refs += 1
            parent = node.parent
            if node.refs > 1 or parent is None:
                return
            self.order.discard(node)
            pages = len(node.pages)
            self.num_locked += pages
            node.space.num_locked += pages
            if node.space.is_dead:
                self.num_dead -= pages
            node = parent

    def unlock(self, node: Node) -> None:
        """Undo one `lock`. What nobody protects any more becomes evictable, youngest last."""
        while True:
            node.refs -= 1
            parent = node.parent
            if node.refs or parent is None:
                return
            pages = len(node.pages)
            self.num_locked -= pages
            node.space.num_locked -= pages
            if node.space.is_dead:
                self.num_dead += pages
                self._graveyard.extend(node.children.values())
                self._remove(node)
            elif len(node.tokens) < self._key_bytes and has_longer(parent, bytes(node.tokens)):
                self._remove(node)  # a sibling holds all of this leaf, and more
            else:
                self.order.add(node)
            node = parent

    def prune(self, space: Space) -> None:
        """Forget a namespace that holds nothing and that nobody holds."""
        root = space.root
        if not root.refs and not root.children and self.spaces.get(space.name) is space:
            del self.spaces[space.name]

    # -- changing -----------------------------------------------------------------------------

    def attach(
        self,
        parent: Node,
        start: int,
        tokens: bytearray,
        pages: array[int],
        *,
        is_public: bool,
        takes_hold: bool,
    ) -> Node:
        """A new leaf that owns `tokens` and `pages` from now on.

        `is_public`: not of a holder; the caller publishes the path once it is locked.
        `takes_hold`: one hold on `parent` becomes a hold on the leaf, which keeps `parent` locked;
        else the leaf is unlocked and the caller locks it before anything else.
        """
        space, size, key = parent.space, len(pages), bytes(tokens[: self._key_bytes])
        leaf = self._new_node(space, parent, start, tokens, pages)
        leaf.mark = self.order.first_mark
        if not is_public:
            leaf.claims = Claims(is_public=False)
        self.num_pages += size
        space.num_pages += size
        if takes_hold:
            leaf.refs = 1
            self.num_locked += size
            space.num_locked += size
        elif space.is_dead:
            self.num_dead += size
        assert key not in parent.children
        parent.children[key] = leaf
        if self.page_size > 1:
            add_key(parent, key)
        if parent.watchers:
            self.watches.touch(parent, key[:TOKEN_BYTES])
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
        parent.children[self.key(node)] = upper  # the first page, and so the key, is the same
        del node.tokens[:cut]
        del node.pages[:pages]
        node.start += at
        node.parent = upper
        self._link(upper, node)
        upper.mark = node.mark
        if node.claims is not None and self.retention is not None:
            self.retention.split(upper, node)
        if node.refs:
            upper.refs = 1
        else:
            self.order.resized(node)
        self.num_splits += 1
        if node.watchers:
            self.watches.touch(node)
        return upper

    def extend(self, leaf: Node, tokens: bytearray, pages: array[int]) -> None:
        """Append to a locked leaf in place; its key follows when it was shorter than a page."""
        if len(leaf.tokens) < self._key_bytes and leaf.parent is not None:
            old_key = bytes(leaf.tokens)
            self._unlink(leaf.parent, old_key, leaf)
            leaf.tokens += tokens
            self._link(leaf.parent, leaf)
            self.watches.touch(leaf.parent, old_key[:TOKEN_BYTES])
        else:
            leaf.tokens += tokens
        if pages:
            leaf.pages += pages
            self._count_pages(leaf, len(pages))
        if leaf.watchers:
            self.watches.touch(leaf, bytes(tokens[:TOKEN_BYTES]))

    def take_tail_page(self, leaf: Node) -> int:
        """Cut the partial last page off a leaf that has whole pages too; the caller owns it now."""
        extra = leaf.num_tokens % self.page_size
        assert extra
        assert not leaf.children
        page = leaf.pages.pop()
        del leaf.tokens[-extra * TOKEN_BYTES :]
        self._count_pages(leaf, -1)
        if not leaf.refs:
            self.order.resized(leaf)
        self.watches.touch(leaf)
        return page

    def detach(self, leaf: Node) -> array[int]:
        """Take an unlocked leaf out of the tree; the caller owns its pages now."""
        assert leaf.refs == 0
        assert not leaf.children
        pages = self._take_out(leaf)
        self.order.discard(leaf)
        return pages

    def reclaim(self, leaf: Node) -> array[int]:
        """The only holder of a leaf takes it out of the tree; its hold is gone with it."""
        assert leaf.refs == 1
        assert not leaf.children
        parent = leaf.parent
        assert parent is not None
        pages = self._take_out(leaf)
        self.unlock(parent)
        return pages

    def key(self, node: Node) -> bytes:
        return bytes(node.tokens[: self._key_bytes])

    def _count_pages(self, node: Node, pages: int) -> None:
        space = node.space
        self.num_pages += pages
        space.num_pages += pages
        if node.refs:
            self.num_locked += pages
            space.num_locked += pages
        elif space.is_dead:
            self.num_dead += pages
        if node.claims is not None and self.retention is not None:
            self.retention.count_pages(node, pages)

    # -- letting go ---------------------------------------------------------------------------

    @property
    def num_evictable(self) -> int:
        """Pages that eviction could free now."""
        return self.num_pages - self.num_locked

    def evict(self, num_pages: int) -> int:
        """Free up to `num_pages` pages of living spaces, leaves in order, each from its tail.

        Returns the pages freed. Cost: O(pages freed + nodes removed), however large the tree.
        """
        freed, victim = 0, self.order.victim
        while freed < num_pages:
            leaf = victim()
            if leaf is None:
                break
            size = len(leaf.pages)
            if leaf.space.is_dead:  # counts as free already
                self._remove(leaf)
                continue
            if size <= num_pages - freed:
                self._evict_whole(leaf, size)
            else:
                size = num_pages - freed
                self._evict_tail(leaf, size)
            freed += size
        return freed

    def reset(self, name: str) -> None:
        """Forget a namespace in O(1): its pages count as free, taken apart when needed."""
        self.ghosts.forget(name)
        space = self.spaces.pop(name, None)
        if space is None:
            return
        space.is_dead = True
        self.num_dead += space.num_pages - space.num_locked
        self.watches.touch_space(name)
        if space.num_pages > space.num_locked:  # what is locked goes when it is let go
            self._graveyard.append(space.root)

    def graveyard(self) -> list[Node]:
        """Roots of the dead subtrees not yet taken apart, for audits."""
        return list(self._graveyard)

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

    def _evict_whole(self, leaf: Node, size: int) -> None:
        """`_remove` for an unlocked leaf of a living space, which is remembered. The hot path."""
        parent, space, key = leaf.parent, leaf.space, bytes(leaf.tokens[: self._key_bytes])
        assert parent is not None
        place = (parent.serial, leaf.start, key[:TOKEN_BYTES])
        self.ghosts.remember(place, key)
        order = self.order
        if order.tracks_loss:
            order.dropped(leaf, place, size)
        order.discard(leaf)
        self.num_evicted_tokens += len(leaf.tokens) // TOKEN_BYTES
        self.num_nodes -= 1
        self.num_pages -= size
        space.num_pages -= size
        del parent.children[key]
        if parent.heads is not None:
            remove_key(parent, key)
        if leaf.watchers:
            self.watches.touch(leaf)
        self._pool.free(leaf.pages)
        if leaf.claims is not None and self.retention is not None:
            self.retention.count_pages(leaf, -size)
            leaf.pages = _NO_PAGES
            self.retention.buried(leaf)
        leaf.pages = _NO_PAGES
        leaf.parent = None
        if parent.parent is None and not parent.children:
            self.prune(space)

    def _evict_tail(self, leaf: Node, num_pages: int) -> None:
        """Free the last `num_pages` pages of a leaf that has more."""
        keep = len(leaf.pages) - num_pages
        cut = keep * self._key_bytes
        page = bytes(leaf.tokens[cut : cut + self._key_bytes])
        place = (leaf.serial, leaf.start + keep * self.page_size, page[:TOKEN_BYTES])
        self.num_evicted_tokens += (len(leaf.tokens) - cut) // TOKEN_BYTES
        self.ghosts.remember(place, page)
        if self.order.tracks_loss:
            self.order.dropped(leaf, place, num_pages)
        self._pool.free(leaf.pages[keep:])
        del leaf.pages[keep:]
        del leaf.tokens[cut:]
        self._count_pages(leaf, -num_pages)
        self.order.resized(leaf)
        if leaf.watchers:
            self.watches.touch(leaf)

    def _remove(self, node: Node) -> None:
        """Take an unlocked node out and free its pages. Its children are the caller's concern."""
        self._pool.free(self._take_out(node))
        self.order.discard(node)

    def _take_out(self, node: Node) -> array[int]:
        """Leave nothing that a stale reference could mistake for a living node; its pages."""
        parent, pages = node.parent, node.pages
        assert parent is not None
        self._count_pages(node, -len(pages))
        self._unlink(parent, self.key(node), node)
        if node.watchers:
            self.watches.touch(node)
        self.num_nodes -= 1
        node.pages = _NO_PAGES
        if node.claims is not None and self.retention is not None:
            self.retention.buried(node)
        if node.children:
            for child in node.children.values():
                child.parent = child.space.root  # to be taken apart, unreachable from above
            node.children = {}
            node.heads = None
        node.parent = None
        return pages

    # -- children -----------------------------------------------------------------------------

    def _new_node(
        self, space: Space, parent: Node, start: int, tokens: bytearray, pages: array[int]
    ) -> Node:
        self._next_serial += 1
        self.num_nodes += 1
        return Node(space, parent, start, tokens, pages, self._next_serial)

    def _link(self, parent: Node, child: Node) -> None:
        key = bytes(child.tokens[: self._key_bytes])
        assert key not in parent.children
        parent.children[key] = child
        if self.page_size > 1:
            add_key(parent, key)

    def _unlink(self, parent: Node, key: bytes, child: Node) -> None:
        if parent.children.get(key) is child:
            del parent.children[key]
            if parent.heads is not None:
                remove_key(parent, key)


_NO_PAGES = array("i")  # of nodes that are gone; stays empty


def common_tokens(edge: bytearray, data: bytes, pos: int, end: int, at: int = 0) -> int:
    """Leading tokens that `edge` from byte `at` and `data` in bytes [pos, end) have in common."""
    count = min(len(edge) - at, end - pos) // TOKEN_BYTES
    if not count:
        return 0
    differs = np.frombuffer(edge, np.int32, count, at) != np.frombuffer(data, np.int32, count, pos)
    first = int(differs.argmax())
    return first if differs[first] else count
