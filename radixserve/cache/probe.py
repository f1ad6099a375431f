"""`Probe`: a look-up that is repeated only when the tree has changed where it ended."""

from __future__ import annotations

from radixserve.arrays import IntArray
from radixserve.cache.node import Node, Space, Watcher
from radixserve.cache.radix_tree import Match, RadixTree
from radixserve.cache.tokens import as_view


class Probe(Watcher):
    """How much of one prompt is cached, for a waiting request. Read-only, like `lookup`.

    Until it is closed it watches the node where its match ends; `RadixCache.changed_watches` says
    which ones have to `refresh`. Between two refreshes it answers from memory.
    """

    __slots__ = ("_data", "_match", "_namespace", "_tree", "_watched", "cached_len")

    def __init__(self, tree: RadixTree, tokens: IntArray, namespace: str, *, reuse: bool) -> None:
        self._tree = tree
        self._data = as_view(tokens[: max(0, len(tokens) - 1) if reuse else 0].copy())
        self._namespace = namespace
        root = Space(namespace).root
        self._match = Match(0, root, root)
        self._watched: list[tuple[Node, bytes]] = []  # with the token that would go on there
        self.cached_len = 0  # tokens in the cache, at most all but the last one
        tree.watches.open(self, namespace)
        self.refresh()

    @property
    def locked_len(self) -> int:
        """Of `cached_len`, tokens in pages that running sequences hold anyway. O(depth)."""
        node = self._match.node
        if node.parent is None:  # nothing is cached, or it was dropped since the last refresh
            return 0
        if node.refs:
            return self._match.length
        while node.parent is not None and not node.refs:
            node = node.parent
        return min(self._match.length, node.end)

    def path(self) -> tuple[int, ...]:
        """Serial numbers of the nodes that the match goes through, from the root down."""
        serials: list[int] = []
        node = self._match.node
        while node.parent is not None:
            serials.append(int(node.serial))
            node = node.parent
        serials.reverse()
        return tuple(serials)

    def refresh(self) -> None:
        """Look again, and watch where the match ends now. O(tokens matched) in memcmp."""
        tree = self._tree
        space = tree.spaces.get(self._namespace)
        if space is None:
            root = Space(self._namespace).root
            self._match = Match(0, root, root)
        else:
            self._match = tree.match(space, self._data, len(self._data))
        self._unwatch()
        self._watched = self._places()
        for node, token in self._watched:
            tree.watches.rest(self, node, token)
        self.cached_len = self._match.length

    def close(self) -> None:
        """Stop watching."""
        self._unwatch()
        self._tree.watches.close(self, self._namespace)

    def _unwatch(self) -> None:
        for node, token in self._watched:
            self._tree.watches.leave(self, node, token)
        self._watched = []

    def _places(self) -> list[tuple[Node, bytes]]:
        """Where the match ends, with the token that would continue it there (b"" at the prompt's
        end). Two places where it ends in a child's first page: another child may share more of it.
        """
        match = self._match
        places = [(match.node, self._token(match.length))]
        if match.resume is not match.node:
            places.append((match.resume, self._token(match.resume.end)))
        return places

    def _token(self, position: int) -> bytes:
        return self._data[position : position + 1].tobytes()
