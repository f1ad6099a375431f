"""`check()` and `dump()`: every law of the cache, and a picture of it. Iterative everywhere."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from radixserve.cache.radix.allocator import PageAllocator
from radixserve.cache.radix.child_index import check_index, has_longer
from radixserve.cache.radix.node import NamespaceTree, Node
from radixserve.cache.radix.sequence import CachedSequence
from radixserve.cache.tokens import TOKEN_BYTES


def check_cache(allocator: PageAllocator) -> None:
    """Raise AssertionError at the first broken law."""
    owners = _Owners(allocator.pool.num_pages)
    owners.add(allocator.pool.free_ids(), "the free list")
    nodes = _all_nodes(allocator)
    for node in nodes:
        owners.add(node.pages.tolist(), f"node {node.node_id}")
        _check_node(allocator, node)
    _check_locks(allocator, nodes)
    _check_counts(allocator, nodes)
    _check_order(allocator, nodes)
    _check_session_refs(allocator, nodes)
    for sequence in sequences(allocator):
        owners.add(sequence._pages[sequence._num_shared :].tolist(), repr(sequence))
        _check_sequence(allocator, sequence)
    owners.check_complete()


def sequences(allocator: PageAllocator) -> list[CachedSequence]:
    return [session for session in allocator.live_sequences if isinstance(session, CachedSequence)]


class _Owners:
    """Who owns each page; a second owner is an error."""

    def __init__(self, num_pages: int) -> None:
        self._owner: list[str | None] = [None] * num_pages

    def add(self, pages: list[int], owner: str) -> None:
        for page in pages:
            assert 0 <= page < len(self._owner), f"{owner} has page {page}, which does not exist"
            other = self._owner[page]
            assert other is None, f"page {page} belongs to {other} and to {owner}"
            self._owner[page] = owner

    def check_complete(self) -> None:
        lost = [page for page, owner in enumerate(self._owner) if owner is None]
        assert not lost, f"pages {lost[:8]} belong to nobody ({len(lost)} in all)"


def _all_nodes(allocator: PageAllocator) -> list[Node]:
    """Every node but the roots: of living spaces, of dead ones, of those only sequences hold."""
    tops = [namespace.root for namespace in allocator.tree.namespaces.values()]
    tops += allocator.tree.pending_free
    for sequence in sequences(allocator):
        node = sequence._last_node
        while node.parent is not None:
            node = node.parent
        tops.append(node)
    seen: dict[int, Node] = {}
    stack = list(tops)
    roots: set[int] = set()
    while stack:
        node = stack.pop()
        if id(node) in seen or id(node) in roots:
            continue
        if node is node.namespace.root:
            roots.add(id(node))
        elif node.parent is not None:
            seen[id(node)] = node
        stack.extend(node.children.values())
    return list(seen.values())


def _check_node(allocator: PageAllocator, node: Node) -> None:
    size, parent, name = allocator.page_size, node.parent, f"node {node.node_id}"
    assert parent is not None, f"{name} has no parent"
    assert node.num_tokens > 0, f"{name} is empty"
    assert node.start % size == 0, f"{name} starts inside a page"
    assert len(node.pages) == allocator.pages_for(node.num_tokens), f"{name} lacks or hoards pages"
    assert not node.children or node.end % size == 0, f"{name} has children and a partial page"
    if parent.children.get(node.key) is node:
        assert node.start == parent.end, f"{name} does not begin where its parent ends"
    else:
        assert node.namespace.is_dead, f"{name} is not among its parent's children"
    for key, child in node.children.items():
        assert child.parent is node, f"{name} has a child with another parent"
        assert key == child.key, f"{name} has a child under a wrong key"
        head = bytes(child.tokens[: size * TOKEN_BYTES])
        assert key == head, f"{name} has a child under the key of another first page"
    check_index(node)
    if not node.lock_ref and not node.namespace.is_dead:
        is_short = node.num_tokens < size
        is_covered = is_short and has_longer(parent, bytes(node.tokens))
        assert not is_covered, f"{name} is unused and covered by a sibling"


def _check_locks(allocator: PageAllocator, nodes: list[Node]) -> None:
    held: dict[int, int] = {}
    for sequence in sequences(allocator):
        held[id(sequence._last_node)] = held.get(id(sequence._last_node), 0) + 1
    for node in nodes:
        wanted = held.get(id(node), 0) + sum(
            1 for child in node.children.values() if child.lock_ref
        )
        assert node.lock_ref == wanted, (
            f"node {node.node_id} has {node.lock_ref} locks, not {wanted}"
        )


def _check_counts(allocator: PageAllocator, nodes: list[Node]) -> None:
    tree = allocator.tree
    pages = sum(len(node.pages) for node in nodes)
    locked = sum(len(node.pages) for node in nodes if node.lock_ref)
    dead = sum(len(n.pages) for n in nodes if n.namespace.is_dead and not n.lock_ref)
    assert tree.num_nodes == len(nodes), f"{tree.num_nodes} nodes counted, {len(nodes)} found"
    assert tree.num_pages == pages, f"{tree.num_pages} tree pages counted, {pages} found"
    assert tree.num_locked == locked, f"{tree.num_locked} locked pages counted, {locked} found"
    assert tree.num_dead == dead, f"{tree.num_dead} dead pages counted, {dead} found"
    assert allocator.num_private == sum(s.num_private for s in sequences(allocator)), (
        "private pages miscounted"
    )
    for namespace in tree.namespaces.values():
        mine = [node for node in nodes if node.namespace is namespace]
        assert namespace.num_pages == sum(len(n.pages) for n in mine), (
            f"pages of {namespace.name!r}"
        )
        locked = sum(len(n.pages) for n in mine if n.lock_ref)
        assert namespace.num_locked == locked, f"locked pages of {namespace.name!r}"
        assert namespace.root.children or namespace.root.lock_ref, (
            f"namespace {namespace.name!r} is empty"
        )


def _check_order(allocator: PageAllocator, nodes: list[Node]) -> None:
    """Every unlocked node is in one queue, before its parent or in an earlier queue."""
    rank: dict[int, tuple[int, int]] = {}
    for number, queue in enumerate(allocator.tree.order.queues()):
        for at, node in enumerate(queue):
            assert id(node) not in rank, f"node {node.node_id} is in two queues of eviction"
            rank[id(node)] = number, at
    for node in nodes:
        if node.namespace.is_dead:
            continue
        assert (id(node) in rank) == (not node.lock_ref), (
            f"node {node.node_id}: locked and evictable"
        )
        if node.lock_ref or node.parent is None or id(node.parent) not in rank:
            continue
        assert rank[id(node)] < rank[id(node.parent)], f"node {node.node_id} outlives its parent"
    found = {id(node) for node in nodes}
    assert all(key in found for key in rank), "the eviction order holds a node that is gone"


def _check_session_refs(allocator: PageAllocator, nodes: list[Node]) -> None:
    """Claims are what the sessions' anchors and leases say, and rise towards the root."""
    session_eviction = allocator.tree.session_eviction
    if session_eviction is None:
        assert not any(node.session_refs for node in nodes), "a claim without sessions"
        return
    leased = sum(
        len(n.pages) for n in nodes if n.session_refs is not None and n.session_refs.num_leased
    )
    assert session_eviction.num_leased_pages == leased, "leased pages miscounted"
    for node in nodes:
        if node.namespace.is_dead:
            continue
        name, session_refs = f"node {node.node_id}", node.session_refs
        below = [child.session_refs for child in node.children.values()]
        end_nodes = [
            h.end_nodes[node] for h in session_eviction.open_sessions if node in h.end_nodes
        ]
        num_open = len(end_nodes) + sum(1 for c in below if c is not None and c.num_open)
        num_leased = sum(1 for lease in end_nodes if lease is not None)
        num_leased += sum(1 for c in below if c is not None and c.num_leased)
        is_public = any(
            child.session_refs is None or child.session_refs.is_public
            for child in node.children.values()
        )
        if session_refs is None:
            assert not num_open, f"{name} is claimed and does not know it"
            continue
        assert session_refs.num_open == num_open, (
            f"{name}: {session_refs.num_open} claims, not {num_open}"
        )
        assert session_refs.num_leased == num_leased, f"{name}: wrong number of leases"
        assert session_refs.num_leased <= session_refs.num_open, f"{name} is leased and not claimed"
        assert session_refs.is_public or not is_public or node.lock_ref, (
            f"{name} has public children"
        )
    session_eviction.check()


def _check_sequence(allocator: PageAllocator, sequence: CachedSequence) -> None:
    size, name = allocator.page_size, repr(sequence)
    assert not sequence.is_released, f"{name} is registered after its release"
    assert len(sequence.pages) == allocator.pages_for(sequence.length), f"{name} has wrong pages"
    published, committed = sequence._published, sequence.committed_len
    known = sequence.length - sequence.num_unknown
    assert published <= committed <= known, f"{name} has committed too much"
    assert (sequence.tokens[known:] == -1).all(), f"{name} knows what it calls unknown"
    assert committed - published < size, f"{name} has unpublished pages"
    assert sequence._num_shared >= published // size, f"{name} holds published pages as its own"
    tokens, pages = _path(sequence._node_covering(published))
    ours = sequence.tokens[:published].tobytes()
    assert tokens[: len(ours)] == ours, f"{name} is not on the path it holds"
    shared = sequence.pages[: sequence._num_shared].tolist()
    assert pages[: len(shared)] == shared, f"{name} shares pages that are not on its path"
    for source, target, count in sequence.cow_copies:
        assert target in sequence.pages[sequence._num_shared :], f"{name} copies to a foreign page"
        assert 0 < count < size, f"{name} copies {count} tokens"
        at = sequence._last_node
        found = False
        while at.parent is not None:
            found = found or source in at.pages
            at = at.parent
        assert found, f"{name} copies from page {source}, which it does not protect"


def _path(node: Node) -> tuple[bytes, list[int]]:
    """Tokens and pages from the root to the end of `node`."""
    nodes = []
    at: Node | None = node
    while at is not None:
        nodes.append(at)
        at = at.parent
    nodes.reverse()
    return b"".join(n.tokens for n in nodes), [page for n in nodes for page in n.pages]


def dump_trees(allocator: PageAllocator, max_nodes: int) -> dict[str, Any]:
    """See `RadixCache.dump`."""
    num_sequences: dict[int, int] = {}
    for sequence in sequences(allocator):
        at: Node | None = sequence._last_node
        while at is not None:
            num_sequences[id(at)] = num_sequences.get(id(at), 0) + 1
            at = at.parent
    namespaces: dict[str, Any] = {}
    queue: deque[tuple[Node, dict[str, Any]]] = deque()
    for name, namespace in sorted(allocator.tree.namespaces.items(), key=lambda item: item[0]):
        namespaces[name] = _as_dict(namespace.root, num_sequences)
        queue.append((namespace.root, namespaces[name]))
    count = 0
    while queue and count < max_nodes:
        node, picture = queue.popleft()
        for child in node.children.values():
            if count >= max_nodes:
                break
            below = _as_dict(child, num_sequences)
            picture["children"].append(below)
            queue.append((child, below))
            count += 1
    return {
        "page_size": allocator.page_size,
        "truncated": count
        < sum(_count_nodes(namespace) for namespace in allocator.tree.namespaces.values()),
        "namespaces": namespaces,
    }


def _count_nodes(namespace: NamespaceTree) -> int:
    count, stack = 0, list(namespace.root.children.values())
    while stack:
        node = stack.pop()
        count += 1
        stack.extend(node.children.values())
    return count


def _as_dict(node: Node, num_sequences: dict[int, int]) -> dict[str, Any]:
    count = len(node.tokens) // TOKEN_BYTES
    return {
        "start": node.start,
        "num_tokens": count,
        "tokens": np.frombuffer(bytes(node.tokens), np.int32).tolist(),
        "pages": node.pages.tolist(),
        "lock_ref": node.lock_ref,
        "sequences": num_sequences.get(id(node), 0),
        "children": [],
    }
