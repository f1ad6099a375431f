"""`Probe`: a remembered look-up that costs nothing while the part of the tree it ended in rests."""

from __future__ import annotations

from radixserve.arrays import IntArray
from radixserve.cache.node import Space
from radixserve.cache.radix_tree import Match, RadixTree


class Probe:
    """How much of one prompt is cached, for a waiting request. Read-only, like `lookup`."""

    __slots__ = ("_data", "_match", "_namespace", "_reuse", "_seen", "_space", "_tree")

    def __init__(self, tree: RadixTree, tokens: IntArray, namespace: str, *, reuse: bool) -> None:
        self._tree = tree
        self._data = tokens[: max(0, len(tokens) - 1)].tobytes()
        self._namespace = namespace
        self._reuse = reuse
        self._space = Space(namespace)
        self._match = Match(0, self._space.root, self._space.root)
        self._seen = (-1, -1)

    @property
    def cached_len(self) -> int:
        """Tokens in the cache now, at most all but the last one."""
        self.refresh()
        return self._match.length

    @property
    def locked_len(self) -> int:
        """Of those, tokens in pages that running sequences hold anyway."""
        self.refresh()
        node = self._match.node
        if node.refs:
            return self._match.length
        while node.parent is not None and not node.refs:
            node = node.parent
        return node.end

    def path(self) -> tuple[int, ...]:
        """Serial numbers of the nodes that the match goes through, from the root down."""
        self.refresh()
        serials: list[int] = []
        node = self._match.node
        while node.parent is not None:
            serials.append(int(node.serial))
            node = node.parent
        serials.reverse()
        return tuple(serials)

    def refresh(self) -> bool:
        """Look again if a node that the match rests on has changed; True if the length did."""
        if not self._reuse:
            return False
        space = self._tree.spaces.get(self._namespace)
        match = self._match
        if space is None:
            if match.length == 0:
                return False
            space = Space(self._namespace)
        elif space is self._space and self._seen == (match.node.version, match.resume.version):
            return False
        old = self._match.length
        self._space = space
        self._match = match = self._tree.match(space, self._data)
        self._seen = (match.node.version, match.resume.version)
        return match.length != old
