"""`PrefixWatch`: a persistent look-up; `WatchRegistry`: the watches to refresh after a change."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable

WatchKey = tuple[Hashable, bytes]  # a node, block key or namespace, and the token looked for there


class PrefixWatch(ABC):
    """How much of one prompt is cached, for a waiting request. Read-only, like `lookup`.

    Its places are those where a change may alter its answer; `take_changed` refreshes the watches
    of changed places. Between two refreshes it answers from memory.
    """

    __slots__ = ("_registry", "cached_len", "places")

    def __init__(self, registry: WatchRegistry) -> None:
        self._registry = registry
        self.places: frozenset[WatchKey] = frozenset()  # where its answer may change
        self.cached_len = 0  # tokens in the cache, at most all but the last one

    @property
    @abstractmethod
    def locked_len(self) -> int:
        """Tokens of `cached_len` in pages that live sequences hold anyway."""

    @abstractmethod
    def path(self) -> tuple[int, ...]:
        """Ids of the nodes or blocks that the match goes through, from the root down."""

    @abstractmethod
    def refresh(self) -> None:
        """Look up again and watch the places where the match ends now."""

    def close(self) -> None:
        """Stop watching. Idempotent."""
        self._watch_at(frozenset())

    def _watch_at(self, places: frozenset[WatchKey]) -> None:
        if places != self.places:
            self._registry.move(self, self.places, places)
            self.places = places


class WatchRegistry:
    """Watches by place. `notify` costs O(1); only watches of changed places are refreshed."""

    __slots__ = ("_changed", "watched")

    def __init__(self) -> None:
        self.watched: dict[Hashable, dict[bytes, set[PrefixWatch]]] = {}
        self._changed: set[tuple[Hashable, bytes | None]] = set()

    def __len__(self) -> int:
        """Open watches."""
        return len({w for tokens in self.watched.values() for ws in tokens.values() for w in ws})

    def move(self, watch: PrefixWatch, old: frozenset[WatchKey], new: frozenset[WatchKey]) -> None:
        """Move `watch` from the places `old` to the places `new`. O(places)."""
        watched = self.watched
        for place, token in old - new:
            watches = watched[place][token]
            watches.discard(watch)
            if not watches:
                del watched[place][token]
                if not watched[place]:
                    del watched[place]
        for place, token in new - old:
            watched.setdefault(place, {}).setdefault(token, set()).add(watch)

    def notify(self, place: Hashable, token: bytes | None = None) -> None:
        """`place` changed: refresh its watches; with `token`, only those that look for it there.
        Callers skip the call where `watched` is empty."""
        if place in self.watched:
            self._changed.add((place, token))

    def take_changed(self) -> list[PrefixWatch]:
        """Refresh the watches whose places changed since the last call; returns them."""
        changed: set[PrefixWatch] = set()
        for place, token in self._changed:
            tokens = self.watched.get(place, {})
            changed.update(*(tokens.values() if token is None else (tokens.get(token, ()),)))
        self._changed.clear()
        for watch in changed:
            watch.refresh()
        return list(changed)
