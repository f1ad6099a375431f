"""Closed loops: a session sends its next request a think time after the last answer.

The real scheduler and cache serve the requests in simulated time. An open replay sends a request
when the trace says, however late the answers are; here a slow server slows its own arrivals.
"""

from __future__ import annotations

import heapq
import itertools
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np

from radixserve.arrays import IntArray
from radixserve.checks import check_float
from radixserve.errors import InvalidRequest
from radixserve.output import RequestOutput
from radixserve.replay.caches import CacheSpec, ReplayResult, TraceClock
from radixserve.replay.paths import PathTable
from radixserve.replay.scheduled import Serving, StepModel, recorded_samples
from radixserve.replay.trace import Floats, Ints, Trace
from radixserve.request import Request, SamplingParams
from radixserve.schedule import ModelRunnerOutput
from radixserve.scheduler import Scheduler

MAX_THINK_S = 900.0  # longer gaps of a trace are breaks: the session goes on after so long


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """Which requests follow each other, and how long their sessions think between them."""

    sessions: list[list[int]]  # by session, in order of their first request: its requests
    starts: Floats  # [sessions] seconds, when the first request is sent
    think_s: Floats  # [requests] from the end of the session's request before; 0 for a first one

    @property
    def session_think_s(self) -> Floats:
        """[sessions] seconds that each thinks in all."""
        return np.asarray([self.think_s[requests].sum() for requests in self.sessions])


def infer_closed_loop(trace: Trace, serving: Serving) -> ClosedLoop:
    """The sessions of a trace, each request of none as its own.

    A think time is the recorded gap less the time that the answer takes when it is alone and its
    prompt is cached, at most MAX_THINK_S. `serving.time_scale` stretches starts, not think times.
    """
    by_name: dict[str | int, list[int]] = {}
    for index, name in enumerate(trace.sessions):
        by_name.setdefault(index if name is None else name, []).append(index)
    sessions = list(by_name.values())
    step, think_s = serving.step, np.zeros(len(trace))
    for requests in sessions:
        for before, index in itertools.pairwise(requests):
            answer_s = (step.fixed_s + step.decode_row_s) * max(1, int(trace.num_output[before]))
            gap = float(trace.times[index] - trace.times[before])
            think_s[index] = min(max(0.0, gap - answer_s), MAX_THINK_S)
    firsts = [requests[0] for requests in sessions]
    return ClosedLoop(sessions, trace.times[firsts] * serving.time_scale, think_s)


def read_step_costs(path: str | os.PathLike[str]) -> StepModel:
    """The step costs in a file: a JSON object of fields of `StepModel`, in seconds.

    Raises InvalidRequest for another content, OSError for a file that cannot be read.
    """
    with open(path, encoding="utf-8") as file:
        try:
            document = json.load(file)
        except ValueError as error:
            raise InvalidRequest(f"{path}: not a JSON file: {error}") from None
    names = [term.name for term in fields(StepModel)]
    if not isinstance(document, dict) or not set(document) <= set(names):
        raise InvalidRequest(f"{path}: step costs are an object with {', '.join(names)}")
    return StepModel(**{name: check_float(name, document[name], 0.0, 1e6) for name in document})


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedLoopResult(ReplayResult):
    """One closed loop through the scheduler and a cache; times in modelled seconds."""

    serving: Serving
    loop: ClosedLoop
    ttft_s: Floats  # [requests] from being sent to first token; nan for those that do not fit
    session_s: Floats  # [sessions] from the first request's sending to the last answer's end
    alone_s: Floats  # [sessions] the same, were it alone with an unlimited cache
    computed_tokens: int  # in prefill and decode, of everything
    preemptions: int
    steps: int
    makespan_s: float
    num_held: int  # decisions to let a request wait: see `PricedAdmission`
    max_running: int  # the most requests that ran at once
    max_queue_s: float  # the longest that a request waited for its first admission

    @property
    def fairness(self) -> float:
        """Jain's index of the sessions' speeds, each over its speed alone: 1 is fairest."""
        speeds = self.alone_s / np.maximum(self.session_s, 1e-12)
        return float(speeds.sum() ** 2 / (len(speeds) * (speeds**2).sum()))

    def session_at(self, percentile: float) -> float:
        return float(np.percentile(self.session_s, percentile))

    @property
    def mean_session_s(self) -> float:
        return float(self.session_s.mean())

    @property
    def mean_wait_s(self) -> float:
        """Session time without the think times."""
        return float((self.session_s - self.loop.session_think_s).mean())

    @property
    def mean_ttft_s(self) -> float:
        """nan when nothing was served."""
        served = self.ttft_s[~np.isnan(self.ttft_s)]
        return float(served.mean()) if len(served) else float("nan")

    def document(self) -> dict[str, float | int | str]:
        """The figures of a table's row."""
        return {
            "order": self.serving.order,
            "admission": self.serving.admission,
            "cache": self.spec.label,
            "cache_tokens": self.spec.cache_tokens,
            "computed_tokens": self.computed_tokens,
            "hit_rate": self.hit_rate,
            "makespan_s": self.makespan_s,
            "ttft_mean_s": self.mean_ttft_s,
            "session_mean_s": self.mean_session_s,
            "session_p50_s": self.session_at(50),
            "session_p95_s": self.session_at(95),
            "session_p99_s": self.session_at(99),
            "session_worst_s": float(self.session_s.max()),
            "wait_mean_s": self.mean_wait_s,
            "queue_worst_s": self.max_queue_s,
            "fairness": self.fairness,
            "preemptions": self.preemptions,
            "steps": self.steps,
            "too_large_requests": self.num_too_large,
            "seconds": self.seconds,
        }


class ClientGate:
    """Decides outside of the server when a session's request is sent: none is held back here."""

    def __init__(self, scheduler: Scheduler, loop: ClosedLoop) -> None:
        self.scheduler, self.loop = scheduler, loop

    def arrive(self, session: int, index: int) -> list[int]:
        """A session wants to send a request; returns the requests to send now."""
        del session
        return [index]

    def end(self, session: int, index: int, *, is_last: bool) -> list[int]:
        """A request has ended; returns the requests to send now."""
        del session, index, is_last
        return []


def replay_closed_loop(
    trace: Trace,
    loop: ClosedLoop,
    spec: CacheSpec,
    serving: Serving,
    *,
    lease_s: float | None = None,
    make_gate: Callable[[Scheduler, ClosedLoop], ClientGate] = ClientGate,
    on_request: Callable[[], object] = lambda: None,
) -> ClosedLoopResult:
    """Serve a closed loop. Requests that do not fit into the cache alone end at once, empty.

    `lease_s`: of the sessions where `spec.use_sessions`. `on_request` is called when one has
    ended. The cache is audited at the end. About 30 us a row of a step.
    """
    begin = time.perf_counter()
    run = _Run(trace, loop, spec, serving, lease_s, make_gate, on_request)
    run.drain()
    return run.result(time.perf_counter() - begin)


class _Run:
    def __init__(
        self,
        trace: Trace,
        loop: ClosedLoop,
        spec: CacheSpec,
        serving: Serving,
        lease_s: float | None,
        make_gate: Callable[[Scheduler, ClosedLoop], ClientGate],
        on_request: Callable[[], object],
    ) -> None:
        self._trace, self._loop, self._spec, self._serving = trace, loop, spec, serving
        self._lease_s, self._on_request = lease_s, on_request
        self._clock = TraceClock()
        self._cache = spec.make(self._clock)
        self._scheduler = serving.make_scheduler(self._cache, self._clock)
        self._gate = make_gate(self._scheduler, loop)
        self._session_of = np.zeros(len(trace), np.int64)  # [requests]
        self._next = np.full(len(trace), -1, np.int64)  # [requests] the session's next one
        self._arrivals: list[tuple[float, int]] = []  # a heap of (time, request)
        for session, requests in enumerate(loop.sessions):
            self._session_of[requests] = session
            self._next[requests[:-1]] = requests[1:]
            heapq.heappush(self._arrivals, (float(loop.starts[session]), requests[0]))
        self._wanted_at = np.full(len(trace), np.nan)  # [requests] when the session wanted it sent
        self._ended_at = np.full(len(trace), np.nan)
        self._ttft = np.full(len(trace), np.nan)
        self._hits = np.zeros(len(trace), np.int64)
        self._is_served = np.zeros(len(trace), np.bool_)
        self._outputs: dict[str, IntArray] = {}  # recorded ones, of requests in the scheduler
        self._max_queue_s = 0.0
        self._max_running = 0

    def drain(self) -> None:
        clock, scheduler, arrivals = self._clock, self._scheduler, self._arrivals
        while scheduler.has_work or arrivals:
            while arrivals and arrivals[0][0] <= clock.now:
                self._arrive(heapq.heappop(arrivals)[1])
            schedule = scheduler.schedule() if scheduler.has_work else None
            if schedule is None:
                self._wait()
                continue
            self._max_running = max(self._max_running, scheduler.num_running)
            clock.now += self._serving.step.seconds(schedule)
            sampled = ModelRunnerOutput(recorded_samples(schedule, self._outputs), {})
            for output in scheduler.update(schedule, sampled):
                self._note_output(output)

    def _wait(self) -> None:
        """Nothing runs: until the next arrival."""
        if self._arrivals:
            self._clock.now = max(self._clock.now, self._arrivals[0][0])

    def result(self, seconds: float) -> ClosedLoopResult:
        self._cache.check()
        self._scheduler.check()
        assert not self._cache.stats()["sequences"], "a sequence was not released"
        loop, counts = self._loop, self._scheduler.counts
        ends = np.asarray([self._ended_at[requests[-1]] for requests in loop.sessions])
        return ClosedLoopResult(
            spec=self._spec,
            serving=self._serving,
            loop=loop,
            hits=self._hits,
            is_served=self._is_served,
            prompt_tokens=self._trace.prompt_tokens,
            evicted_tokens=self._cache.stats()["evicted_tokens"],
            seconds=seconds,
            ttft_s=self._ttft,
            session_s=ends - loop.starts,
            alone_s=alone_s(self._trace, loop, self._serving.step),
            computed_tokens=counts.prefilled_tokens + counts.decoded_tokens,
            preemptions=counts.preemptions,
            steps=counts.steps,
            makespan_s=self._clock.now - float(loop.starts.min(initial=self._clock.now)),
            num_held=self._scheduler.num_held,
            max_running=self._max_running,
            max_queue_s=self._max_queue_s,
        )

    def _arrive(self, index: int) -> None:
        self._wanted_at[index] = self._clock.now
        for ready in self._gate.arrive(int(self._session_of[index]), index):
            self._send(ready)

    def _send(self, index: int) -> None:
        trace, name = self._trace, str(index)
        num_output = max(1, int(trace.num_output[index]))
        max_len = int(trace.num_prompt[index]) + num_output
        if max_len > self._cache.num_pages * self._cache.page_size:
            self._end(index)
            return
        recorded = trace.request(index)
        session = recorded.session if self._spec.use_sessions else None
        if session is not None:
            self._scheduler.sessions.open(session, self._lease_s)
        self._outputs[name], self._is_served[index] = recorded.output, True
        params = SamplingParams(max_tokens=num_output, namespace=recorded.namespace)
        self._scheduler.add(
            Request(
                request_id=name,
                token_ids=recorded.prompt,
                params=params,
                seed=0,
                end_ids=frozenset(),
                max_len=max_len,
                session=session or "",
            )
        )

    def _note_output(self, output: RequestOutput) -> None:
        index = int(output.request_id)
        if output.token_ids and np.isnan(self._ttft[index]):
            self._ttft[index] = self._clock.now - self._wanted_at[index]
        if output.finish is not None:
            self._hits[index] = output.finish.usage.cached_tokens
            self._max_queue_s = max(self._max_queue_s, output.finish.metrics.queue_s or 0.0)
            del self._outputs[output.request_id]
            self._end(index)

    def _end(self, index: int) -> None:
        self._on_request()
        now, later = self._clock.now, int(self._next[index])
        self._ended_at[index] = now
        if later >= 0:
            heapq.heappush(self._arrivals, (now + float(self._loop.think_s[later]), later))
        elif self._spec.use_sessions and self._trace.sessions[index] is not None:
            self._scheduler.sessions.close(str(self._trace.sessions[index]))
        session = int(self._session_of[index])
        for ready in self._gate.end(session, index, is_last=later < 0):
            self._send(ready)


def alone_s(trace: Trace, loop: ClosedLoop, step: StepModel) -> Floats:
    """[sessions] seconds that each would take alone, with nothing of it evicted."""
    seconds = np.zeros(len(loop.sessions))
    for session, requests in enumerate(loop.sessions):
        known = 0
        for index in requests:
            num_prompt, num_output = int(trace.num_prompt[index]), int(trace.num_output[index])
            seconds[session] += (
                step.prefill_token_s * max(1, num_prompt - known)
                + step.fixed_s * max(1, num_output)
                + step.decode_row_s * max(0, num_output - 1)
                + step.kv_token_s * num_prompt * max(1, num_output)
            )
            known = num_prompt + num_output
    return seconds + loop.session_think_s


@dataclass(frozen=True, slots=True)
class LoopBound:
    """No schedule and no cache of that size can do better."""

    computed_tokens: int
    makespan_s: float


def bound_closed_loop(
    trace: Trace, paths: PathTable, loop: ClosedLoop, cache_tokens: int, serving: Serving
) -> LoopBound:
    """What hindsight could reach: for each think time it is chosen whether its K/V is kept.

    Keeping w tokens over a gap of g seconds takes w g of the room's tokens x seconds and saves the
    computing of w tokens, so the shortest gaps are kept first. Keeping may be in part, a session's
    requests take no room while they run, and prefixes that other sessions have are always kept:
    all of this makes the bound lower. The makespan also is at least that of the session which
    thinks and answers longest, with everything cached.
    """
    step = serving.step
    users = _session_counts(paths, loop)
    gaps, sizes = [], []
    for requests in loop.sessions:
        for before, index in itertools.pairwise(requests):
            path = _common(paths.path(index)[: paths.num_usable[index]], paths.path(before))
            shared = path[users[path] == 1]
            gaps.append(float(loop.think_s[index]))
            sizes.append(int(paths.lengths[shared].sum()))
    order = np.argsort(gaps, kind="stable")
    gap, size = np.asarray(gaps)[order], np.asarray(sizes, np.float64)[order]
    num_decoded = int(np.maximum(trace.num_output - 1, 0).sum())
    decode_s = num_decoded * (step.decode_row_s + step.fixed_s / serving.max_running_requests)
    num_steps = [np.maximum(trace.num_output[requests], 1).sum() for requests in loop.sessions]
    ends = loop.starts + loop.session_think_s + step.fixed_s * np.asarray(num_steps)
    alone = float(ends.max() - loop.starts.min())
    needed, room_used = paths.distinct_tokens, np.cumsum(gap * size)

    def computed(makespan_s: float) -> float:
        kept = int(np.searchsorted(room_used, cache_tokens * makespan_s, "right"))
        rest, part = float(size[kept:].sum()), 0.0
        if kept < len(size):
            left = cache_tokens * makespan_s - (float(room_used[kept - 1]) if kept else 0.0)
            part = left / float(gap[kept])
        return needed + max(0.0, rest - part)

    def busy_s(makespan_s: float) -> float:
        return decode_s + step.prefill_token_s * max(0.0, computed(makespan_s) - num_decoded)

    low, high = alone, alone + busy_s(0.0)
    for _ in range(60):
        middle = (low + high) / 2
        is_enough = busy_s(middle) <= middle
        low, high = (low, middle) if is_enough else (middle, high)
    return LoopBound(round(computed(high)), high)


def _session_counts(paths: PathTable, loop: ClosedLoop) -> Ints:
    """[segments] in how many sessions each one is."""
    counts = np.zeros(len(paths.lengths), np.int64)
    last_session = np.full(len(paths.lengths), -1, np.int64)  # that was counted
    for session, requests in enumerate(loop.sessions):
        for index in requests:
            path = paths.path(index)
            new = path[last_session[path] != session]
            last_session[new] = session
            counts[new] += 1
    return counts


def _common(path: IntArray, other: IntArray) -> IntArray:
    """The first segments that two paths have in common."""
    size = min(len(path), len(other))
    differs = path[:size] != other[:size]
    return path[: int(differs.argmax()) if differs.any() else size]
