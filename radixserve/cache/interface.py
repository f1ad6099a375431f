"""What a prefix cache is, for those who use one: the scheduler, the engine, replay.

`RadixCache` and `HashBlockCache` are the two implementations; one contract test runs on both.
Single-threaded: one owner makes every call. Nobody but the cache changes what it hands out, apart
from `copies`, which the owner of the K/V memory performs before the sequence is used.
"""

from __future__ import annotations

from typing import Any, Protocol

from radixserve.arrays import IntArray
from radixserve.cache.tokens import TokenIds
from radixserve.output import Lookup

PageCopy = tuple[int, int, int]  # (source page, destination page, tokens of its head)


class CacheSession(Protocol):
    """Somebody whose sequences belong together and who will come back, until it is closed: a chat,
    a branch, a tenant."""

    @property
    def name(self) -> str: ...

    @property
    def is_open(self) -> bool: ...

    def close(self) -> None:
        """It will not come back: what only closed sessions reach goes first. Twice does nothing."""


class PrefixWatch(Protocol):
    """A look-up that stays: answers from memory until the cache changes where it ended."""

    @property
    def cached_len(self) -> int:
        """Tokens in the cache at the last refresh, at most all but the last one."""

    @property
    def locked_len(self) -> int:
        """Of `cached_len`, tokens in pages that live sequences hold anyway."""

    def path(self) -> tuple[int, ...]:
        """Names of the places that the match goes through, from the root down."""

    def close(self) -> None: ...


class CacheSequence(Protocol):
    """One session of a path, with its own pages behind it; see `CachedSequence`."""

    cached_len: int
    cow_copies: list[PageCopy]

    @property
    def tokens(self) -> IntArray: ...

    @property
    def length(self) -> int: ...

    @property
    def committed_len(self) -> int: ...

    @property
    def num_unknown(self) -> int: ...

    @property
    def pages(self) -> IntArray: ...

    @property
    def num_private(self) -> int: ...

    @property
    def is_released(self) -> bool: ...

    @property
    def is_stale(self) -> bool: ...

    def pages_wanted(self, num_tokens: int) -> int: ...

    def page_table_delta(self) -> tuple[IntArray, int]: ...

    def extend(self, tokens: TokenIds, num_unknown: int = 0) -> None: ...

    def append_placeholders(self, num_tokens: int) -> None: ...

    def fill(self, tokens: TokenIds) -> None: ...

    def commit(self, length: int) -> None: ...

    def fork(self) -> CacheSequence: ...

    def truncate(self, length: int) -> None: ...

    def release(self) -> None: ...


class PrefixCache(Protocol):
    """Tokens in, the longest cached prefix out; see `RadixCache` for what each call promises."""

    @property
    def num_pages(self) -> int: ...

    @property
    def page_size(self) -> int: ...

    @property
    def sharing_enabled(self) -> bool:
        """Whether sequences share what others computed."""

    @property
    def num_available(self) -> int:
        """Pages that are free or evictable now."""

    def lookup(
        self, tokens: TokenIds, namespace: str = "", *, allow_full: bool = False
    ) -> Lookup: ...

    def watch(self, tokens: IntArray, namespace: str = "") -> PrefixWatch: ...

    def changed_watches(self) -> list[PrefixWatch]:
        """Refresh the open probes whose answer may have changed since the last call."""

    def acquire(
        self,
        tokens: TokenIds,
        namespace: str = "",
        *,
        allow_full: bool = False,
        session: CacheSession | None = None,
        priority: int = 0,
    ) -> CacheSequence: ...

    def open_session(self, name: str, *, lease_s: float | None = None) -> CacheSession: ...

    def evict(self, num_tokens: int) -> int: ...

    def reset(self, namespace: str | None = None) -> None: ...

    def stats(self) -> dict[str, Any]: ...

    def check(self) -> None: ...

    def dump(self, max_nodes: int = 10_000) -> dict[str, Any]: ...
