"""`find_match`: the longest common prefix of some tokens with anything in one namespace's tree."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from radixserve.cache.radix.child_index import closest_child
from radixserve.cache.radix.node import NamespaceTree, Node
from radixserve.cache.tokens import TOKEN_BYTES


class Match(NamedTuple):
    """Where a walk stopped: `length` tokens agree, the last of them in `node`.

    `resume` is the deepest node whose tokens agree from its start on whole pages; it differs
    from `node` when only a prefix of a child's first page agrees.
    """

    length: int
    node: Node
    resume: Node


_match: Callable[[tuple[int, Node, Node]], Match] = partial(tuple.__new__, Match)  # 0.1 us less


def find_match(namespace: NamespaceTree, data: memoryview, limit: int, page_size: int) -> Match:
    """Longest common prefix of the first `limit` tokens of `data` (int32) with anything in
    `namespace`. Read-only.

    O(tokens matched) in memcmp, plus O(log children) a node at page sizes above 1.
    """
    node, pos, width = namespace.root, 0, page_size
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
        closest, agreed = closest_child(node, data[pos : min(pos + width, limit)].tobytes())
        if closest is not None:
            return _match((pos + agreed, closest, node))
    return _match((pos, node, node))


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
