"""Which child shares most of a page with a key: the part of a page that two siblings may share.

Needed at page sizes above 1 only, where children are keyed by whole pages. Many children are
indexed by their first token; those with the same first token in byte order, where neighbours share
the longest heads. Cost: O(1) for distinct first tokens, O(log n) among n with the same one.
"""

from __future__ import annotations

from collections.abc import Iterable

from sortedcontainers import SortedList

from radixserve.cache.node import TOKEN_BYTES, Node

_FEW = 8  # up to this many keys a scan is faster than an index


def add_key(node: Node, key: bytes) -> None:
    """`key` is among `node.children` now."""
    heads = node.heads
    if heads is None:
        if len(node.children) > _FEW:
            node.heads = {}
            for known in node.children:
                _add(node.heads, known)
    else:
        _add(heads, key)


def remove_key(node: Node, key: bytes) -> None:
    """`key` is no longer among `node.children`."""
    heads = node.heads
    if heads is None:
        return
    token = key[:TOKEN_BYTES]
    keys = heads[token]
    keys.remove(key)
    if not keys:
        del heads[token]


def closest_child(node: Node, key: bytes) -> tuple[Node | None, int]:
    """The child that shares most leading tokens with `key`, and how many (None, 0 if none)."""
    candidates: Iterable[bytes] = node.children
    if node.heads is not None:
        keys = node.heads.get(key[:TOKEN_BYTES], ())
        candidates = keys
        if isinstance(keys, SortedList):
            at = keys.bisect_left(key)
            candidates = keys[max(0, at - 1) : at + 1]
    best, most = None, 0
    for candidate in candidates:
        agreed = common_head(candidate, key)
        if agreed > most:
            best, most = candidate, agreed
    return (None, 0) if best is None else (node.children[best], most)


def child_covering(node: Node, head: bytes) -> Node | None:
    """A child whose first page begins with all of `head` (shorter than a page)."""
    child, agreed = closest_child(node, head)
    return child if agreed * TOKEN_BYTES == len(head) else None


def has_longer(node: Node, key: bytes) -> bool:
    """Whether another child's first page begins with all of the child `key` and goes on."""
    candidates: Iterable[bytes] = node.children
    if node.heads is not None:
        keys = node.heads.get(key[:TOKEN_BYTES], ())
        candidates = keys
        if isinstance(keys, SortedList):
            at = keys.bisect_right(key)
            candidates = keys[at : at + 1]
    return any(len(other) > len(key) and other.startswith(key) for other in candidates)


def covered_children(node: Node, key: bytes) -> list[Node]:
    """The children whose tokens are a proper head of `key`: leaves shorter than a page."""
    candidates: Iterable[bytes] = node.children
    if node.heads is not None:
        candidates = node.heads.get(key[:TOKEN_BYTES], ())
        if isinstance(candidates, SortedList):
            ends = range(TOKEN_BYTES, len(key), TOKEN_BYTES)
            candidates = [key[:end] for end in ends if key[:end] in node.children]
    size = len(key)
    found = [other for other in candidates if len(other) < size and key.startswith(other)]
    return [node.children[other] for other in found]


def check_heads(node: Node) -> None:
    """AssertionError unless the index holds exactly the children."""
    if node.heads is None:
        return
    found = [key for keys in node.heads.values() for key in keys]
    assert sorted(found) == sorted(node.children), f"node {node.serial}: wrong index of children"
    for token, keys in node.heads.items():
        assert keys, f"node {node.serial}: an empty entry in the index of children"
        assert all(key.startswith(token) for key in keys), f"node {node.serial}: misplaced child"


def common_head(left: bytes, right: bytes) -> int:
    """Leading tokens that two keys (at most a page each) have in common."""
    size = min(len(left), len(right))
    differs = int.from_bytes(left[:size], "little") ^ int.from_bytes(right[:size], "little")
    if not differs:
        return size // TOKEN_BYTES
    return ((differs & -differs).bit_length() - 1) // (8 * TOKEN_BYTES)


def _add(heads: dict[bytes, list[bytes] | SortedList], key: bytes) -> None:
    token = key[:TOKEN_BYTES]
    keys = heads.get(token)
    if keys is None:
        heads[token] = [key]
    elif isinstance(keys, list):
        keys.append(key)
        if len(keys) > _FEW:
            heads[token] = SortedList(keys)
    else:
        keys.add(key)
