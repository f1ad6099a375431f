"""`KVLoader`: fills pages with stored K/V for the requests that wait for it.

    queue(request) -> [ heads are read in a thread ] -> is it worth loading?
                   -> [ runs are read in a thread ]  -> pages filled between steps -> on_loaded

One request at a time is loaded, in order of arrival. Loaded tokens are committed to the cache run
by run, by the same calls as computed tokens. If a read fails, is late or does not verify, the
request continues with the runs loaded so far and computes the rest.

The engine's thread makes all calls, and owns all state but the buffers. It reads and writes no
store: a thread for heads and a thread for runs do. It never waits for them longer than `step_s`,
and a request waits for each no longer than its deadline.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from radixserve.arrays import IntArray
from radixserve.cache import CacheSequence, RadixCache
from radixserve.cache.namespace import is_within
from radixserve.errors import OutOfPages
from radixserve.request import Request
from radixserve.runner.kv_layout import ByteArray
from radixserve.store.buffers import BufferedRun, BufferPool, slots_of
from radixserve.store.counts import StoreCounts
from radixserve.store.daemon_executor import DaemonExecutor
from radixserve.store.health import StoreHealth
from radixserve.store.limits import StoreLimits
from radixserve.store.load_cost import LoadCostModel
from radixserve.store.stored_prefixes import StoredPrefix, StoredPrefixes, StoredRun

if TYPE_CHECKING:
    from radixserve.runner.kv_pool import KVPool


@dataclass(eq=False)
class PendingLoad:
    """Tokens that wait for their stored K/V: those of a request, or of `load_cache`."""

    tokens: IntArray  # those that may be loaded
    namespace: str
    on_loaded: Callable[[int | None], None]  # with the tokens loaded; None if pages are missing
    request_id: str | None = None
    num_prompt: int = 0
    queued_at: float = 0.0  # by the scheduler's clock
    only_free: bool = False  # load the next run alone, and evict nothing for it
    search: Future[StoredPrefix] | None = None  # for its stored prefix
    deadline: float = 0.0  # of the search: time.monotonic()
    num_missing: int = 0  # tokens that are stored and not cached


@dataclass(eq=False)
class Load:
    """A load in progress: the stored runs of one request. It locks no page between steps."""

    pending: PendingLoad
    stored: StoredPrefix
    runs: deque[StoredRun]  # not yet read
    steps_before_s: float  # seconds of steps when it began
    reads: deque[tuple[StoredRun, Future[BufferedRun | None]]] = field(default_factory=deque)
    deadline: float = 0.0  # of the whole: time.monotonic()
    num_loaded: int = 0
    tiers: dict[str, str] = field(default_factory=dict)  # of the runs that were read, by name
    used_tiers: set[str] = field(default_factory=set)  # of those whose K/V is in pages
    began: float = field(default_factory=time.monotonic)


class KVLoader:
    """See the module."""

    def __init__(
        self,
        prefixes: StoredPrefixes,
        pool: KVPool,
        cache: RadixCache,
        buffers: BufferPool,
        cost: LoadCostModel,
        counts: StoreCounts,
        limits: StoreLimits,
        *,
        step_seconds: Callable[[], float] = lambda: 0.0,
        has_room: Callable[[int, float], bool] = lambda _, __: True,
        touch: Callable[[StoredPrefix], None] = lambda _: None,
    ) -> None:
        """
        step_seconds  seconds in which steps were under way so far
        has_room      whether a request of so many tokens, queued at such a time, would find pages
                      if it were admitted now
        touch         notes that a stored prefix was used; must return at once
        """
        self.cost = cost
        self.health = StoreHealth("reading", limits)
        self.tiers: dict[str, str] = {}  # of open requests: where their K/V was loaded from
        self._prefixes, self._pool, self._cache = prefixes, pool, cache
        self._buffers, self._counts, self._limits = buffers, counts, limits
        self._step_seconds, self._has_room, self._touch = step_seconds, has_room, touch
        self._searching: deque[PendingLoad] = deque()
        self._waiting: deque[PendingLoad] = deque()
        self._load: Load | None = None
        self._finder = DaemonExecutor("radixserve-store-finder")
        self._reader = DaemonExecutor("radixserve-store-reader")

    def __len__(self) -> int:
        """Number of loads that have not ended. May be called from any thread."""
        return len(self._searching) + len(self._waiting) + (self._load is not None)

    @property
    def may_ask(self) -> bool:
        """Whether the store may be asked: its threads answer, and it did not fail again and
        again."""
        return self.health.may_try and not (self._finder.is_stuck or self._reader.is_stuck)

    def find(self, tokens: IntArray, namespace: str, seconds: float) -> Future[StoredPrefix]:
        """Look for the stored prefix, in a thread that gives up after some seconds."""
        return self._finder.submit(
            self._prefixes.match, tokens, namespace, time.monotonic() + seconds
        )

    # -- what waits ----------------------------------------------------------------------------

    def queue(
        self, request: Request, queued_at: float, on_loaded: Callable[[int | None], None]
    ) -> bool:
        """Queue a request to load its stored prefix before it is scheduled. Returns False, and does
        nothing, if that is sure not to pay: the prompt is cached, or computed sooner than loaded.
        `queued_at`: by the scheduler's clock."""
        tokens, namespace = self._reusable_tokens(request), request.params.namespace
        if len(tokens) < self._limits.min_tokens or not self.may_ask:
            return False
        num_missing = len(tokens) - self._cached_len(tokens, namespace)
        if num_missing < self._limits.min_tokens:
            return False
        if not self.cost.pays(num_missing, self._ahead()):
            return False
        pending = PendingLoad(
            tokens, namespace, on_loaded, request.request_id, len(request.token_ids), queued_at
        )
        if self._prefixes.known(tokens, namespace).length == len(tokens):
            pending.num_missing = num_missing
            self._waiting.append(pending)
        else:
            self._search(pending, self._limits.lookup_s)
        return True

    def load_free(
        self, tokens: IntArray, namespace: str, on_loaded: Callable[[int | None], None]
    ) -> None:
        """Put the next run of the stored part of `tokens` into free pages, without evicting any.
        `on_loaded`: see `PendingLoad`; 0 tokens if all are cached or the run cannot be read."""
        if not self.may_ask:
            on_loaded(0)
            return
        pending = PendingLoad(tokens, namespace, on_loaded, only_free=True)
        self._search(pending, self._limits.bulk_s)

    def cancel(self, request_id: str | None = None) -> None:
        """End the load of one request, or all loads if None."""
        if self._load is not None and request_id in (None, self._load.pending.request_id):
            self._end_load(self._load)
        for queue in (self._searching, self._waiting):
            for pending in list(queue):
                if request_id in (None, pending.request_id):
                    queue.remove(pending)
                    self._drop(pending)

    def forget(self, namespace: str | None) -> None:
        """End the loads of a namespace, or all if None."""
        load = self._load
        if load is not None and is_within(load.pending.namespace, namespace):
            self._end_load(load)
        for queue in (self._searching, self._waiting):
            for pending in list(queue):
                if is_within(pending.namespace, namespace):
                    queue.remove(pending)
                    self._drop(pending)

    def _search(self, pending: PendingLoad, seconds: float) -> None:
        pending.search = self.find(pending.tokens, pending.namespace, seconds)
        pending.deadline = time.monotonic() + seconds
        self._searching.append(pending)

    def _drop(self, pending: PendingLoad) -> None:
        if pending.search is not None:
            pending.search.cancel()
        pending.on_loaded(0)

    def _drop_waiting(self) -> None:
        """The store is late or broken: nothing waits for it."""
        for queue in (self._searching, self._waiting):
            while queue:
                self._drop(queue.popleft())

    def _ahead(self) -> list[int]:
        """The tokens of the loads before the next one."""
        load = self._load
        return [one.num_missing for one in ([] if load is None else [load.pending])] + [
            one.num_missing for one in self._waiting
        ]

    def _cached_len(self, tokens: IntArray, namespace: str) -> int:
        lookup = self._cache.lookup(tokens, namespace, allow_full=True, compare_namespaces=False)
        return lookup.cached_len

    # -- between steps -------------------------------------------------------------------------

    def step(self, *, may_wait: bool) -> None:
        """Put the runs that have been read into pages, for up to `step_s`. `may_wait`: wait up to
        `step_s` for what is being read."""
        until = time.monotonic() + self._limits.step_s
        self._take_found(until if may_wait else 0.0)
        while (load := self._load or self._begin_next()) is not None:
            run, read = load.reads[0]
            if may_wait:
                wait([read], max(0.0, until - time.monotonic()))
            if not read.done():
                if time.monotonic() > load.deadline:
                    self._reader.abandon(read)
                    self._note_failed_read(f"reading {run.name} takes too long")
                    self._end_load(load)
                return
            load.reads.popleft()
            if not self._install_run(load, run, read):
                self._end_load(load)
            elif not load.reads:
                steps_s = self._step_seconds() - load.steps_before_s
                self.cost.note_load(load.num_loaded, time.monotonic() - load.began - steps_s)
                self._end_load(load)
            if time.monotonic() > until:
                if self._load is None:
                    self._begin_next()  # it is read while the step is computed
                return

    def _take_found(self, until: float) -> None:
        """Sort out the prompts whose stored prefix has been searched for. Waits for the searches
        until then."""
        while self._searching:
            pending = self._searching[0]
            search = pending.search
            assert search is not None
            wait([search], max(0.0, until - time.monotonic()))
            if not search.done():
                if time.monotonic() > pending.deadline:
                    self._finder.abandon(search)
                    self._note_failed_read("the search for stored prefixes takes too long")
                    self._drop_waiting()
                return
            self._searching.popleft()
            try:
                search.result()
            except Exception as error:
                self._note_failed_read(error)
                pending.on_loaded(0)
                continue
            self.health.note_success()
            if self._plan(pending, self._ahead()) is None:
                pending.on_loaded(0)
            else:
                self._waiting.append(pending)

    def _plan(self, pending: PendingLoad, ahead: Sequence[int]) -> StoredPrefix | None:
        """Returns the stored prefix to load, after loads of as many tokens as `ahead` says; None if
        loading does not pay. Updates `num_missing`."""
        tokens, namespace = pending.tokens, pending.namespace
        stored = self._prefixes.known(tokens, namespace)
        if not stored.length:
            return None
        pending.num_missing = stored.length - self._cached_len(tokens, namespace)
        if pending.only_free:
            return stored if pending.num_missing > 0 else None
        if pending.num_missing < self._limits.min_tokens:
            return None
        return stored if self.cost.pays(pending.num_missing, ahead) else None

    def _begin_next(self) -> Load | None:
        """Start the next load that pays and whose request would find pages: what is loaded long
        before its request is admitted would be evicted again."""
        if self._waiting and not self.may_ask:
            self._drop_waiting()
        while self._load is None and self._waiting:
            pending = self._waiting[0]
            needed = pending.num_prompt + 1
            if not pending.only_free and not self._has_room(needed, pending.queued_at):
                return None
            self._load = self._begin(self._waiting.popleft())
        return self._load

    def _begin(self, pending: PendingLoad) -> Load | None:
        """Start to read the runs that are not cached. Returns the load; None if there is none."""
        stored = self._plan(pending, ())
        if stored is None:
            pending.on_loaded(0)
            return None
        cached_len = stored.length - pending.num_missing
        runs = [run for run in stored.runs if run.start + run.num_tokens > cached_len]
        if pending.only_free:
            runs = runs[:1]
            if not self._fits_free(runs[0].start + runs[0].num_tokens - cached_len):
                pending.on_loaded(None)
                return None
        load = Load(pending, stored, deque(runs), self._step_seconds())
        expected_s = self.cost.load_seconds(pending.num_missing)
        load.deadline = time.monotonic() + self._limits.read_s + 4 * expected_s
        for _ in range(self._limits.read_ahead):
            self._read_next(load)
        return load

    def _fits_free(self, num_tokens: int) -> bool:
        return -(-num_tokens // self._cache.page_size) + 1 <= self._cache.num_free

    def _read_next(self, load: Load) -> None:
        if load.runs:
            run = load.runs.popleft()
            load.tiers[run.name] = self._prefixes.store.tier_of(run.name)
            load.reads.append((run, self._reader.submit(self._read, run, load.pending.tokens)))

    def _read(self, run: StoredRun, tokens: IntArray) -> BufferedRun | None:
        """Returns the K/V of a run, None if it was removed; called in the reader's thread."""
        buffer, kv = self._buffers.take(), None
        try:
            began = time.perf_counter()
            kv = self._prefixes.read(run, tokens, buffer.data)
            if kv is None:
                return None
            self.cost.note_read(kv.nbytes, time.perf_counter() - began)
            return BufferedRun(kv, buffer)
        finally:
            if kv is None:
                self._buffers.give_back(buffer)

    def _install_run(self, load: Load, run: StoredRun, read: Future[BufferedRun | None]) -> bool:
        """Put a run's K/V into pages and commit it. Returns False if the load must end here."""
        try:
            buffered = read.result()
            reason = f"{run.name} was removed or replaced"
        except Exception as error:  # BadRun, OSError, or whatever a disk can make of it
            buffered, reason = None, str(error) or repr(error)
            if isinstance(error, OSError):
                self.health.note_failure(error)
        if buffered is None:
            self._counts.failed_reads += 1
            self._counts.warn(f"a stored run cannot be read, its tokens are computed: {reason}")
            return False
        self.health.note_success()
        self._read_next(load)
        tokens, namespace = load.pending.tokens, load.pending.namespace
        end = run.start + run.num_tokens
        try:
            with self._lock(tokens[:end], namespace) as sequence:
                if load.pending.only_free and not self._fits_free(end - sequence.length):
                    return False
                count = self._fill(sequence, run, tokens, buffered.kv)
        finally:
            self._buffers.give_back(buffered.buffer)
        load.num_loaded += count
        if count:
            load.used_tiers.add(load.tiers[run.name])
        self._counts.loaded_tokens += count
        return count > 0

    def _lock(self, tokens: IntArray, namespace: str) -> CacheSequence:
        """Returns a sequence over the cached part of `tokens`, whose `cow_copies` were made. The
        cache's counters leave it out."""
        sequence = self._cache.acquire(tokens, namespace, allow_full=True)
        self._cache.discount(sequence, len(tokens))
        if sequence.cow_copies:
            self._pool.copy_page_prefixes(np.array(sequence.cow_copies, np.int32))
        return sequence

    def _fill(
        self, sequence: CacheSequence, run: StoredRun, tokens: IntArray, kv: ByteArray
    ) -> int:
        """Append a run to a sequence and commit it. Returns the tokens appended, 0 if no page is
        available or the tokens before the run are no longer cached."""
        begin, end = sequence.length, run.start + run.num_tokens
        if begin < run.start or end <= begin:
            return 0
        try:
            sequence.extend(tokens[begin:end])
        except OutOfPages:
            return 0
        slots = slots_of(sequence.pages, begin, end, self._cache.page_size)
        self._pool.write(slots, kv[:, :, begin - run.start :])
        sequence.commit(end)
        return end - begin

    def _end_load(self, load: Load) -> None:
        self._load = None
        for _, read in load.reads:
            self._discard(read)
        self._touch(load.stored)
        if load.pending.request_id is not None and load.used_tiers:
            self.tiers[load.pending.request_id] = "+".join(sorted(load.used_tiers))
        load.pending.on_loaded(load.num_loaded)

    def _discard(self, read: Future[BufferedRun | None]) -> None:
        """Return the buffer of an abandoned read to the pool when the read ends."""

        def give_back(read: Future[BufferedRun | None]) -> None:
            if not read.cancelled() and read.exception() is None and (run := read.result()):
                self._buffers.give_back(run.buffer)

        read.cancel()
        read.add_done_callback(give_back)

    def _note_failed_read(self, reason: object) -> None:
        self._counts.failed_reads += 1
        self._counts.warn(f"{reason}; tokens are computed instead of loaded")
        self.health.note_failure(reason)

    # -- the whole -----------------------------------------------------------------------------

    def close(self) -> None:
        """End all loads and the threads, without waiting for them."""
        self.cancel()
        self._finder.shutdown(0.0)
        self._reader.shutdown(0.0)

    def check(self) -> None:
        """Audit what waits and the load in progress. Raises AssertionError."""
        load = self._load
        pending = [*([] if load is None else [load.pending]), *self._searching, *self._waiting]
        ids = [one.request_id for one in pending if one.request_id is not None]
        assert len(ids) == len(set(ids)), "a request waits for two loads"
        if load is None:
            return
        assert load.num_loaded <= load.stored.length, "more was loaded than is stored"
        runs = [*(run for run, _ in load.reads), *load.runs]
        ends = [run.start + run.num_tokens for run in runs]
        assert runs, "a load without a run to read is kept"
        assert [run.start for run in runs[1:]] == ends[:-1], "runs of a load are not in a row"
        if not load.pending.only_free:
            assert ends[-1] == load.stored.length, "a load ends before its prefix"

    @property
    def may_hold_buffers(self) -> bool:
        """Whether reads in progress, abandoned ones included, may have buffers."""
        if self._load is not None and self._load.reads:
            return True
        return self._reader.busy_s > 0 or self._reader.is_stuck

    def _reusable_tokens(self, request: Request) -> IntArray:
        """Returns the tokens of a prompt that may be loaded: neither the last one nor scored
        ones."""
        wanted = request.keyed_tokens()[: request.score_start + 1]
        return wanted[: self._prefixes.num_storable(wanted[:-1])]
