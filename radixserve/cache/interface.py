"""`PrefixCache`: the interface of a prefix cache to the scheduler, the engine and replay.

`RadixCache` and `HashBlockCache` are the two implementations; one contract test runs on both.
Single-threaded: one owner makes every call. Only the cache modifies returned objects. The owner of
the K/V memory performs a sequence's `cow_copies` before the sequence is used.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple, Protocol, Self

from radixserve.arrays import IntArray
from radixserve.cache.events import EventLog
from radixserve.cache.page_pool import PageAllocator, PageOwner
from radixserve.cache.recent import hit_rate
from radixserve.cache.sequence import CacheSequence, append_placeholder
from radixserve.cache.snapshot import SnapshotView
from radixserve.cache.state_pool import StateCopy
from radixserve.cache.tokens import TokenIds
from radixserve.cache.watch import PrefixWatch, WatchRegistry
from radixserve.checks import check_int, check_str
from radixserve.output import Lookup
from radixserve.schedule import WindowUpdates


class CacheSession(Protocol):
    """Groups related sequences that are expected to be continued until it is closed: a chat, a
    branch, a tenant."""

    @property
    def name(self) -> str: ...

    @property
    def is_open(self) -> bool: ...

    def close(self) -> None:
        """Close: pages reached only by closed sessions are evicted first. Idempotent. The end of a
        `with` block closes, too."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


class Inspection(NamedTuple):
    """How a cache tells what it holds: the methods of `PrefixCache`, their arguments checked."""

    check: Callable[[], None]
    count_shared: Callable[[], int]  # published pages that two or more sequences have locked
    preview: Callable[[int], list[dict[str, Any]]]
    snapshot: Callable[[SnapshotView], dict[str, Any]]
    dump: Callable[[int, str | None], dict[str, Any]]


class PrefixCache(ABC):
    """Tokens in, the longest cached prefix out; see `RadixCache` for what each call promises."""

    def __init__(
        self,
        allocator: PageAllocator,
        owner: PageOwner,
        watch_registry: WatchRegistry,
        inspection: Inspection,
    ) -> None:
        self._allocator = allocator
        self._owner = owner
        self._watch_registry = watch_registry
        self._inspection = inspection

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
    def num_states(self) -> int:
        """Recurrent states, for models whose layers have some; 0: none."""
        return 0

    def take_state_copies(self) -> list[StateCopy]:
        """(source, destination) states, to be copied one after the other before the next step."""
        return []

    @property
    def window_size(self) -> int:
        """Positions that layers with windows see, where they have pages of their own; else 0."""
        return 0

    def take_window_updates(self) -> WindowUpdates | None:
        """What a runner must know of window pages before the next step; None: there are none."""
        return None

    @property
    def num_available(self) -> int:
        """Pages that are free or evictable now."""
        return self._allocator.num_available

    def num_obtainable(self, wanted: int) -> int:
        """How many of `wanted` pages new tokens can take now: as many as are available and, with
        windows, as there are window pages that no live sequence sees."""
        return self._allocator.num_obtainable(wanted)

    @abstractmethod
    def lookup(
        self,
        tokens: TokenIds,
        namespace: str = "",
        *,
        allow_full: bool = False,
        compare_namespaces: bool = True,
    ) -> Lookup:
        """What `acquire` would reuse now, and why not more. Changes nothing.

        With `compare_namespaces` False the answer does not depend on what other namespaces hold.
        """

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

    def append_placeholder(self, sequences: Sequence[CacheSequence]) -> None:
        """`append_placeholders(1)` of each, of which the pages are available."""
        if not self.num_states:
            append_placeholder(sequences)
            return
        for sequence in sequences:
            sequence.append_placeholders(1)

    def commit_next(self, sequences: Sequence[CacheSequence], token_ids: Sequence[int]) -> None:
        """`CacheSequence.commit_next` of each, in any order: what a decode step does."""
        for sequence, token_id in zip(sequences, token_ids, strict=True):
            sequence.commit_next(token_id)

    @abstractmethod
    def open_session(
        self, name: str, *, lease_s: float | None = None, retain_until: float | None = None
    ) -> CacheSession:
        """A session to pass to `acquire`. Names need not be unique; they are for `stats`."""

    # -- hints; where sessions have no effect they reach nothing, and nothing is demoted ----------

    @property
    def keeps_sessions(self) -> bool:
        """Whether sessions have an effect on what is evicted."""
        return False

    def time(self) -> float:
        """Seconds on the cache's clock, that of `retain_until`."""
        return self._allocator.note_time()

    @property
    def num_retained(self) -> int:
        """Pages that retaining sessions reach. O(1) amortised."""
        return 0

    def pin(self, tokens: TokenIds, namespace: str = "", *, session: CacheSession) -> CacheSequence:
        """`acquire` of all of `tokens`, which are cached: a lock that no request needs, and that
        `stats` and `dump` tell from those of requests. Whole pages only."""
        sequence = self.acquire(tokens, namespace, allow_full=True, session=session)
        sequence.is_pin = True
        return sequence

    def demote(self, tokens: TokenIds, namespace: str = "") -> int:
        """Let what is cached of `tokens` and goes on from them be evicted first, as after the end
        of all of its sessions, until it is used again; so, too, what comes before and nothing else
        goes on from. What open sessions reach stays in its place until they are closed.

        Returns the tokens that go first now.
        """
        del tokens, namespace
        return 0

    def demote_session(self, session: CacheSession) -> int:
        """Close the session; returns the tokens of what it reached that go first now."""
        session.close()
        return 0

    def held_tokens(self, sessions: Iterable[CacheSession]) -> int:
        """Tokens, in whole pages, from the root to where sequences of these sessions ended; what
        several reach counts once."""
        del sessions
        return 0

    def session_prefixes(self, session: CacheSession) -> list[tuple[str, IntArray]]:
        """The namespace and tokens of each place where sequences of the session ended last."""
        del session
        return []

    def evict(self, num_tokens: int) -> int:
        """Free pages for `num_tokens`, rounded up to a page, that no sequence has locked.

        Returns the tokens freed, in whole pages: fewer than asked when there are no more.
        """
        num_tokens = check_int("num_tokens", num_tokens, 0)
        self._allocator.note_time()
        return self._owner.evict(self._allocator.pages_for(num_tokens)) * self.page_size

    def reset(self, namespace: str | None = None) -> None:
        """Forget one namespace, or all; pages in use are freed when released.

        Sequences acquired before continue, but what they commit is not cached.
        """
        if namespace is not None:
            check_str("namespace", namespace)
        self._owner.reset(namespace)
        self._allocator.stats.num_resets += 1

    @abstractmethod
    def open_events(self, epoch: int | None = None) -> EventLog:
        """Collect what is stored and dropped from now on, until the log is closed. `epoch`: see
        `EventLog`. InvalidRequest while another log is open. Costs nothing while none is."""

    def stats(self) -> dict[str, Any]:
        """Counters since the start (tokens) and gauges (pages).

        free + tree + private == total, and by what could be done with them:
        pages_free          nothing is in them
        pages_cached        evictable: published, and no sequence uses them
        pages_referenced    sequences use them, published or not; the three make up the total
        pages_shared        of those, published ones that two or more sequences have locked
        hit_rate            matched_tokens over acquired_tokens
        collisions          block keys that were equal for different prefixes (cache "hash")
        last_minute         what the counters gained in the last 60 seconds, exact to a second:
                            "matched_tokens" and "matched_tokens_per_s", and so on; "hit_rate";
                            "seconds", fewer than 60 soon after the start
        leases              the leases now, first to end first: {"session", "tokens",
                            "seconds_left"}, with the tokens from the root to where its sequence
                            ended
        pages_retained, pages_pinned  by hints: evicted after all others; locked. What is pinned is
                    retained, too
        retained_evicted_pages  since the start: evicted while they were retained

        O(1) but for three: pages_shared and pages_pinned cost O(nodes or blocks that live sequences
        lock), leases O(leases).
        """
        allocator = self._allocator
        counts, recent = asdict(allocator.stats), allocator.recent.gains(allocator.note_time())
        recent["hit_rate"] = hit_rate(recent["matched_tokens"], recent["acquired_tokens"])
        return {
            **self.gauges(),
            "pages_shared": self._inspection.count_shared(),
            "hit_rate": hit_rate(counts["matched_tokens"], counts["acquired_tokens"]),
            "collisions": 0,
            "last_minute": recent,
            "sequences": len(allocator.live_sequences),
            "watches": len(self._watch_registry),
            "splits": 0,
            **counts,
            "leases": [],
            "pages_leased": 0,
            "pages_closed": 0,
            "pages_retained": 0,
            "pages_pinned": 0,
            "retained_evicted_pages": 0,
        }

    def gauges(self) -> dict[str, int]:
        """The pages of `stats` that cost O(1), and the evicted tokens."""
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

    def check(self) -> None:
        """Audit every page's owner and every invariant of the cache; AssertionError names the first
        broken one. O(everything): for tests and debugging."""
        self._inspection.check()

    def eviction_preview(self, count: int = 10) -> list[dict[str, Any]]:
        """The nodes or blocks that eviction would take next, the first to go first, if nothing else
        happened. Changes nothing. O(count), O(unlocked nodes) with policy "arc". Exact but among
        leased ones: the eviction of one ends its lease, after which what was above it goes earlier.

        {"namespace", "start", "tokens", "num_tokens", "num_pages", "idle_s", "reason"} each; idle_s
        is the time since its last use ended, as in `dump`.
        """
        self._allocator.note_time()
        return self._inspection.preview(check_int("count", count, 0))

    def dump(self, max_nodes: int = 10_000, namespace: str | None = None) -> dict[str, Any]:
        """The cached prefixes as nested dicts, breadth first up to `max_nodes` nodes; those of one
        namespace where it is given.

        {"page_size", "truncated", "namespaces": {name: node}, "sequences", "fragmentation"}.

        node        {"start", "tokens", "num_tokens", "pages", "lock_ref", "sequences", "state",
                    "last_use", "children"}. state: "shared" (two or more sequences use it),
                    "referenced" (one does), "pinned" (only pins lock it), "cached", and for
                    sessions "leased", "retained" and "closed".
                    last_use: when its last sequence was released, in seconds of the cache's
                    clock, None while one uses it; read when that sequence last committed or was
                    acquired
        sequences   page tables of the live ones: {"length", "committed_len", "cached_len",
                    "num_private", "pages"}
        fragmentation  {"pages" in use, "slots" in them, "unused_slots": slots without a token,
                    "unused_share"} of the whole cache, truncated or not. O(nodes)
        """
        return self._inspection.dump(check_int("max_nodes", max_nodes, 0), namespace)

    def snapshot(self, view: SnapshotView) -> dict[str, Any]:
        """A bounded view of a cache that is in use. Changes nothing.

        {"page_size", "namespaces", "nodes", "pages", "fragmentation", "victims"}

        nodes       parents first, {"id", "parent" (None: below the namespace's root), "namespace",
                    "start", "num_tokens", "head", "tail" (its first and last tokens), "num_pages",
                    "pages" ([[first, count], ...]), "lock_ref", "sequences", "state" (as in
                    `dump`), "idle_s" (None while it is used), "sessions" (names of those that end
                    here), "num_sessions", "num_children" (shown or not)}
        pages       see `PageMap.report`
        fragmentation  {"slots", "unused_slots"} of what is shown and of the sequences
        victims     as in `eviction_preview`, with "head" and "tail" for its tokens, and "id"

        The cost does not grow with the tree, but for O(pages) in numpy.
        """
        self._allocator.note_time()
        return self._inspection.snapshot(view)
