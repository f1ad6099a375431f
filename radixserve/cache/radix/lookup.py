"""Prefix matching in the tree of a namespace.

`match_prefix` finds the longest cached prefix of a prompt. `explain` tells why it is not longer.
`RadixPrefixWatch` keeps the match of a waiting request's prompt up to date.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import numpy as np

from radixserve.arrays import IntArray
from radixserve.cache.lookup import Lookup, MissReason
from radixserve.cache.namespace import Namespace
from radixserve.cache.radix.child_index import closest_child, common_head
from radixserve.cache.radix.node import Match, NamespaceTree, Node, path
from radixserve.cache.radix.radix_tree import RadixTree
from radixserve.cache.tokens import TOKEN_BYTES, as_view
from radixserve.cache.watch import PrefixWatch, WatchKey


def match_prefix(
    namespace: NamespaceTree,
    data: memoryview,
    limit: int,
    page_size: int,
    page: bytes = b"",
) -> Match:
    """Returns the longest common prefix of the first `limit` tokens of `data` (int32) with the
    sequences in `namespace`. Changes nothing: nodes are not split. `page`: the first page of these
    tokens as bytes, if the caller has it.

    O(tokens matched) in memcmp, plus O(log children) per node at page sizes above 1.
    """
    node, pos = namespace.root, 0
    page = page or data[: page_size if page_size < limit else limit].tobytes()
    while (child := node.children.get(page)) is not None:
        edge = child.tokens
        stop = pos + len(edge) // TOKEN_BYTES
        if stop > limit:
            if edge.startswith(data[pos:limit]):
                return limit, child, child, b""
            length = pos + common_tokens(edge, data, pos, limit)
            return length, child, child, b""
        if edge != data[pos:stop]:
            length = pos + common_tokens(edge, data, pos, stop)
            return length, child, child, b""
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
    edge: bytearray, data: bytearray | memoryview, pos: int, end: int, offset: int = 0
) -> int:
    """Returns how many leading tokens of `edge`, from token `offset` on, agree with the tokens
    [pos, end) of `data`. Both are int32 bytes."""
    count = min(len(edge) // TOKEN_BYTES - offset, end - pos)
    if not count:
        return 0
    here = np.frombuffer(edge, np.int32, count, offset * TOKEN_BYTES)
    differs = here != np.frombuffer(data, np.int32, count, pos * TOKEN_BYTES)
    first = int(differs.argmax())
    return first if differs[first] else count


_MAX_NAMESPACES = 64  # namespaces asked at most when explaining a miss

NEVER_SEEN = Lookup(0, "never_seen", 0)


def explain(
    tree: RadixTree,
    namespace: NamespaceTree,
    match: Match,
    data: memoryview,
    limit: int,
    compare_namespaces: bool,
) -> Lookup:
    """Returns a match as a `Lookup`, with the reason why it is not longer. `data`: the whole
    prompt; `limit`: the tokens that were looked for."""
    length, node, resume, page = match
    if length >= limit:
        return Lookup(length, "full", length)
    size, point = tree.page_size, resume.start + len(resume.tokens) // TOKEN_BYTES
    if point > length:  # inside an edge, which may have been cut here and grown again
        point = length - length % size
    page = page or data[point : min(limit, point + size)].tobytes()
    evicted = tree.evicted_history.find((resume.node_id, point, page[:TOKEN_BYTES]))
    if evicted and common_head(evicted, page) > length - point:
        return Lookup(length, "evicted", length)
    if namespace.is_dead or len(tree.namespaces) > 1 or tree.other_epochs:
        for other, why in _others(tree, namespace.key, compare_namespaces):
            if match_prefix(other, data, limit, size)[0] > length:
                return Lookup(length, why, length)
    if not length:
        return NEVER_SEEN
    below: Node | None = node
    if node.end <= length:  # newest child: deleted entries accumulate at the dict's front
        below = next(reversed(node.children.values()), None)
    if below is None:
        return Lookup(length, "never_seen", length)
    token_id = int(np.frombuffer(data[length : length + 1], np.int32)[0])
    return Lookup(length, "diverged", length, below.token_at(length), token_id)


def _others(
    tree: RadixTree, key: Namespace, compare_namespaces: bool
) -> Iterator[tuple[NamespaceTree, MissReason]]:
    """Yields what else may have more of a prompt, and the reason if it does: other epochs of the
    namespace, then those of other adapters, then, if they are compared, all others."""
    for spaces in islice(reversed(tree.other_epochs.values()), _MAX_NAMESPACES):
        if (space := spaces.get(key)) is not None:
            yield space, "epoch"
    first = islice(tree.namespaces.values(), _MAX_NAMESPACES)
    others = [other for other in first if other.key != key]
    of_adapters = {other for other in others if other.key._replace(adapter=key.adapter) == key}
    yield from ((other, "adapter") for other in of_adapters)
    if compare_namespaces:
        yield from ((other, "namespace") for other in others if other not in of_adapters)


def never_saw(tree: RadixTree, namespace: NamespaceTree, first_page: bytes) -> bool:
    """Whether it is certain that no cached or evicted sequence of any namespace begins with the
    first token of `first_page`, which is not the key of a child. False if it is not known. O(1)."""
    if namespace.is_dead or len(tree.namespaces) > 1 or tree.other_epochs:
        return False
    root, token = namespace.root, first_page
    if tree.page_size > 1:
        if closest_child(root, first_page)[0] is not None:
            return False
        token = first_page[:TOKEN_BYTES]
    return not tree.evicted_history.find((root.node_id, 0, token))


class RadixPrefixWatch(PrefixWatch):
    """The cached prefix of one prompt. Watches the node where its match ends."""

    __slots__ = ("_limit", "_tree", "data", "match", "namespace", "num_releases")

    def __init__(
        self, tree: RadixTree, tokens: IntArray, namespace: Namespace, *, reuse: bool
    ) -> None:
        super().__init__(tree.watch_registry, len(tokens))
        self._tree = tree
        self._limit = max(0, len(tokens) - 1) if reuse else 0
        self.data = as_view(tokens.copy())  # the whole prompt
        self.namespace = namespace
        # of sequences of sessions, before the prompt was sent
        self.num_releases = 0 if tree.retention is None else tree.retention.num_releases
        self.match: Match
        self.refresh()

    @property
    def locked_len(self) -> int:
        """Tokens of `cached_len` in pages that live sequences have locked. O(depth).

        0 where the matched nodes have been evicted since the last refresh.
        """
        length, last_node, _, _ = self.match
        for node in path(last_node):
            if node.lock_ref:
                return min(length, node.end)
        return 0

    def path(self) -> tuple[int, ...]:
        """Ids of the matched nodes, from the root down."""
        _, last_node, _, _ = self.match
        return tuple([int(node.node_id) for node in path(last_node)][::-1])

    def refresh(self) -> None:
        """Match the prompt again, and watch the node where the match ends now. O(tokens matched) in
        memcmp."""
        tree, key = self._tree, self.namespace
        namespace = tree.namespaces.get(key)
        if namespace is None:
            root = NamespaceTree(key).root
            self.match = 0, root, root, b""
        else:
            self.match = match_prefix(namespace, self.data, self._limit, tree.page_size)
        length, node, resume, _ = self.match
        self.cached_len = length
        # The token that would continue the match there, b"" at the prompt's end. Two nodes where
        # it ends in a child's first page: another child may share more of it.
        places: set[WatchKey] = {tree.watch_key(key), (node.node_id, self._token(length))}
        if resume is not node:
            places.add((resume.node_id, self._token(resume.end)))
        self._watch_at(frozenset(places))

    def _token(self, position: int) -> bytes:
        end = position + 1
        return self.data[position:end].tobytes() if end <= self._limit else b""
