"""`KVConnector`: writes the pool's K/V to disk when requests end, reads it when they return.

    queue_load(request) -> [ reads in a thread ] -> pages filled between steps -> Scheduler.add
    end of a request -> K/V copied between steps -> [ written in a thread ]

A request whose prefix is stored and not cached waits until its runs are loaded, one request at a
time in order of arrival; other requests do not wait. Loaded tokens are committed to the cache run
by run, by the same calls as computed tokens. If a read fails, is late or does not verify, the
request continues with the runs loaded so far and computes the rest.

K/V is copied out of the pool when the engine has had nothing to run for a while. Before that it is
copied if the pool may evict it otherwise, or if it has waited for long; with the policy "auto" only
if writing it costs less than what later loads are expected to save.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from radixserve.arrays import IntArray
from radixserve.cache import CacheSequence, PrefixCache, RadixCache
from radixserve.config import EngineConfig, KVStoreWrite, parse_bytes
from radixserve.errors import InvalidRequest, OutOfPages
from radixserve.output import StoredLookup
from radixserve.request import Request
from radixserve.runner.kv_layout import ByteArray
from radixserve.store import (
    MAX_RUN_TOKENS,
    BadRun,
    FolderStore,
    HostStore,
    ReturnRate,
    RunStore,
    StoredPrefix,
    StoredPrefixes,
    StoredRun,
    TieredStore,
    UseCounts,
)
from radixserve.store.daemon_executor import DaemonExecutor
from radixserve.store.fingerprint import model_fingerprint
from radixserve.store.redis_store import SCHEMES, RedisStore

if TYPE_CHECKING:
    from radixserve.runner.base import ModelRunner
    from radixserve.runner.kv_pool import KVPool

_log = logging.getLogger("radixserve")
MIN_TOKENS = 16  # fewer are neither written nor loaded
_MIN_MEASURED = 64  # tokens computed before their time is known
_BACKLOG_BYTES = 256 << 20  # most K/V that waits to be written; what exceeds it is not stored
_READ_AHEAD = 2  # runs that are read while another is put into pages
_PATIENCE_S = 2.0  # a read is given up after this and four times its expected time
_FIRST_BANDWIDTH = 1e9  # bytes/s that are expected until reads were timed
_FIRST_LATENCY_S = 0.1e-3  # fixed cost of a load until loads were timed, and the least assumed
_FORGETTING = 0.02  # share of the measured latency forgotten each time that a load does not pay
_STEP_S = 0.005  # time per step for filling pages
_MAX_FREE_BUFFERS = 8  # unused buffers that are kept for the next reads and copies
_CLOSE_S = 30.0  # until writes are given up
_CHECK_S = 60.0  # `check` waits at most so long for writes
_IDLE_S = 0.05  # without requests, until K/V is copied that is written when the engine is idle
_MAX_PAUSE_S = 0.2  # of the writer, for each run of such K/V, while requests run
_MAX_UNSAVED_S = 5.0  # K/V is copied after so long even while the engine is busy
_FIRST_WRITE_S = 1.2e-9  # for each byte, until writes were timed
_RETURNS_WINDOW = 4  # pools of evicted tokens, after which half of them are forgotten
_LOG_EVERY_S = 60.0
_CACHE_FOLDER = Path("~/.cache/radixserve")  # of fingerprints, where the store is not a folder


class LoadingRequest(NamedTuple):
    """A request that waits for its stored prefix. `on_loaded`: passes it to the scheduler, with the
    number of tokens that were loaded for it."""

    request: Request
    on_loaded: Callable[[int], None]
    num_missing: int  # tokens that are stored and not cached
    queued_at: float = 0.0  # by the scheduler's clock


class BufferPool:
    """Memory buffers for the K/V of runs. Reuse is several times faster than new memory, whose
    pages the system maps on first use. May be called from any thread."""

    def __init__(self, num_bytes: int) -> None:
        """`num_bytes`: of a buffer."""
        self._num_bytes = num_bytes
        self._free: list[ByteArray] = []
        self._lock = threading.Lock()
        self.num_lent = 0

    def take(self) -> ByteArray:
        """Returns a buffer, [num_bytes] uint8 of any content."""
        with self._lock:
            self.num_lent += 1
            if self._free:
                return self._free.pop()
        return np.empty(self._num_bytes, np.uint8)

    def give_back(self, buffer: ByteArray) -> None:
        """Return a buffer that is no longer used."""
        with self._lock:
            self.num_lent -= 1
            if len(self._free) < _MAX_FREE_BUFFERS:
                self._free.append(buffer)


class BufferedRun(NamedTuple):
    """K/V [layers, 2, tokens, row bytes] that lies in a buffer of the `BufferPool`."""

    kv: ByteArray
    buffer: ByteArray


class LoadPlan(NamedTuple):
    """What to load for a request."""

    stored: StoredPrefix
    num_tokens: int  # of it, that are not cached


@dataclass(eq=False)
class Load:
    """A load in progress: the stored runs of one request. It locks no page between steps."""

    waiter: LoadingRequest
    stored: StoredPrefix
    runs: deque[StoredRun]  # not yet read
    steps_before_s: float  # seconds of steps when it began
    reads: deque[tuple[StoredRun, Future[BufferedRun | None]]] = field(default_factory=deque)
    deadline: float = 0.0  # of the first read: time.monotonic()
    num_loaded: int = 0
    began: float = field(default_factory=time.monotonic)


@dataclass(eq=False)
class Unsaved:
    """A sequence whose K/V is to be copied out of the pool, a run at a time."""

    tokens: IntArray
    namespace: str
    since: float  # time.monotonic()
    only_idle: bool = False  # it is not worth the time of a busy engine
    stored: StoredPrefix | None = None  # of `tokens`; None until the first run is copied
    runs: list[BufferedRun] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        return sum(run.kv.nbytes for run in self.runs)


@dataclass
class TierStats:
    """Counters since the start, in tokens unless the name says otherwise."""

    loaded_tokens: int = 0
    written_tokens: int = 0
    unwritten_tokens: int = 0  # the disk was too slow or refused
    skipped_tokens: int = 0  # evicted before the engine was idle, and not worth writing before
    returned_tokens: int = 0  # computed again after they had been evicted
    failed_reads: int = 0  # files that were damaged, gone or late
    failed_writes: int = 0  # files


class KVConnector:
    """Owned by the engine's thread, which makes every call but `stats`."""

    def __init__(
        self,
        prefixes: StoredPrefixes,
        pool: KVPool,
        cache: RadixCache,
        *,
        policy: KVStoreWrite = "finish",
        min_uses: int = 2,
        step_tokens: int = 0,
        token_cost: Callable[[], tuple[float, int]] = lambda: (0.0, 0),
        step_seconds: Callable[[], float] = lambda: 0.0,
        has_room: Callable[[int, float], bool] = lambda _, __: True,
    ) -> None:
        """
        policy        what is written when, see `EngineConfig.kv_store_write`
        min_uses      of a prefix, before the policy "reuse" writes it
        step_tokens   of the pool, that a step may take
        token_cost    seconds spent on computing prompts, and their tokens, so far
        step_seconds  seconds in which steps were under way so far
        has_room      whether a request of so many tokens, queued at such a time, would find pages
                      if it were admitted now
        """
        self._prefixes = prefixes
        self._pool = pool
        self._cache = cache
        self._policy = policy
        self._uses = UseCounts(min_uses)
        self._returns = ReturnRate(_RETURNS_WINDOW * cache.num_pages * cache.page_size)
        self._token_cost = token_cost
        self._step_seconds = step_seconds
        self._has_room = has_room
        self._waiting: deque[LoadingRequest] = deque()
        self._load: Load | None = None
        self._reader = DaemonExecutor("radixserve-store-reader")
        self._writer = DaemonExecutor("radixserve-store-writer")
        self._late_read: Future[BufferedRun | None] | None = None  # its thread may hang
        self._step_tokens = step_tokens
        self._buffers = BufferPool(prefixes.max_file_bytes)
        self._unsaved: deque[Unsaved] = deque()
        self._deferred: deque[Unsaved] = deque()  # to be copied when the engine is idle
        self._num_deferred = 0  # their tokens
        self._busy_at = 0.0  # time.monotonic()
        self._cpu_before_s = 0.0  # time.thread_time() of the engine's thread at the first request
        self._resting = threading.Event()  # set while the engine has been idle for a while
        self._writes: dict[str, Unsaved] = {}  # under way, by the names of their first runs
        self._bandwidth = _FIRST_BANDWIDTH
        self._latency_s = _FIRST_LATENCY_S
        self._write_s = _FIRST_WRITE_S  # CPU seconds for each byte
        self._copy_s = 0.0  # for each byte, in the engine's thread
        self._missed_s = 0.0  # that loads would have saved, of what was not worth writing
        self._counts = TierStats()
        self._logged_at = -_LOG_EVERY_S
        self._is_closing = False

    # -- loading ------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Number of requests that wait for a load. May be called from any thread."""
        return len(self._waiting) + (self._load is not None)

    @property
    def num_loading_tokens(self) -> int:
        """Tokens of the prompts that wait for a load."""
        return sum(len(waiter.request.token_ids) for waiter in self._loading_requests())

    def _loading_requests(self) -> list[LoadingRequest]:
        load = self._load
        return [*([] if load is None else [load.waiter]), *self._waiting]

    def _match(self, tokens: IntArray, namespace: str) -> StoredPrefix:
        try:
            return self._prefixes.match(tokens, namespace)
        except OSError:
            return self._prefixes.known(tokens, namespace)

    def stored_len(self, tokens: IntArray, namespace: str) -> int:
        """Returns the length of the longest stored prefix in tokens."""
        return self._match(tokens, namespace).length

    def lookup(self, tokens: IntArray, namespace: str, cached_len: int) -> StoredLookup:
        """See `StoredLookup`. `cached_len`: leading tokens of the prompt that are cached."""
        stored = self._match(tokens, namespace)
        stored_len, in_memory = stored.length, self._prefixes.store.in_memory
        host_len = sum(run.num_tokens for run in stored.runs if in_memory(run.name))
        num_tokens = max(0, min(stored_len, len(tokens) - 1) - cached_len)
        seconds, computed = self._token_cost()
        load_s = self._load_seconds(num_tokens) if num_tokens else 0.0
        compute_s = num_tokens * seconds / computed if computed >= _MIN_MEASURED else None
        return StoredLookup(stored_len, num_tokens, load_s, compute_s, host_len)

    def queue_load(
        self, request: Request, on_loaded: Callable[[int], None], queued_at: float = 0.0
    ) -> bool:
        """Queue a request to load its stored prefix before it is scheduled. Returns False, and does
        nothing, if loading does not pay: the prefix is cached, not stored, or computed sooner.
        `on_loaded`, `queued_at`: see `LoadingRequest`."""
        self._note_busy()
        is_stuck = self._late_read is not None and not self._late_read.done()
        missing = None if is_stuck else self._plan_load(request, self._loading_requests())
        if missing is None:
            return False
        self._waiting.append(LoadingRequest(request, on_loaded, missing.num_tokens, queued_at))
        return True

    def cancel_loads(self, request_id: str | None = None) -> None:
        """Pass one waiting request, or all if None, to the scheduler without loading more."""
        if self._load is not None and request_id in (None, self._load.waiter.request.request_id):
            self._end_load(self._load)
        for waiter in list(self._waiting):
            if request_id in (None, waiter.request.request_id):
                self._waiting.remove(waiter)
                waiter.on_loaded(0)

    @property
    def has_work(self) -> bool:
        """Whether requests wait for a load or K/V is to be copied now."""
        if len(self) > 0:
            return True
        if self._policy == "finish":
            return len(self._unsaved) > 0
        return self.idle_timeout == 0.0

    @property
    def idle_timeout(self) -> float | None:
        """Seconds until an idle engine should copy K/V; None where nothing is to be copied."""
        waits = self._policy != "evict" and (self._unsaved or self._deferred)
        return max(0.0, self._busy_at + _IDLE_S - time.monotonic()) if waits else None

    def step(self, *, may_wait: bool) -> None:
        """Put the runs that have been read into pages, for up to 5 ms. `may_wait`: wait up to 5 ms
        for those that are being read."""
        until = time.monotonic() + _STEP_S
        while (load := self._load or self._begin_next()) is not None:
            run, read = load.reads[0]
            if may_wait:
                wait([read], max(0.0, until - time.monotonic()))
            if not read.done():
                if time.monotonic() > load.deadline:
                    self._late_read = read
                    self._counts.failed_reads += 1
                    self._warn(f"reading {run.name} takes too long; its tokens are computed")
                    self._end_load(load)
                return
            load.reads.popleft()
            if not self._install_run(load, run, read):
                self._end_load(load)
            elif not load.reads:
                self._time_load(load)
                self._end_load(load)
            else:
                self._set_deadline(load)
            if time.monotonic() > until:
                if self._load is None:
                    self._begin_next()  # it is read while the step is computed
                return

    def _begin_next(self) -> Load | None:
        """Start the next load that pays and whose request would find pages: what is loaded long
        before its request is admitted would be evicted again."""
        while self._load is None and self._waiting:
            waiter = self._waiting[0]
            if not self._has_room(len(waiter.request.token_ids) + 1, waiter.queued_at):
                return None
            self._load = self._begin(self._waiting.popleft())
        return self._load

    def _plan_load(self, request: Request, ahead: Sequence[LoadingRequest]) -> LoadPlan | None:
        """Returns what to load for a request, after the loads of the requests `ahead`; None if
        loading does not pay."""
        tokens, namespace = _reusable_tokens(request), request.params.namespace
        if len(tokens) < MIN_TOKENS:
            return None
        lookup = self._cache.lookup(tokens, namespace, allow_full=True, compare_namespaces=False)
        if len(tokens) - lookup.cached_len < MIN_TOKENS:
            return None
        stored = self._match(tokens, namespace)
        num_missing = stored.length - lookup.cached_len
        if num_missing < MIN_TOKENS or not self._pays(num_missing, ahead):
            return None
        return LoadPlan(stored, num_missing)

    def _pays(self, num_tokens: int, ahead: Sequence[LoadingRequest]) -> bool:
        """Whether loading `num_tokens`, after the loads of the requests `ahead`, takes less time
        than computing them, by the rates measured so far."""
        seconds, computed = self._token_cost()
        if computed < _MIN_MEASURED:
            return True
        waits_s = sum(self._load_seconds(waiter.num_missing) for waiter in ahead)
        pays = waits_s + self._load_seconds(num_tokens) < num_tokens * seconds / computed
        if not pays:  # once loads do not pay, none is timed: what was slow may be fast again
            self._latency_s += _FORGETTING * (_FIRST_LATENCY_S - self._latency_s)
        return pays

    def _load_seconds(self, num_tokens: int) -> float:
        return self._latency_s + num_tokens * self._prefixes.layout.token_bytes / self._bandwidth

    def _time_load(self, load: Load) -> None:
        """Update the measured latency of loads with a load that has succeeded."""
        steps_s = self._step_seconds() - load.steps_before_s
        seconds = time.monotonic() - load.began - steps_s  # computing would have waited for these
        num_bytes = load.num_loaded * self._prefixes.layout.token_bytes
        latency_s = max(_FIRST_LATENCY_S, seconds - num_bytes / self._bandwidth)
        self._latency_s += 0.2 * (latency_s - self._latency_s)

    def _begin(self, waiter: LoadingRequest) -> Load | None:
        """Start to read the runs that are not cached. Returns the load; None if loading no longer
        pays."""
        request = waiter.request
        missing = self._plan_load(request, ())
        if missing is None:
            waiter.on_loaded(0)
            return None
        stored = missing.stored
        cached_len = stored.length - missing.num_tokens
        runs = [run for run in stored.runs if run.start + run.num_tokens > cached_len]
        load = Load(waiter, stored, deque(runs), self._step_seconds())
        for _ in range(_READ_AHEAD):
            self._read_next(load)
        self._set_deadline(load)
        return load

    def _set_deadline(self, load: Load) -> None:
        expected = self._load_seconds(load.reads[0][0].num_tokens)
        load.deadline = time.monotonic() + _PATIENCE_S + 4 * expected

    def _read_next(self, load: Load) -> None:
        if load.runs:
            run = load.runs.popleft()
            load.reads.append((run, self._reader.submit(self._read, run, load.waiter.request)))

    def _read(self, run: StoredRun, request: Request) -> BufferedRun | None:
        """Returns the K/V of a run, None if it was removed; called in the reader's thread."""
        buffer, kv = self._buffers.take(), None
        try:
            began = time.perf_counter()
            kv = self._prefixes.read(run, request.token_ids, buffer.data)
            if kv is None:
                return None
            seconds = max(1e-9, time.perf_counter() - began)
            self._bandwidth += 0.2 * (kv.nbytes / seconds - self._bandwidth)
            return BufferedRun(kv, buffer)
        finally:
            if kv is None:
                self._buffers.give_back(buffer)

    def _discard(self, read: Future[BufferedRun | None]) -> None:
        """Return the buffer of an abandoned read to the pool when the read ends."""

        def give_back(read: Future[BufferedRun | None]) -> None:
            if not read.cancelled() and read.exception() is None and (run := read.result()):
                self._buffers.give_back(run.buffer)

        read.cancel()
        read.add_done_callback(give_back)

    def _install_run(self, load: Load, run: StoredRun, read: Future[BufferedRun | None]) -> bool:
        """Put a run's K/V into pages and commit it. Returns False if the load must end here."""
        try:
            buffered = read.result()
            reason = f"{run.name} was removed or replaced"
        except Exception as error:  # BadRun, OSError, or whatever a disk can make of it
            buffered, reason = None, str(error) or repr(error)
        if buffered is None:
            self._counts.failed_reads += 1
            self._warn(f"a stored run cannot be read, its tokens are computed: {reason}")
            return False
        self._read_next(load)
        request = load.waiter.request
        end, namespace = run.start + run.num_tokens, request.params.namespace
        try:
            with self._lock(request.token_ids[:end], namespace) as sequence:
                count = self._fill(sequence, run, request.token_ids, buffered.kv)
        finally:
            self._buffers.give_back(buffered.buffer)
        load.num_loaded += count
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
        self._writer.submit(self._prefixes.touch, load.stored)
        load.waiter.on_loaded(load.num_loaded)

    # -- writing ------------------------------------------------------------------------------

    def save(self, sequence: CacheSequence, num_prompt: int, num_reused: int) -> None:
        """Queue the K/V of a request that ends to be stored, as far as the policy wants it. It is
        copied out of the pool now only if the pool may soon evict it. Never raises.

        num_prompt  tokens of its prompt
        num_reused  leading tokens that it did not compute
        """
        length, now = sequence.committed_len, time.monotonic()
        if length < MIN_TOKENS or sequence.is_stale:
            return
        tokens, namespace = sequence.tokens[:length].copy(), sequence.namespace
        num_wanted = self._num_wanted(tokens, namespace, num_prompt, num_reused)
        if num_wanted >= MIN_TOKENS:
            self._unsaved.append(Unsaved(tokens[:num_wanted], namespace, now))
        if self._policy == "auto" and length - num_wanted >= MIN_TOKENS:
            self._defer(Unsaved(tokens, namespace, now, only_idle=True))
        while self._unsaved and self._is_short_of_pages():
            self._copy_or_warn(self._unsaved[0])

    def _num_wanted(
        self, tokens: IntArray, namespace: str, num_prompt: int, num_reused: int
    ) -> int:
        """Leading tokens of an ended request that are to be written even while others run."""
        if self._policy in ("finish", "evict"):
            return len(tokens)
        if self._policy == "reuse":
            num_again = self._uses.note(tokens, namespace)
            return max(num_again, num_reused) if self._uses.min_uses == 2 else num_again
        num_again = self._uses.note(tokens, namespace, num_reused)
        num_returned = max(0, min(num_again, num_prompt) - num_reused)
        self._counts.returned_tokens += num_returned
        seconds, computed = self._token_cost()
        if computed < _MIN_MEASURED:
            return 0
        token_bytes = self._prefixes.layout.token_bytes
        write_s = token_bytes * (self._write_s + self._copy_s)
        rate = self._return_rate
        if not num_returned and write_s >= rate * seconds / computed:
            return 0  # not even if loads were free
        saved_s = self._cpu_share * seconds / computed - token_bytes / self._bandwidth
        if saved_s <= 0.0:
            return 0
        end = len(tokens) if write_s < rate * saved_s else num_again
        if end - num_reused < MIN_TOKENS:  # what was found in memory is not about to be evicted
            return 0
        gain_s = saved_s * (num_returned + rate * (end - num_reused - num_returned))
        num_unstored = end - self._match(tokens[:end], namespace).length
        if num_unstored * write_s < gain_s + self._missed_s:
            self._missed_s = 0.0
            return end
        self._missed_s += gain_s  # of requests that share a long prefix each gains little
        return 0

    @property
    def _cpu_share(self) -> float:
        """Of the time in which steps were computed, that the engine's thread had a core: the cost
        of writes is CPU time. 1 on a device."""
        steps_s = self._step_seconds()
        if not self._pool.is_in_host_memory or not steps_s:
            return 1.0
        return min(1.0, (time.thread_time() - self._cpu_before_s) / steps_s)

    @property
    def _return_rate(self) -> float:
        """The share of evicted tokens that are asked for again, by what was seen lately."""
        num_returned = self._counts.returned_tokens + self._counts.loaded_tokens
        return self._returns.share(self._cache.num_evicted_tokens, num_returned)

    def _defer(self, unsaved: Unsaved) -> None:
        """Copy it when the engine is idle, if the pool still has it then."""
        self._deferred.append(unsaved)
        self._num_deferred += len(unsaved.tokens)
        while self._num_deferred > self._cache.num_pages * self._cache.page_size:
            oldest = self._deferred.popleft()
            self._num_deferred -= len(oldest.tokens)
            self._counts.skipped_tokens += len(oldest.tokens)

    def _next_deferred(self) -> Unsaved:
        """The one that was used last, taken out of the queue."""
        unsaved = self._deferred.pop()
        self._num_deferred -= len(unsaved.tokens)
        return unsaved

    def _note_busy(self) -> None:
        if not self._busy_at:
            self._cpu_before_s = time.thread_time()
        self._busy_at = time.monotonic()
        if self._resting.is_set():
            self._resting.clear()

    def copy_unsaved(self, *, is_idle: bool) -> None:
        """Copy one run of K/V out of the pool if it is due, see the module. Never raises."""
        if not is_idle:
            self._note_busy()
        elif self.idle_timeout == 0.0:
            self._resting.set()
            if not self._unsaved and self._deferred:
                self._unsaved.append(self._next_deferred())
        is_resting = self._resting.is_set() or (is_idle and self._policy == "finish")
        while self._unsaved:
            unsaved = self._unsaved[0]
            if unsaved.only_idle and not is_resting:
                self._end_copying(unsaved)
                continue
            is_short = self._is_short_of_pages()
            is_late = time.monotonic() - unsaved.since > _MAX_UNSAVED_S
            if not (is_resting or is_short or (is_late and self._policy != "evict")):
                return
            self._copy_or_warn(unsaved)
            if not is_short:
                return

    def _is_short_of_pages(self) -> bool:
        """Whether the pool may soon evict K/V that is to be copied. It was used last, so most
        policies evict it last, but none guarantees it."""
        wanted = sum(len(unsaved.tokens) for unsaved in self._unsaved) + self._step_tokens
        return 2 * wanted > self._cache.num_available * self._cache.page_size

    def _copy_or_warn(self, unsaved: Unsaved) -> None:
        """Copy the next run of `unsaved`. After its last run, and after an error, `unsaved` leaves
        the queue and its runs go to the writer."""
        try:
            if self._copy_run(unsaved):
                return
        except Exception as error:  # of a device, or of memory
            self._counts.failed_writes += 1
            self._warn(f"K/V cannot be copied: {error!r}")
        self._end_copying(unsaved)

    def _end_copying(self, unsaved: Unsaved) -> None:
        """Write what was copied of it."""
        self._unsaved.remove(unsaved)
        stored = unsaved.stored
        if stored is None:
            return
        num_copied = sum(run.kv.shape[2] for run in unsaved.runs)
        end = stored.length + num_copied
        if unsaved.only_idle:
            self._counts.skipped_tokens += len(unsaved.tokens) - end
        else:
            self._counts.unwritten_tokens += len(unsaved.tokens) - end
        if num_copied:
            unsaved.tokens = unsaved.tokens[:end]
            self._writes[stored.next_name] = unsaved
            self._writer.submit(self._write, unsaved)

    def _copy_run(self, unsaved: Unsaved) -> bool:
        """Copy the next run that is cached and not stored. Returns False if it was the last."""
        tokens, namespace = unsaved.tokens, unsaved.namespace
        if unsaved.stored is None:
            writing = self._writes.copy()  # before the match: what is written by then is matched
            stored = self._match(tokens, namespace)
            if len(tokens) - stored.length < MIN_TOKENS:
                return False
            unsaved.stored = stored
            if stored.next_name in writing:
                return False
        begin: int = unsaved.stored.length + sum(run.kv.shape[2] for run in unsaved.runs)
        cached_len, pages = self._cache.cached_pages(tokens[: begin + MAX_RUN_TOKENS], namespace)
        num_bytes = (cached_len - begin) * self._prefixes.layout.token_bytes
        if cached_len <= begin or self._backlog + num_bytes > _BACKLOG_BYTES:
            return False
        began = time.thread_time()
        unsaved.runs.append(self._copy(pages, begin, cached_len))
        copy_s = (time.thread_time() - began) / num_bytes
        self._copy_s += 0.1 * (copy_s - self._copy_s)
        return cached_len - begin == MAX_RUN_TOKENS

    def _copy(self, pages: IntArray, begin: int, end: int) -> BufferedRun:
        """Returns the K/V of the positions [begin, end) of a sequence's pages, at most
        MAX_RUN_TOKENS, in a buffer."""
        buffer = self._buffers.take()
        try:
            slots = slots_of(pages, begin, end, self._cache.page_size)
            return BufferedRun(self._pool.read(slots, buffer), buffer)
        except BaseException:
            self._buffers.give_back(buffer)
            raise

    @property
    def _backlog(self) -> int:
        """Bytes of K/V that were copied out of the pool and are not written yet."""
        jobs = [*self._unsaved, *list(self._writes.values())]
        return sum(unsaved.num_bytes for unsaved in jobs)

    def _write(self, unsaved: Unsaved) -> None:
        """Write the copied runs; called in the writer's thread."""
        stored = unsaved.stored
        assert stored is not None
        num_left = len(unsaved.tokens) - stored.length
        began = time.thread_time()
        try:
            kv: Iterable[ByteArray] = self._paced(unsaved)
            # Writes that were queued before may have stored a part of it since it was copied.
            present = self._match(unsaved.tokens, unsaved.namespace)
            if present.length > stored.length:
                num_left = len(unsaved.tokens) - present.length
                kv = _split(list(kv), present.length - stored.length)
            else:
                present = stored
            for num_tokens in self._put(unsaved.tokens, unsaved.namespace, present, kv):
                self._counts.written_tokens += num_tokens
                num_left -= num_tokens
            write_s = (time.thread_time() - began) / unsaved.num_bytes
            self._write_s += 0.1 * (write_s - self._write_s)
        except Exception as error:
            self._counts.failed_writes += 1
            self._warn(f"K/V cannot be stored: {error}")
        finally:
            self._counts.unwritten_tokens += num_left
            del self._writes[stored.next_name]
            for run in unsaved.runs:
                self._buffers.give_back(run.buffer)

    def _paced(self, unsaved: Unsaved) -> Iterator[ByteArray]:
        """The K/V of its runs; what is not worth the time of a busy engine waits until it rests."""
        for run in unsaved.runs:
            if unsaved.only_idle and not self._is_closing:
                self._resting.wait(_MAX_PAUSE_S)
            yield run.kv

    def _put(
        self, tokens: IntArray, namespace: str, stored: StoredPrefix, kv: Iterable[ByteArray]
    ) -> Iterator[int]:
        """Write what follows the stored prefix, and yield the tokens of each run once it is
        written. The first runs count as used last: none of them is removed before those that
        follow it."""
        written = list(stored.runs)
        for run in self._prefixes.put(tokens, namespace, stored, kv):
            written.append(run)
            yield run.num_tokens
        self._prefixes.touch(StoredPrefix(len(tokens), written, ""))

    # -- synchronous, in the engine's thread ---------------------------------------------------

    def save_now(self, tokens: IntArray, namespace: str) -> int:
        """Write the K/V of the cached part of `tokens` that is not stored. Returns the tokens
        written. Raises OSError."""
        num_written = 0
        while True:
            cached_len, pages = self._cache.cached_pages(tokens, namespace)
            stored = self._match(tokens[:cached_len], namespace)
            end = min(cached_len, stored.length + MAX_RUN_TOKENS)
            if stored.length == end:
                return num_written
            run = self._copy(pages, stored.length, end)
            try:
                num_written += sum(self._put(tokens[:end], namespace, stored, [run.kv]))
            finally:
                self._buffers.give_back(run.buffer)

    def load_now(self, tokens: IntArray, namespace: str) -> int | None:
        """Put the next run of the stored part of `tokens` into free pages, without evicting any.
        Returns the tokens loaded, 0 if all are cached or the run is damaged; None if it does not
        fit into the free pages."""
        cache, stored = self._cache, self._match(tokens, namespace)
        with self._lock(tokens[: stored.length], namespace) as sequence:
            for run in stored.runs:
                num_missing = run.start + run.num_tokens - sequence.length
                if num_missing <= 0:
                    continue
                if -(-num_missing // cache.page_size) + 1 > cache.num_free:
                    return None
                try:
                    kv = self._prefixes.read(run, tokens)
                except (BadRun, OSError) as error:
                    self._warn(str(error))
                    return 0
                return 0 if kv is None else self._fill(sequence, run, tokens, kv)
        return 0

    def forget(self, namespace: str | None) -> None:
        """Drop the stored prefixes of a namespace, or all of this model if None. Returns at
        once."""
        for waiter in self._loading_requests():
            if namespace in (None, waiter.request.params.namespace):
                self.cancel_loads(waiter.request.request_id)
        for unsaved in list(self._unsaved):
            if namespace in (None, unsaved.namespace):
                self._unsaved.remove(unsaved)
                for run in unsaved.runs:
                    self._buffers.give_back(run.buffer)
        kept = [
            unsaved
            for unsaved in self._deferred
            if namespace is not None and unsaved.namespace != namespace
        ]
        self._deferred = deque(kept)
        self._num_deferred = sum(len(unsaved.tokens) for unsaved in kept)
        self._uses.clear()
        self._writer.submit(self._prefixes.forget, namespace)

    # -- the whole ----------------------------------------------------------------------------

    def flush(self) -> None:
        """Wait until all queued K/V is written. Not to be called from the engine's thread."""
        while self._unsaved or self._deferred:
            time.sleep(0.001)
        self._writer.submit(lambda: None).result()

    def close(self) -> None:
        """Write the queued K/V, the last used first, and end the threads. Where the store hangs,
        what is not written in time is lost."""
        until = time.monotonic() + _CLOSE_S
        self._is_closing = True
        self._resting.set()
        while self._unsaved or self._deferred:
            if not self._unsaved:
                self._unsaved.append(self._next_deferred())
            while self._writes and self._backlog > _BACKLOG_BYTES // 2:
                if time.monotonic() > until:
                    break
                time.sleep(0.001)
            self._copy_or_warn(self._unsaved[0])
        self._reader.shutdown(0.0)
        if not self._writer.shutdown(max(0.0, until - time.monotonic())):
            num_bytes = sum(unsaved.num_bytes for unsaved in list(self._writes.values()))
            _log.warning("kv_store: writing takes too long; up to %d bytes are lost", num_bytes)

    def check(self) -> None:
        """Audit the waiting requests, the load in progress, the buffers, and, if no other process
        uses the store, its bytes on disk. Waits for writes. Raises AssertionError."""
        self._writer.submit(lambda: None).result(_CHECK_S)
        ids = [waiter.request.request_id for waiter in self._loading_requests()]
        assert len(ids) == len(set(ids)), "a request waits for two loads"
        num_copied = sum(len(unsaved.runs) for unsaved in self._unsaved)
        assert not self._writes, "a write has ended and is kept"
        num_deferred = sum(len(unsaved.tokens) for unsaved in self._deferred)
        assert num_deferred == self._num_deferred, "deferred tokens are miscounted"
        assert not any(unsaved.runs for unsaved in self._deferred), "a deferred sequence was copied"
        assert 0 <= self._backlog <= _BACKLOG_BYTES, "more K/V waits than may"
        load, num_reads = self._load, 0
        if load is not None:
            num_reads = len(load.reads)
            assert load.num_loaded <= load.stored.length, "more was loaded than is stored"
            runs = [*(run for run, _ in load.reads), *load.runs]
            ends = [run.start + run.num_tokens for run in runs]
            assert runs, "a load without a run to read is kept"
            assert [run.start for run in runs[1:]] == ends[:-1], "runs of a load are not in a row"
            assert not runs or ends[-1] == load.stored.length, "a load ends before its prefix"
        is_reading = num_reads > 0 or self._reader_is_busy
        num_lent = self._buffers.num_lent  # afterwards: a read may have ended meanwhile
        assert num_lent >= num_copied, "a buffer with copied K/V was given back"
        assert is_reading or num_lent == num_copied, "a buffer was not given back"
        self._prefixes.store.check()

    @property
    def _reader_is_busy(self) -> bool:
        """Whether reads in progress, abandoned ones included, may have buffers."""
        try:
            self._reader.submit(lambda: None).result(0.05)
        except TimeoutError:
            return True
        return False

    def stats(self) -> dict[str, int]:
        """Returns the counters of `TierStats`, the number of requests that wait for a load, and the
        size of the store."""
        return {
            **vars(self._counts),
            "loading_requests": len(self),
            "unsaved_requests": len(self._unsaved) + len(self._deferred),
            "read_bytes_per_s": round(self._bandwidth),
            "write_ns_per_kb": round(1e12 * (self._write_s + self._copy_s)),
            "load_latency_us": round(1e6 * self._latency_s),
            "store_bytes": self._prefixes.store.num_bytes,
            "store_dropped_files": self._prefixes.store.num_dropped,
        }

    def paths(self) -> Iterator[tuple[str, IntArray]]:
        """See `StoredPrefixes.paths`."""
        return self._prefixes.paths()

    def _warn(self, message: str) -> None:
        """Log a warning, at most once a minute; the counters have the number of all."""
        now = time.monotonic()
        if now - self._logged_at >= _LOG_EVERY_S:
            self._logged_at = now
            _log.warning("kv_store: %s", message)


def _split(kv: Sequence[ByteArray], begin: int) -> Iterator[ByteArray]:
    """Yields the K/V of consecutive runs from token `begin` on, in runs of MAX_RUN_TOKENS."""
    whole = np.concatenate(kv, axis=2)
    for start in range(begin, whole.shape[2], MAX_RUN_TOKENS):
        yield whole[:, :, start : start + MAX_RUN_TOKENS]


def slots_of(pages: IntArray, begin: int, end: int, page_size: int) -> IntArray:
    """Returns [end - begin] int64 slots of positions in a sequence's pages, page * page_size +
    offset."""
    positions = np.arange(begin, end)
    return pages[positions // page_size].astype(np.int64) * page_size + positions % page_size


def _reusable_tokens(request: Request) -> IntArray:
    """Returns the tokens of a prompt that may be loaded: neither the last one nor scored ones."""
    wanted = request.token_ids[: request.score_start + 1]
    return wanted[: len(wanted) - 1]


def open_connector(
    config: EngineConfig,
    runner: ModelRunner,
    cache: PrefixCache,
    **callables: Any,
) -> KVConnector:
    """Returns the connector to the store that `config` names. `callables`: see `KVConnector`.
    Raises InvalidRequest if the model's K/V cannot be stored or the store cannot be used."""
    assert isinstance(cache, RadixCache)
    pool, layout, settings = runner.storable_pool()
    store = open_store(config, pool)
    settings["layout"] = layout.as_list()
    name = f"{runner.info.architecture} {config.seed}"
    is_folder = config.kv_store is not None and not config.kv_store.startswith(SCHEMES)
    folder = Path(config.kv_store or "") if is_folder else _CACHE_FOLDER
    model = model_fingerprint(runner.model_path, name, settings, folder.expanduser())
    return KVConnector(
        StoredPrefixes(store, model, layout),
        pool,
        cache,
        policy=config.kv_store_write,
        min_uses=config.kv_store_min_uses,
        step_tokens=config.chunked_prefill_size,
        **callables,
    )


def open_store(config: EngineConfig, pool: KVPool) -> RunStore:
    """The store that `config` names, for the K/V of a pool. Raises InvalidRequest."""
    host = None
    if config.host_cache_memory is not None:
        if pool.is_in_host_memory:
            raise InvalidRequest(
                "host_cache_memory cannot be used on the CPU: there the pool is in host memory; "
                "make it larger with kv_cache_memory"
            )
        size = parse_bytes(config.host_cache_memory, "host_cache_memory")
        host = HostStore(size, pool.make_pinned)
    if config.kv_store is None:
        assert host is not None
        return host
    try:
        store: RunStore
        if config.kv_store.startswith(SCHEMES):
            store = RedisStore(config.kv_store)
        else:
            folder = Path(config.kv_store).expanduser()
            store = FolderStore(folder, parse_bytes(config.kv_store_size, "kv_store_size"))
            store.drop_temporary()
    except OSError as error:
        raise InvalidRequest(f"kv_store={config.kv_store!r} cannot be used: {error}") from error
    return store if host is None else TieredStore(host, store)
