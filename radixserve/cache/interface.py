"""`PrefixCache`: the interface of a prefix cache to the scheduler, the engine and replay.

`RadixCache` and `HashBlockCache` are the two implementations; one contract test runs on both.
Single-threaded: one owner makes every call. Only the cache modifies returned objects. The owner of
the K/V memory performs a sequence's `cow_copies` before the sequence is used.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, Protocol, Self

from radixserve.arrays import IntArray
from radixserve.cache.events import EventLog
from radixserve.cache.garbage import GarbageFreezer
from radixserve.cache.layers import CacheLayers
from radixserve.cache.lookup import Lookup
from radixserve.cache.namespace import DEFAULT_NAMESPACE, Namespace, as_namespace
from radixserve.cache.sequence import (
    CacheSequence,
    PageAllocator,
    PageOwner,
    ReturnEstimate,
    append_next,
)
from radixserve.cache.snapshot import SnapshotView
from radixserve.cache.stats import hit_rate, no_retention
from radixserve.cache.tokens import TokenIds
from radixserve.cache.watch import PrefixWatch, WatchRegistry
from radixserve.checks import check_int
from radixserve.errors import InvalidRequest


class CacheSession(Protocol):
    """Groups related sequences that are expected to be continued until it is closed: a chat, a
    branch, a user."""

    @property
    def name(self) -> str: ...

    @property
    def is_open(self) -> bool: ...

    def close(self) -> None:
        """Close: pages reached only by closed sessions are evicted first. Idempotent. The end of a
        `with` block closes, too."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


class PrefixCache(ABC):
    """A cache of K/V pages that finds the longest cached prefix of a prompt.

    `acquire` returns a `CacheSequence`, which adds tokens by `extend`, publishes them by `commit`
    and unlocks its pages by `release`.
    """

    layers: CacheLayers | None = None  # beside K/V; the scheduler asks them what a step needs

    def __init__(
        self,
        allocator: PageAllocator,
        owner: PageOwner,
        watch_registry: WatchRegistry,
        *,
        freeze_garbage: bool = False,
    ) -> None:
        """`freeze_garbage`: see `GarbageFreezer`; for the owner of the process."""
        self._allocator = allocator
        self._owner = owner
        self._watch_registry = watch_registry
        self._freezer = GarbageFreezer() if freeze_garbage else None

    def __repr__(self) -> str:
        gauges = self.gauges()
        return (
            f"{type(self).__name__}({self.num_pages:,} pages of {self.page_size} tokens: "
            f"{gauges['pages_referenced']:,} in use, {gauges['pages_cached']:,} cached, "
            f"{gauges['pages_free']:,} free)"
        )

    @property
    def num_pages(self) -> int:
        return self._allocator.pool.num_pages

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self._allocator.page_size

    @property
    def sharing_enabled(self) -> bool:
        """Whether sequences reuse K/V that other sequences computed."""
        return True

    @property
    def num_free(self) -> int:
        """Pages that are not in use. O(1)."""
        return self._allocator.pool.num_free

    @property
    def num_available(self) -> int:
        """Pages that are free or evictable now. O(1)."""
        return self._allocator.num_available

    def num_obtainable(self, wanted: int) -> int:
        """Returns how many of `wanted` pages can be allocated for new tokens now. Bounded by the
        available pages and by what `layers` have room for."""
        return self._allocator.num_obtainable(wanted)

    @abstractmethod
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

        With `compare_namespaces=False` the answer is independent of the contents of namespaces that
        differ in more than the adapter.
        """

    @abstractmethod
    def watch(
        self, tokens: IntArray, namespace: str | Namespace = DEFAULT_NAMESPACE
    ) -> PrefixWatch:
        """Open a persistent look-up, which answers from memory until `changed_watches` refreshes
        it. The caller closes it."""

    def changed_watches(self) -> list[PrefixWatch]:
        """Refresh the open watches whose match may have changed since the last call; returns them.

        O(watches of changed places), not O(all watches).
        """
        return self._watch_registry.take_changed()

    @abstractmethod
    def acquire(
        self,
        tokens: TokenIds,
        namespace: str | Namespace = DEFAULT_NAMESPACE,
        *,
        allow_full: bool = False,
        session: CacheSession | None = None,
        priority: int = 0,
    ) -> CacheSequence:
        """Lock the longest cached prefix of `tokens` until the returned sequence is released.

        At least the last token is left to compute unless `allow_full`. The sequence's length is
        `cached_len`; `extend` allocates pages for the rest.
        """

    @abstractmethod
    def acquire_watched(
        self, watch: PrefixWatch, *, session: CacheSession | None = None, priority: int = 0
    ) -> tuple[CacheSequence, Lookup]:
        """Acquire a watched prompt. Also returns the result that `lookup` would have had before.

        The watch's match is reused: the prompt is matched again only where the cache has changed
        since. The watch stays open.
        """

    def resumable_len(self, watch: PrefixWatch) -> int:
        """Returns the `cached_len` of the sequence that `acquire_watched` would return now. It is
        shorter than the watch's own `cached_len` where `layers` lack something of the prefix."""
        self._watch_registry.refresh(watch)
        return watch.cached_len

    def append_next(
        self, sequences: Sequence[CacheSequence], token_ids: Sequence[int] | None = None
    ) -> None:
        """Extend each sequence by one of `token_ids`, or by a placeholder if that is None.

        Raises OutOfPages at the first sequence without a page; those before it are extended.
        """
        if self.layers is None or not self.layers.needs_each_call:
            append_next(sequences, token_ids)
            return
        for index, sequence in enumerate(sequences):
            if token_ids is None:
                sequence.append_placeholders(1)
            else:
                sequence.extend(token_ids[index : index + 1])

    def commit_next(self, sequences: Sequence[CacheSequence], token_ids: Sequence[int]) -> None:
        """Call `CacheSequence.commit_next` of each sequence, in any order. The scheduler calls it
        after each decode step: generated tokens are cached from then on. Raises ValueError for
        other ids than those that were appended."""
        for sequence, token_id in zip(sequences, token_ids, strict=True):
            sequence.commit_next(token_id)

    @abstractmethod
    def open_session(
        self, name: str, *, lease_s: float | None = None, retain_until: float | None = None
    ) -> CacheSession:
        """Open a session to pass to `acquire`. Names need not be unique; `stats` shows them."""

    # -- expected returns; without effect in a cache that evicts in another order ------------------

    @property
    def tracks_returns(self) -> bool:
        """Whether eviction depends on `CacheSequence.expected_return`."""
        return False

    def expect_return(self, watch: PrefixWatch, expected: ReturnEstimate) -> None:
        """Set when the matched prefix of a waiting prompt is expected to be used."""
        del watch, expected

    def adopt_returns(self, typical: ReturnEstimate) -> None:
        """Set this estimate for all paths that were released without one, each from its own last
        use on. To be called once."""
        del typical

    def victims(self) -> Iterator[tuple[int, ReturnEstimate | None]]:
        """Yields (number of pages, expected return) of each node that eviction would free, in
        order, if nothing else happened. None: no return is known or expected. Changes nothing."""
        return iter(())

    # -- retention: without effect in a cache that keeps no sessions -------------------------------

    @property
    def keeps_sessions(self) -> bool:
        """Whether sessions change the order of eviction."""
        return False

    def time(self) -> float:
        """Seconds on the cache's clock, that of `retain_until`."""
        return self._allocator.note_time()

    @property
    def num_retained(self) -> int:
        """Pages reached by retaining sessions. O(1) amortised."""
        return 0

    def pin(
        self,
        tokens: TokenIds,
        namespace: str | Namespace = DEFAULT_NAMESPACE,
        *,
        session: CacheSession,
    ) -> CacheSequence:
        """Lock all of `tokens`, which are cached, without a request. `stats` and `dump` show pins
        apart from the locks of requests. Whole pages only."""
        sequence = self.acquire(tokens, namespace, allow_full=True, session=session)
        sequence.is_pin = True
        return sequence

    def demote(self, tokens: TokenIds, namespace: str | Namespace = DEFAULT_NAMESPACE) -> int:
        """Evict the cached part of `tokens`, and everything that continues it, before all others,
        until it is used again. Parts of the prefix that nothing else continues are demoted, too.
        Nodes that open sessions reach keep their place until these are closed.

        Returns the tokens that are evicted first from now on.
        """
        del tokens, namespace
        return 0

    def demote_session(self, session: CacheSession) -> int:
        """Close the session; returns the tokens it reached that are evicted first from now on."""
        session.close()
        return 0

    def held_tokens(self, sessions: Iterable[CacheSession]) -> int:
        """Returns the tokens, in whole pages, on the paths from the root to the end nodes of these
        sessions. A node that several sessions reach counts once."""
        del sessions
        return 0

    def session_prefixes(self, session: CacheSession) -> list[tuple[str, IntArray]]:
        """Returns (namespace, tokens) of each end node of the session."""
        del session
        return []

    def prefixes(self, namespace: str | Namespace | None = None) -> list[tuple[str, IntArray]]:
        """Returns (namespace, tokens) of each cached sequence that no other one continues, of one
        namespace and those below it or of all if None, the last used first."""
        del namespace
        raise InvalidRequest('only cache="radix" lists its prefixes')

    def evict(self, num_tokens: int) -> int:
        """Free pages for `num_tokens`, rounded up to a page, that no sequence has locked.

        Returns the tokens freed, in whole pages: fewer than asked when no more can be freed.
        """
        num_tokens = check_int("num_tokens", num_tokens, 0)
        self._allocator.note_time()
        return self._owner.evict(self._allocator.pages_for(num_tokens)) * self.page_size

    def namespaces(self) -> list[Namespace]:
        """Returns those in which something is cached, or about to be, in any epoch."""
        return list(self._owner.namespaces)

    def reset(self, namespace: str | Namespace | None = None) -> None:
        """Drop one namespace and those below it (see `Namespace.covers`), or all if None, in all
        epochs. Pages in use are freed when they are released.

        Sequences acquired before continue, but their commits are not cached.
        """
        self._owner.reset(None if namespace is None else as_namespace(namespace))
        self._allocator.stats.num_resets += 1

    def begin_epoch(self, epoch: int) -> None:
        """The weights have changed: K/V that was computed with others is not found from now on.
        `epoch` numbers the weights; a cache that keeps the K/V of several finds that of an earlier
        epoch again when it begins once more. This one drops all others."""
        del epoch
        self.reset()

    def close(self) -> None:
        """Return all objects that the cache has frozen to the garbage collector. Idempotent."""
        if self._freezer is not None:
            self._freezer.thaw()

    def _note_growth(self) -> None:
        """Freeze garbage if that is due; called when a sequence is acquired. O(1), amortised,
        except for `GarbageFreezer.note`."""
        freezer, num_created = self._freezer, self._owner.num_created
        if freezer is not None and num_created >= freezer.due:
            freezer.note(num_created, self._owner.num_nodes)

    def discount(self, sequence: CacheSequence, num_tokens: int) -> None:
        """Take the `acquire` of `num_tokens` that returned `sequence` out of the counters: it was
        not a request's."""
        stats = self._allocator.stats
        stats.num_acquired -= 1
        stats.acquired_tokens -= num_tokens
        stats.matched_tokens -= sequence.cached_len

    @abstractmethod
    def open_events(self, epoch: int | None = None) -> EventLog:
        """Open a log of all insertions and evictions from now on. `epoch`: see `EventLog`. Raises
        InvalidRequest while another log is open."""

    def stats(self) -> dict[str, Any]:
        """Counters since the start (tokens) and gauges (pages).

        pages_free + pages_tree + pages_private == pages_total, and so do the first three of:
        pages_free          not in use
        pages_cached        evictable: published, and used by no sequence
        pages_referenced    used by sequences, published or not
        pages_shared        of those, published pages that two or more sequences have locked
        hit_rate            matched_tokens over acquired_tokens
        collisions          block keys that were equal for different prefixes (cache "hash")
        last_minute         gains of the counters in the last 60 seconds, exact to a second:
                            "matched_tokens" and "matched_tokens_per_s", and so on; "hit_rate";
                            "seconds", fewer than 60 soon after the start
        pages_pinned        locked by `pin`; pinned pages are retained, too

        and what sessions keep, see `no_retention`. O(1) but for that, and for pages_shared and
        pages_pinned, which cost O(nodes or blocks that live sequences lock).
        """
        allocator = self._allocator
        counts, recent = asdict(allocator.stats), allocator.recent.gains(allocator.note_time())
        recent["hit_rate"] = hit_rate(recent["matched_tokens"], recent["acquired_tokens"])
        return {
            **self.gauges(),
            "pages_shared": self._count_shared(),
            "hit_rate": hit_rate(counts["matched_tokens"], counts["acquired_tokens"]),
            "collisions": 0,
            "last_minute": recent,
            "sequences": len(allocator.live_sequences),
            "watches": len(self._watch_registry),
            "splits": 0,
            "old_epoch_pages": 0,
            **counts,
            **no_retention(),
            "pages_pinned": 0,
        }

    def gauges(self) -> dict[str, int]:
        """Returns the page counts of `stats` that cost O(1), and the evicted tokens."""
        allocator, owner = self._allocator, self._owner
        num_locked, num_private = owner.num_pages - owner.num_evictable, allocator.num_private
        return {
            "page_size": self.page_size,
            "pages_total": self.num_pages,
            "pages_free": allocator.pool.num_free,
            "pages_tree": owner.num_pages,
            "pages_locked": num_locked,
            "pages_private": num_private,
            "pages_cached": owner.num_evictable,
            "pages_referenced": num_locked + num_private,
            "evicted_tokens": owner.num_evicted_tokens,
        }

    @abstractmethod
    def check(self) -> None:
        """Audit every page's owner and every invariant of the cache; AssertionError names the first
        broken one. O(everything): for tests and debugging."""

    def eviction_preview(self, count: int = 10) -> list[dict[str, Any]]:
        """Returns the next `count` nodes or blocks that eviction would take, in order, if nothing
        else happened. Changes nothing. O(count); O(unlocked nodes) with policy "arc". Exact except
        among nodes that sessions keep: evicting one may end what keeps its ancestors.

        {"namespace", "start", "tokens", "num_tokens", "num_pages", "idle_s", "reason"} each; idle_s
        is the time since its last use ended, as in `dump`.
        """
        self._allocator.note_time()
        return self._preview(check_int("count", count, 0))

    @abstractmethod
    def _preview(self, count: int) -> list[dict[str, Any]]:
        """`eviction_preview` with a checked argument."""

    def dump(
        self, max_nodes: int = 10_000, namespace: str | Namespace | None = None
    ) -> dict[str, Any]:
        """Returns the cached prefixes as nested dicts, breadth first up to `max_nodes` nodes; those
        of one namespace and those below it if it is given.

        {"page_size", "truncated", "namespaces": {name: node}, "sequences", "fragmentation"}.

        node        {"start", "tokens", "num_tokens", "pages", "lock_ref", "sequences", "state",
                    "last_use", "children"}. state: "shared" (two or more sequences use it),
                    "referenced" (one does), "pinned" (only pins lock it), "cached", and those
                    of `RetentionPolicy.state`.
                    last_use: when its last sequence was released, in seconds of the cache's
                    clock, None while one uses it; read when that sequence last committed or was
                    acquired
        sequences   page tables of the live ones: {"length", "committed_len", "cached_len",
                    "num_private", "pages"}
        fragmentation  {"pages" in use, "slots" in them, "unused_slots": slots without a token,
                    "unused_share"} of the whole cache, truncated or not. O(nodes)
        """
        only = None if namespace is None else str(as_namespace(namespace))
        return self._dump(check_int("max_nodes", max_nodes, 0), only)

    @abstractmethod
    def _dump(self, max_nodes: int, only: str | None) -> dict[str, Any]:
        """`dump` with checked arguments."""

    @abstractmethod
    def _count_shared(self) -> int:
        """Returns the number of published pages that two or more sequences have locked."""

    def snapshot(self, view: SnapshotView) -> dict[str, Any]:
        """Returns a bounded view of a cache that is in use. Changes nothing.

        {"page_size", "namespaces", "nodes", "pages", "fragmentation", "victims"}

        nodes       parents first, {"id", "parent" (None: below the namespace's root), "namespace",
                    "start", "num_tokens", "head", "tail" (its first and last tokens), "num_pages",
                    "pages" ([[first, count], ...]), "lock_ref", "sequences", "state" (as in
                    `dump`), "idle_s" (None while it is used), "sessions" (names of those that end
                    here), "num_sessions", "num_children" (shown or not)}
        pages       see `PageMap.report`
        fragmentation  {"slots", "unused_slots"} of what is shown and of the sequences
        victims     as in `eviction_preview`, with "head" and "tail" for its tokens, and "id"

        The cost does not depend on the size of the tree, except for O(pages) in numpy.
        """
        self._allocator.note_time()
        return self._snapshot(view)

    @abstractmethod
    def _snapshot(self, view: SnapshotView) -> dict[str, Any]:
        """`snapshot` at the clock's present time."""
