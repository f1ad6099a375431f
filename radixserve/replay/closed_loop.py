"""`replay_closed_loop`: a session sends its next request a think time after the last answer.

The real scheduler and cache serve the requests in simulated time. The open replay of `scheduled.py`
sends a request at its recorded time, however late the answers are; here, a slow server slows its
own arrivals.
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
from radixserve.output import Finish
from radixserve.replay.caches import CacheSpec, ReplayResult, none_if_nan
from radixserve.replay.paths import PathTable
from radixserve.replay.scheduled import Serving, SimulatedServer, StepModel
from radixserve.replay.trace import Floats, Ints, Trace
from radixserve.scheduler import Scheduler

MAX_THINK_S = 900.0  # a longer gap in a trace is a break, and is shortened to this


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """The sessions of a trace: which requests follow each other, after which think times."""

    sessions: list[list[int]]  # the requests of each session; in order of their first requests
    starts: Floats  # [sessions] when the first request is sent, in seconds
    think_s: Floats  # [requests] seconds after the session's previous request ended; 0: the first

    @property
    def session_think_s(self) -> Floats:
        """[sessions] the sum of each session's think times, in seconds."""
        return np.asarray([self.think_s[requests].sum() for requests in self.sessions])


def infer_closed_loop(trace: Trace, serving: Serving) -> ClosedLoop:
    """The sessions of a trace. A request without a session is a session of its own.

    A think time is the recorded gap minus the time that the answer takes alone with a cached
    prompt, at most MAX_THINK_S. `serving.time_scale` stretches starts, but not think times.
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
    """Read the step costs in a file: a JSON object with fields of `StepModel`, in seconds.

    Raises InvalidRequest for other content, OSError for a file that cannot be read.
    """
    with open(path, encoding="utf-8") as file:
        try:
            document = json.load(file)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"{path}: not a JSON file: {error}") from None
    names = [term.name for term in fields(StepModel)]
    if not isinstance(document, dict) or not set(document) <= set(names):
        raise InvalidRequest(f"{path}: step costs are an object with {', '.join(names)}")
    return StepModel(**{name: check_float(name, document[name], 0.0, 1e6) for name in document})


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedLoopResult(ReplayResult):
    """The result of a closed loop through the scheduler and a cache. Times are modelled seconds."""

    serving: Serving
    loop: ClosedLoop
    ttft_s: Floats  # [requests] from sending to the first token; nan if it does not fit
    session_s: Floats  # [sessions] from sending the first request to the end of the last answer
    alone_s: Floats  # [sessions] the same, if it were alone with an unlimited cache
    computed_tokens: int  # in prefill and decode
    preemptions: int
    steps: int
    makespan_s: float
    num_held: int  # how often priced admission let a request wait: see `PricedAdmission`
    max_running: int  # most requests that ran at the same time
    max_queue_s: float  # longest wait of a request for its first admission

    @property
    def fairness(self) -> float:
        """Jain's index of the sessions' speeds, each relative to its speed alone; 1.0 at best."""
        speeds = self.alone_s / np.maximum(self.session_s, 1e-12)
        return float(speeds.sum() ** 2 / (len(speeds) * (speeds**2).sum()))

    def session_at(self, percentile: float) -> float:
        return float(np.percentile(self.session_s, percentile))

    @property
    def mean_session_s(self) -> float:
        return float(self.session_s.mean())

    @property
    def mean_wait_s(self) -> float:
        """The mean time of a session without its think times."""
        return float((self.session_s - self.loop.session_think_s).mean())

    @property
    def mean_ttft_s(self) -> float:
        """nan when nothing was served."""
        served = self.ttft_s[~np.isnan(self.ttft_s)]
        return float(served.mean()) if len(served) else float("nan")

    def document(self) -> dict[str, float | int | str | None]:
        """The figures of a row in a table."""
        return {
            "order": self.serving.order,
            "admission": self.serving.admission,
            "cache": self.spec.label,
            "cache_tokens": self.spec.cache_tokens,
            "computed_tokens": self.computed_tokens,
            "hit_rate": self.hit_rate,
            "makespan_s": self.makespan_s,
            "ttft_mean_s": none_if_nan(self.mean_ttft_s),
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
    """Decides outside the server when a session's request is sent: this one sends it at once."""

    def __init__(self, scheduler: Scheduler, loop: ClosedLoop) -> None:
        self.scheduler, self.loop = scheduler, loop

    def arrive(self, session: int, index: int) -> list[int]:
        """A session wants to send a request. Returns the requests to send now."""
        del session
        return [index]

    def end(self, session: int, index: int, *, is_last: bool) -> list[int]:
        """A request has ended. Returns the requests to send now."""
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
    """Serve a closed loop. A request that alone exceeds the cache ends at once, without tokens.

    lease_s     of the cache's sessions, in seconds; None: the cache's default
    make_gate   makes the `ClientGate`, which may delay requests
    on_request  is called when a request has ended

    The cache is audited at the end. About 30 us per row of a step.
    """
    begin = time.perf_counter()
    run = _ClosedReplay(trace, loop, spec, serving, lease_s, make_gate, on_request)
    run.drain()
    return run.result(time.perf_counter() - begin)


class _ClosedReplay(SimulatedServer):
    """Requests are sent when their session wants them and the gate lets them through."""

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
        super().__init__(trace, spec, serving, lease_s, on_request)
        self._loop = loop
        self._gate = make_gate(self._scheduler, loop)
        self._session_of = np.zeros(len(trace), np.int64)  # [requests]
        self._next = np.full(len(trace), -1, np.int64)  # [requests] the next one of its session
        self._arrivals: list[tuple[float, int]] = []  # a heap of (time, request)
        for session, requests in enumerate(loop.sessions):
            self._session_of[requests] = session
            self._next[requests[:-1]] = requests[1:]
            heapq.heappush(self._arrivals, (float(loop.starts[session]), requests[0]))
        self._ended_at = np.full(len(trace), np.nan)
        self._is_served = np.zeros(len(trace), np.bool_)
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
            self._run_step(schedule)

    def _wait(self) -> None:
        """Advance the time to the next arrival, since no request runs."""
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
        self._sent_at[index] = self._clock.now  # its session wants it now
        for ready in self._gate.arrive(int(self._session_of[index]), index):
            self._send(ready)

    def _send(self, index: int) -> None:
        self._is_served[index] = self._add(index)

    def _note_finish(self, index: int, finish: Finish) -> None:
        del index
        self._max_queue_s = max(self._max_queue_s, finish.metrics.queue_s or 0.0)

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
    """[sessions] the seconds that each would take alone, without evictions."""
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
    """Lower bounds for every schedule and every cache of a size."""

    computed_tokens: int
    makespan_s: float


def bound_closed_loop(
    trace: Trace, paths: PathTable, loop: ClosedLoop, cache_tokens: int, serving: Serving
) -> LoopBound:
    """The best that hindsight could reach, by choosing for each think time whether to keep the K/V.

    Keeping w tokens over a gap of g seconds takes w x g of the cache's tokens x seconds, and saves
    computing w tokens, so the shortest gaps are kept first. Three assumptions make the bound lower:
    K/V may be kept in part; a session's requests take no room while they run; and prefixes of
    several sessions are always kept. The makespan is also at least that of the longest session with
    everything cached.
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
    """[segments] the number of sessions that have each segment."""
    counts = np.zeros(len(paths.lengths), np.int64)
    last_session = np.full(len(paths.lengths), -1, np.int64)  # the last one that was counted
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
