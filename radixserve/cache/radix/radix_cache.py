"""`RadixCache`, the interface of the tree: look up, acquire, evict, reset, explain, audit.

Single-threaded: one owner makes every call. Independent of tensors: the owner of the K/V memory
performs the page copies that sequences ask for.
"""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, cast

from radixserve.arrays import IntArray
from radixserve.cache.events import EventLog
from radixserve.cache.interface import CacheSession, Inspection, PrefixCache
from radixserve.cache.page_pool import PageAllocator, PagePool
from radixserve.cache.radix.audit import (
    check_tree,
    count_shared,
    dump_tree,
    preview_tree,
    tree_stats,
)
from radixserve.cache.radix.hinted_nodes import demotable, held_nodes, num_demoted, paths_of
from radixserve.cache.radix.match import Match, find_match
from radixserve.cache.radix.miss_reason import NEVER_SEEN, explain, never_saw
from radixserve.cache.radix.node import NamespaceTree, Node, path_pages
from radixserve.cache.radix.policies import POLICIES
from radixserve.cache.radix.prefix_watch import RadixPrefixWatch
from radixserve.cache.radix.publishing_tree import open_log
from radixserve.cache.radix.radix_tree import RadixTree
from radixserve.cache.radix.sequence import (
    CachedSequence,
    append_to_leaves,
    node_covering,
)
from radixserve.cache.radix.session import RadixSession, check_session
from radixserve.cache.radix.session_eviction import SessionAwareEviction
from radixserve.cache.radix.snapshot import snapshot_tree
from radixserve.cache.radix.state_checkpoints import CheckpointTree, StateCheckpoints
from radixserve.cache.radix.stateful_sequence import StatefulSequence
from radixserve.cache.radix.windowed_sequence import WindowedSequence, usable_match
from radixserve.cache.sequence import CacheSequence, PageCopy
from radixserve.cache.state_pool import StateCopy
from radixserve.cache.tokens import TOKEN_BYTES, TokenIds, as_token_ids, token_view
from radixserve.cache.window_pool import WindowedAllocator, WindowPool
from radixserve.checks import check_choice, check_float, check_int, check_str
from radixserve.config import EVICTION_POLICIES
from radixserve.errors import InvalidRequest, OutOfPages
from radixserve.output import Lookup
from radixserve.schedule import WindowLayers, WindowUpdates

LEAST_BATCH = 3  # sequences that are committed in one loop; fewer are faster one by one
LEASE_S = 300.0  # seconds that an open session's pages are preferred after their last use


class RadixCache(PrefixCache):
    """A token-level radix tree over a pool of `num_pages` KV pages of `page_size` tokens.

        cache = RadixCache(num_pages=1024, page_size=16)
        seq = cache.acquire(prompt)                  # longest cached prefix, locked
        seq.extend(prompt[seq.cached_len :])         # room for the rest
        ...                                          # copy seq.cow_copies, compute into seq.pages
        seq.commit(seq.length)                       # publish it
        seq.release()

    `eviction` is one of config.EVICTION_POLICIES; sessions take precedence over it: see
    `open_session`; their leases fill at most `max_lease_share` of the pool, on `clock` (seconds).
    With `reuse=False` nothing is ever shared or kept between sequences (but forks still share).
    A reset is O(1) for each namespace. `num_states`: of a model with recurrent layers; a sequence
    begins at the deepest checkpoint of its path then, see `stateful_sequence`. Checkpoints are
    taken every `checkpoint_interval` tokens, before a prompt's last token, where prompts branch
    and at the end of sequences. `windows`: of a model with layers that see a window of positions
    only and have a memory of their own, see `window_pool`. Not together with states.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int = 1,
        eviction: str = "lru",
        *,
        reuse: bool = True,
        num_states: int = 0,
        checkpoint_interval: int = 512,
        windows: WindowLayers | None = None,
        max_lease_share: float = 0.5,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        num_pages = check_int("num_pages", num_pages, 1, 2**31 - 1)
        page_size = check_int("page_size", page_size, 1)
        check_choice("eviction", eviction, EVICTION_POLICIES)
        share = check_float("max_lease_share", max_lease_share, 0.0, 1.0)
        pool = PagePool(num_pages)
        check_int("num_states", num_states, 0, 2**31 - 1)
        check_int("checkpoint_interval", checkpoint_interval, 1)
        self._windows = None if windows is None else WindowPool(pool, page_size, windows)
        order = POLICIES[eviction](num_pages)
        self._checkpoints: StateCheckpoints | None = None
        self._tree: RadixTree
        if num_states:
            if windows is not None:
                raise InvalidRequest("a cache has num_states or windows, not both")
            self._checkpoints = StateCheckpoints(num_states, checkpoint_interval)
            self._tree = CheckpointTree(pool, page_size, order, self._checkpoints)
        else:
            self._tree = RadixTree(pool, page_size, order)
        tree = self._tree
        if self._windows is None:
            allocator = PageAllocator(pool, page_size, tree, clock)
        else:
            allocator = WindowedAllocator(pool, page_size, tree, clock, self._windows)
        inspection = Inspection(
            partial(check_tree, allocator, tree),
            partial(count_shared, allocator),
            partial(preview_tree, tree),
            partial(snapshot_tree, allocator, tree),
            partial(dump_tree, allocator, tree),
        )
        super().__init__(allocator, tree, tree.watch_registry, inspection)
        # whether a prefix may be cached that no sequence can go on from
        self._forgets = self._checkpoints is not None or self._windows is not None
        self._max_leased = int(num_pages * share)
        self._clock = clock
        self._reuse = reuse

    @property
    def sharing_enabled(self) -> bool:
        return self._reuse

    @property
    def num_states(self) -> int:
        return 0 if self._checkpoints is None else self._checkpoints.pool.num_states

    def take_state_copies(self) -> list[StateCopy]:
        return [] if self._checkpoints is None else self._checkpoints.pool.take_copies()

    @property
    def window_size(self) -> int:
        return 0 if self._windows is None else self._windows.window_size

    def take_window_updates(self) -> WindowUpdates | None:
        return None if self._windows is None else self._windows.take_updates()

    # -- look-up ------------------------------------------------------------------------------

    def lookup(
        self,
        tokens: TokenIds,
        namespace: str = "",
        *,
        allow_full: bool = False,
        compare_namespaces: bool = True,
    ) -> Lookup:
        """What `acquire` would reuse now, and why not more. Changes nothing.

        O(tokens matched) in memcmp; a miss also asks other namespaces (at most 64).
        """
        ids, tree = as_token_ids(tokens), self._tree
        limit = len(ids)
        if limit and not allow_full:
            limit -= 1
        found = tree.namespaces.get(namespace)
        if found is None:
            found = NamespaceTree(check_str("namespace", namespace), is_dead=True)
        size = tree.page_size
        first_page = ids[: size if size < limit else limit].tobytes()
        is_known = not first_page or first_page in found.root.children
        if not is_known and never_saw(tree, found, first_page):
            return NEVER_SEEN
        data = token_view(ids)
        match = find_match(found, data, limit, size, first_page)
        answer = explain(tree, found, match, data, limit, compare_namespaces)
        length, node, _, _ = match
        if self._forgets:
            usable, at = self._usable(node, length)
            match = usable, at, at, b""
            if usable < length:
                reason = "no_checkpoint" if self._windows is None else "window_evicted"
                length, answer = usable, Lookup(usable, reason, answer.position)
        if not length % size or self._can_copy_page_prefix(match):
            return answer
        return answer._replace(cached_len=self._without_page_prefix(match))

    def watch(self, tokens: IntArray, namespace: str = "") -> RadixPrefixWatch:
        check_str("namespace", namespace)
        return RadixPrefixWatch(self._tree, as_token_ids(tokens), namespace, reuse=self._reuse)

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
        page for the copy of its prefix; when there is none, the prefix ends at the page boundary.
        `session`: session of the sequence, from `open_session`. `priority`: for the "priority"
        eviction policy; pages of high priority are kept longer.
        """
        data, tree, allocator = token_view(as_token_ids(tokens)), self._tree, self._allocator
        owner = None if session is None else check_session(session, tree.session_eviction)
        if priority != 0:
            priority = check_int("priority", priority, -(2**31), 2**31 - 1)
        found = tree.namespaces.get(namespace)
        if found is None:  # always, without reuse
            check_str("namespace", namespace)
            found = (
                tree.open_namespace(namespace)
                if self._reuse
                else NamespaceTree(namespace, is_dead=True)
            )
        size, count, copy = tree.page_size, len(data), None
        limit = count - 1 if count and not allow_full else count
        match = find_match(found, data, limit, size)
        match_len, node, _, _ = match
        length, checkpoints, windows = match_len, self._checkpoints, self._windows
        if self._forgets:
            wanted = {length, limit}  # lengths that others may go on from
            length, node = self._usable(node, length)
            match = length, node, node, b""
        tree.lock(node)
        shared = path_pages(node, length // size) if length else array("i")
        if windows is not None:
            windows.use(
                shared if not length % size else path_pages(node, length // size + 1), length
            )
        if length % size:
            node, length, copy = self._copy_page_prefix(match)
            if copy is None:
                del shared[length // size :]
        allocator.note_time()
        stats = allocator.stats
        stats.num_acquired += 1
        stats.acquired_tokens += count
        stats.matched_tokens += length
        if copy is not None:
            stats.copied_tokens += copy[2]
        if 2 * length > count:
            known = bytearray(data)  # it keeps that room, for the rest
            del known[length * TOKEN_BYTES :]
        else:
            known = bytearray(data[:length])
        parts = allocator, tree, node, known, shared, copy, length, owner, priority
        if windows is not None:
            if copy is not None:
                windows.copy(*copy)
            windows.end_use()
            return WindowedSequence(*parts, match_len=match_len)
        if checkpoints is None:
            return CachedSequence(*parts)
        sequence = StatefulSequence(*parts)
        sequence.begin_at(checkpoints.deepest(node, length), wanted)
        return sequence

    def _usable(self, node: Node, length: int, multiple_of: int = 1) -> tuple[int, Node]:
        """The longest prefix of a match of `length` tokens, whose last one is in `node`, that a
        sequence can go on from, and the node with its last token: the match itself but with
        recurrent states or windows. A match of whole pages stays one."""
        if self._checkpoints is not None:
            usable, _, node = self._checkpoints.deepest(node, length, multiple_of)
            return usable, node
        if self._windows is not None and length:
            return usable_match(self._windows, node, length)
        return length, node

    def commit_next(self, sequences: Sequence[CacheSequence], token_ids: Sequence[int]) -> None:
        """See `PrefixCache.commit_next`."""
        if self._checkpoints is not None or len(sequences) < LEAST_BATCH:
            super().commit_next(sequences, token_ids)
            return
        mine = cast(Sequence[CachedSequence], sequences)
        rest = append_to_leaves(self._allocator, self._tree, mine, token_ids)
        for sequence, token_id in rest:
            sequence.commit_next(token_id)

    def _copy_page_prefix(self, match: Match) -> tuple[Node, int, PageCopy | None]:
        """Take a page for the partial last page of a locked match, or shorten the match."""
        length, node, _, _ = match
        whole, extra = divmod(length, self.page_size)
        try:
            page = self._allocator.allocate(1, may_shrink_locks=False)[0]
        except OutOfPages:
            length = self._without_page_prefix(match)
            return self._tree.move_lock(node, node_covering(node, length)), length, None
        return node, length, (node.pages[whole - node.start // self.page_size], page, extra)

    def _without_page_prefix(self, match: Match) -> int:
        """Tokens of the match that can be reused in whole pages."""
        (length, node, _, _), size = match, self.page_size
        return self._usable(node, length - length % size, multiple_of=size)[0]

    def _can_copy_page_prefix(self, match: Match) -> bool:
        """Whether a page for the copy is available once the matched path is locked."""
        length, last, windows = match[0], match[1], self._windows
        if windows is not None:
            pages = path_pages(last, length // self.page_size + 1)
            if not windows.num_obtainable(1, pages[windows.first_seen_page(length) :]):
                return False
        if self._allocator.pool.num_free:
            return True
        kept, node = 0, match[1]
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
    ) -> RadixSession:
        """Open a session; close it when it will not be continued: a chat, a branch, a tenant.

        Pages that only closed sessions reached are dropped first. Those where sequences of an open
        one ended are dropped last for `lease_s` seconds (default: 300; 0: no lease) from the last
        time. `retain_until` (on the cache's clock) instead of a lease: until then they are dropped
        after everything else, leased pages too. Names need not be unique; they are for `stats`. A
        session that is never closed counts as open for as long as the cache lives.
        """
        check_str("name", name)
        lease = LEASE_S if lease_s is None else check_float("lease_s", lease_s, 0.0, math.inf)
        if retain_until is not None:
            retain_until = check_float("retain_until", retain_until, 0.0, math.inf)
        return self._session_eviction().open(name, lease, retain_until)

    def _session_eviction(self) -> SessionAwareEviction:
        tree = self._tree
        if tree.session_eviction is None:
            tree.set_session_eviction(
                SessionAwareEviction(tree.order, self._max_leased, self._clock)
            )
        assert tree.session_eviction is not None
        return tree.session_eviction

    # -- hints --------------------------------------------------------------------------------

    @property
    def num_retained(self) -> int:
        sessions = self._tree.session_eviction
        return 0 if sessions is None else sessions.num_retained_pages

    def demote(self, tokens: TokenIds, namespace: str = "") -> int:
        """See `PrefixCache.demote`. O(tokens + nodes that go on from them)."""
        data, found = token_view(as_token_ids(tokens)), self._tree.namespaces.get(namespace)
        if found is None or not len(data):
            return 0
        nodes = demotable(find_match(found, data, len(data), self.page_size), len(data))
        if nodes:
            self._session_eviction().demote(nodes)
        return num_demoted(nodes)

    def demote_session(self, session: CacheSession) -> int:
        """See `PrefixCache.demote_session`. O(nodes that it reaches)."""
        nodes = held_nodes([check_session(session, self._tree.session_eviction)])
        session.close()
        return num_demoted(nodes)

    def held_tokens(self, sessions: Iterable[CacheSession]) -> int:
        """See `PrefixCache.held_tokens`. O(nodes that they reach)."""
        order = self._tree.session_eviction
        nodes = held_nodes(check_session(one, order) for one in sessions)
        return sum(len(node.pages) for node in nodes) * self.page_size

    def session_prefixes(self, session: CacheSession) -> list[tuple[str, IntArray]]:
        """See `PrefixCache.session_prefixes`. O(tokens)."""
        return paths_of(check_session(session, self._tree.session_eviction))

    def open_events(self, epoch: int | None = None) -> EventLog:
        return open_log(self._tree, epoch)

    # -- inspection ---------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """See `PrefixCache.stats`."""
        found = {**super().stats(), **tree_stats(self._allocator, self._tree)}
        for extra in (self._checkpoints, self._windows):
            if extra is not None:
                found |= extra.stats()
        return found

    def gauges(self) -> dict[str, int]:
        """Pages of a namespace that was reset count as free at once."""
        found, num_dead = super().gauges(), self._tree.num_dead
        found["pages_free"] += num_dead
        found["pages_tree"] -= num_dead
        found["pages_cached"] -= num_dead
        return {**found, "nodes": self._tree.num_nodes}
