"""`HashBlockCache`: whole-block prefix cache with chained block hashes, as in vLLM.

It has the interface of `RadixCache`, so that the two designs can be compared by measurement.
Single-threaded: one owner makes every call. Independent of tensors.
"""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any, Self

from radixserve.arrays import IntArray
from radixserve.cache.events import EventLog, Stored
from radixserve.cache.hash.audit import check_blocks, count_shared, dump_blocks, preview_blocks
from radixserve.cache.hash.block_hash import BlockChain, make_digest
from radixserve.cache.hash.block_pool import BlockPool, stored
from radixserve.cache.hash.prefix_watch import HashPrefixWatch
from radixserve.cache.hash.sequence import HashSequence
from radixserve.cache.hash.snapshot import snapshot_blocks
from radixserve.cache.interface import CacheSession, Inspection, PrefixCache
from radixserve.cache.page_pool import PageAllocator, PagePool
from radixserve.cache.tokens import TOKEN_BYTES, TokenIds, as_token_ids
from radixserve.checks import check_float, check_int, check_str, shown
from radixserve.errors import InvalidRequest
from radixserve.output import Lookup

_MAX_NAMESPACES = 64  # namespaces asked at most when explaining a miss


class HashSession:
    """A session handle without effect: this cache evicts in LRU order only."""

    __slots__ = ("_name", "_open")

    def __init__(self, open_sessions: set[HashSession], name: str) -> None:
        self._open = open_sessions  # of its cache
        self._name = name
        open_sessions.add(self)

    @property
    def name(self) -> str:
        return self._name

    @property
    def is_open(self) -> bool:
        return self in self._open

    def close(self) -> None:
        """Idempotent."""
        self._open.discard(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def belongs_to(self, open_sessions: set[HashSession]) -> bool:
        return self._open is open_sessions


class HashBlockCache(PrefixCache):
    """Chained block hashes over a pool of `num_pages` KV pages of `block_size` tokens.

        cache = HashBlockCache(num_pages=1024, block_size=16)

    It is used like a `RadixCache`, and promises the same with these differences:
    - Only whole blocks are shared: `cached_len` is a multiple of the block size, and page
      prefixes are copied only for a fork or a cut inside a block.
    - A look-up hashes every block that it finds. A hit is compared token by token, too, so a weak
      hash costs time, never a wrong answer.
    - A reset costs O(blocks forgotten).
    - Unused blocks are dropped in LRU order, a sequence's last one first. Sessions and priorities
      are accepted and have no effect.

    `hash_algorithm`: "sha256", or "xxh3" where the package xxhash is installed.
    """

    def __init__(
        self,
        num_pages: int,
        block_size: int = 16,
        *,
        hash_algorithm: str = "sha256",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        num_pages = check_int("num_pages", num_pages, 1, 2**31 - 1)
        block_size = check_int("block_size", block_size, 1)
        pages = PagePool(num_pages)
        self._pool = pool = BlockPool(pages, block_size, make_digest(hash_algorithm))
        allocator = PageAllocator(pages, block_size, pool, clock)
        inspection = Inspection(
            partial(check_blocks, allocator, pool),
            partial(count_shared, allocator),
            partial(preview_blocks, pool),
            partial(snapshot_blocks, allocator, pool),
            partial(dump_blocks, allocator, pool),
        )
        super().__init__(allocator, pool, pool.watch_registry, inspection)
        self._sessions: set[HashSession] = set()  # open ones

    def lookup(
        self,
        tokens: TokenIds,
        namespace: str = "",
        *,
        allow_full: bool = False,
        compare_namespaces: bool = True,
    ) -> Lookup:
        """What `acquire` would reuse now, and why not more. Changes nothing.

        reason is "full" (every whole block that may be reused is cached), "evicted" (the next
        block was cached and has been dropped), "namespace" (another one has more of these blocks)
        or "never_seen". `position` is the end of the last block found: hashes cannot tell where
        inside the next one the tokens part, so there is no "diverged". As many evicted blocks are
        remembered as the cache has pages, and at least 4,096.

        O(blocks found); a miss also asks other namespaces (at most 64).
        """
        ids = as_token_ids(tokens)
        check_str("namespace", namespace)
        chain = self._pool.chain(namespace, self._reusable(ids, allow_full))
        found = len(self._pool.match(namespace, chain, []))
        length = found * self.page_size
        reason = self._reason(namespace, chain, found, compare_namespaces)
        return Lookup(length, reason, length)

    def _reusable(self, ids: IntArray, allow_full: bool) -> bytes:
        """The whole blocks that may be reused, as int32 bytes."""
        limit = len(ids) if allow_full else max(0, len(ids) - 1)
        return ids[: limit - limit % self.page_size].tobytes()

    def _reason(
        self, namespace: str, chain: BlockChain, found: int, compare_namespaces: bool
    ) -> str:
        pool = self._pool
        if found == chain.num_blocks:
            return "full"
        if pool.evicted.get(chain.key(found)) == namespace:
            return "evicted"
        for name in islice(pool.namespaces, _MAX_NAMESPACES if compare_namespaces else 0):
            if name != namespace:
                other = pool.chain(name, chain.data)
                if len(pool.match(name, other, [])) > found:
                    return "namespace"
        return "never_seen"

    def watch(self, tokens: IntArray, namespace: str = "") -> HashPrefixWatch:
        return HashPrefixWatch(self._pool, as_token_ids(tokens), namespace)

    def acquire(
        self,
        tokens: TokenIds,
        namespace: str = "",
        *,
        allow_full: bool = False,
        session: CacheSession | None = None,
        priority: int = 0,
    ) -> HashSequence:
        """The longest cached prefix of whole blocks, locked until the sequence is released.

        As `RadixCache.acquire`, but `session` and `priority` are checked and have no effect.
        """
        ids = as_token_ids(tokens)
        check_str("namespace", namespace)
        if type(priority) is not int:
            check_int("priority", priority, -(2**31), 2**31 - 1)
        if session is not None:
            self._check_session(session)
        pool, stats = self._pool, self._allocator.stats
        opened = pool.open_namespace(namespace)
        chain = pool.chain(namespace, self._reusable(ids, allow_full))
        pages = array("i")
        blocks = pool.match(namespace, chain, [], pages)
        pool.lock(blocks)
        length = len(blocks) * self.page_size
        self._allocator.note_time()
        stats.num_acquired += 1
        stats.acquired_tokens += len(ids)
        stats.matched_tokens += length
        known = bytearray(chain.data[: length * TOKEN_BYTES])
        return HashSequence(self._allocator, pool, opened, known, blocks, pages)

    def open_session(
        self, name: str, *, lease_s: float | None = None, retain_until: float | None = None
    ) -> HashSession:
        """A handle for `acquire`, without effect on eviction. `lease_s` and `retain_until`
        (seconds, >= 0) are checked and ignored."""
        check_str("name", name)
        for what, seconds in (("lease_s", lease_s), ("retain_until", retain_until)):
            if seconds is not None:
                check_float(what, seconds, 0.0, math.inf)
        return HashSession(self._sessions, name)

    def _check_session(self, session: object) -> None:
        if not isinstance(session, HashSession) or not session.belongs_to(self._sessions):
            raise InvalidRequest(
                f"session must be None or come from this cache's open_session, got {shown(session)}"
            )

    def open_events(self, epoch: int | None = None) -> EventLog:
        """See `PrefixCache.open_events`. A node is a block."""
        pool = self._pool
        if pool.events is not None:
            raise InvalidRequest("this cache's events are open already: close that log first")

        def close() -> None:
            if pool.events is log:
                pool.events = None

        log = pool.events = EventLog(self._stored_blocks, close, epoch)
        return log

    def _stored_blocks(self) -> Iterator[Stored]:
        """All findable blocks, each after the one before it in its prefix."""
        blocks = [b for n in self._pool.namespaces.values() for b in n.blocks.values()]
        return map(stored, sorted(blocks, key=lambda block: block.block_id))

    def stats(self) -> dict[str, Any]:
        """The keys of `PrefixCache.stats`. `pages_tree` are the pages of blocks: findable ones
        (`nodes`), and those that only running sequences still hold. There are no leases."""
        namespaces = self._pool.namespaces
        return {
            **super().stats(),
            "collisions": self._pool.num_collisions,
            "namespaces": len(namespaces),
            "nodes": sum(len(namespace.blocks) for namespace in namespaces.values()),
            "sessions": len(self._sessions),
        }
