"""A trace through the real scheduler and cache, with the time of a step from a model of it.

Requests arrive when the trace says; those that are there together run together. Outputs are the
recorded ones, so they enter the cache as they did then. A request whose prompt contains another
one's output, or its beginning, is not sent before that one has ended: its client could not have
known it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from sortedcontainers import SortedList

from radixserve.output import RequestOutput
from radixserve.replay.caches import CacheSpec, TraceClock
from radixserve.replay.device import RecordedDevice
from radixserve.replay.ledger import ComputeLedger
from radixserve.replay.paths import PathTable
from radixserve.replay.serving import ScheduledResult, Serving
from radixserve.replay.trace import Ints, Trace
from radixserve.request import Request, SamplingParams
from radixserve.schedule import SchedulerOutput
from radixserve.scheduler import Scheduler


def replay_scheduled(
    trace: Trace,
    paths: PathTable,
    spec: CacheSpec,
    serving: Serving,
    *,
    lease_s: float | None = None,
    on_finish: Callable[[], object] = lambda: None,
) -> ScheduledResult:
    """`paths`: of this trace. `lease_s`: of the sessions' holders, in time of the trace.

    Requests that do not fit into the cache alone are passed over. `on_finish` is called once a
    request. The cache is audited at the end. About 30 us a row of a step.
    """
    start = time.perf_counter()
    run = _Run(trace, paths, spec, serving, lease_s, on_finish)
    run.drain()
    return run.result(time.perf_counter() - start)


class _Run:
    def __init__(
        self,
        trace: Trace,
        paths: PathTable,
        spec: CacheSpec,
        serving: Serving,
        lease_s: float | None,
        on_finish: Callable[[], object],
    ) -> None:
        self._trace, self._spec, self._serving = trace, spec, serving
        self._lease_s, self._on_finish = lease_s, on_finish
        self._clock = TraceClock()
        self._cache = spec.make(self._clock)
        self._scheduler = Scheduler(
            self._cache,
            policy=serving.order,
            chunked_prefill_size=serving.chunked_prefill_size,
            max_running_requests=serving.max_running_requests,
            max_overtake=serving.max_overtake,
            clock=self._clock,
        )
        self._device = RecordedDevice()
        self._ledger = ComputeLedger(trace, paths)
        self._arrivals = trace.times * serving.time_scale  # by the trace
        self._num_arrived = 0
        self._waits_for = predecessors(trace, paths)
        self._held: dict[int, list[int]] = {}  # by whom they wait for
        self._has_ended = np.zeros(len(trace), np.bool_)
        self._sent_at: dict[int, float] = {}
        self._hits = np.zeros(len(trace), np.int64)
        self._ttft = np.full(len(trace), np.nan)
        self._sent_as: dict[int, int] = {}  # the how-manieth
        self._admitted: list[int] = []  # those numbers, in order of admission
        self._is_admitted = np.zeros(len(trace), np.bool_)
        self._left: dict[str, int] = {}  # requests of each session that have not ended
        for session in trace.sessions:
            if session is not None:
                self._left[session] = self._left.get(session, 0) + 1

    def drain(self) -> None:
        """Serve everything."""
        clock, scheduler = self._clock, self._scheduler
        while scheduler.has_work or self._num_arrived < len(self._trace):
            if not scheduler.has_work:
                clock.now = max(clock.now, float(self._arrivals[self._num_arrived]))
            self._take_arrivals()
            schedule = scheduler.schedule()
            if schedule is None:
                continue
            self._note_rows(schedule)
            clock.now += self._serving.step.seconds(schedule)
            for output in scheduler.update(schedule, self._device.answer(schedule)):
                self._note_output(output)

    def result(self, seconds: float) -> ScheduledResult:
        self._cache.check()
        stats = self._scheduler.stats()
        return ScheduledResult(
            spec=self._spec,
            serving=self._serving,
            hits=self._hits,
            ttft_s=self._ttft,
            prompt_tokens=self._trace.prompt_tokens,
            computed_tokens=self._ledger.computed,
            needed_tokens=self._ledger.needed,
            repeated_tokens=self._ledger.repeated,
            compute_ratio=self._ledger.ratio,
            num_too_large=len(self._trace) - len(self._admitted),
            max_overtaken=_max_overtaken(self._admitted),
            preemptions=stats["preemptions"],
            steps=stats["steps"],
            span_s=self._clock.now,
            evicted_tokens=self._cache.stats()["evicted_tokens"],
            seconds=seconds,
        )

    def _take_arrivals(self) -> None:
        while self._num_arrived < len(self._trace):
            index = self._num_arrived
            if self._arrivals[index] > self._clock.now:
                return
            self._num_arrived += 1
            first = int(self._waits_for[index])
            if first < 0 or self._has_ended[first]:
                self._send(index, float(self._arrivals[index]))
            else:
                self._held.setdefault(first, []).append(index)

    def _send(self, index: int, now: float) -> None:
        trace, name = self._trace, str(index)
        self._sent_at[index], self._sent_as[index] = now, len(self._sent_as)
        num_output = max(1, int(trace.num_output[index]))
        max_len = int(trace.num_prompt[index]) + num_output
        if max_len > self._cache.num_pages * self._cache.page_size:
            self._end(index)
            return
        one = trace.request(index)
        holder = one.session if self._spec.use_holders else None
        if holder is not None:
            self._scheduler.open_session(holder, self._lease_s)
        self._device.expect(name, one.output)
        self._scheduler.add(
            Request(
                request_id=name,
                token_ids=one.prompt,
                params=SamplingParams(max_tokens=num_output, namespace=one.namespace),
                seed=0,
                end_ids=frozenset(),
                max_len=max_len,
                session=holder or "",
            )
        )

    def _note_rows(self, schedule: SchedulerOutput) -> None:
        for row in schedule.rows:
            index = int(row.request_id)
            if not self._is_admitted[index]:
                self._is_admitted[index] = True
                self._admitted.append(self._sent_as[index])
            self._ledger.note(index, row.start, row.end)

    def _note_output(self, output: RequestOutput) -> None:
        index = int(output.request_id)
        if output.token_ids and np.isnan(self._ttft[index]):
            self._ttft[index] = self._clock.now - self._sent_at[index]
        if output.finish is not None:
            self._hits[index] = output.finish.usage.cached_tokens
            self._device.forget(output.request_id)
            self._ledger.close(index)
            self._end(index)

    def _end(self, index: int) -> None:
        self._on_finish()
        self._has_ended[index] = True
        for later in self._held.pop(index, ()):
            self._send(later, self._clock.now)
        session = self._trace.sessions[index]
        if session is not None:
            self._left[session] -= 1
            if not self._left[session]:
                self._scheduler.close_session(session)


def predecessors(trace: Trace, paths: PathTable) -> Ints:
    """[requests] the request whose output, or its beginning, is in this one's prompt; -1: none.

    Of those before it the one that goes furthest with it, the last one among equals.
    """
    owners = np.full(len(paths.lengths), -1, np.int64)  # by segment: whose output is in it
    found = np.full(len(trace), -1, np.int64)
    for index in range(len(trace)):
        path = paths.path(index)
        before = owners[path[: paths.num_usable[index]]]
        known = before[before >= 0]
        if len(known):
            found[index] = known[-1]
        if trace.num_output[index] > 1:
            begun = int(np.searchsorted(paths.starts[path], trace.num_prompt[index], "right")) - 1
            owners[path[begun]] = owners[path[-1]] = index
    return found


def _max_overtaken(admitted: list[int]) -> int:
    """Most later ones that come before one in the order of admission."""
    before, most = SortedList(), 0
    for number in admitted:
        most = max(most, len(before) - before.bisect_right(number))
        before.add(number)
    return most
