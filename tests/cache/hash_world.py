"""The worlds of `world` for `HashBlockCache`, and with copies made as late as possible."""

from __future__ import annotations

from typing import Any

from radixserve.cache import HashBlockCache
from tests.cache.world import Prefix, World


class LateWorld(World):
    """Page heads are copied just before their sequence commits, as late as can be.

    Until then whatever anybody does must leave the source as it was.
    """

    is_waiting = False

    def copy_page_prefixes(self, seq: Any) -> None:
        if not self.is_waiting:
            super().copy_page_prefixes(seq)

    def commit(self, seq: Any, length: int) -> None:
        self.copy_page_prefixes(seq)
        super().commit(seq, length)

    def extend(self, seq: Any, tokens: Prefix) -> bool:
        self.is_waiting = True
        has_room = super().extend(seq, tokens)
        self.is_waiting = False
        return has_room

    def truncate(self, seq: Any, length: int) -> None:
        self.is_waiting = True
        super().truncate(seq, length)
        self.is_waiting = False

    def write(self, seq: Any, start: int) -> None:
        super().write(seq, start)
        for other in self.open:
            self.verify(other)

    def check(self) -> None:
        super().check()
        for seq in self.open:
            self.verify(seq)

    def add_sequence(self, seq: Any, namespace: str) -> None:
        self.is_waiting = True
        super().add_sequence(seq, namespace)
        self.is_waiting = False


class HashWorld(World):
    """Only whole blocks are found; eviction is LRU and reuse is on, whatever the program asks."""

    hash_algorithm = "sha256"

    def make_cache(self, num_pages: int, page_size: int, **_: Any) -> Any:
        return HashBlockCache(num_pages, page_size, hash_algorithm=self.hash_algorithm)

    def longest_cached(self, tokens: Prefix, namespace: str) -> int:
        return self.whole(super().longest_cached(tokens, namespace))

    def commit(self, seq: Any, length: int) -> None:
        seq.commit(length)
        self.verify(seq)
        if id(seq) not in self.stale:
            cached = self.longest_cached(tuple(seq.tokens[:length]), self.spaces[id(seq)])
            assert cached == self.whole(length), "published blocks are not found"

    def drain(self) -> None:
        super().drain()
        stats = self.cache.stats()
        assert stats["namespaces"] == stats["nodes"] == 0

    def whole(self, length: int) -> int:
        return length - length % self.page_size


class LateHashWorld(LateWorld, HashWorld):
    pass
