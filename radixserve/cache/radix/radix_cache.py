"""`RadixCache`, the front of the cache: look up, acquire, evict, reset, explain, audit.

Single-threaded by contract: one owner. Knows nothing of tensors; whoever owns the K/V memory
performs the page copies that sequences ask for.
"""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from radixserve.arrays import IntArray
from radixserve.cache.interface import CacheSession, PageCopy, PrefixWatch
from radixserve.cache.radix.allocator import PageAllocator
from radixserve.cache.radix.audit import check_cache, dump_trees
from radixserve.cache.radix.miss_reason import NOTHING, explain
from radixserve.cache.radix.node import NamespaceTree, Node
from radixserve.cache.radix.policies import make_eviction
from radixserve.cache.radix.prefix_watch import RadixPrefixWatch
from radixserve.cache.radix.radix_tree import Match
from radixserve.cache.radix.sequence import CachedSequence
from radixserve.cache.radix.session_eviction import (
    RadixSession,
    SessionAwareEviction,
    check_session,
)
from radixserve.cache.tokens import TokenIds, as_token_ids, token_view
from radixserve.checks import check_choice, check_float, check_int, check_str
from radixserve.config import EVICTION_POLICIES
from radixserve.errors import OutOfPages
from radixserve.output import Lookup

LEASE_S = 300.0  # seconds that an open session's pages are preferred after their last use


class RadixCache:
    """A token-level radix tree over a pool of `num_pages` KV pages of `page_size` tokens.

        cache = RadixCache(num_pages=1024, page_size=16)
        seq = cache.acquire(prompt)                  # longest cached prefix, locked
        seq.extend(prompt[seq.cached_len :])         # room for the rest
        ...                                          # copy seq.cow_copies, compute into seq.pages
        seq.commit(seq.length)                       # publish it
        seq.release()

    `eviction` is one of EVICTION_POLICIES. Above it stands what is known of sessions: see
    `open_session`; their leases fill at most `max_lease_share` of the pool, on `clock` (seconds).
    With `reuse=False` nothing is ever shared or kept between sequences (but forks still share).
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int = 1,
        eviction: str = "lru",
        *,
        reuse: bool = True,
        max_lease_share: float = 0.5,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        num_pages = check_int("num_pages", num_pages, 1, 2**31 - 1)
        page_size = check_int("page_size", page_size, 1)
        check_choice("eviction", eviction, EVICTION_POLICIES)
        share = check_float("max_lease_share", max_lease_share, 0.0, 1.0)
        self._allocator = PageAllocator(num_pages, page_size, make_eviction(eviction, num_pages))
        self._max_leased = int(num_pages * share)
        self._clock = clock
        self._reuse = reuse

    @property
    def num_pages(self) -> int:
        return self._allocator.pool.num_pages

    @property
    def page_size(self) -> int:
        return self._allocator.page_size

    @property
    def sharing_enabled(self) -> bool:
        """Whether sequences share what others computed."""
        return self._reuse

    @property
    def num_available(self) -> int:
        """Pages that are free or evictable now."""
        return self._allocator.num_available

    # -- finding ------------------------------------------------------------------------------

    def lookup(self, tokens: TokenIds, namespace: str = "", *, allow_full: bool = False) -> Lookup:
        """What `acquire` would reuse now, and why not more. Changes nothing.

        O(tokens matched) in memcmp; a miss also asks other namespaces (at most 64).
        """
        ids, tree = as_token_ids(tokens), self._allocator.tree
        limit = len(ids) if allow_full else len(ids) - 1
        namespace_tree = tree.namespaces.get(namespace) if self._reuse else None
        if namespace_tree is None:
            namespace_tree = NamespaceTree(check_str("namespace", namespace))
        size = tree.page_size
        if limit >= size and tree.never_saw(namespace_tree, ids[:size].tobytes()):
            return NOTHING
        data, limit = token_view(ids), max(0, limit)
        match = tree.match(namespace_tree, data, limit)
        found = explain(tree, namespace_tree, match, data, limit)
        extra = match[0] % size
        if not extra or self._can_copy_head(match):
            return found
        return found._replace(cached_len=match.length - extra)

    def watch(self, tokens: IntArray, namespace: str = "") -> RadixPrefixWatch:
        """A look-up that stays: see `changed_watches`. It has to be closed."""
        check_str("namespace", namespace)
        return RadixPrefixWatch(
            self._allocator.tree, as_token_ids(tokens), namespace, reuse=self._reuse
        )

    def changed_watches(self) -> list[PrefixWatch]:
        """Refresh the open probes whose match may have changed since the last call; returns them.

        O(probes that rest on changed nodes), not O(all probes).
        """
        changed = self._allocator.tree.watch_registry.take_changed()
        watches = [watcher for watcher in changed if isinstance(watcher, RadixPrefixWatch)]
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
    ) -> CachedSequence:
        """The longest cached prefix of `tokens`, locked until the sequence is released.

        At least the last token is left to compute unless `allow_full`. The sequence's length is
        `cached_len`; `extend` takes room for the rest. A prefix that ends inside a page takes one
        page for the copy of its head; when there is none, the prefix ends at the page boundary.
        `session`: who it belongs to, from `open_session`. `priority`: what it is worth to the
        "priority" eviction, high ones are kept longer.
        """
        data, allocator, tree = token_view(tokens), self._allocator, self._allocator.tree
        owner = None if session is None else check_session(session, tree.session_eviction)
        if priority != 0:
            priority = check_int("priority", priority, -(2**31), 2**31 - 1)
        namespace_tree = tree.namespaces.get(namespace) if self._reuse else None
        if namespace_tree is None:
            check_str("namespace", namespace)
            namespace_tree = (
                tree.namespace(namespace) if self._reuse else NamespaceTree(namespace, is_dead=True)
            )
        limit = len(data) if allow_full else max(0, len(data) - 1)
        size, copy = tree.page_size, None
        match = tree.match(namespace_tree, data, limit)
        length, node, _ = match
        if length:
            tree.lock(node)
            shared = path_pages(node, length // size)
        else:
            node.lock_ref += 1  # the root
            shared = array("i")
        if length % size:
            node, length, copy = self._copy_head(match)
        counters = allocator.counters
        counters.num_acquired += 1
        counters.acquired_tokens += len(data)
        counters.matched_tokens += length
        if copy is not None:
            counters.copied_tokens += copy[2]
        known = bytearray(data[:length])
        return CachedSequence(allocator, node, known, shared, copy, length, owner, priority)

    def _copy_head(self, match: Match) -> tuple[Node, int, PageCopy | None]:
        """Take a page for the partial last page of a locked match, or shorten the match."""
        allocator, (length, node, _) = self._allocator, match
        whole, extra = divmod(length, self.page_size)
        try:
            page = int(allocator.allocate(1, may_shrink_locks=False)[0])
        except OutOfPages:
            upper = node if node.start < length - extra else node.parent
            assert upper is not None
            if upper is not node:
                allocator.tree.lock(upper)
                allocator.tree.unlock(node)
            return upper, length - extra, None
        return node, length, (node.pages[whole - node.start // self.page_size], page, extra)

    def _can_copy_head(self, match: Match) -> bool:
        """Whether a page can be had for the copy, once the matched path is locked."""
        if self._allocator.pool.num_free:
            return True
        kept, node = 0, match.node
        while node.parent is not None and not node.lock_ref:
            kept += len(node.pages)
            node = node.parent
        return self._allocator.num_available > kept

    # -- sessions ------------------------------------------------------------------------------

    def open_session(self, name: str, *, lease_s: float | None = None) -> RadixSession:
        """Somebody who will come back until it is closed: a chat, a branch, a tenant.

        Pages that only closed sessions reached are dropped first. Those where sequences of an open
        one ended are dropped last for `lease_s` seconds (default: 300; 0: no lease) from the last
        time. Names need not be unique; they are for `stats`. A session that is never closed counts
        as open for as long as the cache lives.
        """
        check_str("name", name)
        lease = LEASE_S if lease_s is None else check_float("lease_s", lease_s, 0.0, math.inf)
        tree = self._allocator.tree
        if tree.session_eviction is None:
            tree.set_session_eviction(
                SessionAwareEviction(tree.order, self._max_leased, self._clock)
            )
        assert tree.session_eviction is not None
        return tree.session_eviction.open(name, lease)

    # -- letting go ---------------------------------------------------------------------------

    def evict(self, num_tokens: int) -> int:
        """Free room for `num_tokens`, rounded up to a page, from what nobody holds.

        Returns the room freed, in tokens of whole pages: less than asked when there is no more.
        """
        num_tokens = check_int("num_tokens", num_tokens, 0)
        return self._allocator.tree.evict(self._allocator.pages_for(num_tokens)) * self.page_size

    def reset(self, namespace: str | None = None) -> None:
        """Forget one namespace, or all. O(1) for each; pages in use are freed when released.

        Sequences acquired before go on undisturbed, but what they commit is not kept.
        """
        if namespace is not None:
            check_str("namespace", namespace)
        names = list(self._allocator.tree.namespaces) if namespace is None else [namespace]
        for name in names:
            self._allocator.tree.reset(name)
        self._allocator.counters.num_resets += 1

    # -- knowing ------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Counters since the start (tokens) and gauges (pages). free + tree + private == total.

        "leases" lists the leases now, first to end first: {"session", "tokens", "seconds_left"},
        with the tokens from the root to where its sequence ended.
        """
        allocator, tree = self._allocator, self._allocator.tree
        session_eviction = tree.session_eviction
        return {
            "page_size": self.page_size,
            "pages_total": self.num_pages,
            "pages_free": allocator.pool.num_free + tree.num_dead,
            "pages_tree": tree.num_pages - tree.num_dead,
            "pages_locked": tree.num_locked,
            "pages_private": allocator.num_private,
            "sequences": len(allocator.live_sequences),
            "namespaces": len(tree.namespaces),
            "nodes": tree.num_nodes,
            "splits": tree.num_splits,
            "evicted_tokens": tree.num_evicted_tokens,
            **asdict(allocator.counters),
            "sessions": 0 if session_eviction is None else len(session_eviction.open_sessions),
            "leases": [] if session_eviction is None else session_eviction.leases(),
            "pages_leased": 0 if session_eviction is None else session_eviction.num_leased_pages,
            "pages_closed": 0 if session_eviction is None else session_eviction.num_closed_pages,
        }

    def check(self) -> None:
        """Audit every page's owner and every law of the tree; AssertionError names the first broken
        one. O(everything): for tests and for those in doubt."""
        check_cache(self._allocator)

    def dump(self, max_nodes: int = 10_000) -> dict[str, Any]:
        """The trees as nested dicts, breadth first up to `max_nodes` nodes; "truncated" tells.

        {"page_size", "truncated", "namespaces": {name: node}}, where a node is {"start", "tokens",
        "num_tokens", "pages", "lock_ref", "sequences", "children"}.
        """
        return dump_trees(self._allocator, check_int("max_nodes", max_nodes, 0))


def path_pages(node: Node, count: int) -> array[int]:
    """The first `count` page ids on the path from the root to `node`. O(count)."""
    parent = node.parent
    if parent is None or parent.parent is None:
        return node.pages[:count]
    path = [node.pages]
    at: Node | None = parent
    while at is not None:
        path.append(at.pages)
        at = at.parent
    path.reverse()
    pages = array("i")
    for piece in path:
        pages += piece
    del pages[count:]
    return pages
