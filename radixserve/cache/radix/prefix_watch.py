"""`RadixPrefixWatch`: a look-up repeated only after a change at the end of its match."""

from __future__ import annotations

from radixserve.arrays import IntArray
from radixserve.cache.radix.match import Match, find_match
from radixserve.cache.radix.node import NamespaceTree, path
from radixserve.cache.radix.radix_tree import RadixTree
from radixserve.cache.tokens import as_view
from radixserve.cache.watch import PrefixWatch, WatchKey


class RadixPrefixWatch(PrefixWatch):
    """How much of one prompt is in the tree. It watches the node where its match ends."""

    __slots__ = ("_data", "_match", "_namespace", "_tree")

    def __init__(self, tree: RadixTree, tokens: IntArray, namespace: str, *, reuse: bool) -> None:
        super().__init__(tree.watch_registry)
        self._tree = tree
        self._data = as_view(tokens[: max(0, len(tokens) - 1) if reuse else 0].copy())
        self._namespace = namespace
        self._match: Match
        self.refresh()

    @property
    def locked_len(self) -> int:
        """Tokens of `cached_len` in pages that running sequences hold anyway. O(depth).

        0 where what was cached has been dropped since the last refresh.
        """
        length, last_node, *_ = self._match
        for node in path(last_node):
            if node.lock_ref:
                return min(length, node.end)
        return 0

    def path(self) -> tuple[int, ...]:
        """Ids of the nodes that the match goes through, from the root down."""
        return tuple([int(node.node_id) for node in path(self._match[1])][::-1])

    def refresh(self) -> None:
        """Look up again and watch where the match ends now. O(tokens matched) in memcmp."""
        tree, name = self._tree, self._namespace
        namespace = tree.namespaces.get(name)
        if namespace is None:
            root = NamespaceTree(name).root
            self._match = 0, root, root, b""
        else:
            data, size = self._data, tree.page_size
            self._match = find_match(namespace, data, len(data), size)
        length, node, resume, _ = self._match
        self.cached_len = length
        # The token that would continue the match there, b"" at the prompt's end. Two nodes where
        # it ends in a child's first page: another child may share more of it.
        places: set[WatchKey] = {tree.place(name), (node.node_id, self._token(length))}
        if resume is not node:
            places.add((resume.node_id, self._token(resume.end)))
        self._watch_at(frozenset(places))

    def _token(self, position: int) -> bytes:
        return self._data[position : position + 1].tobytes()
