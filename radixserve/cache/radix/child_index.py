"""Index of a node's children: the child that shares the longest page prefix with a key.

Needed at page sizes above 1 only, where children are keyed by whole pages. Many children are
indexed by their first token; those with the same first token in byte order, where neighbours share
the longest prefixes. Cost: O(1) for distinct first tokens, O(log n) among n with the same one.
"""

from __future__ import annotations

from collections.abc import Iterable

from sortedcontainers import SortedList

from radixserve.cache.radix.node import Node
from radixserve.cache.tokens import TOKEN_BYTES

_SCAN_UP_TO = 8  # up to this many keys a scan is faster than an index


def add_key(node: Node, key: bytes) -> None:
    """Add `key`, which is in `node.children` already, to the index."""
    first_token_index = node.first_token_index
    if first_token_index is None:
        if len(node.children) > _SCAN_UP_TO:
            node.first_token_index = {}
            for known in node.children:
                _add(node.first_token_index, known)
    else:
        _add(first_token_index, key)


def remove_key(node: Node, key: bytes) -> None:
    """Remove `key`, which is no longer in `node.children`, from the index."""
    first_token_index = node.first_token_index
    if first_token_index is None:
        return
    token = key[:TOKEN_BYTES]
    keys = first_token_index[token]
    keys.remove(key)
    if not keys:
        del first_token_index[token]


def _with_first_token(node: Node, key: bytes) -> Iterable[bytes]:
    """Yields the children's keys that begin with the same token; without an index all of them."""
    index = node.first_token_index
    return node.children if index is None else index.get(key[:TOKEN_BYTES], ())


def closest_child(node: Node, key: bytes) -> tuple[Node | None, int]:
    """Returns the child that shares most leading tokens with `key`, and how many (None, 0 if
    none)."""
    candidates = _with_first_token(node, key)
    if isinstance(candidates, SortedList):
        index = candidates.bisect_left(key)
        candidates = candidates[max(0, index - 1) : index + 1]
    best, most = None, 0
    for candidate in candidates:
        agreed = common_head(candidate, key)
        if agreed > most:
            best, most = candidate, agreed
    return (None, 0) if best is None else (node.children[best], most)


def child_covering(node: Node, prefix: bytes) -> Node | None:
    """Returns a child whose first page begins with all of `prefix` (shorter than a page)."""
    child, agreed = closest_child(node, prefix)
    return child if agreed * TOKEN_BYTES == len(prefix) else None


def has_longer(node: Node, key: bytes) -> bool:
    """Whether another child's first page begins with all of the child `key` and is longer."""
    candidates = _with_first_token(node, key)
    if isinstance(candidates, SortedList):
        index = candidates.bisect_right(key)
        candidates = candidates[index : index + 1]
    return any(len(other) > len(key) and other.startswith(key) for other in candidates)


def covered_children(node: Node, key: bytes) -> list[Node]:
    """Returns the children whose tokens are a proper prefix of `key`: leaves shorter than a
    page."""
    candidates = _with_first_token(node, key)
    if isinstance(candidates, SortedList):
        ends = range(TOKEN_BYTES, len(key), TOKEN_BYTES)
        candidates = [key[:end] for end in ends if key[:end] in node.children]
    size = len(key)
    covered = [other for other in candidates if len(other) < size and key.startswith(other)]
    return [node.children[other] for other in covered]


def siblings_with_head(node: Node, length: int) -> list[Node]:
    """Returns `node` and its siblings whose first pages agree with its own up to position
    `length`."""
    parent = node.parent
    assert parent is not None
    size = (length - node.start) * TOKEN_BYTES
    if not 0 < size <= len(node.key):
        return [node]
    head = node.key[:size]
    keys = _with_first_token(parent, node.key)
    return [parent.children[key] for key in keys if key.startswith(head)]


def check_index(node: Node) -> None:
    """AssertionError unless the index holds exactly the children."""
    if node.first_token_index is None:
        return
    indexed = [key for keys in node.first_token_index.values() for key in keys]
    assert sorted(indexed) == sorted(node.children), f"node {node.node_id}: wrong index of children"
    for token, keys in node.first_token_index.items():
        assert keys, f"node {node.node_id}: an empty entry in the index of children"
        assert all(key.startswith(token) for key in keys), f"node {node.node_id}: misplaced child"


def common_head(left: bytes, right: bytes) -> int:
    """Returns the number of leading tokens that two keys (at most a page each) have in common."""
    size = min(len(left), len(right))
    differs = int.from_bytes(left[:size], "little") ^ int.from_bytes(right[:size], "little")
    if not differs:
        return size // TOKEN_BYTES
    return ((differs & -differs).bit_length() - 1) // (8 * TOKEN_BYTES)


def _add(first_token_index: dict[bytes, list[bytes] | SortedList], key: bytes) -> None:
    token = key[:TOKEN_BYTES]
    keys = first_token_index.get(token)
    if keys is None:
        first_token_index[token] = [key]
    elif isinstance(keys, list):
        keys.append(key)
        if len(keys) > _SCAN_UP_TO:
            first_token_index[token] = SortedList(keys)
    else:
        keys.add(key)
