"""`PrefixWatch`: a persistent look-up; `WatchRegistry`: the watches to refresh after a change."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable

WatchKey = tuple[Hashable, bytes]  # a node, block key or namespace, and the token looked for there


class PrefixWatch(ABC):
    """The cached prefix of a waiting request's prompt. Read-only, like `lookup`.

    A change at one of its places may alter its match; `take_changed` refreshes the watches of
    changed places. Between two refreshes it answers from memory, and `acquire_watched` takes its
    match instead of matching the prompt again.
    """

    __slots__ = ("_registry", "cached_len", "num_tokens", "places", "version")

    def __init__(self, registry: WatchRegistry, num_tokens: int) -> None:
        self._registry = registry
        self.num_tokens = num_tokens  # of the prompt
        self.places: frozenset[WatchKey] = frozenset()  # where its answer may change
        self.cached_len = 0  # tokens in the cache, at most all but the last one
        self.version = 0  # the registry's at the last refresh

    @property
    @abstractmethod
    def locked_len(self) -> int:
        """Tokens of `cached_len` in pages that live sequences have locked."""

    @abstractmethod
    def path(self) -> tuple[int, ...]:
        """Ids of the nodes or blocks that the match goes through, from the root down."""

    @abstractmethod
    def refresh(self) -> None:
        """Match the prompt again, and watch the places where the match ends now."""

    def close(self) -> None:
        """Stop watching. Idempotent."""
        self._watch_at(frozenset())

    def _watch_at(self, places: frozenset[WatchKey]) -> None:
        if places != self.places:
            self._registry.move(self, self.places, places)
            self.places = places
        self.version = self._registry.version


class WatchRegistry:
    """Watches by place. `notify` costs O(1); only watches of changed places are refreshed."""

    __slots__ = ("_changed", "_refreshed", "version", "watched")

    def __init__(self) -> None:
        self.watched: dict[Hashable, dict[bytes, set[PrefixWatch]]] = {}
        self.version = 0  # changes since the start
        # the version after the last change of a place; token None: a change for every token
        self._changed: dict[tuple[Hashable, bytes | None], int] = {}
        self._refreshed: set[PrefixWatch] = set()  # since the last `take_changed`, by `refresh`

    def __len__(self) -> int:
        """Number of open watches."""
        by_token = [watches for tokens in self.watched.values() for watches in tokens.values()]
        return len({watch for watches in by_token for watch in watches})

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
        """Note that `place` changed, so that its watches are refreshed; with `token` only those
        that look for that token there. Callers skip the call while `watched` is empty."""
        if place in self.watched:
            self.version = self._changed[place, token] = self.version + 1

    def refresh(self, watch: PrefixWatch) -> None:
        """Refresh `watch` now where one of its places has changed; `take_changed` still returns
        it. O(places)."""
        changed = self._changed
        if not changed:
            return
        for place, token in watch.places:
            last = max(changed.get((place, token), 0), changed.get((place, None), 0))
            if last > watch.version:
                watch.refresh()
                self._refreshed.add(watch)
                return

    def take_changed(self) -> list[PrefixWatch]:
        """Refresh the watches whose places changed since the last call; returns them."""
        changed: set[PrefixWatch] = set()
        for (place, token), version in self._changed.items():
            tokens = self.watched.get(place, {})
            for watches in tokens.values() if token is None else (tokens.get(token, ()),):
                changed.update(watch for watch in watches if watch.version < version)
        self._changed.clear()
        for watch in changed:
            watch.refresh()
        if self._refreshed:
            changed.update(watch for watch in self._refreshed if watch.places)  # still open
            self._refreshed.clear()
        return list(changed)
