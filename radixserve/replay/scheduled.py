"""A trace through the real scheduler and cache, with the time of a step from a model of it.

Requests arrive when the trace says; those that are there together run together. Outputs are the
recorded ones, so they enter the cache as they did then. A request whose prompt contains another
request's output, or its beginning, is sent only after that one has ended, as its client could not
have known it before.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from sortedcontainers import SortedList

from radixserve.arrays import IntArray
from radixserve.output import RequestOutput
from radixserve.replay.caches import CacheSpec, TraceClock
from radixserve.replay.paths import PathTable
from radixserve.replay.serving import ComputeLedger, ScheduledResult, Serving
from radixserve.replay.trace import Ints, Trace
from radixserve.request import Request, SamplingParams
from radixserve.schedule import ModelRunnerOutput, SampleOutput, ScheduledRequest
from radixserve.scheduler import Scheduler


def replay_scheduled(
    trace: Trace,
    paths: PathTable,
    spec: CacheSpec,
    serving: Serving,
    *,
    lease_s: float | None = None,
    on_request: Callable[[], object] = lambda: None,
) -> ScheduledResult:
    """`paths`: of this trace. `lease_s`: of the sessions, in time of the trace.

    Requests that do not fit into the cache alone are passed over. `on_request` is called when one
    has ended. The cache is audited at the end. About 30 us a row of a step.
    """
    start = time.perf_counter()
    run = _Run(trace, paths, spec, serving, lease_s, on_request)
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
        on_request: Callable[[], object],
    ) -> None:
        self._trace, self._spec, self._serving = trace, spec, serving
        self._lease_s, self._on_request = lease_s, on_request
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
        self._ledger = ComputeLedger(trace, paths)
        self._num_arrived = 0
        self._arrivals = trace.times * serving.time_scale  # [requests] seconds
        self._predecessors = predecessors(trace, paths)
        self._held: dict[int, list[int]] = {}  # {predecessor: arrived requests that wait for it}
        self._has_ended = np.zeros(len(trace), np.bool_)
        self._hits = np.zeros(len(trace), np.int64)
        self._sent_at = np.full(len(trace), np.nan)  # [requests] seconds
        self._ttft = np.full(len(trace), np.nan)
        self._outputs: dict[str, IntArray] = {}  # recorded ones, of requests in the scheduler
        self._sent_as: dict[int, int] = {}  # {request: its place in the order of sending}
        self._admitted: dict[int, None] = {}  # requests in order of admission
        self._num_left = trace.session_sizes()  # requests of each session that have not ended

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
            for row in schedule.rows:
                self._admitted.setdefault(int(row.request_id))
                self._ledger.note(int(row.request_id), row.start, row.end)
            clock.now += self._serving.step.seconds(schedule)
            sampled = ModelRunnerOutput(tuple(self._sample_rows(row) for row in schedule.rows), {})
            for output in scheduler.update(schedule, sampled):
                self._note_output(output)

    def result(self, seconds: float) -> ScheduledResult:
        self._cache.check()
        stats, ledger = self._scheduler.stats(), self._ledger
        is_served = np.zeros(len(self._trace), np.bool_)
        is_served[list(self._admitted)] = True
        return ScheduledResult(
            spec=self._spec,
            serving=self._serving,
            hits=self._hits,
            is_served=is_served,
            ttft_s=self._ttft,
            prompt_tokens=self._trace.prompt_tokens,
            computed_tokens=ledger.computed,
            needed_tokens=ledger.needed,
            repeated_tokens=ledger.repeated,
            compute_ratio=ledger.ratio,
            max_overtaken=_max_overtaken([self._sent_as[index] for index in self._admitted]),
            preemptions=stats["preemptions"],
            steps=stats["steps"],
            span_s=self._clock.now,
            evicted_tokens=self._cache.stats()["evicted_tokens"],
            seconds=seconds,
        )

    def _take_arrivals(self) -> None:
        due = int(np.searchsorted(self._arrivals, self._clock.now, "right"))
        for index in range(self._num_arrived, due):
            before = int(self._predecessors[index])
            if before < 0 or self._has_ended[before]:
                self._send(index, float(self._arrivals[index]))
            else:
                self._held.setdefault(before, []).append(index)
        self._num_arrived = max(self._num_arrived, due)

    def _send(self, index: int, now: float) -> None:
        trace, name = self._trace, str(index)
        self._sent_at[index], self._sent_as[index] = now, len(self._sent_as)
        num_output = max(1, int(trace.num_output[index]))
        max_len = int(trace.num_prompt[index]) + num_output
        if max_len > self._cache.num_pages * self._cache.page_size:
            self._end(index)
            return
        one = trace.request(index)
        session = one.session if self._spec.use_sessions else None
        if session is not None:
            self._scheduler.open_session(session, self._lease_s)
        self._outputs[name] = one.output
        self._scheduler.add(
            Request(
                request_id=name,
                token_ids=one.prompt,
                params=SamplingParams(max_tokens=num_output, namespace=one.namespace),
                seed=0,
                end_ids=frozenset(),
                max_len=max_len,
                session=session or "",
            )
        )

    def _sample_rows(self, row: ScheduledRequest) -> SampleOutput | None:
        """The recorded token of a row, and token 0 after them."""
        if row.sample is None:
            return None
        output, index = self._outputs[row.request_id], row.end - row.sample.num_prompt
        return SampleOutput(int(output[index]) if index < len(output) else 0, None, ())

    def _note_output(self, output: RequestOutput) -> None:
        index = int(output.request_id)
        if output.token_ids and np.isnan(self._ttft[index]):
            self._ttft[index] = self._clock.now - self._sent_at[index]
        if output.finish is not None:
            self._hits[index] = output.finish.usage.cached_tokens
            del self._outputs[output.request_id]
            self._ledger.close(index)
            self._end(index)

    def _end(self, index: int) -> None:
        self._on_request()
        self._has_ended[index] = True
        for later in self._held.pop(index, ()):
            self._send(later, self._clock.now)
        session = self._trace.sessions[index]
        if session is not None:
            self._num_left[session] -= 1
            if not self._num_left[session]:
                self._scheduler.close_session(session)


def predecessors(trace: Trace, paths: PathTable) -> Ints:
    """[requests] the request whose output, or its beginning, is in this one's prompt; -1: none.

    Among several it is the one with the longest common prefix, the last one among equals.
    """
    owners = np.full(len(paths.lengths), -1, np.int64)  # by segment: the request whose output it is
    found = np.full(len(trace), -1, np.int64)
    for index in range(len(trace)):
        path = paths.path(index)
        before = owners[path[: paths.num_usable[index]]]
        known = before[before >= 0]
        if len(known):
            found[index] = known[-1]
        if trace.num_output[index] > 1:
            first = int(np.searchsorted(paths.starts[path], trace.num_prompt[index], "right")) - 1
            owners[path[first]] = owners[path[-1]] = index
    return found


def _max_overtaken(admitted: list[int]) -> int:
    """The most requests that were sent after one and admitted before it."""
    before, most = SortedList(), 0
    for place in admitted:
        most = max(most, len(before) - before.bisect_right(place))
        before.add(place)
    return most
