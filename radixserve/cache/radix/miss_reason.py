"""Why a look-up in the tree stops where it stops."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import islice

from radixserve.cache.radix.child_index import common_head
from radixserve.cache.radix.node import NamespaceTree, Node
from radixserve.cache.radix.radix_tree import Match, RadixTree
from radixserve.cache.tokens import TOKEN_BYTES
from radixserve.output import Lookup

_MAX_NAMESPACES = 64  # namespaces asked at most when explaining a miss


NOTHING = Lookup(0, "never_seen", 0)
_lookup: Callable[[tuple[int, str, int, None, None]], Lookup] = partial(tuple.__new__, Lookup)


def explain(
    tree: RadixTree, namespace: NamespaceTree, match: Match, data: memoryview, limit: int
) -> Lookup:
    """Why `match` is not longer. `data`: the whole prompt; `limit`: tokens looked for."""
    length, _, resume = match
    if length >= limit:
        return _lookup((length, "full", length, None, None))
    point = resume.end
    if point > length:  # inside an edge, which may have been cut here and grown again
        point = length - length % tree.page_size
    page = data[point : min(limit, point + tree.page_size)].tobytes()
    evicted_page = tree.evicted_history.find((resume.node_id, point, page[:TOKEN_BYTES]))
    if evicted_page and common_head(evicted_page, page) > length - point:
        return _lookup((length, "evicted", length, None, None))
    has_others = len(tree.namespaces) > 1 or namespace.name not in tree.namespaces
    if has_others and _is_elsewhere(tree, namespace, data, limit, length):
        return _lookup((length, "namespace", length, None, None))
    expected = _next_token(match) if length else None
    if expected is None:
        return _lookup((length, "never_seen", length, None, None))
    return Lookup(length, "diverged", length, expected, data[length])


def _is_elsewhere(
    tree: RadixTree, namespace: NamespaceTree, data: memoryview, limit: int, length: int
) -> bool:
    others = islice(tree.namespaces.values(), _MAX_NAMESPACES)
    return any(
        tree.match(other, data, limit).length > length for other in others if other is not namespace
    )


def _next_token(match: Match) -> int | None:
    """A token that is cached where the match stopped."""
    node: Node | None = match.node
    if node is not None and node.end <= match.length:
        node = next(reversed(node.children.values()), None)  # the front is full of holes
    return None if node is None else node.token_at(match.length)
