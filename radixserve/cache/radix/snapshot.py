"""`snapshot` of `RadixCache`: some nodes of the tree and every page's owner, at a bounded cost."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from radixserve.cache.audit import usage_state
from radixserve.cache.namespace import as_namespace
from radixserve.cache.radix.lookup import match_prefix
from radixserve.cache.radix.node import Node, path
from radixserve.cache.radix.radix_tree import RadixTree
from radixserve.cache.radix.retention import RetentionPolicy
from radixserve.cache.radix.sequence import RadixSequence
from radixserve.cache.sequence import PageAllocator
from radixserve.cache.snapshot import (
    FREE,
    KEPT,
    LOCKED,
    TREE,
    PageMap,
    SnapshotView,
    edge_tokens,
    page_runs,
    private_size,
    unused_slots,
)
from radixserve.cache.tokens import token_view

_SCANNED = 256  # children of a node that are looked at, the newest ones
_CHILDREN = 24  # of these, shown
_ROOT_CHILDREN = 100
_MORE_CHILDREN = 200  # of a node that was opened
_MAX_NAMESPACES = 64
_MAX_MARKED = 2048  # nodes whose pages are marked as kept, and as many of dead namespaces
_MAX_SESSIONS = 4  # named of a node


def snapshot_tree(allocator: PageAllocator, tree: RadixTree, view: SnapshotView) -> dict[str, Any]:
    """See `PrefixCache.snapshot`."""
    snapshot = _TreeSnapshot(allocator, tree, view)
    snapshot.choose()
    return snapshot.report()


class _TreeSnapshot:
    def __init__(self, allocator: PageAllocator, tree: RadixTree, view: SnapshotView) -> None:
        self._tree = tree
        self._view = view
        self._pages = PageMap(allocator.pool, view)
        self._locking_sequences = [  # pins, which serve no request, included
            seq
            for seq in allocator.live_sequences
            if isinstance(seq, RadixSequence) and view.shows(seq.namespace)
        ]
        self._sequences = [seq for seq in self._locking_sequences if not seq.is_pin]
        self._users: dict[int, int] = {}  # sequences by the identity of a locked node
        self._locked = self._find_locked()
        self._shown: dict[int, Node] = {}  # by identity, parents first
        spaces = (space for key, space in tree.namespaces.items() if view.shows(key))
        self._spaces = list(islice(spaces, _MAX_NAMESPACES))

    def _find_locked(self) -> list[Node]:
        """Returns the locked nodes, parents first; counts the sequences that use each.

        O(locked nodes), however many sequences share them.
        """
        users = self._users
        locked: dict[int, Node] = {}
        for sequence in self._locking_sequences:
            last = sequence.last_node
            users[id(last)] = users.get(id(last), 0) + (not sequence.is_pin)
            for node in path(last):
                if id(node) in locked:
                    break
                locked[id(node)] = node
        nodes = sorted(locked.values(), key=lambda node: node.start)
        for node in reversed(nodes):
            if node.parent is not None:
                above = id(node.parent)
                users[above] = users.get(above, 0) + users.get(id(node), 0)
        return nodes

    # -- which nodes --------------------------------------------------------------------------

    def choose(self) -> None:
        """Choose the nodes to show: those on the wanted path and below opened nodes, then locked
        nodes, then the newest and most recently used ones, breadth first."""
        self._show(self._on_wanted_path())
        roots = [space.root for space in self._spaces]
        self._descend(roots, only_opened=True)
        live = (node for node in self._locked if not node.namespace.is_dead)
        self._show(islice(live, self._view.max_nodes // 2))
        self._descend(roots, only_opened=False)

    def _on_wanted_path(self) -> list[Node]:
        view = self._view
        space = self._tree.namespaces.get(as_namespace(view.path_namespace))
        if not view.path or space is None or not view.shows(space.key):
            return []
        data = token_view(view.path)
        _, node, _, _ = match_prefix(space, data, len(data), self._tree.page_size)
        return [*path(node)][::-1]

    def _descend(self, roots: list[Node], *, only_opened: bool) -> None:
        queue, opened = deque(roots), self._view.opened
        while queue and len(self._shown) < self._view.max_nodes:
            node = queue.popleft()
            is_open = node.node_id in opened
            if only_opened and not is_open and node.parent is not None:
                continue
            usual = _ROOT_CHILDREN if node.parent is None else _CHILDREN
            children = self._hottest(node, _MORE_CHILDREN if is_open else usual)
            self._show(children)
            queue.extend(children)

    def _hottest(self, node: Node, count: int) -> list[Node]:
        """Returns the newest and hottest children, newest first. O(_SCANNED)."""
        newest = list(islice(reversed(node.children.values()), _SCANNED))
        if len(newest) <= count:
            return newest
        opened = self._view.opened
        newest.sort(key=lambda n: (n.node_id in opened, n.lock_ref > 0, n.last_use), reverse=True)
        return sorted(newest[:count], key=_age)

    def _show(self, nodes: Iterable[Node]) -> None:
        shown, limit = self._shown, self._view.max_nodes
        for node in nodes:
            if len(shown) >= limit:
                return
            shown[id(node)] = node

    # -- the report ---------------------------------------------------------------------------

    def report(self) -> dict[str, Any]:
        tree, view, retention = self._tree, self._view, self._tree.retention
        if retention is not None:
            retention.refresh()
        nodes = [self._node_record(node, retention) for node in self._shown.values()]
        self._mark_pages(retention)
        private = sum(seq.num_private for seq in self._sequences)
        sizes = [(len(node.pages), node.num_tokens) for node in self._shown.values()]
        sizes += [private_size(seq, tree.page_size) for seq in self._sequences]
        return {
            "page_size": tree.page_size,
            "namespaces": [
                {
                    "name": space.text,
                    "num_pages": space.num_pages,
                    "num_locked": space.num_locked,
                    "num_children": len(space.root.children),
                }
                for space in self._spaces
            ],
            "nodes": nodes,
            "pages": {**self._pages.report(), "private": private},
            "fragmentation": unused_slots(sizes, tree.page_size),
            "victims": [] if view.within is not None else [*self._victims()],
        }

    def _node_record(self, node: Node, retention: RetentionPolicy | None) -> dict[str, Any]:
        parent = node.parent
        assert parent is not None
        users, state, idle_s = self._users.get(id(node), 0), "cached", None
        if node.lock_ref:
            state = usage_state(users) if users else "pinned"
        else:
            idle_s = max(0.0, self._tree.now - node.last_use)
            if retention is not None:
                state = retention.state(node)
        names, num_sessions = ([], 0) if retention is None else retention.names(node, _MAX_SESSIONS)
        return {
            "id": node.node_id,
            "parent": None if parent.parent is None else parent.node_id,
            "namespace": node.namespace.text,
            "start": node.start,
            **edge_tokens(node.tokens),
            "num_pages": len(node.pages),
            "pages": page_runs(node.pages),
            "lock_ref": node.lock_ref,
            "sequences": users,
            "state": state,
            "idle_s": idle_s,
            "sessions": names,
            "num_sessions": num_sessions,
            "num_children": len(node.children),
        }

    def _mark_pages(self, retention: RetentionPolicy | None) -> None:
        pages = self._pages
        if self._view.within is not None:  # else every page is marked TREE already
            for node in self._shown.values():
                pages.mark(node.pages, TREE)
        else:
            for node in islice(self._dead(), _MAX_MARKED):
                pages.mark(node.pages, FREE)
        if retention is not None:
            shown = (n for n in retention.kept_nodes() if self._view.shows(n.namespace.key))
            for node in islice(shown, _MAX_MARKED):
                pages.mark(node.pages, KEPT)
        for node in self._locked:
            pages.mark(node.pages, LOCKED)
        for sequence in self._sequences:
            pages.mark_sequence(sequence)

    def _dead(self) -> Iterator[Node]:
        """Nodes of namespaces that were reset: their pages count as free."""
        stack = self._tree.pending_free[-_MAX_MARKED:]
        while stack:
            node = stack.pop()
            stack.extend(islice(node.children.values(), _MAX_MARKED))
            yield node

    def _victims(self) -> Iterator[dict[str, Any]]:
        tree = self._tree
        looked_at = islice(tree.order.preview(), _SCANNED)
        live = (pair for pair in looked_at if not pair[0].namespace.is_dead)
        for node, reason in islice(live, self._view.max_victims):
            yield {
                "id": node.node_id,
                "namespace": node.namespace.text,
                "start": node.start,
                **edge_tokens(node.tokens),
                "num_pages": len(node.pages),
                "pages": page_runs(node.pages),
                "idle_s": max(0.0, tree.now - node.last_use),
                "reason": reason,
            }


def _age(node: Node) -> int:
    """Returns a sort key that puts the newest node first."""
    return -node.node_id if isinstance(node.node_id, int) else 0
