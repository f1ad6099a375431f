"""`HashBlockCache`, the other known design: whole blocks, found by the hash of all up to their end.

The design of vLLM and nano-vLLM behind the interface of `RadixCache`, so that the two can be told
apart by their numbers. Single-threaded by contract: one owner. Knows nothing of tensors.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from itertools import islice
from typing import Any

from radixserve.arrays import IntArray
from radixserve.cache.hash.audit import check_pool, dump_pool
from radixserve.cache.hash.block_hash import BlockChain, make_digest
from radixserve.cache.hash.block_pool import BlockPool
from radixserve.cache.hash.prefix_watch import HashPrefixWatch
from radixserve.cache.hash.sequence import HashSequence
from radixserve.cache.interface import CacheSession, PrefixWatch
from radixserve.cache.tokens import TOKEN_BYTES, TokenIds, as_token_ids
from radixserve.checks import check_float, check_int, check_str, shown
from radixserve.errors import InvalidRequest
from radixserve.output import Lookup

_MAX_NAMESPACES = 64  # namespaces asked at most when explaining a miss


class HashSession:
    """A session in name only: this design gives nobody a preference."""

    __slots__ = ("_all", "_name")

    def __init__(self, everyone: set[HashSession], name: str) -> None:
        """`everyone`: the open sessions of its cache."""
        self._all = everyone
        self._name = name
        everyone.add(self)

    @property
    def name(self) -> str:
        return self._name

    @property
    def is_open(self) -> bool:
        return self in self._all

    def close(self) -> None:
        """Twice does nothing."""
        self._all.discard(self)

    def belongs_to(self, everyone: set[HashSession]) -> bool:
        return self._all is everyone


class HashBlockCache:
    """Chained block hashes over a pool of `num_pages` KV pages of `block_size` tokens.

        cache = HashBlockCache(num_pages=1024, block_size=16)

    It is used like a `RadixCache`, and promises the same with these differences:
    - Only whole blocks are shared: `cached_len` is a multiple of the block size, and no page head
      is ever copied but for a fork or a cut inside a block.
    - A look-up hashes every block that it finds. A hit is compared token by token, too, so a weak
      hash costs time, never a wrong answer.
    - Unused blocks are dropped in LRU order, a sequence's last one first. Sessions and priorities
      are accepted and give nobody a preference.

    `hash_name`: "sha256", or "xxh3" where the package xxhash is installed.
    """

    def __init__(self, num_pages: int, block_size: int = 16, *, hash_name: str = "sha256") -> None:
        num_pages = check_int("num_pages", num_pages, 1, 2**31 - 1)
        block_size = check_int("block_size", block_size, 1)
        self._pool = BlockPool(num_pages, block_size, make_digest(hash_name))
        self._sessions: set[HashSession] = set()  # open ones

    @property
    def num_pages(self) -> int:
        return self._pool.pages.num_pages

    @property
    def page_size(self) -> int:
        """Tokens a block: a block is a page."""
        return self._pool.block_size

    @property
    def sharing_enabled(self) -> bool:
        """Whether sequences share what others computed."""
        return True

    @property
    def num_available(self) -> int:
        """Pages that are free or evictable now."""
        return self._pool.num_available

    # -- finding ------------------------------------------------------------------------------

    def lookup(self, tokens: TokenIds, namespace: str = "", *, allow_full: bool = False) -> Lookup:
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
        return Lookup(length, self._reason(namespace, chain, found), length)

    def _reusable(self, ids: IntArray, allow_full: bool) -> bytes:
        """The whole blocks that may be reused, as int32 bytes."""
        limit = len(ids) if allow_full else max(0, len(ids) - 1)
        return ids[: limit - limit % self.page_size].tobytes()

    def _reason(self, namespace: str, chain: BlockChain, found: int) -> str:
        pool = self._pool
        if found == chain.num_blocks:
            return "full"
        if pool.evicted.find(chain.key(found)) == namespace:
            return "evicted"
        for name in islice(pool.namespaces, _MAX_NAMESPACES):
            if name != namespace:
                other = pool.chain(name, chain.data)
                if len(pool.match(name, other, [])) > found:
                    return "namespace"
        return "never_seen"

    def watch(self, tokens: IntArray, namespace: str = "") -> HashPrefixWatch:
        """A look-up that stays: see `changed_watches`. It has to be closed."""
        return HashPrefixWatch(self._pool, as_token_ids(tokens), namespace)

    def changed_watches(self) -> list[PrefixWatch]:
        """Refresh the open probes whose match may have changed since the last call; returns them.

        O(probes that wait for, or rest on, blocks that came or went), not O(all probes).
        """
        changed = self._pool.watch_registry.take_changed()
        watches = [watcher for watcher in changed if isinstance(watcher, HashPrefixWatch)]
        for watch in watches:
            watch.refresh()
        return list(watches)

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

        At least the last token is left to compute unless `allow_full`. The sequence's length is
        `cached_len`; `extend` takes room for the rest. `session` and `priority` are checked, and
        have no effect: this design drops blocks in LRU order, whoever used them.
        """
        ids = as_token_ids(tokens)
        check_str("namespace", namespace)
        if type(priority) is not int:
            check_int("priority", priority, -(2**31), 2**31 - 1)
        pool = self._pool
        if session is not None:
            self._check_session(session)
        block_namespace = pool.namespace(namespace)
        chain = pool.chain(namespace, self._reusable(ids, allow_full))
        blocks = pool.match(namespace, chain, [])
        pool.lock(blocks)
        length = len(blocks) * self.page_size
        counters = pool.counters
        counters.num_acquired += 1
        counters.acquired_tokens += len(ids)
        counters.matched_tokens += length
        return HashSequence(
            pool, block_namespace, bytearray(chain.data[: length * TOKEN_BYTES]), blocks
        )

    def open_session(self, name: str, *, lease_s: float | None = None) -> HashSession:
        """A handle to pass to `acquire`. It keeps nothing in the cache: `lease_s` (seconds, >= 0)
        is checked and has no effect."""
        check_str("name", name)
        if lease_s is not None:
            check_float("lease_s", lease_s, 0.0, math.inf)
        return HashSession(self._sessions, name)

    def _check_session(self, session: object) -> None:
        if not isinstance(session, HashSession) or not session.belongs_to(self._sessions):
            raise InvalidRequest(
                f"session must be None or come from this cache's open_session, got {shown(session)}"
            )

    # -- letting go ---------------------------------------------------------------------------

    def evict(self, num_tokens: int) -> int:
        """Free room for `num_tokens`, rounded up to a block, from what nobody holds.

        Returns the room freed, in tokens of whole blocks: less than asked when there is no more.
        """
        num_tokens = check_int("num_tokens", num_tokens, 0)
        return self._pool.evict(self._pool.pages_for(num_tokens)) * self.page_size

    def reset(self, namespace: str | None = None) -> None:
        """Forget one namespace, or all. O(blocks forgotten); those in use are freed when released.

        Sequences acquired before go on undisturbed, but what they commit is not kept.
        """
        if namespace is not None:
            check_str("namespace", namespace)
        names = list(self._pool.namespaces) if namespace is None else [namespace]
        for name in names:
            self._pool.reset(name)
        self._pool.evicted.forget(namespace)
        self._pool.counters.num_resets += 1

    # -- knowing ------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Counters since the start (tokens) and gauges (pages). free + tree + private == total.

        The keys of `RadixCache.stats`. `pages_tree` are the pages of blocks: findable ones
        (`nodes`), and those that only running sequences still hold. There are no leases.
        """
        pool = self._pool
        return {
            "page_size": self.page_size,
            "pages_total": self.num_pages,
            "pages_free": pool.pages.num_free,
            "pages_tree": pool.num_blocks,
            "pages_locked": pool.num_blocks - len(pool.unused),
            "pages_private": pool.num_private,
            "sequences": len(pool.live_sequences),
            "namespaces": len(pool.namespaces),
            "nodes": sum(
                len(block_namespace.blocks) for block_namespace in pool.namespaces.values()
            ),
            "splits": 0,
            "evicted_tokens": pool.num_evicted_tokens,
            **asdict(pool.counters),
            "sessions": len(self._sessions),
            "leases": [],
            "pages_leased": 0,
            "pages_closed": 0,
        }

    def check(self) -> None:
        """Audit every page's owner and every law of the blocks; AssertionError names the first
        broken one. O(everything): for tests and for those in doubt."""
        check_pool(self._pool)

    def dump(self, max_nodes: int = 10_000) -> dict[str, Any]:
        """The findable blocks as nested dicts, each below the one before it; see
        `RadixCache.dump`. Breadth first up to `max_nodes` blocks; "truncated" tells."""
        return dump_pool(self._pool, check_int("max_nodes", max_nodes, 0))
