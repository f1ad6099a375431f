"""`RadixCache`, the public interface of the tree: look up, acquire, evict, reset, explain, audit.

Single-threaded: one owner makes every call. The cache handles page ids, not tensors.

The tree splits nodes between pages only. Where a prompt leaves a cached prefix inside a page,
`acquire` allocates a page and lists a copy of the page's first tokens in
`CacheSequence.cow_copies`. The model runner makes the copy before the next step, see
`KVPool.copy_page_prefixes` in runner/kv_pool.py.

Look-ups find committed tokens only. The scheduler lets a request wait for tokens that another
request is still computing, see `InBatchSharing` in scheduler/admission.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import numpy as np

from radixserve.arrays import IntArray
from radixserve.cache.events import EventLog, open_log
from radixserve.cache.interface import CacheSession, PrefixCache
from radixserve.cache.lookup import Lookup
from radixserve.cache.namespace import DEFAULT_NAMESPACE, Namespace, as_namespace
from radixserve.cache.page_pool import PagePool
from radixserve.cache.radix.eviction import POLICIES, make_order
from radixserve.cache.radix.layers import RadixLayers
from radixserve.cache.radix.lookup import (
    NEVER_SEEN,
    RadixPrefixWatch,
    explain,
    match_prefix,
    never_saw,
)
from radixserve.cache.radix.node import (
    Match,
    NamespaceTree,
    Node,
    path_pages,
    path_tokens,
    prefix_of,
)
from radixserve.cache.radix.radix_tree import RadixTree
from radixserve.cache.radix.retention import MakeRetention, RetentionPolicy, default_retention
from radixserve.cache.radix.sequence import (
    RadixSequence,
    append_to_leaves,
    node_covering,
)
from radixserve.cache.sequence import (
    CacheSequence,
    PageAllocator,
    PageCopy,
    ReturnEstimate,
)
from radixserve.cache.snapshot import SnapshotView
from radixserve.cache.tokens import TokenIds, as_token_ids, token_view
from radixserve.cache.watch import PrefixWatch
from radixserve.checks import check_choice, check_float, check_int
from radixserve.errors import OutOfPages

LEAST_BATCH = 3  # fewer sequences are committed faster one by one than in one loop


class RadixCache(PrefixCache):
    """A token-level radix tree over a pool of `num_pages` KV pages of `page_size` tokens.

        cache = RadixCache(num_pages=1024, page_size=16)
        seq = cache.acquire(prompt)                  # longest cached prefix, locked
        seq.extend(prompt[seq.cached_len :])         # room for the rest
        ...                                          # copy seq.cow_copies, compute into seq.pages
        seq.commit(seq.length)                       # publish it
        seq.release()

    eviction             the eviction policy, one of `eviction.POLICIES`. Sessions take
                         precedence over it, see `open_session`
    reuse                False: sequences share and keep nothing, except that forks share pages
    layers               layers beside K/V, of this cache alone; see `radixserve.cache_layers`
    retention            makes the `RetentionPolicy` around the eviction policy when a session is
                         first opened; None: sessions, of `radixserve.retention`
    max_lease_share      share of the pool that sessions may keep longer than the policy would
    clock                returns seconds
    freeze_garbage       keep the nodes of a large tree out of Python's full garbage collections,
                         which stop the process for half a second with a million nodes. Freezes all
                         objects of the process until `close`, see garbage.py

    A reset is O(1) per namespace, plus the end nodes of open sessions. Raises InvalidRequest.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int = 1,
        eviction: str = "lru",
        *,
        reuse: bool = True,
        layers: RadixLayers | None = None,
        retention: MakeRetention | None = None,
        max_lease_share: float = 0.5,
        clock: Callable[[], float] = time.monotonic,
        freeze_garbage: bool = False,
    ) -> None:
        num_pages = check_int("num_pages", num_pages, 1, 2**31 - 1)
        page_size = check_int("page_size", page_size, 1)
        check_choice("eviction", eviction, tuple(POLICIES))
        share = check_float("max_lease_share", max_lease_share, 0.0, 1.0)
        order = make_order(eviction, num_pages, clock)
        allocator: PageAllocator
        if layers is None:
            pool = PagePool(num_pages)
            self._tree = RadixTree(pool, page_size, order)
            allocator = PageAllocator(pool, page_size, self._tree, clock)
        else:
            pool = layers.make_pool(num_pages)
            self._tree = layers.make_tree(pool, page_size, order)
            allocator = layers.make_allocator(pool, page_size, self._tree, clock)
        tree = self._tree
        super().__init__(allocator, tree, tree.watch_registry, freeze_garbage=freeze_garbage)
        self.layers: RadixLayers | None = layers
        self._make_retention = retention
        self._max_kept = int(num_pages * share)
        self._clock = clock
        self._reuse = reuse

    @property
    def sharing_enabled(self) -> bool:
        return self._reuse

    # -- look-up ------------------------------------------------------------------------------

    def lookup(
        self,
        tokens: TokenIds,
        namespace: str | Namespace = DEFAULT_NAMESPACE,
        *,
        allow_full: bool = False,
        compare_namespaces: bool = True,
    ) -> Lookup:
        """Returns how many tokens `acquire` would reuse now, and why not more. Changes nothing.

        O(tokens matched) in memcmp; a miss is also matched in other namespaces (at most 64).
        """
        ids, tree = as_token_ids(tokens), self._tree
        limit = len(ids)
        if limit and not allow_full:
            limit -= 1
        key = namespace if type(namespace) is Namespace else as_namespace(namespace)
        space = tree.namespaces.get(key) or NamespaceTree(key, is_dead=True)
        size = tree.page_size
        first_page = ids[: size if size < limit else limit].tobytes()
        is_known = not first_page or first_page in space.root.children
        if not is_known and never_saw(tree, space, first_page):
            return NEVER_SEEN
        data = token_view(ids)
        match = match_prefix(space, data, limit, size, first_page)
        answer = explain(tree, space, match, data, limit, compare_namespaces)
        match_len, node, _, _ = match
        length = match_len
        if self.layers is not None:
            length, node = self.layers.resumable_prefix(node, match_len)
            if length < match_len:
                answer = Lookup(length, self.layers.missing_reason, answer.position)
        if length % size:
            length = self._cached_len(length, node)
        return answer if length == answer.cached_len else answer._replace(cached_len=length)

    def namespaces(self) -> list[Namespace]:
        """See `PrefixCache.namespaces`."""
        return list(dict.fromkeys(space.key for space in self._tree.all_namespaces()))

    @property
    def num_evicted_tokens(self) -> int:
        """Tokens whose K/V was evicted since the start."""
        return self._tree.num_evicted_tokens

    def cached_pages(
        self, tokens: TokenIds, namespace: str | Namespace = DEFAULT_NAMESPACE
    ) -> tuple[int, IntArray]:
        """Returns the length of the longest cached prefix, and its page ids [n] int32: token i is
        in slot i % page_size of pages[i // page_size]. Locks nothing: the result is valid until
        the cache changes. O(tokens matched).
        """
        length, node = self.match(tokens, namespace)
        if node is None:
            return 0, np.zeros(0, np.int32)
        return length, np.array(path_pages(node, -(-length // self.page_size)), np.int32)

    def match(
        self, tokens: TokenIds, namespace: str | Namespace = DEFAULT_NAMESPACE
    ) -> tuple[int, Node | None]:
        """Returns the length of the longest cached prefix, and the node in which it ends; None for
        an empty namespace. Locks nothing. O(tokens matched)."""
        space = self._tree.namespaces.get(as_namespace(namespace))
        if space is None:
            return 0, None
        data = token_view(tokens)
        length, node, _, _ = match_prefix(space, data, len(data), self.page_size)
        return length, node

    def watch(
        self, tokens: IntArray, namespace: str | Namespace = DEFAULT_NAMESPACE
    ) -> RadixPrefixWatch:
        key = as_namespace(namespace)
        return RadixPrefixWatch(self._tree, as_token_ids(tokens), key, reuse=self._reuse)

    def acquire(
        self,
        tokens: TokenIds,
        namespace: str | Namespace = DEFAULT_NAMESPACE,
        *,
        allow_full: bool = False,
        session: CacheSession | None = None,
        priority: int = 0,
    ) -> RadixSequence:
        """Lock the longest cached prefix of `tokens` until the returned sequence is released.

        At least the last token is left to compute unless `allow_full`. The sequence's length is
        `cached_len`; `extend` allocates pages for the rest. If the prefix ends inside a page, one
        page is allocated for a copy of that page's first tokens, see `cow_copies`; when no page is
        available, the prefix ends at the page boundary. `session`: from `open_session`. `priority`:
        for the "priority" eviction policy, which keeps pages of high priority longer. Raises
        InvalidRequest.
        """
        data, tree = token_view(tokens), self._tree
        count = len(data)
        if session is not None:
            session = self._check_session(session)
        if priority != 0:
            priority = check_int("priority", priority, -(2**31), 2**31 - 1)
        key = namespace if type(namespace) is Namespace else as_namespace(namespace)
        space = tree.namespaces.get(key) or self._open_namespace(key)
        limit = count - 1 if count and not allow_full else count
        match = match_prefix(space, data, limit, tree.page_size)
        return self._acquire_match(match, data, limit, session, priority, None)

    def acquire_watched(
        self, watch: PrefixWatch, *, session: CacheSession | None = None, priority: int = 0
    ) -> tuple[RadixSequence, Lookup]:
        """See `PrefixCache.acquire_watched`."""
        tree = self._tree
        assert isinstance(watch, RadixPrefixWatch)
        if session is not None:
            session = self._check_session(session)
        if priority != 0:
            priority = check_int("priority", priority, -(2**31), 2**31 - 1)
        tree.watch_registry.refresh(watch)
        space, match, data = tree.namespaces.get(watch.namespace), watch.match, watch.data
        if space is None:
            space = self._open_namespace(watch.namespace)
            match = 0, space.root, space.root, b""
        limit = max(0, len(data) - 1)
        lookup = explain(tree, space, match, data, limit, True)
        if self.layers is not None:
            match_len, node, _, _ = match
            length, _ = self.layers.resumable_prefix(node, match_len)
            if length < match_len:
                lookup = Lookup(length, self.layers.missing_reason, lookup.position)
        sequence = self._acquire_match(match, data, limit, session, priority, watch.num_releases)
        if sequence.cached_len != lookup.cached_len:
            lookup = lookup._replace(cached_len=sequence.cached_len)
        return sequence, lookup

    def resumable_len(self, watch: PrefixWatch) -> int:
        """See `PrefixCache.resumable_len`."""
        assert isinstance(watch, RadixPrefixWatch)
        self._tree.watch_registry.refresh(watch)
        length, node, _, _ = watch.match
        if self.layers is not None:
            length, node = self.layers.resumable_prefix(node, length)
        return self._cached_len(length, node)

    def _open_namespace(self, key: Namespace) -> NamespaceTree:
        """Returns the namespace of a new sequence; without reuse one that no look-up finds."""
        if self._reuse:
            return self._tree.open_namespace(key)
        return NamespaceTree(key, is_dead=True)

    def _acquire_match(
        self,
        match: Match,
        data: memoryview,
        limit: int,
        session: CacheSession | None,
        priority: int,
        num_releases: int | None,
    ) -> RadixSequence:
        """Returns a sequence over the part of a prompt's match that it can resume. `data`: the
        whole prompt; `limit`: the tokens that were looked for; `num_releases`: see
        `RetentionPolicy.on_prompt`. O(nodes locked), unless a page's first tokens are copied."""
        tree, allocator = self._tree, self._allocator
        layers = self.layers
        size, num_tokens, copy = tree.page_size, len(data), None
        match_len, node, _, _ = match
        length = match_len
        if layers is not None:
            length, node = layers.resumable_prefix(node, match_len)
        if self._freezer is not None:
            self._note_growth()
        tree.lock(node)
        if session is not None and limit < num_tokens:
            self._retention().on_prompt(match, data, session, num_releases)
        if layers is not None:
            layers.begin_sequence(match, node, length)
        if length % size:
            node, length, copy = self._plan_page_copy(length, node)
        allocator.note_time()
        stats = allocator.stats
        stats.num_acquired += 1
        stats.acquired_tokens += num_tokens
        stats.matched_tokens += length
        if copy is not None:
            stats.copied_tokens += copy[2]
        if layers is None:
            return RadixSequence(
                allocator, tree, node, length, None, copy, length, session, priority
            )
        held = path_tokens(node, length), path_pages(node, length // size)  # layers look at them
        parts = allocator, tree, node, length, held, copy, length, session, priority
        return layers.make_sequence(*parts, match_len=match_len, limit=limit, num_tokens=num_tokens)

    def _cached_len(self, length: int, node: Node) -> int:
        """Returns the length of the sequence that `_acquire_match` would make over a resumable
        prefix of `length` tokens, the last of them in `node`."""
        if not length % self._tree.page_size or self._has_page_for_copy(length, node):
            return length
        return self._whole_page_prefix(length, node)

    def commit_next(self, sequences: Sequence[CacheSequence], token_ids: Sequence[int]) -> None:
        """See `PrefixCache.commit_next`."""
        layers = self.layers
        if len(sequences) < LEAST_BATCH or (layers is not None and layers.needs_each_call):
            super().commit_next(sequences, token_ids)
            return
        mine = cast(Sequence[RadixSequence], sequences)
        rest = append_to_leaves(self._allocator, self._tree, mine, token_ids)
        for sequence, token_id in rest:
            sequence.commit_next(token_id)

    def _plan_page_copy(self, length: int, node: Node) -> tuple[Node, int, PageCopy | None]:
        """Allocate a page for a copy of the partial last page of a locked prefix. Returns the last
        node, the length and the copy. Without a free page the prefix is shortened to whole pages,
        and the copy is None. The runner copies, see the module."""
        whole, extra = divmod(length, self.page_size)
        try:
            page = self._allocator.allocate(1, may_shrink_locks=False)[0]
        except OutOfPages:
            length = self._whole_page_prefix(length, node)
            return self._tree.move_lock(node, node_covering(node, length)), length, None
        return node, length, (node.pages[whole - node.start // self.page_size], page, extra)

    def _whole_page_prefix(self, length: int, node: Node) -> int:
        """Returns how many tokens of the prefix can be reused in whole pages."""
        length -= length % self.page_size
        if self.layers is not None:
            length, _ = self.layers.resumable_prefix(node, length, multiple_of=self.page_size)
        return length

    def _has_page_for_copy(self, length: int, node: Node) -> bool:
        """Whether a page for `_plan_page_copy` is available once the path to `node` is locked."""
        if self.layers is not None and not self.layers.has_room_for_copy(node, length):
            return False
        if self._allocator.pool.num_free:
            return True
        kept = 0
        while node.parent is not None and not node.lock_ref:
            kept += len(node.pages)
            node = node.parent
        return self.num_available > kept

    # -- sessions ------------------------------------------------------------------------------

    @property
    def keeps_sessions(self) -> bool:
        return self._reuse

    def open_session(
        self, name: str, *, lease_s: float | None = None, retain_until: float | None = None
    ) -> CacheSession:
        """Open a session; close it when it will not be continued: a chat, a branch, a user. See
        `RetentionPolicy.open`."""
        return self._retention().open(name, lease_s, retain_until)

    def _retention(self) -> RetentionPolicy:
        tree = self._tree
        if tree.retention is None:
            make = self._make_retention or default_retention()
            tree.set_retention(make(tree.order, self._max_kept, self._clock))
        assert tree.retention is not None
        return tree.retention

    def _check_session(self, session: object) -> CacheSession:
        return self._retention().check_session(session)

    # -- expected returns ---------------------------------------------------------------------

    @property
    def tracks_returns(self) -> bool:
        return self._reuse and self._tree.order.tracks_returns

    def expect_return(self, watch: PrefixWatch, expected: ReturnEstimate) -> None:
        """See `PrefixCache.expect_return`. O(depth)."""
        assert isinstance(watch, RadixPrefixWatch)
        node = watch.match[1]
        if self._tree.order.tracks_returns and not node.namespace.is_dead:
            self._tree.order.expect(node, expected)

    def adopt_returns(self, typical: ReturnEstimate) -> None:
        """See `PrefixCache.adopt_returns`. O(unlocked nodes)."""
        late_s = typical.late_at - typical.return_at + typical.wait_s
        self._tree.order.adopt(typical.wait_s, late_s, typical.probability, typical.is_regular)

    def victims(self) -> Iterator[tuple[int, ReturnEstimate | None]]:
        """See `PrefixCache.victims`."""
        order = self._tree.order
        for node, _ in order.preview():
            if not node.namespace.is_dead:
                yield len(node.pages), order.expected_return(node)

    # -- retention ----------------------------------------------------------------------------

    @property
    def num_retained(self) -> int:
        retention = self._tree.retention
        return 0 if retention is None else retention.num_retained_pages

    def demote(self, tokens: TokenIds, namespace: str | Namespace = DEFAULT_NAMESPACE) -> int:
        """See `PrefixCache.demote`. O(tokens + nodes below them)."""
        data, space = token_view(tokens), self._tree.namespaces.get(as_namespace(namespace))
        if space is None or not len(data):
            return 0
        match = match_prefix(space, data, len(data), self.page_size)
        return self._retention().demote(match, len(data))

    def demote_session(self, session: CacheSession) -> int:
        """See `PrefixCache.demote_session`. O(nodes that it reaches)."""
        return self._retention().demote_session(session)

    def held_tokens(self, sessions: Iterable[CacheSession]) -> int:
        """See `PrefixCache.held_tokens`. O(nodes that they reach)."""
        return self._retention().held_tokens(sessions, self.page_size)

    def session_prefixes(self, session: CacheSession) -> list[tuple[str, IntArray]]:
        """See `PrefixCache.session_prefixes`. O(tokens)."""
        ends = self._retention().session_ends(session)
        tree = self._tree
        return [prefix_of(end) for end in ends if tree.is_current(end.namespace)]

    def prefixes(self, namespace: str | Namespace | None = None) -> list[tuple[str, IntArray]]:
        """See `PrefixCache.prefixes`. O(tokens of all of them)."""
        key = None if namespace is None else as_namespace(namespace)
        return [prefix_of(leaf) for leaf in self._tree.leaves(key)]

    def begin_epoch(self, epoch: int) -> None:
        """See `PrefixCache.begin_epoch`. K/V of other epochs leaves in the order of eviction.
        O(open watches)."""
        self._tree.begin_epoch(epoch)

    def open_events(self, epoch: int | None = None) -> EventLog:
        """See `PrefixCache.open_events`."""
        return open_log(self._tree, self._tree.stored_nodes, epoch)

    # -- inspection: its modules are loaded when they are used ---------------------------------

    def stats(self) -> dict[str, Any]:
        """See `PrefixCache.stats`."""
        from radixserve.cache.radix.audit import tree_stats

        stats = {**super().stats(), **tree_stats(self._allocator, self._tree)}
        return stats if self.layers is None else stats | self.layers.stats()

    def gauges(self) -> dict[str, int]:
        """See `PrefixCache.gauges`. Pages of a namespace that was reset count as free at once."""
        gauges, num_dead = super().gauges(), self._tree.num_dead
        gauges["pages_free"] += num_dead
        gauges["pages_tree"] -= num_dead
        gauges["pages_cached"] -= num_dead
        return {**gauges, "nodes": self._tree.num_nodes}

    def check(self) -> None:
        """See `PrefixCache.check`."""
        from radixserve.cache.radix.audit import check_tree

        check_tree(self._allocator, self._tree, self.layers)

    def _count_shared(self) -> int:
        from radixserve.cache.radix.audit import count_shared

        return count_shared(self._allocator)

    def _preview(self, count: int) -> list[dict[str, Any]]:
        from radixserve.cache.radix.audit import preview_tree

        return preview_tree(self._tree, count)

    def _dump(self, max_nodes: int, only: str | None) -> dict[str, Any]:
        from radixserve.cache.radix.audit import dump_tree

        return dump_tree(self._allocator, self._tree, max_nodes, only)

    def _snapshot(self, view: SnapshotView) -> dict[str, Any]:
        from radixserve.cache.radix.snapshot import snapshot_tree

        return snapshot_tree(self._allocator, self._tree, view)
