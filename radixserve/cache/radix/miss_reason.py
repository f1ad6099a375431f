"""`explain`: the reason why a look-up in the tree matches no more tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import islice

import numpy as np

from radixserve.cache.radix.child_index import closest_child, common_head
from radixserve.cache.radix.match import Match, find_match
from radixserve.cache.radix.node import NamespaceTree, Node
from radixserve.cache.radix.radix_tree import RadixTree
from radixserve.cache.tokens import TOKEN_BYTES
from radixserve.output import Lookup

_MAX_NAMESPACES = 64  # namespaces asked at most when explaining a miss

NEVER_SEEN = Lookup(0, "never_seen", 0)
_lookup: Callable[[tuple[int, str, int, None, None]], Lookup] = partial(tuple.__new__, Lookup)


def explain(
    tree: RadixTree,
    namespace: NamespaceTree,
    match: Match,
    data: memoryview,
    limit: int,
    compare_namespaces: bool,
) -> Lookup:
    """Why `match` is not longer. `data`: the whole prompt; `limit`: tokens looked for."""
    length, node, resume, page = match
    if length >= limit:
        return _lookup((length, "full", length, None, None))
    size, point = tree.page_size, resume.start + len(resume.tokens) // TOKEN_BYTES
    if point > length:  # inside an edge, which may have been cut here and grown again
        point = length - length % size
    page = page or data[point : min(limit, point + size)].tobytes()
    evicted = tree.evicted_history.find((resume.node_id, point, page[:TOKEN_BYTES]))
    if evicted and common_head(evicted, page) > length - point:
        return _lookup((length, "evicted", length, None, None))
    if compare_namespaces and (namespace.is_dead or len(tree.namespaces) > 1):
        for other in islice(tree.namespaces.values(), _MAX_NAMESPACES):
            if other is namespace:
                continue
            if find_match(other, data, limit, size)[0] > length:
                return _lookup((length, "namespace", length, None, None))
    if not length:
        return NEVER_SEEN
    below: Node | None = node
    if node.end <= length:  # newest child: deleted entries accumulate at the dict's front
        below = next(reversed(node.children.values()), None)
    if below is None:
        return _lookup((length, "never_seen", length, None, None))
    found = int(np.frombuffer(data[length : length + 1], np.int32)[0])
    return Lookup(length, "diverged", length, below.token_at(length), found)


def never_saw(tree: RadixTree, namespace: NamespaceTree, first_page: bytes) -> bool:
    """Whether nothing begins with the first token of that page, which is not the key of a child,
    nor did anything that is remembered, in any namespace. May say no where `explain` says yes.
    O(1)."""
    root = namespace.root
    return (
        (tree.page_size == 1 or closest_child(root, first_page)[0] is None)
        and not tree.evicted_history.find((root.node_id, 0, first_page[:TOKEN_BYTES]))
        and len(tree.namespaces) == 1
        and not namespace.is_dead
    )
