"""`RadixTree`: nodes, their tokens and pages, locks and the order of eviction.

It owns every page that holds published K/V. It is independent of sequences and never allocates.

A node's edge holds `tokens` (int32 bytes) from position `start`, and one page id for every page
they touch. Starts are multiples of the page size P. Interior nodes end on a page boundary; a leaf
may end inside a page. Children are keyed by the bytes of their first page (fewer for a leaf
shorter than a page), so siblings may share a page prefix but never a whole page:

    root ── [0 ........ 32) ─┬─ [32 ..... 48) ── [48 .. 53)      P = 16; the last page holds 5
                             └─ [32 .. 41)                       tokens, the sibling's 9

Pages are never split or copied here: where two prompts diverge inside a page, each has a page of
its own for it, see radix_cache.py. A node with `lock_ref` > 0 cannot be evicted: a sequence ends in
it, or it has a locked child.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator, Sequence

from radixserve.cache.events import (
    ROOT,
    Appended,
    EventLog,
    Removed,
    Reset,
    Split,
    Stored,
    Truncated,
)
from radixserve.cache.interface import CacheSession
from radixserve.cache.namespace import Namespace, is_within
from radixserve.cache.page_pool import PagePool
from radixserve.cache.radix.child_index import add_key, closest_child, has_longer, remove_key
from radixserve.cache.radix.eviction import EvictedHistory, EvictionOrder
from radixserve.cache.radix.node import NO_CHILDREN, NamespaceTree, Node
from radixserve.cache.radix.retention import RetentionPolicy
from radixserve.cache.tokens import TOKEN_BYTES
from radixserve.cache.watch import WatchKey, WatchRegistry

_NO_PAGES = array("i")  # of removed nodes; stays empty


class RadixTree:
    """All namespaces' trees over one page pool."""

    def __init__(self, pool: PagePool, page_size: int, order: EvictionOrder) -> None:
        self.page_size = page_size
        self.epoch = 0  # of the weights
        self.namespaces: dict[Namespace, NamespaceTree] = {}  # of that epoch
        self.other_epochs: dict[int, dict[Namespace, NamespaceTree]] = {}  # K/V of other weights
        self.order = order  # eviction order of the unlocked nodes
        self.retention: RetentionPolicy | None = None  # `order`, once sessions are used
        self.evicted_history = EvictedHistory()
        self.watch_registry = WatchRegistry()
        self._watched = self.watch_registry.watched
        self.events: EventLog | None = None  # while a log is open
        self.num_pages = 0  # in nodes, dead ones included
        self.num_locked = 0  # pages of locked nodes
        self.num_dead = 0  # unlocked pages of dead namespaces: count as free
        self.num_nodes = 0
        self.num_splits = 0
        self.num_evicted_tokens = 0
        self.now = 0.0  # seconds, see `PageOwner`
        self.pending_free: list[Node] = []  # subtrees of dead namespaces, freed when needed
        self.pool = pool  # where pages that `cut` and `remove` returned are freed
        self._key_bytes = page_size * TOKEN_BYTES
        self.num_created = 0  # nodes since the start; the number of one is its id

    def set_retention(self, retention: RetentionPolicy) -> None:
        """Replace the order by a policy that was made around it."""
        self.order = self.retention = retention

    # -- look-up ------------------------------------------------------------------------------

    def open_namespace(self, key: Namespace) -> NamespaceTree:
        """Returns the live tree of a namespace; creates it if there is none."""
        namespace = self.namespaces.get(key)
        if namespace is None:
            namespace = self.namespaces[key] = NamespaceTree(key, self.epoch)
            self.watch_registry.notify(*self.watch_key(key))
        return namespace

    def watch_key(self, key: Namespace) -> WatchKey:
        """Returns the key under which watches wait for changes of that namespace."""
        return key, b""

    # -- locks --------------------------------------------------------------------------------

    def lock(self, node: Node) -> None:
        """Lock `node` and its ancestors. Climbs only to the first node already locked."""
        lock_ref, parent, namespace = node.lock_ref, node.parent, node.namespace
        while not lock_ref and parent is not None:
            node.lock_ref = 1
            self.order.discard(node)
            pages = len(node.pages)
            self.num_locked += pages
            namespace.num_locked += pages
            if namespace.is_dead:
                self.num_dead -= pages
            node = parent
            lock_ref, parent = node.lock_ref, node.parent
        node.lock_ref = lock_ref + 1

    def unlock(self, node: Node) -> None:
        """Undo one `lock`. Nodes without locks become evictable, most recently unlocked last."""
        namespace, order = node.namespace, self.order
        while True:
            node.lock_ref = lock_ref = node.lock_ref - 1
            parent = node.parent
            if lock_ref:
                return
            if parent is None:
                if not node.children:
                    self._prune(namespace)
                return
            pages = len(node.pages)
            self.num_locked -= pages
            namespace.num_locked -= pages
            if namespace.is_dead:
                self.num_dead += pages
                self.pending_free.extend(node.children.values())
                self.pool.free(self.remove(node))
            elif len(node.tokens) < self._key_bytes and has_longer(parent, node.key):
                self.pool.free(self.remove(node))  # a sibling holds all of this leaf, and more
            else:
                node.last_use = self.now
                order.add(node)
            node = parent

    def move_lock(self, old: Node, new: Node) -> Node:
        """Turn a lock on `old` into a lock on `new`. Returns `new`."""
        if new is not old:
            self.lock(new)
            self.unlock(old)
        return new

    def _prune(self, namespace: NamespaceTree) -> None:
        """Delete an empty, unlocked namespace."""
        root, epoch = namespace.root, namespace.epoch
        if root.lock_ref or root.children:
            return
        spaces = self.namespaces if epoch == self.epoch else self.other_epochs.get(epoch, {})
        if spaces.get(namespace.key) is namespace:
            del spaces[namespace.key]
            if not spaces:
                self.other_epochs.pop(epoch, None)

    # -- insertion and removal ----------------------------------------------------------------

    def attach(
        self,
        parent: Node,
        start: int,
        key: bytes,
        tokens: bytearray,
        pages: array[int],
        locked: Node,
        session: CacheSession | None,
    ) -> Node:
        """Add a leaf that takes over `tokens`, whose first page is `key`, and `pages`. Returns the
        leaf. The caller's lock on `locked`, which is `parent` or on its path, moves to the leaf.
        `session`: the caller's."""
        namespace, size = parent.namespace, len(pages)
        self.num_created = node_id = self.num_created + 1
        self.num_nodes += 1
        leaf = Node(namespace, parent, start, key, tokens, pages, node_id)
        leaf.policy_key = self.order.initial_key
        self.num_pages += size
        namespace.num_pages += size
        self._link(parent, leaf)
        if self._watched:
            self.watch_registry.notify(parent.node_id, key[:TOKEN_BYTES])
        if locked is parent:  # its count does not change: the leaf is a locked child from now on
            leaf.lock_ref = 1
            self.num_locked += size
            namespace.num_locked += size
        else:
            if namespace.is_dead:
                self.num_dead += size
            self.move_lock(locked, leaf)
        if self.retention is not None:
            self.retention.on_attached(leaf, session)
        if self.events is not None and self.is_current(namespace):
            self.events.add(_stored(leaf))
        return leaf

    def split(self, node: Node, num_tokens: int) -> Node:
        """Split `node` after its first `num_tokens`, which are whole pages. Returns the new upper
        part.

        `node` becomes the lower part and keeps its place in the order. An unlocked upper part is
        in no order yet: the caller locks it before any other call.
        """
        parent, cut, pages = node.parent, num_tokens * TOKEN_BYTES, num_tokens // self.page_size
        assert parent is not None
        assert 0 < num_tokens < node.num_tokens
        assert num_tokens % self.page_size == 0
        self.num_created = node_id = self.num_created + 1
        self.num_nodes += 1
        tokens, first = node.tokens[:cut], node.pages[:pages]
        upper = Node(node.namespace, parent, node.start, node.key, tokens, first, node_id)
        parent.children[node.key] = upper  # the first page, and so the key, is the same
        del node.tokens[:cut]
        del node.pages[:pages]
        node.start += num_tokens
        node.parent = upper
        node.key = bytes(node.tokens[: self._key_bytes])
        self._link(upper, node)
        upper.policy_key, upper.last_use = node.policy_key, node.last_use
        if node.retention is not None and self.retention is not None:
            self.retention.on_split(upper, node)
        if node.token_values is not None:
            upper.token_values = node.token_values.split(num_tokens)
        if node.lock_ref:
            upper.lock_ref = 1
        else:
            self.order.on_resized(node)
        self.num_splits += 1
        self.watch_registry.notify(node.node_id)
        if self.events is not None and self.is_current(node.namespace):
            self.events.add(Split(int(node.node_id), int(upper.node_id), node.num_tokens))
        return upper

    def extend(self, leaf: Node, tokens: bytearray, pages: array[int]) -> None:
        """Append to a locked leaf in place; its key follows when it was shorter than a page."""
        if len(leaf.tokens) < self._key_bytes and (parent := leaf.parent) is not None:
            old_key = leaf.key
            self._unlink(parent, leaf)
            leaf.tokens += tokens
            leaf.key = bytes(leaf.tokens[: self._key_bytes])
            self._link(parent, leaf)
            self.watch_registry.notify(parent.node_id, old_key[:TOKEN_BYTES])
        else:
            leaf.tokens += tokens
        if pages:
            leaf.pages += pages
            self._count_pages(leaf, len(pages))
        if self._watched or self.events is not None:
            self.note_appended(leaf, bytes(tokens))

    @property
    def has_listeners(self) -> bool:
        """Whether `note_appended` has an effect."""
        return bool(self._watched) or self.events is not None

    def note_appended(self, leaf: Node, tokens: bytes) -> None:
        """Report tokens that were appended to a leaf, to watches and the event log."""
        self.watch_registry.notify(leaf.node_id, tokens[:TOKEN_BYTES])
        if self.events is not None and self.is_current(leaf.namespace):
            self.events.add(Appended(int(leaf.node_id), tokens))

    def count_grown(self, leaves: Sequence[Node]) -> None:
        """Count one more page in each of these locked leaves."""
        self.num_pages += len(leaves)
        self.num_locked += len(leaves)
        for leaf in leaves:
            namespace = leaf.namespace
            namespace.num_pages += 1
            namespace.num_locked += 1
        if self.retention is not None:
            for leaf in leaves:
                if leaf.retention is not None:
                    self.retention.count_pages(leaf, 1)

    def cut(self, leaf: Node, keep: int) -> array[int]:
        """Cut a leaf, locked or not, after its first `keep` >= 1 pages. Returns the pages after
        them, which the caller owns from now on."""
        assert not leaf.children
        if self.events is not None and self.is_current(leaf.namespace):
            num_cut = leaf.num_tokens - keep * self.page_size
            self.events.add(Truncated(int(leaf.node_id), num_cut))
        pages = leaf.pages[keep:]
        del leaf.pages[keep:]
        del leaf.tokens[keep * self._key_bytes :]
        if leaf.token_values is not None:
            leaf.token_values.cut(leaf.num_tokens)
        self._count_pages(leaf, -len(pages))
        if not leaf.lock_ref:
            self.order.on_resized(leaf)
        if self._watched:
            self.watch_registry.notify(leaf.node_id)
        return pages

    def withdraw(self, leaf: Node) -> tuple[Node, array[int]]:
        """Remove a leaf with a single lock, the caller's, which moves to the parent. Returns the
        parent and the leaf's pages, which the caller owns from now on."""
        parent = leaf.parent
        assert leaf.lock_ref == 1
        assert parent is not None
        return parent, self.remove(leaf)

    def remove(self, node: Node) -> array[int]:
        """Remove a node that is not in the order of eviction. Returns its pages, which the caller
        owns from now on.

        In a dead namespace it may have children, which the caller frees. Its links are cleared, so
        that stale references do not take it for a live node.
        """
        parent, pages, namespace = node.parent, node.pages, node.namespace
        assert parent is not None
        size = len(pages)
        self.num_nodes -= 1
        self.num_pages -= size
        namespace.num_pages -= size
        if node.lock_ref:
            self.num_locked -= size
            namespace.num_locked -= size
        elif namespace.is_dead:
            self.num_dead -= size
        key, children = node.key, parent.children
        if children.get(key) is node:
            del children[key]
            if parent.first_token_index is not None:
                remove_key(parent, key)
        if self._watched:
            self.watch_registry.notify(node.node_id)
        node.pages = _NO_PAGES
        if node.retention is not None and self.retention is not None:
            self.retention.count_pages(node, -size)
            self.retention.on_removed(node)
        if node.children:
            for child in node.children.values():
                child.parent = namespace.root  # to be freed, unreachable from above
            node.children = NO_CHILDREN
            node.first_token_index = None
        node.parent = None
        if self.events is not None and self.is_current(namespace):
            shared = closest_child(parent, key)[1] if self.page_size > 1 else 0
            self.events.add(Removed(int(node.node_id), node.num_tokens - shared))
        return pages

    def drop(self, node: Node) -> None:
        """Remove an unlocked node and free its pages."""
        self.order.discard(node)
        self.pool.free(self.remove(node))

    def _count_pages(self, node: Node, pages: int) -> None:
        namespace = node.namespace
        self.num_pages += pages
        namespace.num_pages += pages
        if node.lock_ref:
            self.num_locked += pages
            namespace.num_locked += pages
        elif namespace.is_dead:
            self.num_dead += pages
        if node.retention is not None and self.retention is not None:
            self.retention.count_pages(node, pages)

    # -- eviction -----------------------------------------------------------------------------

    @property
    def num_evictable(self) -> int:
        """Pages that eviction could free now."""
        return self.num_pages - self.num_locked

    def evict(self, num_pages: int) -> int:
        """Free up to `num_pages` pages of live namespaces, leaves in order, each from its tail.

        Returns the pages freed. Cost: O(pages freed + nodes removed), however large the tree.
        """
        order, history = self.order, self.evicted_history
        wanted, num_bytes = num_pages, 0  # of the tokens dropped
        freed: array[int] | None = None
        while wanted > 0 and (leaf := order.pop(wanted)) is not None:
            if leaf.namespace.is_dead:  # counts as free already
                self.drop(leaf)
                continue
            parent, size, num_bytes = leaf.parent, len(leaf.pages), num_bytes + len(leaf.tokens)
            assert parent is not None
            if size <= wanted:
                keep, page = 0, leaf.key
                point = parent.node_id, leaf.start, page[:TOKEN_BYTES]
            else:
                keep, size = size - wanted, wanted
                cut = keep * self._key_bytes
                page = bytes(leaf.tokens[cut : cut + self._key_bytes])
                point = leaf.node_id, leaf.start + keep * self.page_size, page[:TOKEN_BYTES]
                num_bytes -= cut
            history.remember(point, page)
            if order.tracks_evictions:
                order.on_evicted(leaf, point, size)
            wanted -= size
            pages = self.cut(leaf, keep) if keep else self.remove(leaf)
            if freed is None:
                freed = pages
            else:
                freed += pages
            if not parent.children and parent.parent is None:
                self._prune(leaf.namespace)
        if freed is not None:
            self.pool.free(freed)
        self.num_evicted_tokens += num_bytes // TOKEN_BYTES
        return num_pages - wanted

    def make_room(self, num_pages: int) -> bool:
        """Free `num_pages` pages: of dead namespaces first, then in the order of eviction. Returns
        False, and frees nothing, if fewer can be freed."""
        if num_pages > self.num_pages - self.num_locked:
            return False
        while self.pending_free and num_pages > 0:
            node = self.pending_free.pop()
            self.pending_free.extend(node.children.values())
            if node.lock_ref or node.parent is None:  # locked, a root, or gone already
                continue
            num_pages -= len(node.pages)
            self.drop(node)
        if num_pages > 0:
            self.evict(num_pages)
        return True

    def reset(self, key: Namespace | None) -> None:
        """Drop a namespace and those below it, or all if None, in all epochs. Their pages count as
        free at once; their nodes are removed when their pages are needed. O(1) per namespace and
        epoch, plus the history of evictions and what the retention policy keeps."""
        if key is not None:
            self.evicted_history.forget(str(key))
        for spaces in [self.namespaces, *self.other_epochs.values()]:
            for gone in [own for own in spaces if is_within(own, key)]:
                self._drop_namespace(spaces.pop(gone))
        self.other_epochs = {epoch: old for epoch, old in self.other_epochs.items() if old}

    def _drop_namespace(self, namespace: NamespaceTree) -> None:
        """See `reset`. It is among the namespaces no more."""
        self.evicted_history.forget(namespace.root.node_id)
        if self.retention is not None:
            self.retention.on_reset(namespace)
        if self.events is not None and self.is_current(namespace):
            self.events.add(Reset(namespace.text))
        namespace.is_dead = True
        self.num_dead += namespace.num_pages - namespace.num_locked
        self.watch_registry.notify(*self.watch_key(namespace.key))
        if namespace.num_pages > namespace.num_locked:  # locked nodes are freed on unlock
            self.pending_free.append(namespace.root)

    # -- epochs -------------------------------------------------------------------------------

    def begin_epoch(self, epoch: int) -> None:
        """The weights have changed: look-ups find the K/V of `epoch` alone from now on, which is
        that of an earlier call with the same number. Nodes of other epochs keep their places in the
        order of eviction. O(open watches), and with an event log O(nodes of both epochs)."""
        if self.events is not None:
            for namespace in self.namespaces.values():
                self.events.add(Reset(namespace.text))
        if self.namespaces:
            self.other_epochs[self.epoch] = self.namespaces
        self.epoch, self.namespaces = epoch, self.other_epochs.pop(epoch, {})
        if self.events is not None:
            for stored in self.stored_nodes():
                self.events.add(stored)
        for place in list(self._watched):
            self.watch_registry.notify(place)

    def all_namespaces(self) -> Iterator[NamespaceTree]:
        """Yields the live namespaces of all epochs."""
        for spaces in (self.namespaces, *self.other_epochs.values()):
            yield from spaces.values()

    def is_current(self, namespace: NamespaceTree) -> bool:
        """Whether look-ups find the namespace, and consumers of events follow it."""
        return not namespace.is_dead and namespace.epoch == self.epoch

    # -- events -------------------------------------------------------------------------------

    def stored_nodes(self) -> Iterator[Stored]:
        """Yields the `Stored` event of each node of live namespaces, parents first."""
        for space in self.namespaces.values():
            queue = deque(space.root.children.values())
            while queue:
                node = queue.popleft()
                yield _stored(node)
                queue.extend(node.children.values())

    def leaves(self, key: Namespace | None) -> list[Node]:
        """Returns the leaves of a namespace and those below it, or of all if None, the last used
        first. O(nodes)."""
        spaces = self.namespaces.items()
        leaves, stack = [], [space.root for own, space in spaces if is_within(own, key)]
        while stack:
            node = stack.pop()
            if node.children:
                stack.extend(node.children.values())
            elif node.parent is not None:
                leaves.append(node)
        return sorted(leaves, key=lambda leaf: -leaf.last_use)

    # -- children -----------------------------------------------------------------------------

    def _link(self, parent: Node, child: Node) -> None:
        children, key = parent.children, child.key
        assert key not in children
        if children is NO_CHILDREN:
            children = parent.children = {}
        children[key] = child
        if self.page_size > 1:
            add_key(parent, key)

    def _unlink(self, parent: Node, child: Node) -> None:
        if parent.children.get(child.key) is child:
            del parent.children[child.key]
            if parent.first_token_index is not None:
                remove_key(parent, child.key)


def _stored(node: Node) -> Stored:
    """Returns the `Stored` event of a node."""
    parent = node.parent
    assert parent is not None
    above = ROOT if parent.parent is None else int(parent.node_id)
    return Stored(int(node.node_id), above, node.namespace.text, bytes(node.tokens))
