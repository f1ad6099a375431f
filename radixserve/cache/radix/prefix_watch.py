"""`RadixPrefixWatch`: a look-up that is repeated only when the tree has changed where it ended."""

from __future__ import annotations

from radixserve.arrays import IntArray
from radixserve.cache.radix.node import NamespaceTree, Node, Watcher
from radixserve.cache.radix.radix_tree import Match, RadixTree
from radixserve.cache.tokens import as_view


class RadixPrefixWatch(Watcher):
    """How much of one prompt is cached, for a waiting request. Read-only, like `lookup`.

    Until it is closed it watches the node where its match ends; `RadixCache.changed_watches` says
    which ones have to `refresh`. Between two refreshes it answers from memory.
    """

    __slots__ = ("_data", "_match", "_namespace", "_tree", "_watched", "cached_len")

    def __init__(self, tree: RadixTree, tokens: IntArray, namespace: str, *, reuse: bool) -> None:
        self._tree = tree
        self._data = as_view(tokens[: max(0, len(tokens) - 1) if reuse else 0].copy())
        self._namespace = namespace
        root = NamespaceTree(namespace).root
        self._match = Match(0, root, root)
        self._watched: list[tuple[Node, bytes]] = []  # with the token that would go on there
        self.cached_len = 0  # tokens in the cache, at most all but the last one
        tree.watch_registry.open(self, namespace)
        self.refresh()

    @property
    def locked_len(self) -> int:
        """Of `cached_len`, tokens in pages that running sequences hold anyway. O(depth)."""
        node = self._match.node
        if node.parent is None:  # nothing is cached, or it was dropped since the last refresh
            return 0
        if node.lock_ref:
            return self._match.length
        while node.parent is not None and not node.lock_ref:
            node = node.parent
        return min(self._match.length, node.end)

    def path(self) -> tuple[int, ...]:
        """Serial numbers of the nodes that the match goes through, from the root down."""
        node_ids: list[int] = []
        node = self._match.node
        while node.parent is not None:
            node_ids.append(int(node.node_id))
            node = node.parent
        node_ids.reverse()
        return tuple(node_ids)

    def refresh(self) -> None:
        """Look again, and watch where the match ends now. O(tokens matched) in memcmp."""
        tree = self._tree
        namespace_tree = tree.namespaces.get(self._namespace)
        if namespace_tree is None:
            root = NamespaceTree(self._namespace).root
            self._match = Match(0, root, root)
        else:
            self._match = tree.match(namespace_tree, self._data, len(self._data))
        self._unwatch()
        self._watched = self._places()
        for node, token in self._watched:
            tree.watch_registry.add(self, node, token)
        self.cached_len = self._match.length

    def close(self) -> None:
        """Stop watching."""
        self._unwatch()
        self._tree.watch_registry.close(self, self._namespace)

    def _unwatch(self) -> None:
        for node, token in self._watched:
            self._tree.watch_registry.remove(self, node, token)
        self._watched = []

    def _places(self) -> list[tuple[Node, bytes]]:
        """Where the match ends, with the token that would continue it there (b"" at the prompt's
        end). Two places where it ends in a child's first page: another child may share more of it.
        """
        match = self._match
        points = [(match.node, self._token(match.length))]
        if match.resume is not match.node:
            points.append((match.resume, self._token(match.resume.end)))
        return points

    def _token(self, position: int) -> bytes:
        return self._data[position : position + 1].tobytes()
