"""`KeyWatchRegistry`: watches by block key. `EvictedKeys`: a bounded memory of evictions."""

from __future__ import annotations

from collections import OrderedDict

from radixserve.cache.hash.block import BlockWatcher


class KeyWatchRegistry:
    """A watcher names the keys that matter to it: its last block's and the first missing one."""

    __slots__ = ("_by_key", "_changed")

    def __init__(self) -> None:
        self._by_key: dict[bytes, set[BlockWatcher]] = {}
        self._changed: set[BlockWatcher] = set()  # to be told

    def __len__(self) -> int:
        """How many keys are watched."""
        return len(self._by_key)

    def add(self, key: bytes, watcher: BlockWatcher) -> None:
        self._by_key.setdefault(key, set()).add(watcher)

    def remove(self, key: bytes, watcher: BlockWatcher) -> None:
        watchers = self._by_key[key]
        watchers.discard(watcher)
        if not watchers:
            del self._by_key[key]

    def close(self, watcher: BlockWatcher) -> None:
        """`watcher`, which watches nothing any more, need not be told."""
        self._changed.discard(watcher)

    def notify(self, key: bytes) -> None:
        """The block of that key came or went. O(the watchers concerned)."""
        watchers = self._by_key.get(key)
        if watchers:
            self._changed |= watchers

    def take_changed(self) -> set[BlockWatcher]:
        """Those to be told, once."""
        changed, self._changed = self._changed, set()
        return changed


class EvictedKeys:
    """Remembers the keys of evicted blocks, oldest forgotten first."""

    __slots__ = ("_capacity", "_names")

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._names: OrderedDict[bytes, str] = OrderedDict()  # key -> its namespace

    def __len__(self) -> int:
        return len(self._names)

    def find(self, key: bytes) -> str | None:
        """The namespace that the block of that key was in, or None."""
        return self._names.get(key)

    def remember(self, key: bytes, namespace: str) -> None:
        self._names[key] = namespace
        if len(self._names) > self._capacity:
            self._names.popitem(last=False)

    def discard(self, key: bytes) -> None:
        """It is cached again."""
        self._names.pop(key, None)

    def forget(self, namespace: str | None) -> None:
        """A reset forgets one namespace, or all. O(all that is remembered)."""
        if namespace is None:
            self._names.clear()
            return
        keys = [key for key, name in self._names.items() if name == namespace]
        for key in keys:
            del self._names[key]
