"""`KVSaver`: writes the K/V of ended requests to a store.

    save(sequence) -> K/V copied out of the pool between steps -> [ written in a thread ]

K/V is copied when the engine has had nothing to run for a while. Before that it is copied if the
pool may evict it otherwise, or if it has waited for long; with the policy "auto" only what the
`WritePolicy` names. The engine's thread makes all calls and copies; the writer's thread alone
touches the store. Nothing waits for it: while it is late or the store is broken, K/V is not copied.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from radixserve.arrays import IntArray
from radixserve.cache import CacheSequence, RadixCache
from radixserve.cache.namespace import is_within
from radixserve.runner.kv_layout import ByteArray
from radixserve.store.buffers import BufferedRun, BufferPool, slots_of
from radixserve.store.counts import StoreCounts
from radixserve.store.daemon_executor import DaemonExecutor
from radixserve.store.health import StoreHealth
from radixserve.store.limits import StoreLimits
from radixserve.store.stored_prefixes import MAX_RUN_TOKENS, StoredPrefix, StoredPrefixes
from radixserve.store.write_policy import WritePolicy

if TYPE_CHECKING:
    from radixserve.runner.kv_pool import KVPool

_log = logging.getLogger("radixserve")


@dataclass(eq=False)
class PendingSave:
    """A sequence whose K/V is to be copied out of the pool, a run at a time, and written."""

    tokens: IntArray
    namespace: str
    since: float  # time.monotonic()
    only_idle: bool = False  # it is not worth the time of a busy engine
    stored: StoredPrefix | None = None  # of `tokens`; None until the first run is copied
    runs: list[BufferedRun] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        return sum(run.kv.nbytes for run in self.runs)


class KVSaver:
    """See the module."""

    def __init__(
        self,
        prefixes: StoredPrefixes,
        pool: KVPool,
        cache: RadixCache,
        buffers: BufferPool,
        policy: WritePolicy,
        counts: StoreCounts,
        limits: StoreLimits,
        *,
        step_tokens: int = 0,
    ) -> None:
        """`step_tokens`: of the pool, that a step may take."""
        self.policy = policy
        self.health = StoreHealth("writing", limits)
        self._prefixes, self._pool, self._cache = prefixes, pool, cache
        self._buffers, self._counts, self._limits = buffers, counts, limits
        self._step_tokens = step_tokens
        self._unsaved: deque[PendingSave] = deque()
        self._deferred: deque[PendingSave] = deque()  # to be copied when the engine is idle
        self._num_deferred = 0  # their tokens
        self._busy_at = 0.0  # time.monotonic()
        self._resting = threading.Event()  # set while the engine has been idle for a while
        self._writes: dict[str, PendingSave] = {}  # under way, by the names of their first runs
        self._last_forget: Future[None] | None = None
        self._last_save: Future[int] | None = None  # of `save_run`
        self._write_began: float | None = None  # of the run that is being written
        self._is_late = False  # the write under way was counted as a failure
        self._is_closing = False
        self._writer = DaemonExecutor("radixserve-store-writer")

    def __len__(self) -> int:
        """Number of ended requests whose K/V may still be copied. From any thread."""
        return len(self._unsaved) + len(self._deferred)

    @property
    def is_forgetting(self) -> bool:
        """Whether something is in the store that is to be forgotten."""
        return self._last_forget is not None and not self._last_forget.done()

    @property
    def has_work(self) -> bool:
        """Whether K/V is to be copied now."""
        if self.policy.name == "finish":
            return len(self._unsaved) > 0
        return self.idle_timeout == 0.0

    @property
    def idle_timeout(self) -> float | None:
        """Seconds until an idle engine should copy K/V; None where nothing is to be copied."""
        waits = self.policy.name != "evict" and (self._unsaved or self._deferred)
        return max(0.0, self._busy_at + self._limits.idle_s - time.monotonic()) if waits else None

    # -- in the engine's thread ----------------------------------------------------------------

    def save(self, sequence: CacheSequence, num_prompt: int, num_reused: int) -> None:
        """Queue the K/V of a request that ends to be stored, as far as the policy wants it. It is
        copied out of the pool now only if the pool may soon evict it.

        num_prompt  tokens of its prompt
        num_reused  leading tokens that it did not compute
        """
        length, now, least = sequence.committed_len, time.monotonic(), self._limits.min_tokens
        if length < least or sequence.is_stale:
            return
        tokens, namespace = sequence.tokens[:length].copy(), sequence.namespace
        tokens = tokens[: self._prefixes.num_storable(tokens)]
        if (length := len(tokens)) < least:
            return
        num_wanted = self.policy.num_wanted(
            tokens,
            namespace,
            num_prompt,
            num_reused,
            lambda tokens: self._prefixes.known(tokens, namespace).length,
        )
        if num_wanted >= least:
            self._unsaved.append(PendingSave(tokens[:num_wanted], namespace, now))
        if self.policy.name == "auto" and length - num_wanted >= least:
            self._defer(PendingSave(tokens, namespace, now, only_idle=True))
        while self._unsaved and self._is_short_of_pages():
            self._copy_or_warn(self._unsaved[0])

    def _defer(self, unsaved: PendingSave) -> None:
        """Copy it when the engine is idle, if the pool still has it then."""
        self._deferred.append(unsaved)
        self._num_deferred += len(unsaved.tokens)
        while self._num_deferred > self._cache.num_pages * self._cache.page_size:
            oldest = self._deferred.popleft()
            self._num_deferred -= len(oldest.tokens)
            self._counts.skipped_tokens += len(oldest.tokens)

    def _next_deferred(self) -> PendingSave:
        """The one that was used last, taken out of the queue."""
        unsaved = self._deferred.pop()
        self._num_deferred -= len(unsaved.tokens)
        return unsaved

    def note_busy(self) -> None:
        """A request has arrived, or a step runs."""
        self._busy_at = time.monotonic()
        if self._resting.is_set():
            self._resting.clear()

    def copy_unsaved(self, *, is_idle: bool) -> None:
        """Copy one run of K/V out of the pool if it is due, see the module."""
        if not is_idle:
            self.note_busy()
        elif self.idle_timeout == 0.0:
            self._resting.set()
            if not self._unsaved and self._deferred:
                self._unsaved.append(self._next_deferred())
        is_resting = self._resting.is_set() or (is_idle and self.policy.name == "finish")
        while self._unsaved:
            unsaved = self._unsaved[0]
            if unsaved.only_idle and not is_resting:
                self._end_copying(unsaved)
                continue
            is_short = self._is_short_of_pages()
            is_late = time.monotonic() - unsaved.since > self._limits.unsaved_s
            if not (is_resting or is_short or (is_late and self.policy.name != "evict")):
                return
            self._copy_or_warn(unsaved)
            if not is_short:
                return

    def _is_short_of_pages(self) -> bool:
        """Whether the pool may soon evict K/V that is to be copied. It was used last, so most
        policies evict it last, but none guarantees it."""
        wanted = sum(len(unsaved.tokens) for unsaved in self._unsaved) + self._step_tokens
        return 2 * wanted > self._cache.num_available * self._cache.page_size

    @property
    def _may_write(self) -> bool:
        """Whether the store takes writes: none is late, and it did not fail again and again."""
        began, limit = self._write_began, self._limits.write_s
        is_late = self._writer.busy_s > limit and (
            began is None or time.monotonic() - began > limit
        )
        if is_late and not self._is_late:
            self._counts.failed_writes += 1
            self.health.note_failure("a write takes too long")
        self._is_late = is_late
        return not is_late and self.health.may_try

    def _copy_or_warn(self, unsaved: PendingSave) -> None:
        """Copy the next run of `unsaved`. After its last run, and after an error, `unsaved` leaves
        the queue and its runs go to the writer."""
        try:
            if self._copy_run(unsaved):
                return
        except Exception as error:  # of a device, or of memory
            self._counts.failed_writes += 1
            self._counts.warn(f"K/V cannot be copied: {error!r}")
        self._end_copying(unsaved)

    def _end_copying(self, unsaved: PendingSave) -> None:
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

    def _copy_run(self, unsaved: PendingSave) -> bool:
        """Copy the next run that is cached and not stored. Returns False if it was the last."""
        tokens, namespace = unsaved.tokens, unsaved.namespace
        if unsaved.stored is None:
            writing = self._writes.copy()  # before the match: what is written by then is matched
            stored = self._prefixes.known(tokens, namespace)
            if len(tokens) - stored.length < self._limits.min_tokens:
                return False
            unsaved.stored = stored
            if stored.next_name in writing:
                return False
        if not self._may_write:
            return False
        begin: int = unsaved.stored.length + sum(run.kv.shape[2] for run in unsaved.runs)
        cached_len, pages = self._cache.cached_pages(tokens[: begin + MAX_RUN_TOKENS], namespace)
        num_bytes = (cached_len - begin) * self._prefixes.layout.token_bytes
        if cached_len <= begin or self._backlog + num_bytes > self._limits.backlog_bytes:
            return False
        began = time.thread_time()
        unsaved.runs.append(self._copy(pages, begin, cached_len))
        self.policy.note_copy(num_bytes, time.thread_time() - began)
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

    def save_run(self, tokens: IntArray, namespace: str) -> Future[int] | None:
        """Write the K/V of the next run of the cached part of `tokens` that is not known to be
        stored. Returns the tokens that it writes, in a future; None if there is none."""
        cached_len, pages = self._cache.cached_pages(tokens, namespace)
        stored = self._prefixes.known(tokens[:cached_len], namespace)
        end = min(cached_len, stored.length + MAX_RUN_TOKENS)
        if stored.length == end:
            return None
        run = self._copy(pages, stored.length, end)

        def write() -> int:
            try:
                return sum(self._put(tokens[:end], namespace, stored, [run.kv]))
            finally:
                self._buffers.give_back(run.buffer)

        self._last_save = self._writer.submit(write)
        return self._last_save

    def touch(self, stored: StoredPrefix) -> None:
        """Note in the store that a prefix was used."""
        if self._may_write:
            self._writer.submit(self._prefixes.touch, stored)

    def forget(self, namespace: str | None) -> None:
        """Drop what waits and what is stored of a namespace, or all of this model if None. Returns
        at once."""
        self.drop_pending(namespace)
        self._last_forget = self._writer.submit(self._forget, namespace)

    def end_writes(self) -> None:
        """Drop what waits to be copied, and wait until the rest is written: K/V of other weights
        follows. Raises TimeoutError where the store is too late."""
        self.drop_pending(None)
        self._resting.set()
        self._writer.submit(lambda: None).result(self._limits.close_s)

    def drop_pending(self, namespace: str | None) -> None:
        """Drop what waits to be copied of a namespace, or all if None."""
        for unsaved in list(self._unsaved):
            if is_within(unsaved.namespace, namespace):
                self._unsaved.remove(unsaved)
                for run in unsaved.runs:
                    self._buffers.give_back(run.buffer)
        self._deferred = deque(
            unsaved for unsaved in self._deferred if not is_within(unsaved.namespace, namespace)
        )
        self._num_deferred = sum(len(unsaved.tokens) for unsaved in self._deferred)
        self.policy.clear()

    # -- in the writer's thread ----------------------------------------------------------------

    def _forget(self, namespace: str | None) -> None:
        try:
            self._prefixes.forget(namespace)
        except OSError as error:
            self._counts.warn(f"stored K/V cannot be dropped: {error}")

    def _write(self, unsaved: PendingSave) -> None:
        """Write the copied runs."""
        stored = unsaved.stored
        assert stored is not None
        num_left = len(unsaved.tokens) - stored.length
        began, self._write_began = time.thread_time(), time.monotonic()
        try:
            kv: Iterable[ByteArray] = self._paced(unsaved)
            # Writes that were queued before may have stored a part of it since it was copied.
            present = self._prefixes.match(unsaved.tokens, unsaved.namespace)
            if present.length > stored.length:
                num_left = len(unsaved.tokens) - present.length
                kv = _split(list(kv), present.length - stored.length)
            else:
                present = stored
            for num_tokens in self._put(unsaved.tokens, unsaved.namespace, present, kv):
                self._counts.written_tokens += num_tokens
                num_left -= num_tokens
                self._write_began = time.monotonic()
            self.policy.note_write(unsaved.num_bytes, time.thread_time() - began)
            self.health.note_success()
        except Exception as error:
            self._counts.failed_writes += 1
            self._counts.warn(f"K/V cannot be stored: {error}")
            self.health.note_failure(error)
        finally:
            self._write_began = None
            self._counts.unwritten_tokens += num_left
            del self._writes[stored.next_name]
            for run in unsaved.runs:
                self._buffers.give_back(run.buffer)

    def _paced(self, unsaved: PendingSave) -> Iterator[ByteArray]:
        """The K/V of its runs; what is not worth the time of a busy engine waits until it rests."""
        for run in unsaved.runs:
            if unsaved.only_idle and not self._is_closing:
                self._resting.wait(self._limits.pacing_s)
            self._write_began = time.monotonic()
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

    # -- the whole -----------------------------------------------------------------------------

    def close(self, timeout_s: float) -> None:
        """Write the queued K/V, the last used first, and end the thread. Where the store hangs,
        what is not written in time is lost."""
        until = time.monotonic() + timeout_s
        self._is_closing = True
        self._resting.set()
        while (self._unsaved or self._deferred) and time.monotonic() < until:
            if not self._unsaved:
                self._unsaved.append(self._next_deferred())
            while self._writes and self._backlog > self._limits.backlog_bytes // 2:
                if time.monotonic() > until:
                    break
                time.sleep(0.001)
            self._copy_or_warn(self._unsaved[0])
        if not self._writer.shutdown(max(0.0, until - time.monotonic())) and timeout_s > 0.0:
            num_bytes = sum(unsaved.num_bytes for unsaved in list(self._writes.values()))
            _log.warning("kv_store: writing takes too long; up to %d bytes are lost", num_bytes)

    def check(self) -> Future[None]:
        """Audit what waits; in the future, once all that was queued is written, the writes and the
        store's own books. Raises AssertionError."""
        num_deferred = sum(len(unsaved.tokens) for unsaved in self._deferred)
        assert num_deferred == self._num_deferred, "deferred tokens are miscounted"
        assert not any(unsaved.runs for unsaved in self._deferred), "a deferred sequence was copied"
        assert 0 <= self._backlog <= self._limits.backlog_bytes, "more K/V waits than may"
        before = list(self._writes.values())

        def check() -> None:
            kept = list(self._writes.values())
            assert not any(one is other for one in before for other in kept), "a write was kept"
            self._prefixes.store.check()

        return self._writer.submit(check)

    @property
    def num_buffers(self) -> int:
        """Buffers with copied K/V that is not yet given to the writer."""
        return sum(len(unsaved.runs) for unsaved in self._unsaved)

    @property
    def may_hold_buffers(self) -> bool:
        """Whether writes hold buffers."""
        is_saving = self._last_save is not None and not self._last_save.done()
        return bool(self._writes) or is_saving or self._writer.busy_s > 0


def _split(kv: Sequence[ByteArray], begin: int) -> Iterator[ByteArray]:
    """Yields the K/V of consecutive runs from token `begin` on, in runs of MAX_RUN_TOKENS."""
    whole = np.concatenate(kv, axis=2)
    for start in range(begin, whole.shape[2], MAX_RUN_TOKENS):
        yield whole[:, :, start : start + MAX_RUN_TOKENS]
