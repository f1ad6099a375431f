"""`Engine`: runs the steps: schedule, launch, collect, update.

Synchronous, no I/O, one owner. It handles token ids, not text. It decides nothing about the order
of requests: `Scheduler` does. `InBatchSharing` (scheduler/admission.py) lets a request wait for a
prefix that a running request is computing. What else an engine can do plugs in as an
`EngineExtension` (engine/extension.py).

With a runner of overlap depth 1 the host schedules the next step while the device computes the
present one:

    host     schedule 1, launch 1 | schedule 2, launch 2, update 1 | schedule 3, launch 3, update 2
    device                        | step 1                         | step 2

The token that a row of step 1 samples goes into step 2 on the device; the host sees it in update 1.
A step that depends on the result of the step in flight is scheduled after that result arrived.
"""

from __future__ import annotations

import gc
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from radixserve.arrays import IntArray
from radixserve.cache import EventBatch, EventLog, EventSnapshot, Lookup, PrefixCache, SnapshotView
from radixserve.cache.stats import hit_rate
from radixserve.engine.extension import EngineExtension, Extensions
from radixserve.errors import EngineDead, InvalidRequest, request_failed
from radixserve.output import RequestOutput
from radixserve.request import Request, unkeyed
from radixserve.schedule import SchedulerOutput
from radixserve.scheduler import Scheduler
from radixserve.scheduler.drafter import Drafter

if TYPE_CHECKING:
    from radixserve.runner.base import ModelRunner

_PARTS = ("schedule", "prepare", "forward", "sample", "commit", "overlapped")
_CLOSE_S = 60.0  # until an extension is given up


class Engine:
    """Requests in, tokens out, one step at a time."""

    def __init__(
        self, runner: ModelRunner, cache: PrefixCache, scheduler: Scheduler, *, overlap: bool = True
    ) -> None:
        """`make_engine` (api/engine_factory.py) makes the parts that the settings name.

        cache      manages the runner's pages
        scheduler  of that cache
        overlap    schedule a step while the one before it is computed, if the runner can
        """
        self._runner = runner
        self._overlap_depth = runner.overlap_depth if overlap else 0
        self._cache = cache
        self._scheduler = scheduler
        self.extensions = Extensions()
        self._in_flight: list[tuple[SchedulerOutput, Any]] = []  # launched steps, the older first
        self._must_collect = False  # whether `end_step` has a step to collect
        self._events: EventLog | None = None  # of `take_events`
        self._seconds = dict.fromkeys(_PARTS, 0.0)
        self.is_paused = False  # see `pause`
        self._late_outputs: list[RequestOutput] = []  # of `take_late_outputs`
        self._busy_since = 0.0  # nothing before it was counted in the two below
        self._prefill_s = self._decode_s = 0.0

    def add(self, request: Request) -> None:
        """Queue a checked request. It can be scheduled from the next step on, or once an extension
        releases it. Raises InvalidRequest for one that does not fit into the cache."""
        self._scheduler.check_fits(request)
        if self.extensions.is_held(request.request_id):
            raise InvalidRequest(f"request id {request.request_id!r} is in use")
        queued_at = self._scheduler.clock()

        def admit(num_loaded: int = 0) -> None:
            self._scheduler.add(request, queued_at=queued_at, num_loaded=num_loaded)

        if not self.extensions.hold(request, queued_at, admit):
            admit()

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request with finish_reason "abort", see `finish`."""
        return self.finish(request_id, "abort")

    def finish(
        self, request_id: str, reason: str, error: BaseException | None = None
    ) -> RequestOutput | None:
        """End a request for a reason from outside, such as a stop string in its text. Returns its
        last output, None if it has ended already.

        Its private pages are freed and its published ones unlocked at once, even if a step in
        flight still computes a row of it: the result of that row is dropped.
        """
        self.extensions.let_go(request_id)
        return self._scheduler.finish(request_id, reason, error)

    def fail(self, request_id: str, error: BaseException) -> None:
        """End a request with `error`, for an extension. The next step returns its last output."""
        output = self.finish(request_id, "error", error)
        if output is not None:
            self._late_outputs.append(output)

    def take_late_outputs(self) -> list[RequestOutput]:
        """Returns the outputs that came between two steps: of steps that `pause` has collected, and
        of requests that extensions ended. The next step returns them; an owner who ends a request
        before it takes them first."""
        outputs, self._late_outputs = self._late_outputs, []
        return outputs

    def fail_all(self, error: BaseException) -> list[RequestOutput]:
        """End all requests with `error`. Returns their outputs. Waits for the steps in flight."""
        self.extensions.let_go()
        outputs = self.extensions.on_outputs(self._scheduler.fail_all(error))
        while self._in_flight:
            try:
                assert not self._collect(), "a request has not ended"
            except EngineDead:  # of the runner; all have ended already
                continue
        return outputs

    def open_events(self) -> EventLog:
        """See `PrefixCache.open_events`."""
        return self._cache.open_events()

    def take_events(self, *, with_snapshot: bool) -> tuple[EventBatch, EventSnapshot | None]:
        """Returns the cache's events since the last call, and a snapshot if wanted. The first call
        opens the log."""
        if self._events is None:
            self._events = self.open_events()
        batch = self._events.take()
        return batch, self._events.snapshot() if with_snapshot else None

    def has_work(self) -> bool:
        """Whether requests are left that may continue, a step is in flight, or outputs are to be
        delivered."""
        if self._in_flight or self._late_outputs:
            return True
        if self._scheduler.has_work and not self.is_paused:
            return True
        return bool(self.extensions.of_has_work) and self.extensions.has_work

    @property
    def idle_timeout(self) -> float | None:
        """Seconds after which an idle engine has work of its own; None for never."""
        return self.extensions.idle_timeout

    def rest(self) -> None:
        """The loop is about to wait for requests."""
        self.extensions.on_idle()

    def warm_up(self) -> bool:
        """See `ModelRunner.warm_up`."""
        return self._runner.warm_up()

    def step(self) -> list[RequestOutput]:
        """Launch a step, and collect the oldest one beyond the overlap depth.

        When a step fails, its requests end with RequestFailed and the others continue. Raises
        EngineDead when the runner can compute no step any more: `fail_all` is left to do.
        """
        return self.begin_step() + self.end_step()

    def begin_step(self) -> list[RequestOutput]:
        """Schedule and launch a step: the first half of `step`. Returns the outputs of before, and
        those of requests that failed.

        The second half, `end_step`, waits for the device or computes without Python's lock.
        """
        if self.extensions.of_before_step:
            is_idle = not self._in_flight and not self._scheduler.has_work
            self.extensions.before_step(may_wait=is_idle)
        self._must_collect = bool(self._in_flight)
        outputs = self.take_late_outputs()
        if not self.is_paused:
            outputs += self._launch()
            self._must_collect |= len(self._in_flight) > self._overlap_depth
        return outputs

    def end_step(self) -> list[RequestOutput]:
        """Collect the oldest launched step and publish its tokens: the second half of `step`.
        Returns the outputs of its requests."""
        outputs: list[RequestOutput] = []
        if self._must_collect:
            outputs = self._collect()
            if self._overlap_depth and not self._in_flight:
                outputs += self._launch()
        if self.extensions.of_after_step:
            is_idle = not self._in_flight and not self._scheduler.has_work
            self.extensions.after_step(is_idle=is_idle)
        return outputs

    def pause(self) -> None:
        """Launch no further step until `resume`. Steps in flight are collected, and `step` returns
        their outputs. Requests may be added, and keep what they have computed."""
        self.is_paused = True
        while self._in_flight:
            self._late_outputs += self._collect()

    def resume(self) -> None:
        """Continue after `pause`."""
        self.is_paused = False

    def open_session(self, name: str, lease_s: float | None = None) -> None:
        """See `Sessions.open` (scheduler/sessions.py)."""
        self._scheduler.sessions.open(name, lease_s)

    def claim(self, name: str, tokens: IntArray, namespace: str = "") -> int:
        """Let a session claim the cached part of `tokens`. Returns its length. Computes nothing."""
        return self._scheduler.sessions.claim(name, tokens, namespace)

    def close(self) -> None:
        """End the extensions and release the cache's frozen objects. Only reports may be read
        afterwards. Idempotent."""
        self.extensions.close(_CLOSE_S)
        self._cache.close()

    def close_session(self, name: str) -> None:
        """Close a session; an unknown name does nothing."""
        self._scheduler.sessions.close(name)

    def lookup(
        self, token_ids: IntArray, namespace: str = "", *, compare_namespaces: bool = True
    ) -> Lookup:
        """Returns how much of a prompt is cached, and why not more. Changes nothing."""
        lookup = self._cache.lookup(token_ids, namespace, compare_namespaces=compare_namespaces)
        return unkeyed(lookup)

    def prefixes(self, namespace: str | None) -> list[tuple[str, IntArray]]:
        """See `PrefixCache.prefixes`."""
        return self._cache.prefixes(namespace)

    def reset_cache(self, namespace: str | None = None) -> None:
        """Drop the cached prefixes of a namespace and those below it, or of all if None, and what
        extensions keep of them. Running requests continue."""
        self._cache.reset(namespace)
        self._scheduler.sessions.forget_claims()
        self.extensions.on_reset(namespace)

    def queue_depths(self) -> dict[str, int]:
        """See `Scheduler.queue_depths`. Requests that an extension holds count as waiting. May be
        called from any thread."""
        depths = self._scheduler.queue_depths()
        num_held, num_tokens = self.extensions.held_counts()
        depths["waiting"] += num_held
        depths["waiting_tokens"] += num_tokens
        return depths

    # -- for extensions -----------------------------------------------------------------------

    def extend(self, extension: EngineExtension, *, is_first: bool = False) -> None:
        """Plug an extension in, see `Extensions.add`. In the engine's thread, or before it
        begins."""
        self.extensions.add(extension, is_first=is_first)
        self._scheduler.set_finish_hook(self.extensions.on_release)

    def set_drafter(self, drafter: Drafter, *, is_for_jumps: bool = False) -> None:
        """See `Scheduler.set_drafter`."""
        self._scheduler.set_drafter(drafter, is_for_jumps=is_for_jumps)

    @property
    def cache(self) -> PrefixCache:
        """Extensions may read it and lock sequences in it between steps."""
        return self._cache

    @property
    def scheduler(self) -> Scheduler:
        """Extensions may plug a `SchedulerExtension` in, and add requests of their own."""
        return self._scheduler

    @property
    def runner(self) -> ModelRunner:
        return self._runner

    def has_room(self, num_tokens: int, queued_at: float) -> bool:
        """See `Scheduler.has_room`."""
        return self._scheduler.has_room(num_tokens, queued_at)

    def step_seconds(self) -> float:
        """Returns the seconds in which steps were under way, since the start."""
        return self._prefill_s + self._decode_s

    def prefill_cost(self) -> tuple[float, int]:
        """Returns the seconds in which prompts were computed, and their tokens, since the start."""
        return self._prefill_s, self._scheduler.counts.prefilled_tokens

    def stats(self) -> dict[str, Any]:
        """Returns the cache's and the scheduler's counters and gauges, and seconds spent by part.

        hit_rate, here and in "last_minute", is the share of prompt tokens that was reused; a prompt
        counts when its request ends. The cache's own rate, which also counts sequences that
        sessions claim and those that resume after a preemption, is not among them.
        overlapped_s is the host's time in other parts while the device had a step to compute.
        prefill_s and decode_s are the seconds in which steps were under way; a step with rows of
        both kinds counts for each by its share of the step's tokens.
        """
        seconds = {f"{part}_s": spent for part, spent in self._seconds.items()}
        seconds |= {"prefill_s": self._prefill_s, "decode_s": self._decode_s}
        scheduler = self._scheduler.stats()  # first: it ends pins whose time is over
        cache = self._cache.stats()
        last_minute = {**cache["last_minute"], **scheduler["last_minute"]}
        stats = {**cache, **scheduler, **seconds, "last_minute": last_minute}
        stats |= self.extensions.stats()
        for counts in (stats, last_minute):
            counts["hit_rate"] = hit_rate(counts["reused_tokens"], counts["prompted_tokens"])
        return stats

    def tree(self, max_nodes: int = 10_000, namespace: str | None = None) -> dict[str, object]:
        """See `PrefixCache.dump`; the sequences have "request_id", too."""
        tables = self._scheduler.page_tables(namespace)
        return {**self._cache.dump(max_nodes, namespace), "sequences": tables}

    def eviction_preview(self, count: int) -> list[dict[str, Any]]:
        """See `PrefixCache.eviction_preview`."""
        return self._cache.eviction_preview(count)

    def snapshot(self, view: SnapshotView) -> dict[str, Any]:
        """See `Runtime.cache_snapshot`."""
        start, collects = time.thread_time(), gc.isenabled()
        gc.disable()  # the records hold no cycle; a collection would visit every node of the tree
        try:
            snapshot = {**self._cache.snapshot(view), **self._scheduler.snapshot(view)}
        finally:
            if collects:
                gc.enable()
        snapshot |= {
            "at": time.monotonic(),
            "counters": {**self._cache.gauges(), **self._scheduler.stats()},
        }
        return {**snapshot, "engine_s": time.thread_time() - start}

    def check(self) -> Future[None] | None:
        """Audit cache, scheduler and extensions; AssertionError names the first broken invariant.
        What extensions check in their own threads is in the future."""
        self._cache.check()
        self._scheduler.check()
        return self.extensions.check()

    # -- one step -----------------------------------------------------------------------------

    def _launch(self) -> list[RequestOutput]:
        start = time.perf_counter()
        is_overlapped = bool(self._in_flight)
        if not is_overlapped:
            self._busy_since = start
        schedule = self._scheduler.schedule()
        spent = time.perf_counter() - start
        self._seconds["schedule"] += spent
        if is_overlapped:
            self._seconds["overlapped"] += spent
        if schedule is None:
            return []
        try:
            pending = self._runner.launch(schedule)
        except Exception as error:
            return self._fail(schedule, error)
        if is_overlapped:
            self._seconds["overlapped"] += time.perf_counter() - start - spent
        self._in_flight.append((schedule, pending))
        return []

    def _collect(self) -> list[RequestOutput]:
        schedule, pending = self._in_flight.pop(0)
        try:
            output = self._runner.collect(pending)
        except Exception as error:
            return self._fail(schedule, error)
        for part, seconds in output.seconds.items():
            self._seconds[part] += seconds
        start = time.perf_counter()
        counts = self._scheduler.counts
        prefilled, decoded = counts.prefilled_tokens, counts.decoded_tokens
        outputs = self._scheduler.update(schedule, output)
        if self.extensions.of_on_outputs:
            outputs = self.extensions.on_outputs(outputs)
        now = time.perf_counter()
        self._seconds["commit"] += now - start
        if self._in_flight:
            self._seconds["overlapped"] += now - start
        # The time since the last step counts for the tokens that this one computed.
        spent, self._busy_since = now - self._busy_since, now
        prefilled, decoded = counts.prefilled_tokens - prefilled, counts.decoded_tokens - decoded
        share = prefilled / max(1, prefilled + decoded)
        self._prefill_s += spent * share
        self._decode_s += spent * (1.0 - share)
        return outputs

    def _fail(self, schedule: SchedulerOutput, cause: Exception) -> list[RequestOutput]:
        if isinstance(cause, EngineDead):
            self._scheduler.fail(schedule, cause)
            raise cause
        error = request_failed(f"the step that computed this request failed: {cause!r}", cause)
        return self.extensions.on_outputs(self._scheduler.fail(schedule, error))
