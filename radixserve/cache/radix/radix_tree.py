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

from radixserve.cache.page_pool import PagePool
from radixserve.cache.radix.child_index import add_key, closest_child, has_longer, remove_key
from radixserve.cache.radix.evicted_history import EvictedHistory
from radixserve.cache.radix.eviction import EvictionOrder
from radixserve.cache.radix.node import NO_CHILDREN, NamespaceTree, Node, SessionRefs
from radixserve.cache.radix.session_eviction import SessionAwareEviction
from radixserve.cache.radix.watch_registry import WatchRegistry
from radixserve.cache.tokens import TOKEN_BYTES


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
        self.namespaces: dict[str, NamespaceTree] = {}
        self.order = order  # of the unlocked nodes
        self.session_eviction: SessionAwareEviction | None = (
            None  # the same, once there are sessions
        )
        self.evicted_history = EvictedHistory()
        self.watch_registry = WatchRegistry()
        self.num_pages = 0  # in nodes, dead ones included
        self.num_locked = 0  # of those, in locked nodes
        self.num_dead = 0  # of those, unlocked in a dead space: as good as free
        self.num_nodes = 0
        self.num_splits = 0
        self.num_evicted_tokens = 0
        self._pool = pool
        self._key_bytes = page_size * TOKEN_BYTES
        self.pending_free: list[Node] = []  # subtrees of dead spaces still to be taken apart
        self._next_id = 0

    def set_session_eviction(self, session_eviction: SessionAwareEviction) -> None:
        """From now on there are sessions; `session_eviction` takes over the order."""
        self.order = self.session_eviction = session_eviction

    # -- finding ------------------------------------------------------------------------------

    def namespace(self, name: str) -> NamespaceTree:
        """The living space of that name, made when missing."""
        found = self.namespaces.get(name)
        if found is None:
            found = self.namespaces[name] = NamespaceTree(name)
            self.watch_registry.notify_namespace(name)
        return found

    def match(self, namespace: NamespaceTree, data: memoryview, limit: int) -> Match:
        """Longest common prefix of the first `limit` tokens of `data` (int32) with anything in
        `namespace`. Read-only.

        O(tokens matched) in memcmp, plus O(log children) a node at page sizes above 1.
        """
        node, pos, width = namespace.root, 0, self.page_size
        while pos < limit:
            stop = pos + width
            child = node.children.get(data[pos : stop if stop < limit else limit].tobytes())
            if child is None:
                break
            edge = child.tokens
            stop = pos + len(edge) // TOKEN_BYTES
            if stop > limit:
                if edge.startswith(data[pos:limit]):
                    return _match((limit, child, child))
                return _match((pos + common_tokens(edge, data, pos, limit), child, child))
            if edge != data[pos:stop]:
                return _match((pos + common_tokens(edge, data, pos, stop), child, child))
            node, pos = child, stop
            if pos % width:
                return _match((pos, node, node))
        if width > 1 and pos < limit:
            head, agreed = closest_child(node, data[pos : min(pos + width, limit)].tobytes())
            if head is not None:
                return _match((pos + agreed, head, node))
        return _match((pos, node, node))

    def never_saw(self, namespace: NamespaceTree, first_page: bytes) -> bool:
        """Whether nothing begins with the first token of that page, nor did anything that is
        remembered. May say no where a closer look says yes. O(1)."""
        namespaces, root = self.namespaces, namespace.root
        return (
            first_page not in root.children
            and (self.page_size == 1 or closest_child(root, first_page)[0] is None)
            and not self.evicted_history.find((root.node_id, 0, first_page[:TOKEN_BYTES]))
            and len(namespaces) == 1
            and namespace.name in namespaces
        )

    # -- locks --------------------------------------------------------------------------------

    def lock(self, node: Node) -> None:
        """Protect `node` and all above it. Climbs only to the first node already protected."""
        while True:
            node.lock_ref += 1
            parent = node.parent
            if node.lock_ref > 1 or parent is None:
                return
            self.order.discard(node)
            pages = len(node.pages)
            self.num_locked += pages
            node.namespace.num_locked += pages
            if node.namespace.is_dead:
                self.num_dead -= pages
            node = parent

    def unlock(self, node: Node) -> None:
        """Undo one `lock`. What nobody protects any more becomes evictable, youngest last."""
        while True:
            node.lock_ref -= 1
            parent = node.parent
            if node.lock_ref or parent is None:
                return
            pages = len(node.pages)
            self.num_locked -= pages
            node.namespace.num_locked -= pages
            if node.namespace.is_dead:
                self.num_dead += pages
                self.pending_free.extend(node.children.values())
                self._remove(node)
            elif len(node.tokens) < self._key_bytes and has_longer(parent, node.key):
                self._remove(node)  # a sibling holds all of this leaf, and more
            else:
                self.order.add(node)
            node = parent

    def prune(self, namespace: NamespaceTree) -> None:
        """Forget a namespace that holds nothing and that nobody holds."""
        root = namespace.root
        if (
            not root.lock_ref
            and not root.children
            and self.namespaces.get(namespace.name) is namespace
        ):
            del self.namespaces[namespace.name]

    # -- changing -----------------------------------------------------------------------------

    def attach(
        self,
        parent: Node,
        start: int,
        key: bytes,
        tokens: bytearray,
        pages: array[int],
        *,
        is_public: bool,
        takes_hold: bool,
    ) -> Node:
        """A new leaf that owns `tokens` and `pages` from now on; `key` is its first page.

        `is_public`: not of a session; the caller publishes the path once it is locked.
        `takes_hold`: one hold on `parent` becomes a hold on the leaf, which keeps `parent` locked;
        else the leaf is unlocked and the caller locks it before anything else.
        """
        namespace, size = parent.namespace, len(pages)
        self._next_id = node_id = self._next_id + 1
        self.num_nodes += 1
        leaf = Node(namespace, parent, start, key, tokens, pages, node_id)
        leaf.policy_key = self.order.initial_key
        if not is_public:
            leaf.session_refs = SessionRefs(is_public=False)
        self.num_pages += size
        namespace.num_pages += size
        if takes_hold:
            leaf.lock_ref = 1
            self.num_locked += size
            namespace.num_locked += size
        elif namespace.is_dead:
            self.num_dead += size
        children = parent.children
        assert key not in children
        if children is NO_CHILDREN:
            children = parent.children = {}
        children[key] = leaf
        if self.page_size > 1:
            add_key(parent, key)
        if parent.watchers:
            self.watch_registry.notify(parent, key[:TOKEN_BYTES])
        return leaf

    def split(self, node: Node, at: int) -> Node:
        """Cut `node` after `at` tokens (whole pages, 0 < at < its length); returns the upper part.

        `node` stays the lower part with its sessions and its place in the order. An unlocked
        upper part is in no order yet: the caller locks it before anything else.
        """
        parent, cut, pages = node.parent, at * TOKEN_BYTES, at // self.page_size
        assert parent is not None
        assert 0 < at < node.num_tokens
        assert at % self.page_size == 0
        self._next_id = node_id = self._next_id + 1
        self.num_nodes += 1
        head, first = node.tokens[:cut], node.pages[:pages]
        upper = Node(node.namespace, parent, node.start, node.key, head, first, node_id)
        parent.children[node.key] = upper  # the first page, and so the key, is the same
        del node.tokens[:cut]
        del node.pages[:pages]
        node.start += at
        node.parent = upper
        self._link(upper, node)
        upper.policy_key = node.policy_key
        if node.session_refs is not None and self.session_eviction is not None:
            self.session_eviction.split(upper, node)
        if node.lock_ref:
            upper.lock_ref = 1
        else:
            self.order.on_resized(node)
        self.num_splits += 1
        if node.watchers:
            self.watch_registry.notify(node)
        return upper

    def extend(self, leaf: Node, tokens: bytearray, pages: array[int]) -> None:
        """Append to a locked leaf in place; its key follows when it was shorter than a page."""
        if len(leaf.tokens) < self._key_bytes and leaf.parent is not None:
            old_key = leaf.key
            self._unlink(leaf.parent, leaf)
            leaf.tokens += tokens
            self._link(leaf.parent, leaf)
            self.watch_registry.notify(leaf.parent, old_key[:TOKEN_BYTES])
        else:
            leaf.tokens += tokens
        if pages:
            leaf.pages += pages
            self._count_pages(leaf, len(pages))
        if leaf.watchers:
            self.watch_registry.notify(leaf, bytes(tokens[:TOKEN_BYTES]))

    def take_tail_page(self, leaf: Node) -> int:
        """Cut the partial last page off a leaf that has whole pages too; the caller owns it now."""
        extra = leaf.num_tokens % self.page_size
        assert extra
        assert not leaf.children
        page = leaf.pages.pop()
        del leaf.tokens[-extra * TOKEN_BYTES :]
        self._count_pages(leaf, -1)
        if not leaf.lock_ref:
            self.order.on_resized(leaf)
        self.watch_registry.notify(leaf)
        return page

    def detach(self, leaf: Node) -> array[int]:
        """Take an unlocked leaf out of the tree; the caller owns its pages now."""
        assert leaf.lock_ref == 0
        assert not leaf.children
        pages = self._take_out(leaf)
        self.order.discard(leaf)
        return pages

    def reclaim(self, leaf: Node) -> array[int]:
        """The only session of a leaf takes it out of the tree; its hold is gone with it."""
        assert leaf.lock_ref == 1
        assert not leaf.children
        parent = leaf.parent
        assert parent is not None
        pages = self._take_out(leaf)
        self.unlock(parent)
        return pages

    def _count_pages(self, node: Node, pages: int) -> None:
        namespace = node.namespace
        self.num_pages += pages
        namespace.num_pages += pages
        if node.lock_ref:
            self.num_locked += pages
            namespace.num_locked += pages
        elif namespace.is_dead:
            self.num_dead += pages
        if node.session_refs is not None and self.session_eviction is not None:
            self.session_eviction.count_pages(node, pages)

    # -- letting go ---------------------------------------------------------------------------

    @property
    def num_evictable(self) -> int:
        """Pages that eviction could free now."""
        return self.num_pages - self.num_locked

    def evict(self, num_pages: int) -> int:
        """Free up to `num_pages` pages of living spaces, leaves in order, each from its tail.

        Returns the pages freed. Cost: O(pages freed + nodes removed), however large the tree.
        """
        order, evicted_history, wanted = self.order, self.evicted_history, num_pages
        recent, max_recent, tracks_evictions = (
            evicted_history.recent,
            evicted_history.max_recent,
            order.tracks_evictions,
        )
        has_long_pages = self.page_size > 1
        gone: list[array[int]] = []  # counted at the end
        num_spare = 0  # bytes that the tokens of partial pages lack
        while wanted > 0:
            leaf = order.pop(wanted)
            if leaf is None:
                break
            parent, namespace, pages = leaf.parent, leaf.namespace, leaf.pages
            size = len(pages)
            if namespace.is_dead:  # counts as free already
                self._remove(leaf)
                continue
            if size > wanted:
                self._evict_tail(leaf, wanted)
                wanted = 0
                break
            # `_remove` for a leaf of a living space, and it is remembered. The hot path.
            assert parent is not None
            key = leaf.key
            point = (parent.node_id, leaf.start, key[:TOKEN_BYTES] if has_long_pages else key)
            recent[point] = key
            if len(recent) > max_recent:
                recent = evicted_history.rotate()
            if tracks_evictions:
                order.on_evicted(leaf, point, size)
            if leaf.watchers:
                self.watch_registry.notify(leaf)
            leaf.pages = _NO_PAGES
            if leaf.session_refs is not None and self.session_eviction is not None:
                self.session_eviction.count_pages(leaf, -size)
                self.session_eviction.on_removed(leaf)
            if has_long_pages:
                num_spare += size * self._key_bytes - len(leaf.tokens)
                if parent.first_token_index is not None:
                    remove_key(parent, key)
            wanted -= size
            namespace.num_pages -= size
            gone.append(pages)
            leaf.parent = None
            del parent.children[key]
            if parent.parent is None and not parent.children:
                self.prune(namespace)
        if gone:
            freed = self._pool.free_all(gone)
            self.num_nodes -= len(gone)
            self.num_pages -= freed
            self.num_evicted_tokens += freed * self.page_size - num_spare // TOKEN_BYTES
        return num_pages - wanted

    def reset(self, name: str) -> None:
        """Forget a namespace in O(1): its pages count as free, taken apart when needed."""
        self.evicted_history.forget(name)
        namespace = self.namespaces.pop(name, None)
        if namespace is None:
            return
        namespace.is_dead = True
        self.num_dead += namespace.num_pages - namespace.num_locked
        self.watch_registry.notify_namespace(name)
        if namespace.num_pages > namespace.num_locked:  # what is locked goes when it is let go
            self.pending_free.append(namespace.root)

    def free_pending(self, num_pages: int) -> int:
        """Take dead subtrees apart until at least `num_pages` pages are free or none is left."""
        freed = 0
        while freed < num_pages and self.pending_free:
            node = self.pending_free.pop()
            self.pending_free.extend(node.children.values())
            if node.lock_ref or node.parent is None:  # held, a root, or gone already
                continue
            freed += len(node.pages)
            self._remove(node)
        return freed

    def _evict_tail(self, leaf: Node, num_pages: int) -> None:
        """Free the last `num_pages` pages of a leaf that has more."""
        tokens, pages = leaf.tokens, leaf.pages
        keep = len(pages) - num_pages
        cut = keep * self._key_bytes
        page = bytes(tokens[cut : cut + self._key_bytes])
        point = (leaf.node_id, leaf.start + keep * self.page_size, page[:TOKEN_BYTES])
        self.num_evicted_tokens += (len(tokens) - cut) // TOKEN_BYTES
        self.evicted_history.remember(point, page)
        if self.order.tracks_evictions:
            self.order.on_evicted(leaf, point, num_pages)
        self._pool.free(pages[keep:])
        del pages[keep:]
        del tokens[cut:]
        self._count_pages(leaf, -num_pages)
        self.order.on_resized(leaf)
        if leaf.watchers:
            self.watch_registry.notify(leaf)

    def _remove(self, node: Node) -> None:
        """Take an unlocked node out and free its pages. Its children are the caller's concern."""
        self._pool.free(self._take_out(node))
        self.order.discard(node)

    def _take_out(self, node: Node) -> array[int]:
        """Leave nothing that a stale reference could mistake for a living node; its pages."""
        parent, pages = node.parent, node.pages
        assert parent is not None
        self._count_pages(node, -len(pages))
        self._unlink(parent, node)
        if node.watchers:
            self.watch_registry.notify(node)
        self.num_nodes -= 1
        node.pages = _NO_PAGES
        if node.session_refs is not None and self.session_eviction is not None:
            self.session_eviction.on_removed(node)
        if node.children:
            for child in node.children.values():
                child.parent = child.namespace.root  # to be taken apart, unreachable from above
            node.children = NO_CHILDREN
            node.first_token_index = None
        node.parent = None
        return pages

    # -- children -----------------------------------------------------------------------------

    def _link(self, parent: Node, child: Node) -> None:
        key = child.key = bytes(child.tokens[: self._key_bytes])
        assert key not in parent.children
        if parent.children is NO_CHILDREN:
            parent.children = {}
        parent.children[key] = child
        if self.page_size > 1:
            add_key(parent, key)

    def _unlink(self, parent: Node, child: Node) -> None:
        if parent.children.get(child.key) is child:
            del parent.children[child.key]
            if parent.first_token_index is not None:
                remove_key(parent, child.key)


_NO_PAGES = array("i")  # of nodes that are gone; stays empty


def common_tokens(
    edge: bytearray, data: bytearray | memoryview, pos: int, end: int, at: int = 0
) -> int:
    """Leading tokens that `edge` from token `at` has in common with `data`, int32 in [pos, end)."""
    count = min(len(edge) // TOKEN_BYTES - at, end - pos)
    if not count:
        return 0
    here = np.frombuffer(edge, np.int32, count, at * TOKEN_BYTES)
    differs = here != np.frombuffer(data, np.int32, count, pos * TOKEN_BYTES)
    first = int(differs.argmax())
    return first if differs[first] else count
