"""`PrefixCache`: the interface of a prefix cache to the scheduler, the engine and replay.

`RadixCache` and `HashBlockCache` are the two implementations; one contract test runs on both.
Single-threaded: one owner makes every call. Only the cache modifies returned objects. The owner of
the K/V memory performs a sequence's `cow_copies` before the sequence is used.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict
from typing import Any, Protocol

from radixserve.arrays import IntArray
from radixserve.cache.page_pool import PageAllocator, PageOwner
from radixserve.cache.sequence import CacheSequence
from radixserve.cache.tokens import TokenIds
from radixserve.cache.watch import PrefixWatch, WatchRegistry
from radixserve.checks import check_int, check_str
from radixserve.output import Lookup


class CacheSession(Protocol):
    """Groups related sequences that are expected to be continued until it is closed: a chat, a
    branch, a tenant."""

    @property
    def name(self) -> str: ...

    @property
    def is_open(self) -> bool: ...

    def close(self) -> None:
        """Close: pages reached only by closed sessions are evicted first. Idempotent."""


class PrefixCache(ABC):
    """Tokens in, the longest cached prefix out; see `RadixCache` for what each call promises."""

    def __init__(
        self, allocator: PageAllocator, owner: PageOwner, watch_registry: WatchRegistry
    ) -> None:
        self._allocator = allocator
        self._owner = owner
        self._watch_registry = watch_registry

    @property
    def num_pages(self) -> int:
        return self._allocator.pool.num_pages

    @property
    def page_size(self) -> int:
        """Tokens a page."""
        return self._allocator.page_size

    @property
    def sharing_enabled(self) -> bool:
        """Whether sequences reuse K/V computed by others."""
        return True

    @property
    def num_available(self) -> int:
        """Pages that are free or evictable now."""
        return self._allocator.num_available

    @abstractmethod
    def lookup(self, tokens: TokenIds, namespace: str = "", *, allow_full: bool = False) -> Lookup:
        """What `acquire` would reuse now, and why not more. Changes nothing."""

    @abstractmethod
    def watch(self, tokens: IntArray, namespace: str = "") -> PrefixWatch:
        """A persistent look-up: answers from memory until `changed_watches` refreshes it. Must be
        closed."""

    def changed_watches(self) -> list[PrefixWatch]:
        """Refresh the open watches whose match may have changed since the last call; returns them.

        O(watches of changed places), not O(all watches).
        """
        return self._watch_registry.take_changed()

    @abstractmethod
    def acquire(
        self,
        tokens: TokenIds,
        namespace: str = "",
        *,
        allow_full: bool = False,
        session: CacheSession | None = None,
        priority: int = 0,
    ) -> CacheSequence:
        """The longest cached prefix of `tokens`, locked until the sequence is released.

        At least the last token is left to compute unless `allow_full`. The sequence's length is
        `cached_len`; `extend` takes room for the rest.
        """

    @abstractmethod
    def open_session(self, name: str, *, lease_s: float | None = None) -> CacheSession:
        """A session to pass to `acquire`. Names need not be unique; they are for `stats`."""

    def evict(self, num_tokens: int) -> int:
        """Free pages for `num_tokens`, rounded up to a page, that no sequence has locked.

        Returns the tokens freed, in whole pages: fewer than asked when there are no more.
        """
        num_tokens = check_int("num_tokens", num_tokens, 0)
        return self._owner.evict(self._allocator.pages_for(num_tokens)) * self.page_size

    def reset(self, namespace: str | None = None) -> None:
        """Forget one namespace, or all; pages in use are freed when released.

        Sequences acquired before continue, but what they commit is not cached.
        """
        if namespace is not None:
            check_str("namespace", namespace)
        self._owner.reset(namespace)
        self._allocator.stats.num_resets += 1

    def stats(self) -> dict[str, Any]:
        """Counters since the start (tokens) and gauges (pages). free + tree + private == total.

        "leases" lists the leases now, first to end first: {"session", "tokens", "seconds_left"},
        with the tokens from the root to where its sequence ended.
        """
        allocator = self._allocator
        return {
            "page_size": self.page_size,
            "pages_total": self.num_pages,
            "pages_free": allocator.pool.num_free,
            "pages_tree": self._owner.num_pages,
            "pages_locked": self._owner.num_pages - self._owner.num_evictable,
            "pages_private": allocator.num_private,
            "sequences": len(allocator.live_sequences),
            "watches": len(self._watch_registry),
            "splits": 0,
            "evicted_tokens": self._owner.num_evicted_tokens,
            **asdict(allocator.stats),
            "leases": [],
            "pages_leased": 0,
            "pages_closed": 0,
        }

    @abstractmethod
    def check(self) -> None:
        """Audit every page's owner and every law of the cache; AssertionError names the first
        broken one. O(everything): for tests and debugging."""

    @abstractmethod
    def dump(self, max_nodes: int = 10_000) -> dict[str, Any]:
        """The cached prefixes as nested dicts, breadth first up to `max_nodes` nodes.

        {"page_size", "truncated", "namespaces": {name: node}}, where a node is {"start", "tokens",
        "num_tokens", "pages", "lock_ref", "sequences", "children"}.
        """
