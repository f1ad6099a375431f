"""`KVConnector`: writes the pool's K/V to disk when requests end, reads it when they return.

    add(request) -> hold -> [ reads in a thread ] -> pages filled between steps -> Scheduler.add
    end of a request -> K/V copied -> [ written in a thread ]

A request whose prefix is stored and not cached is held back until its runs are loaded, one request
at a time in order of arrival; all others pass. Loaded tokens are committed to the cache run by run,
by the same calls as computed tokens. If a read fails, is late or does not verify, the request
continues with the runs loaded so far and computes the rest.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from radixserve.arrays import IntArray
from radixserve.cache import CacheSequence, PrefixCache
from radixserve.config import EngineConfig, parse_bytes
from radixserve.errors import InvalidRequest, OutOfPages
from radixserve.request import Request
from radixserve.store import (
    MAX_RUN_TOKENS,
    BadRun,
    FolderStore,
    StoredPrefix,
    StoredPrefixes,
    StoredRun,
)
from radixserve.store.fingerprint import model_fingerprint
from radixserve.store.run_file import ByteArray

if TYPE_CHECKING:
    from radixserve.runner.base import ModelRunner
    from radixserve.runner.kv_pool import KVPool

_log = logging.getLogger("radixserve")
MIN_TOKENS = 16  # fewer are neither written nor loaded
_MIN_MEASURED = 64  # tokens computed before their time is known
_BACKLOG_BYTES = 256 << 20  # K/V that waits to be written; more is not written
_READ_AHEAD = 2  # runs read while one is loaded
_PATIENCE_S = 2.0  # a read is given up after so long and four times what is expected
_FIRST_BANDWIDTH = 1e9  # bytes/s, until reads were timed
_LATENCY_S = 0.5e-3  # fixed cost of a load
_STEP_S = 0.005  # of a step's time for loads
_LOG_EVERY_S = 60.0


class HeldRequest(NamedTuple):
    """A request that waits for its stored prefix. `finish`: hands it to the scheduler with the
    number of tokens that were loaded for it."""

    request: Request
    finish: Callable[[int], None]


@dataclass
class Load:
    """The request whose runs are being loaded. Between steps it holds no page."""

    held: HeldRequest
    stored: StoredPrefix
    runs: deque[StoredRun]  # not yet read
    reads: deque[tuple[StoredRun, Future[ByteArray | None]]] = field(default_factory=deque)
    deadline: float = 0.0  # of the first read: time.monotonic()
    num_loaded: int = 0


@dataclass
class TierStats:
    """Counters since the start, in tokens unless the name says otherwise."""

    loaded_tokens: int = 0
    written_tokens: int = 0
    unwritten_tokens: int = 0  # the disk was too slow or refused
    failed_reads: int = 0  # files that were damaged, gone or late
    failed_writes: int = 0  # files


class KVConnector:
    """Owned by the engine's thread, which makes every call but `stats`."""

    def __init__(
        self,
        prefixes: StoredPrefixes,
        pool: KVPool,
        cache: PrefixCache,
        *,
        writes_reused_only: bool = False,
        token_cost: Callable[[], tuple[float, int]] = lambda: (0.0, 0),
    ) -> None:
        """`token_cost`: seconds spent on computing prompts, and their tokens, so far."""
        self._prefixes = prefixes
        self._pool = pool
        self._cache = cache
        self._writes_reused_only = writes_reused_only
        self._token_cost = token_cost
        self._held: deque[HeldRequest] = deque()
        self._load: Load | None = None
        self._reader = ThreadPoolExecutor(1, "radixserve-store-reader")
        self._writer = ThreadPoolExecutor(1, "radixserve-store-writer")
        self._late_read: Future[ByteArray | None] | None = None  # its thread may hang
        self._backlog = 0  # bytes
        self._lock_backlog = threading.Lock()
        self._writing: set[str] = set()  # names of first runs
        self._bandwidth = _FIRST_BANDWIDTH
        self._counts = TierStats()
        self._logged_at = -_LOG_EVERY_S

    # -- loading ------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Requests that are held. Any thread may ask."""
        return len(self._held) + (self._load is not None)

    @property
    def num_held_tokens(self) -> int:
        """Tokens of their prompts."""
        return sum(len(held.request.token_ids) for held in self._all_held())

    def _all_held(self) -> list[HeldRequest]:
        load = self._load
        return [*([] if load is None else [load.held]), *self._held]

    def stored_len(self, tokens: IntArray, namespace: str) -> int:
        """Tokens of the longest stored prefix."""
        return self._prefixes.match(tokens, namespace).length

    def hold(self, request: Request, finish: Callable[[int], None]) -> bool:
        """Hold a request back while its stored prefix is loaded; False where loading does not pay:
        it is cached, not stored, or computed sooner. `finish`: see `HeldRequest`."""
        is_stuck = self._late_read is not None and not self._late_read.done()
        if is_stuck or self._find_missing(request) is None:
            return False
        self._held.append(HeldRequest(request, finish))
        return True

    def release(self, request_id: str | None = None) -> None:
        """Hand one held request, or all, to the scheduler without loading more."""
        if self._load is not None and request_id in (None, self._load.held.request.request_id):
            self._end_load(self._load)
        for held in list(self._held):
            if request_id in (None, held.request.request_id):
                self._held.remove(held)
                held.finish(0)

    def step(self, *, may_wait: bool) -> None:
        """Put the runs that have been read into pages, for some milliseconds. `may_wait`: that long
        for the first one."""
        while self._load is None and self._held:
            self._load = self._begin(self._held.popleft())
        load = self._load
        if load is None:
            return None
        if may_wait:
            wait([load.reads[0][1]], _STEP_S)
        began = time.monotonic()
        while load.reads[0][1].done() and time.monotonic() - began < _STEP_S:
            if not self._install(load, *load.reads.popleft()) or not load.reads:
                return self._end_load(load)
            self._set_deadline(load)
        if time.monotonic() > load.deadline:
            run, self._late_read = load.reads[0]
            self._counts.failed_reads += 1
            self._warn(f"reading {run.name} takes too long; its tokens are computed")
            self._end_load(load)
        return None

    def _find_missing(self, request: Request) -> StoredPrefix | None:
        """The stored prefix to load for a request; None if loading does not pay."""
        tokens, namespace = _reusable_tokens(request), request.params.namespace
        if len(tokens) < MIN_TOKENS:
            return None
        lookup = self._cache.lookup(tokens, namespace, allow_full=True, compare_namespaces=False)
        if len(tokens) - lookup.cached_len < MIN_TOKENS:
            return None
        stored = self._prefixes.match(tokens, namespace)
        num_missing = stored.length - lookup.cached_len
        return stored if num_missing >= MIN_TOKENS and self._pays(num_missing) else None

    def _pays(self, num_tokens: int) -> bool:
        """Whether loading them takes less time than computing them, by what was measured."""
        seconds, computed = self._token_cost()
        if computed < _MIN_MEASURED:
            return True
        return self._load_seconds(num_tokens) < num_tokens * seconds / computed

    def _load_seconds(self, num_tokens: int) -> float:
        return _LATENCY_S + num_tokens * self._prefixes.layout.token_bytes / self._bandwidth

    def _begin(self, held: HeldRequest) -> Load | None:
        """Start to read what is not cached; None if loading no longer pays."""
        request = held.request
        stored = self._find_missing(request)
        if stored is None:
            held.finish(0)
            return None
        tokens, namespace = request.token_ids[: stored.length], request.params.namespace
        cached = self._cache.lookup(tokens, namespace, allow_full=True, compare_namespaces=False)
        runs = [run for run in stored.runs if run.start + run.num_tokens > cached.cached_len]
        load = Load(held, stored, deque(runs))
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
            load.reads.append((run, self._reader.submit(self._read, run, load.held.request)))

    def _read(self, run: StoredRun, request: Request) -> ByteArray | None:
        """In the reader's thread."""
        began = time.perf_counter()
        kv = self._prefixes.read(run, request.token_ids)
        if kv is not None:
            seconds = max(1e-9, time.perf_counter() - began)
            self._bandwidth += 0.2 * (kv.nbytes / seconds - self._bandwidth)
        return kv

    def _install(self, load: Load, run: StoredRun, read: Future[ByteArray | None]) -> bool:
        """Put a run's K/V into pages and commit it. False: what follows cannot be loaded."""
        try:
            kv = read.result()
        except (BadRun, OSError) as error:
            self._warn(f"a stored run cannot be read, its tokens are computed: {error}")
            kv = None
        if kv is None:
            self._counts.failed_reads += 1
            return False
        self._read_next(load)
        request = load.held.request
        end, namespace = run.start + run.num_tokens, request.params.namespace
        with self._lock(request.token_ids[:end], namespace) as sequence:
            count = self._fill(sequence, run, request.token_ids, kv)
        load.num_loaded += count
        self._counts.loaded_tokens += count
        return count > 0

    def _lock(self, tokens: IntArray, namespace: str) -> CacheSequence:
        """A sequence of the cached part of `tokens`, whose page heads are copied."""
        sequence = self._cache.acquire(tokens, namespace, allow_full=True)
        if sequence.cow_copies:
            self._pool.copy_page_prefixes(np.array(sequence.cow_copies, np.int32))
        return sequence

    def _fill(
        self, sequence: CacheSequence, run: StoredRun, tokens: IntArray, kv: ByteArray
    ) -> int:
        """Append a run to a sequence and commit it; returns the tokens appended, 0 where no page is
        free or the tokens before it are no longer cached."""
        begin, end = sequence.length, run.start + run.num_tokens
        if begin < run.start or end <= begin:
            return 0
        try:
            sequence.extend(tokens[begin:end])
        except OutOfPages:
            return 0
        slots = slots_of(sequence, begin, end, self._cache.page_size)
        self._pool.write(slots, kv[:, :, begin - run.start :])
        sequence.commit(end)
        return end - begin

    def _end_load(self, load: Load) -> None:
        self._load = None
        for _, read in load.reads:
            read.cancel()
        self._writer.submit(self._prefixes.touch, load.stored)
        load.held.finish(load.num_loaded)

    # -- writing ------------------------------------------------------------------------------

    def save(self, sequence: CacheSequence, num_reused: int) -> None:
        """A request ends: copy the K/V of its tokens that are not stored, to be written soon.
        `num_reused`: leading tokens that it did not compute. Raises nothing."""
        try:
            self._save(sequence, num_reused)
        except Exception as error:  # of a device, or of memory: the request has ended all the same
            self._counts.failed_writes += 1
            self._warn(f"K/V cannot be copied: {error!r}")

    def _save(self, sequence: CacheSequence, num_reused: int) -> None:
        length = sequence.committed_len
        if self._writes_reused_only:
            length = min(length, num_reused)
        if length < MIN_TOKENS or sequence.is_stale:
            return
        tokens = sequence.tokens[:length].copy()
        writing = self._writing.copy()  # before the match: what is written by then is matched
        stored = self._prefixes.match(tokens, sequence.namespace)
        if length - stored.length < MIN_TOKENS:
            return
        token_bytes = self._prefixes.layout.token_bytes
        room = max(0, _BACKLOG_BYTES - self._backlog) // token_bytes
        if stored.next_name in writing or room < MIN_TOKENS:
            self._counts.unwritten_tokens += length - stored.length
            return
        end = min(length, stored.length + room)
        self._counts.unwritten_tokens += length - end
        kv = self._pool.read(slots_of(sequence, stored.length, end, self._cache.page_size))
        with self._lock_backlog:
            self._backlog += kv.nbytes
        self._writing.add(stored.next_name)
        self._writer.submit(self._write, tokens[:end], sequence.namespace, stored, kv)

    def _write(self, tokens: IntArray, namespace: str, stored: StoredPrefix, kv: ByteArray) -> None:
        """In the writer's thread."""
        try:
            self._counts.written_tokens += self._put(tokens, namespace, stored, kv)
        except Exception as error:
            self._counts.failed_writes += 1
            self._counts.unwritten_tokens += len(tokens) - stored.length
            self._warn(f"K/V cannot be stored: {error}")
        finally:
            with self._lock_backlog:
                self._backlog -= kv.nbytes
            self._writing.discard(stored.next_name)

    def _put(self, tokens: IntArray, namespace: str, stored: StoredPrefix, kv: ByteArray) -> int:
        """Write what follows the stored prefix; returns its tokens. The first runs count as used
        last: none of them is removed before those that follow it."""
        runs = list(self._prefixes.put(tokens, namespace, stored, kv))
        self._prefixes.touch(StoredPrefix(len(tokens), [*stored.runs, *runs], ""))
        return sum(run.num_tokens for run in runs)

    # -- synchronous, in the engine's thread ---------------------------------------------------

    def save_now(self, tokens: IntArray, namespace: str) -> int:
        """Write the K/V of the cached part of `tokens` that is not stored. Returns the tokens
        written. Raises OSError."""
        num_written = 0
        with self._lock(tokens, namespace) as sequence:
            while True:
                stored = self._prefixes.match(tokens[: sequence.length], namespace)
                end = min(sequence.length, stored.length + MAX_RUN_TOKENS)
                if stored.length == end:
                    return num_written
                slots = slots_of(sequence, stored.length, end, self._cache.page_size)
                kv = self._pool.read(slots)
                num_written += self._put(tokens[:end], namespace, stored, kv)

    def load_now(self, tokens: IntArray, namespace: str) -> int | None:
        """Put the stored part of `tokens` into free pages. Returns the tokens loaded, None where
        the free pages hold none: nothing is evicted. Damaged runs are left out."""
        cache, stored = self._cache, self._prefixes.match(tokens, namespace)
        num_loaded = 0
        with self._lock(tokens[: stored.length], namespace) as sequence:
            for run in stored.runs:
                num_missing = run.start + run.num_tokens - sequence.length
                if num_missing <= 0:
                    continue
                if -(-num_missing // cache.page_size) + 1 > cache.num_free:
                    return num_loaded or None
                try:
                    kv = self._prefixes.read(run, tokens)
                except (BadRun, OSError) as error:
                    self._warn(str(error))
                    kv = None
                count = 0 if kv is None else self._fill(sequence, run, tokens, kv)
                if not count:
                    break
                num_loaded += count
        return num_loaded

    def forget(self, namespace: str | None) -> None:
        """Drop what is stored of a namespace, or all of this model. Returns at once."""
        for held in self._all_held():
            if namespace in (None, held.request.params.namespace):
                self.release(held.request.request_id)
        self._writer.submit(self._prefixes.forget, namespace)

    # -- the whole ----------------------------------------------------------------------------

    def flush(self) -> None:
        """Wait until all that was to be written has been."""
        self._writer.submit(lambda: None).result()

    def close(self) -> None:
        """Write what is left and end the threads."""
        self._reader.shutdown(wait=False, cancel_futures=True)
        self._writer.shutdown()

    def stats(self) -> dict[str, int]:
        """The counters of `TierStats`, the requests that wait for a load, and the store's size."""
        return {
            **vars(self._counts),
            "loading_requests": len(self),
            "store_bytes": self._prefixes.store.num_bytes,
            "store_dropped_files": self._prefixes.store.num_dropped,
        }

    def paths(self) -> Iterator[tuple[str, IntArray]]:
        """See `StoredPrefixes.paths`."""
        return self._prefixes.paths()

    def _warn(self, message: str) -> None:
        """One line a minute; the counters tell how many there were."""
        now = time.monotonic()
        if now - self._logged_at >= _LOG_EVERY_S:
            self._logged_at = now
            _log.warning("kv_store: %s", message)


def slots_of(sequence: CacheSequence, begin: int, end: int, page_size: int) -> IntArray:
    """[end - begin] int64 slots of its positions: page * page_size + offset."""
    positions = np.arange(begin, end)
    pages = sequence.pages[positions // page_size].astype(np.int64)
    return pages * page_size + positions % page_size


def _reusable_tokens(request: Request) -> IntArray:
    """The tokens of a prompt that need not be computed: not its last one, nor scored ones."""
    wanted = request.token_ids[: request.score_start + 1]
    return wanted[: len(wanted) - 1]


def open_connector(
    config: EngineConfig,
    runner: ModelRunner,
    cache: PrefixCache,
    token_cost: Callable[[], tuple[float, int]],
) -> KVConnector:
    """The tier that `config.kv_store` names. Raises InvalidRequest where K/V cannot be stored, or
    where the folder cannot be made."""
    assert config.kv_store is not None
    pool, layout, settings = runner.storable_pool()
    folder = Path(config.kv_store).expanduser()
    try:
        store = FolderStore(folder, parse_bytes(config.kv_store_size, "kv_store_size"))
        store.drop_temporary()
    except OSError as error:
        raise InvalidRequest(f"kv_store={config.kv_store!r} cannot be used: {error}") from error
    settings["layout"] = layout.as_list()
    name = f"{runner.info.architecture} {config.seed}"
    model = model_fingerprint(runner.model_path, name, settings, folder)
    return KVConnector(
        StoredPrefixes(store, model, layout),
        pool,
        cache,
        writes_reused_only=config.kv_store_write == "reuse",
        token_cost=token_cost,
    )
