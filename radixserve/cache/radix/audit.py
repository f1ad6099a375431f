"""`check()` and `dump()` of `RadixCache`: all invariants of the tree, and its contents."""

from __future__ import annotations

from collections import Counter
from typing import Any

from radixserve.cache.audit import (
    NodeDump,
    check_owners,
    check_tokens,
    check_watches,
    dump_nodes,
    dump_sequences,
    usage_state,
    victim,
)
from radixserve.cache.namespace import is_within
from radixserve.cache.radix.child_index import check_index, has_longer
from radixserve.cache.radix.layers import RadixLayers
from radixserve.cache.radix.node import Node, path
from radixserve.cache.radix.radix_tree import RadixTree
from radixserve.cache.radix.sequence import RadixSequence, node_covering
from radixserve.cache.sequence import PageAllocator
from radixserve.cache.tokens import TOKEN_BYTES


def check_tree(allocator: PageAllocator, tree: RadixTree, layers: RadixLayers | None) -> None:
    """Raise AssertionError at the first broken invariant."""
    sequences = _sequences(allocator)
    nodes = _all_nodes(tree, sequences)
    check_owners(allocator, [(f"node {node.node_id}", node.pages.tolist()) for node in nodes])
    ends = Counter(id(sequence._last_node) for sequence in sequences)
    for node in nodes:
        wanted = ends[id(node)] + sum(child.lock_ref > 0 for child in node.children.values())
        name = f"node {node.node_id}"
        assert node.lock_ref == wanted, f"{name} has {node.lock_ref} locks, not {wanted}"
        _check_node(tree, node)
    _check_counts(tree, nodes)
    _check_order(tree, nodes)
    if tree.retention is not None:
        tree.retention.check_nodes(nodes)
    else:
        assert all(node.retention is None for node in nodes), "retention without a policy"
    for sequence in sequences:
        check_tokens(allocator, sequence)
        _check_sequence(tree, sequence)
    if layers is not None:
        layers.check(allocator.pool, nodes, sequences)
    check_watches(tree.watch_registry)


def _sequences(allocator: PageAllocator) -> list[RadixSequence]:
    return [seq for seq in allocator.live_sequences if isinstance(seq, RadixSequence)]


def _all_nodes(tree: RadixTree, sequences: list[RadixSequence]) -> list[Node]:
    """Every node but the roots: of live namespaces, of dead ones, and of those that only
    sequences still use."""
    stack = [namespace.root for namespace in tree.all_namespaces()] + tree.pending_free
    for sequence in sequences:
        node = sequence._last_node
        while node.parent is not None:
            node = node.parent
        stack.append(node)
    seen: dict[int, Node] = {}
    while stack:
        node = stack.pop()
        if id(node) not in seen:
            seen[id(node)] = node
            stack.extend(node.children.values())
    return [node for node in seen.values() if node.parent is not None]


def _check_node(tree: RadixTree, node: Node) -> None:
    size, parent, name = tree.page_size, node.parent, f"node {node.node_id}"
    assert parent is not None, f"{name} has no parent"
    assert node.num_tokens > 0, f"{name} is empty"
    assert node.start % size == 0, f"{name} starts inside a page"
    assert len(node.pages) == -(-node.num_tokens // size), f"{name} has too few or too many pages"
    assert not node.children or node.end % size == 0, f"{name} has children and a partial page"
    if parent.children.get(node.key) is node:
        assert node.start == parent.end, f"{name} does not begin where its parent ends"
    else:
        assert node.namespace.is_dead, f"{name} is not among its parent's children"
    for key, child in node.children.items():
        assert child.parent is node, f"{name} has a child with another parent"
        assert key == child.key, f"{name} has a child under a wrong key"
        first_page = bytes(child.tokens[: size * TOKEN_BYTES])
        assert key == first_page, f"{name} has a child under the key of another first page"
    check_index(node)
    if not node.lock_ref and not node.namespace.is_dead:
        is_covered = node.num_tokens < size and has_longer(parent, bytes(node.tokens))
        assert not is_covered, f"{name} is unlocked and covered by a sibling"


def _check_counts(tree: RadixTree, nodes: list[Node]) -> None:
    locked = [node for node in nodes if node.lock_ref]
    dead = [node for node in nodes if node.namespace.is_dead and not node.lock_ref]
    for name, counted, summed in (
        ("nodes", tree.num_nodes, len(nodes)),
        ("tree pages", tree.num_pages, _num_pages(nodes)),
        ("locked pages", tree.num_locked, _num_pages(locked)),
        ("dead pages", tree.num_dead, _num_pages(dead)),
    ):
        assert counted == summed, f"{counted} {name} counted, {summed} exist"
    for namespace in tree.all_namespaces():
        name = namespace.text
        mine = [node for node in nodes if node.namespace is namespace]
        assert namespace.num_pages == _num_pages(mine), f"pages of {name!r}"
        locked = [node for node in mine if node.lock_ref]
        assert namespace.num_locked == _num_pages(locked), f"locked pages of {name!r}"
        root = namespace.root
        assert root.children or root.lock_ref, f"namespace {name!r} is empty"


def _num_pages(nodes: list[Node]) -> int:
    return sum(len(node.pages) for node in nodes)


def _check_order(tree: RadixTree, nodes: list[Node]) -> None:
    """Every unlocked node is in one queue, before its parent or in an earlier queue."""
    rank: dict[int, tuple[int, int]] = {}
    for number, queue in enumerate(tree.order.queues()):
        for position, node in enumerate(queue):
            assert id(node) not in rank, f"node {node.node_id} is in two queues of eviction"
            rank[id(node)] = number, position
    for node in nodes:
        if node.namespace.is_dead:
            continue
        name, mine = f"node {node.node_id}", rank.get(id(node))
        assert (mine is not None) == (not node.lock_ref), f"{name}: locked and evictable"
        above = rank.get(id(node.parent))
        assert mine is None or above is None or mine < above, f"{name} outlives its parent"
    known = {id(node) for node in nodes}
    assert known >= rank.keys(), "the eviction order has a node that was removed"
    tree.order.check()


def _check_sequence(tree: RadixTree, sequence: RadixSequence) -> None:
    size, name = tree.page_size, repr(sequence)
    published, committed = sequence._published, sequence.committed_len
    num_shared = len(sequence.pages) - sequence.num_private
    source = sequence._source
    may_lag = source is not None or sequence.is_detached
    assert may_lag or committed - published < size, f"{name} has unpublished pages"
    assert num_shared >= published // size, f"{name} counts published pages as private"
    nodes = [*path(node_covering(sequence._last_node, published))][::-1]
    published_tokens = sequence.tokens[:published].tobytes()
    path_tokens = b"".join(node.tokens for node in nodes)
    assert path_tokens.startswith(published_tokens), f"{name} is not on the path that it locks"
    shared = sequence.pages[:num_shared].tolist()
    pages = [page for node in nodes for page in node.pages]
    assert pages[: len(shared)] == shared, f"{name} shares pages that are not on its path"
    protected = {page for node in path(sequence._last_node) for page in node.pages}
    if source is not None:
        assert not source.is_released, f"{name} copies from pages that it does not protect"
        assert source.tokens.tolist() == sequence.tokens[: source.length].tolist(), f"{name} copies"
        protected |= set(source.pages.tolist())
    for page, target, count in sequence.cow_copies:
        assert target in sequence.pages[num_shared:], f"{name} copies to a foreign page"
        assert 0 < count < size + (source is not None), f"{name} copies {count} tokens"
        assert page in protected, f"{name} copies from page {page}, which it does not protect"


def count_shared(allocator: PageAllocator) -> int:
    """Pages in nodes that two or more sequences have locked. O(locked nodes)."""
    once: set[int] = set()  # identities of nodes; a path that joins another is shared from there on
    often: set[int] = set()
    count = 0
    for sequence in _sequences(allocator):
        for node in path(sequence._last_node):
            if id(node) in often:
                break
            if id(node) in once:
                often.add(id(node))
                count += len(node.pages)
            once.add(id(node))
    return count


def count_pinned(allocator: PageAllocator) -> int:
    """Pages in nodes that pins have locked, requests or not. O(those nodes)."""
    pins = (sequence for sequence in _sequences(allocator) if sequence.is_pin)
    return _num_pages([*{node for pin in pins for node in path(pin._last_node)}])


def tree_stats(allocator: PageAllocator, tree: RadixTree) -> dict[str, Any]:
    """Returns the figures of a tree in `PrefixCache.stats`."""
    stats: dict[str, Any] = {
        "namespaces": len(tree.namespaces),
        "old_epoch_pages": sum(
            space.num_pages for space in tree.all_namespaces() if space.epoch != tree.epoch
        ),
        "nodes": tree.num_nodes,
        "splits": tree.num_splits,
        "sessions": 0,
        "pages_pinned": count_pinned(allocator),
    }
    return stats if tree.retention is None else stats | tree.retention.stats()


def preview_tree(tree: RadixTree, count: int) -> list[dict[str, Any]]:
    """See `PrefixCache.eviction_preview`."""
    victims: list[dict[str, Any]] = []
    for node, reason in tree.order.preview():
        if len(victims) == count:
            break
        name, idle_s = node.namespace.text, tree.now - node.last_use
        if not node.namespace.is_dead:  # else its pages count as free already
            entry = victim(name, node.start, node.tokens, len(node.pages), idle_s, reason)
            victims.append(entry)
    return victims


def dump_tree(
    allocator: PageAllocator, tree: RadixTree, max_nodes: int, only: str | None
) -> dict[str, Any]:
    """See `PrefixCache.dump`."""
    sequences, retention = _sequences(allocator), tree.retention
    if retention is not None:
        retention.refresh()
    users: Counter[int] = Counter()
    for sequence in sequences:
        if sequence.is_pin:
            continue
        node: Node | None = sequence._last_node
        while node is not None:
            users[id(node)] += 1
            node = node.parent

    def describe(node: Node) -> NodeDump:
        state, last_use = usage_state(users[id(node)]) if users[id(node)] else "pinned", None
        if not node.lock_ref:
            state = "cached" if retention is None else retention.state(node)
            last_use = node.last_use
        return NodeDump(
            node.tokens, node.pages.tolist(), node.lock_ref, users[id(node)], state, last_use
        )

    spaces = tree.namespaces.values()
    roots = {space.text: space.root for space in spaces if is_within(space.key, only)}
    sizes = ((len(node.pages), node.num_tokens) for node in _all_nodes(tree, sequences))
    return {
        **dump_nodes(tree.page_size, roots, lambda n: n.children.values(), describe, max_nodes),
        **dump_sequences(allocator, sizes, only),
    }
