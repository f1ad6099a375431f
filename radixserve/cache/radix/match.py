"""`find_match`: the longest common prefix of some tokens with anything in one namespace's tree."""

from __future__ import annotations

import numpy as np

from radixserve.cache.radix.child_index import closest_child
from radixserve.cache.radix.node import NamespaceTree, Node
from radixserve.cache.tokens import TOKEN_BYTES

Match = tuple[int, Node, Node, bytes]
"""(length, node, resume, page), where a walk stopped: `length` tokens agree, the last of them in
`node`.

`resume` is the deepest node whose tokens agree from its start on whole pages; it differs from
`node` when only a prefix of a child's first page agrees. `page` is the first page looked for below
`resume` that is no child's; b"" where the walk stopped for another reason.
"""


def find_match(
    namespace: NamespaceTree,
    data: memoryview,
    limit: int,
    page_size: int,
    page: bytes = b"",
) -> Match:
    """Longest common prefix of the first `limit` tokens of `data` (int32) with anything in
    `namespace`. Read-only. `page`: the first of them, at most a page, where that is at hand.

    O(tokens matched) in memcmp, plus O(log children) a node at page sizes above 1.
    """
    node, pos = namespace.root, 0
    page = page or data[: page_size if page_size < limit else limit].tobytes()
    while (child := node.children.get(page)) is not None:
        edge = child.tokens
        stop = pos + len(edge) // TOKEN_BYTES
        if stop > limit:
            if edge.startswith(data[pos:limit]):
                return limit, child, child, b""
            return pos + common_tokens(edge, data, pos, limit), child, child, b""
        if edge != data[pos:stop]:
            return pos + common_tokens(edge, data, pos, stop), child, child, b""
        node, pos = child, stop
        if pos == limit or pos % page_size:
            return pos, node, node, b""
        stop = pos + page_size
        page = data[pos : stop if stop < limit else limit].tobytes()
    if page_size > 1:
        closest, agreed = closest_child(node, page)
        if closest is not None:
            return pos + agreed, closest, node, page
    return pos, node, node, page


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
