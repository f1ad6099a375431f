"""`HashBlockCache`: whole-block prefix cache with chained block hashes, as in vLLM.

It has the interface of `RadixCache`, so that the two designs can be compared by measurement.
Single-threaded: one owner makes every call. Independent of tensors.
"""

from __future__ import annotations

import math
import time
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, Self

from radixserve.arrays import IntArray
from radixserve.cache.events import EventLog, Stored, open_log
from radixserve.cache.hash.audit import check_blocks, count_shared, dump_blocks, preview_blocks
from radixserve.cache.hash.block import Block, BlockNamespace
from radixserve.cache.hash.block_hash import BlockChain, make_digest
from radixserve.cache.hash.block_pool import BlockPool, stored
from radixserve.cache.hash.sequence import HashSequence
from radixserve.cache.hash.snapshot import snapshot_blocks
from radixserve.cache.interface import CacheSession, PrefixCache
from radixserve.cache.lookup import Lookup, MissReason
from radixserve.cache.namespace import DEFAULT_NAMESPACE, Namespace, as_namespace
from radixserve.cache.page_pool import PagePool
from radixserve.cache.sequence import PageAllocator
from radixserve.cache.snapshot import SnapshotView
from radixserve.cache.tokens import TOKEN_BYTES, TokenIds, as_token_ids
from radixserve.cache.watch import PrefixWatch
from radixserve.checks import check_float, check_int, check_str, shown
from radixserve.errors import InvalidRequest


class HashPrefixWatch(PrefixWatch):
    """The cached whole blocks of one prompt.

    Blocks of a chain are dropped from its end, so it watches only the last one matched and the
    first one missing. The prompt is hashed once, and only as far as it is cached.
    """

    __slots__ = ("_pool", "blocks", "chain", "namespace", "pages")

    def __init__(self, pool: BlockPool, tokens: IntArray, namespace: Namespace) -> None:
        super().__init__(pool.watch_registry, len(tokens))
        self._pool = pool
        self.namespace = namespace
        num_blocks = max(0, len(tokens) - 1) // pool.block_size
        self.chain = pool.chain(namespace, tokens[: num_blocks * pool.block_size].tobytes())
        self.blocks: list[Block] = []  # the match
        self.pages = array("i")  # theirs
        self.refresh()

    @property
    def locked_len(self) -> int:
        """Tokens of `cached_len` in blocks that live sequences have locked. O(log blocks)."""
        num_locked = bisect_left(self.blocks, True, key=lambda block: not block.lock_ref)
        return num_locked * self._pool.block_size

    def path(self) -> tuple[int, ...]:
        """Ids of the blocks matched, from the first on."""
        return tuple([block.block_id for block in self.blocks])

    def refresh(self) -> None:
        """Match again from the last block that is still cached. O(blocks added and removed)."""
        blocks, chain = self.blocks, self.chain
        while blocks and not blocks[-1].is_listed:
            blocks.pop()
        del self.pages[len(blocks) :]
        self._pool.match(self.namespace, chain, blocks, self.pages)
        self.cached_len = len(blocks) * self._pool.block_size
        places = {(blocks[-1].key, b"")} if blocks else set()
        if len(blocks) < chain.num_blocks:
            places.add((chain.key(len(blocks)), b""))
        self._watch_at(frozenset(places))


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

    `hash_algorithm`: "sha256", or "xxh3" where the package xxhash is installed. `freeze_garbage`:
    see `RadixCache`.
    """

    def __init__(
        self,
        num_pages: int,
        block_size: int = 16,
        *,
        hash_algorithm: str = "sha256",
        clock: Callable[[], float] = time.monotonic,
        freeze_garbage: bool = False,
    ) -> None:
        num_pages = check_int("num_pages", num_pages, 1, 2**31 - 1)
        block_size = check_int("block_size", block_size, 1)
        pages = PagePool(num_pages)
        self._pool = pool = BlockPool(pages, block_size, make_digest(hash_algorithm))
        allocator = PageAllocator(pages, block_size, pool, clock)
        super().__init__(allocator, pool, pool.watch_registry, freeze_garbage=freeze_garbage)
        self._sessions: set[HashSession] = set()  # open ones

    def lookup(
        self,
        tokens: TokenIds,
        namespace: str | Namespace = DEFAULT_NAMESPACE,
        *,
        allow_full: bool = False,
        compare_namespaces: bool = True,
    ) -> Lookup:
        """Returns the number of tokens that `acquire` would reuse now, and why not more. Changes
        nothing.

        reason is "full" (every whole block that may be reused is cached), "evicted" (the next
        block was cached and has been dropped), "adapter" or "namespace" (another one has more of
        these blocks) or "never_seen". `position` is the end of the last block found: hashes
        cannot tell where inside the next one the tokens part, so there is no "diverged". As many
        evicted blocks are remembered as the cache has pages, and at least 4,096.

        O(blocks found); a miss also asks other namespaces (at most 64).
        """
        ids, key = as_token_ids(tokens), as_namespace(namespace)
        chain = self._pool.chain(key, self._reusable(ids, allow_full))
        num_matched = len(self._pool.match(key, chain, []))
        length = num_matched * self.page_size
        reason = self._reason(key, chain, num_matched, compare_namespaces)
        return Lookup(length, reason, length)

    def _reusable(self, ids: IntArray, allow_full: bool) -> bytes:
        """Returns the whole blocks of a prompt that may be reused, as int32 bytes."""
        limit = len(ids) if allow_full else max(0, len(ids) - 1)
        return ids[: limit - limit % self.page_size].tobytes()

    def _reason(
        self, namespace: Namespace, chain: BlockChain, num_matched: int, compare_namespaces: bool
    ) -> MissReason:
        pool = self._pool
        if num_matched == chain.num_blocks:
            return "full"
        if pool.evicted.get(chain.key(num_matched)) == namespace:
            return "evicted"
        reason: MissReason = "never_seen"
        for key in islice(pool.namespaces, _MAX_NAMESPACES):
            is_own = key._replace(adapter=namespace.adapter) == namespace
            if key == namespace or not (is_own or compare_namespaces):
                continue
            if len(pool.match(key, pool.chain(key, chain.data), [])) > num_matched:
                if is_own:
                    return "adapter"
                reason = "namespace"
        return reason

    def watch(
        self, tokens: IntArray, namespace: str | Namespace = DEFAULT_NAMESPACE
    ) -> HashPrefixWatch:
        return HashPrefixWatch(self._pool, as_token_ids(tokens), as_namespace(namespace))

    def acquire(
        self,
        tokens: TokenIds,
        namespace: str | Namespace = DEFAULT_NAMESPACE,
        *,
        allow_full: bool = False,
        session: CacheSession | None = None,
        priority: int = 0,
    ) -> HashSequence:
        """Returns the longest cached prefix of whole blocks, locked until the sequence is released.

        As `RadixCache.acquire`, but `session` and `priority` are checked and have no effect.
        """
        ids, pool, pages = as_token_ids(tokens), self._pool, array("i")
        key = as_namespace(namespace)
        self._check_use(session, priority)
        space = pool.open_namespace(key)
        chain = pool.chain(key, self._reusable(ids, allow_full))
        blocks = pool.match(key, chain, [], pages)
        return self._acquire_match(space, len(ids), chain, blocks, pages)

    def acquire_watched(
        self, watch: PrefixWatch, *, session: CacheSession | None = None, priority: int = 0
    ) -> tuple[HashSequence, Lookup]:
        """See `PrefixCache.acquire_watched`."""
        assert isinstance(watch, HashPrefixWatch)
        self._check_use(session, priority)
        self._pool.watch_registry.refresh(watch)
        key, chain, num_blocks = watch.namespace, watch.chain, len(watch.blocks)
        reason = self._reason(key, chain, num_blocks, compare_namespaces=True)
        space, blocks = self._pool.open_namespace(key), [*watch.blocks]
        sequence = self._acquire_match(space, watch.num_tokens, chain, blocks, watch.pages[:])
        return sequence, Lookup(watch.cached_len, reason, watch.cached_len)

    def _acquire_match(
        self,
        space: BlockNamespace,
        num_tokens: int,
        chain: BlockChain,
        blocks: list[Block],
        pages: array[int],
    ) -> HashSequence:
        """Returns a sequence over `blocks`, the match of a prompt of `num_tokens` tokens. The
        sequence owns `blocks` and `pages` from now on."""
        allocator, stats = self._allocator, self._allocator.stats
        if self._freezer is not None:
            self._note_growth()
        self._pool.lock(blocks)
        length = len(blocks) * self.page_size
        allocator.note_time()
        stats.num_acquired += 1
        stats.acquired_tokens += num_tokens
        stats.matched_tokens += length
        known = bytearray(chain.data[: length * TOKEN_BYTES])
        return HashSequence(allocator, self._pool, space, length, blocks, (known, pages))

    def _check_use(self, session: object, priority: int) -> None:
        """Check the arguments of `acquire` that have no effect here. Raises InvalidRequest."""
        if type(priority) is not int:
            check_int("priority", priority, -(2**31), 2**31 - 1)
        if session is not None:
            self._check_session(session)

    def open_session(
        self, name: str, *, lease_s: float | None = None, retain_until: float | None = None
    ) -> HashSession:
        """Returns a handle for `acquire`, which has no effect on eviction. `lease_s` and
        `retain_until` (seconds, >= 0) are checked and ignored."""
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
        return open_log(self._pool, self._stored_blocks, epoch)

    def _stored_blocks(self) -> Iterator[Stored]:
        """Yields all findable blocks, each after the one before it in its prefix."""
        namespaces = self._pool.namespaces.values()
        blocks = [block for namespace in namespaces for block in namespace.blocks.values()]
        return map(stored, sorted(blocks, key=lambda block: block.block_id))

    def stats(self) -> dict[str, Any]:
        """See `PrefixCache.stats`. `pages_tree` counts the pages of blocks: findable ones
        (`nodes`), and those that only running sequences still use. This cache has no leases."""
        namespaces = self._pool.namespaces
        return {
            **super().stats(),
            "collisions": self._pool.num_collisions,
            "namespaces": len(namespaces),
            "nodes": sum(len(namespace.blocks) for namespace in namespaces.values()),
            "sessions": len(self._sessions),
        }

    def check(self) -> None:
        """See `PrefixCache.check`."""
        check_blocks(self._allocator, self._pool)

    def _count_shared(self) -> int:
        return count_shared(self._allocator)

    def _preview(self, count: int) -> list[dict[str, Any]]:
        return preview_blocks(self._pool, count)

    def _dump(self, max_nodes: int, only: str | None) -> dict[str, Any]:
        return dump_blocks(self._allocator, self._pool, max_nodes, only)

    def _snapshot(self, view: SnapshotView) -> dict[str, Any]:
        return snapshot_blocks(self._allocator, self._pool, view)
