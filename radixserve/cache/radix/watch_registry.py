"""`WatchRegistry`: who has to look again because the tree changed where their match ended."""

from __future__ import annotations

from radixserve.cache.radix.node import NO_WATCHERS, Node, Watcher


class WatchRegistry:
    """A watcher rests on nodes; it is told only when one of them changes in a way that matters."""

    __slots__ = ("_by_namespace", "_changed", "_changed_namespaces")

    def __init__(self) -> None:
        self._changed: set[Watcher] = set()  # to be told
        self._changed_namespaces: set[str] = set()  # names made or reset since the last telling
        self._by_namespace: dict[str, set[Watcher]] = {}

    def __len__(self) -> int:
        """How many namespaces are watched."""
        return len(self._by_namespace)

    def open(self, watcher: Watcher, name: str) -> None:
        self._by_namespace.setdefault(name, set()).add(watcher)

    def close(self, watcher: Watcher, name: str) -> None:
        """`watcher` rests on no node any more."""
        self._changed.discard(watcher)
        watching = self._by_namespace.get(name)
        if watching is not None:
            watching.discard(watcher)
            if not watching:
                del self._by_namespace[name]

    def add(self, watcher: Watcher, node: Node, token: bytes) -> None:
        """`watcher` looks for `token` behind what it found in `node`."""
        if node.watchers is NO_WATCHERS:
            node.watchers = {}
        node.watchers.setdefault(token, set()).add(watcher)

    def remove(self, watcher: Watcher, node: Node, token: bytes) -> None:
        watchers = node.watchers.get(token)
        if watchers is not None:
            watchers.discard(watcher)
            if not watchers:
                del node.watchers[token]
                if not node.watchers:
                    node.watchers = NO_WATCHERS

    def notify(self, node: Node, token: bytes | None = None) -> None:
        """Matches that end in `node` may end elsewhere; with `token`, only those that it continues.

        O(the watchers concerned). Callers skip it where `node.watchers` is empty.
        """
        if token is not None:
            self._changed |= node.watchers.get(token, set())
            return
        for watchers in node.watchers.values():
            self._changed |= watchers

    def notify_namespace(self, name: str) -> None:
        """A namespace was made or reset."""
        if name in self._by_namespace:
            self._changed_namespaces.add(name)

    def take_changed(self) -> set[Watcher]:
        """Those to be told, once."""
        changed = self._changed
        for name in self._changed_namespaces:
            changed |= self._by_namespace.get(name, set())
        self._changed, self._changed_namespaces = set(), set()
        return changed
