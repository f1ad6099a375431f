"""`replay_scheduled`: a trace through the real scheduler and cache, with modelled step times.

Requests arrive at the recorded times and are batched. Outputs are the recorded ones, so the cache
gets the same tokens. A request whose prompt contains another request's output, or its beginning, is
sent only after that request has ended, since its client could not have known the output before.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields

import numpy as np
from numpy.typing import NDArray
from sortedcontainers import SortedList

from radixserve.admission_policies import make_admission
from radixserve.arrays import IntArray
from radixserve.cache import PrefixCache
from radixserve.checks import check_choice, check_float, check_int
from radixserve.config import ADMISSIONS, default_max_overtake
from radixserve.output import Finish
from radixserve.replay.caches import CacheSpec, ReplayResult, TraceClock
from radixserve.replay.paths import PathTable
from radixserve.replay.trace import Floats, Ints, Trace
from radixserve.request import Request, SamplingParams
from radixserve.schedule import ModelRunnerOutput, SampleOutput, SchedulerOutput
from radixserve.scheduler import Scheduler
from radixserve.tenants import TenantShares

ORDERS = ("lpm", "fcfs", "dfs-weight")


@dataclass(frozen=True, slots=True)
class StepModel:
    """The modelled time of a step, in seconds: a sum of four terms.

    fixed_s          each step: reads the weights
    prefill_token_s  each prefilled token
    decode_row_s     each decoded token: sampling and bookkeeping
    kv_token_s       each token of K/V that a row reads; it reads its whole sequence once

    The defaults are for a model of 8 billion parameters in bfloat16, with 128 KiB of K/V per token,
    on a GPU with 2.6 TB/s and 600 TFLOP/s: 16 GB of weights per step and some overhead, 16 GFLOP
    per prefilled token, 128 KiB per K/V token.
    """

    fixed_s: float = 0.007
    prefill_token_s: float = 27e-6
    decode_row_s: float = 20e-6
    kv_token_s: float = 50e-9

    def __post_init__(self) -> None:
        for term in fields(self):
            check_float(term.name, getattr(self, term.name), 0.0, 1e6)

    def seconds(self, schedule: SchedulerOutput) -> float:
        """The modelled time of a step."""
        rows = schedule.rows
        return (
            self.fixed_s
            + self.prefill_token_s * schedule.num_prefill_tokens
            + self.decode_row_s * schedule.num_decode_tokens
            + self.kv_token_s * (sum(rows.starts) + sum(rows.num_tokens))
        )


@dataclass(frozen=True, slots=True)
class Serving:
    """How requests are served: the scheduler's settings and the model of a step."""

    order: str = "lpm"
    chunked_prefill_size: int = 2048
    max_running_requests: int = 64
    max_overtake: int = None  # type: ignore[assignment]  # __post_init__ sets admission's default
    time_scale: float = 1.0  # arrivals are this many times as far apart as recorded
    step: StepModel = field(default_factory=StepModel)
    admission: str = "greedy"

    def __post_init__(self) -> None:
        check_choice("order", self.order, ORDERS)
        check_int("chunked_prefill_size", self.chunked_prefill_size, 1)
        check_int("max_running_requests", self.max_running_requests, 1)
        check_choice("admission", self.admission, ADMISSIONS)
        if self.max_overtake is None:
            object.__setattr__(self, "max_overtake", default_max_overtake(self.admission))
        check_int("max_overtake", self.max_overtake, 0)
        check_float("time_scale", self.time_scale, 0.0, 1e6)

    def make_scheduler(self, cache: PrefixCache, clock: Callable[[], float]) -> Scheduler:
        return Scheduler(
            cache,
            policy=self.order,
            chunked_prefill_size=self.chunked_prefill_size,
            max_running_requests=self.max_running_requests,
            max_overtake=self.max_overtake,
            admission=make_admission(self.admission),
            shares=TenantShares(),
            clock=clock,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledResult(ReplayResult):
    """The result of a replay through the scheduler and a cache. Times are modelled seconds."""

    serving: Serving
    ttft_s: Floats  # [requests] from sending to the first token; nan if it does not fit
    computed_tokens: int  # in prefill and decode
    needed_tokens: int  # tokens computed for the first time
    repeated_tokens: int  # tokens computed again without need
    compute_ratio: float  # (needed + repeated) / needed: see `ComputeLedger`
    max_overtaken: int  # most later requests that were admitted before one
    preemptions: int
    steps: int
    span_s: float  # from the first arrival to the last token

    def ttft_at(self, percentile: float) -> float:
        """The time to first token at a percentile, in seconds; nan if no request was served."""
        return float(np.percentile(self._served_ttft, percentile))

    @property
    def mean_ttft_s(self) -> float:
        """nan when nothing was served."""
        return float(self._served_ttft.mean())

    @property
    def _served_ttft(self) -> Floats:
        """[served requests]; [nan] without any."""
        served = self.ttft_s[~np.isnan(self.ttft_s)]
        return served if len(served) else np.full(1, np.nan)


@dataclass(slots=True)
class _Entry:
    """The progress of a request."""

    slots: NDArray[np.int32]  # [kept tokens] the numbers of the request's token prefixes
    reached: int = 0  # its tokens that were computed or found in the cache


class ComputeLedger:
    """Counts the tokens that are computed for the first time (needed), and those that are computed
    again without need (repeated).

    Tokens with different prefixes are different tokens. Computing a token again is unavoidable in
    two cases: it is the last token of a prompt, which the first output needs, or it was sampled,
    and so was unknown before. Any other token that is computed again is repeated: it was evicted
    meanwhile, or two requests computed it at the same time.

        compute-once ratio = (needed + repeated) / needed, 1.0 at best

    Memory: a byte per distinct token of the trace.
    """

    def __init__(self, trace: Trace, paths: PathTable) -> None:
        self._num_prompt = trace.num_prompt
        self._paths = paths
        assert paths.distinct_tokens < 2**31
        self._first_slot = (np.cumsum(paths.lengths) - paths.lengths).astype(np.int32)  # by segment
        self._is_known = np.zeros(paths.distinct_tokens, np.bool_)
        self._entries: dict[int, _Entry] = {}
        self.computed = 0  # tokens in all rows
        self.needed = 0  # tokens computed for the first time
        self.repeated = 0  # tokens computed again without need

    @property
    def ratio(self) -> float:
        """The compute-once ratio; 1.0 if no token was computed."""
        return (self.needed + self.repeated) / self.needed if self.needed else 1.0

    def note(self, request: int, start: int, end: int) -> None:
        """A row has computed the tokens [start, end) of a request. O(end - start)."""
        if request not in self._entries:
            self._entries[request] = self._open(request)
        entry = self._entries[request]
        slots = entry.slots[start:end]
        known = self._is_known[slots]
        num_known = int(np.count_nonzero(known))
        self._is_known[slots] = True
        self.computed += end - start
        self.needed += end - start - num_known
        if num_known:
            first_excused = max(entry.reached, int(self._num_prompt[request]) - 1, start)
            self.repeated += num_known - int(np.count_nonzero(known[first_excused - start :]))
        entry.reached = max(entry.reached, end)

    def close(self, request: int) -> None:
        """Forget a request that has ended."""
        self._entries.pop(request, None)

    def _open(self, request: int) -> _Entry:
        path = self._paths.path(request)
        firsts, lengths = self._first_slot[path], self._paths.lengths[path]
        shifts = firsts - (np.cumsum(lengths) - lengths).astype(np.int32)
        slots = np.repeat(shifts, lengths) + np.arange(lengths.sum(), dtype=np.int32)
        return _Entry(slots)


def replay_scheduled(
    trace: Trace,
    paths: PathTable,
    spec: CacheSpec,
    serving: Serving,
    *,
    lease_s: float | None = None,
    on_request: Callable[[], object] = lambda: None,
) -> ScheduledResult:
    """Replay a trace. A request that alone exceeds the cache is skipped.

    paths       of this trace
    lease_s     of the cache's sessions, in seconds of the trace; None: the cache's default
    on_request  is called when a request has ended

    The cache is audited at the end. About 30 us per row of a step.
    """
    start = time.perf_counter()
    run = _OpenReplay(trace, paths, spec, serving, lease_s, on_request)
    run.drain()
    return run.result(time.perf_counter() - start)


class SimulatedServer(ABC):
    """A scheduler and a cache that serve a trace's requests in simulated time. Subclasses decide
    when a request is sent."""

    def __init__(
        self,
        trace: Trace,
        spec: CacheSpec,
        serving: Serving,
        lease_s: float | None,
        on_request: Callable[[], object],
    ) -> None:
        self._trace, self._spec, self._serving = trace, spec, serving
        self._lease_s, self._on_request = lease_s, on_request
        self._clock = TraceClock()
        self._cache = spec.make(self._clock)
        self._scheduler = serving.make_scheduler(self._cache, self._clock)
        self._hits = np.zeros(len(trace), np.int64)
        self._sent_at = np.full(len(trace), np.nan)  # [requests] seconds; its first token counts
        self._ttft = np.full(len(trace), np.nan)  # from then on
        self._outputs: dict[str, IntArray] = {}  # recorded ones, of requests in the scheduler

    def _add(self, index: int) -> bool:
        """Add a request to the scheduler. False: it alone exceeds the cache, and has ended."""
        trace, name = self._trace, str(index)
        num_output = max(1, int(trace.num_output[index]))
        max_len = int(trace.num_prompt[index]) + num_output
        if max_len > self._cache.num_pages * self._cache.page_size:
            self._end(index)
            return False
        recorded = trace.request(index)
        session = recorded.session if self._spec.use_sessions else None
        if session is not None:
            self._scheduler.sessions.open(session, self._lease_s)
        self._outputs[name] = recorded.output
        self._scheduler.add(
            Request(
                request_id=name,
                token_ids=recorded.prompt,
                params=SamplingParams(max_tokens=num_output, namespace=recorded.namespace),
                seed=0,
                end_ids=frozenset(),
                max_len=max_len,
                session=session or "",
            )
        )
        return True

    def _run_step(self, schedule: SchedulerOutput) -> None:
        """Let a step's time pass; its rows sample what was recorded."""
        self._clock.now += self._serving.step.seconds(schedule)
        sampled = ModelRunnerOutput(recorded_samples(schedule, self._outputs), {})
        for output in self._scheduler.update(schedule, sampled):
            index = int(output.request_id)
            if output.token_ids and np.isnan(self._ttft[index]):
                self._ttft[index] = self._clock.now - self._sent_at[index]
            if output.finish is not None:
                self._hits[index] = output.finish.usage.cached_tokens
                del self._outputs[output.request_id]
                self._note_finish(index, output.finish)
                self._end(index)

    @abstractmethod
    def _note_finish(self, index: int, finish: Finish) -> None:
        """A served request has ended; `_end` follows."""

    @abstractmethod
    def _end(self, index: int) -> None:
        """A request has ended, served or not: send those that wait for it."""


class _OpenReplay(SimulatedServer):
    """Requests are sent at their recorded times, or when the request has ended whose output is in
    their prompt."""

    def __init__(
        self,
        trace: Trace,
        paths: PathTable,
        spec: CacheSpec,
        serving: Serving,
        lease_s: float | None,
        on_request: Callable[[], object],
    ) -> None:
        super().__init__(trace, spec, serving, lease_s, on_request)
        self._ledger = ComputeLedger(trace, paths)
        self._num_arrived = 0
        self._arrivals = trace.times * serving.time_scale  # [requests] seconds
        self._predecessors = predecessors(trace, paths)
        self._waiting: dict[int, list[int]] = {}  # {predecessor: requests that wait for its end}
        self._has_ended = np.zeros(len(trace), np.bool_)
        self._sent_as: dict[int, int] = {}  # {request: its place in the order of sending}
        self._admitted: dict[int, None] = {}  # requests in order of admission
        self._num_left = trace.session_sizes()  # by session: its requests that have not ended

    def drain(self) -> None:
        """Serve all requests."""
        clock, scheduler = self._clock, self._scheduler
        while scheduler.has_work or self._num_arrived < len(self._trace):
            if not scheduler.has_work:
                clock.now = max(clock.now, float(self._arrivals[self._num_arrived]))
            self._take_arrivals()
            schedule = scheduler.schedule()
            if schedule is None:
                continue
            rows = schedule.rows
            for name, start, count in zip(
                rows.request_ids, rows.starts, rows.num_tokens, strict=True
            ):
                self._admitted.setdefault(int(name))
                self._ledger.note(int(name), start, start + count)
            self._run_step(schedule)

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
                self._waiting.setdefault(before, []).append(index)
        self._num_arrived = max(self._num_arrived, due)

    def _send(self, index: int, now: float) -> None:
        self._sent_at[index], self._sent_as[index] = now, len(self._sent_as)
        self._add(index)

    def _note_finish(self, index: int, finish: Finish) -> None:
        del finish
        self._ledger.close(index)

    def _end(self, index: int) -> None:
        self._on_request()
        self._has_ended[index] = True
        for later in self._waiting.pop(index, ()):
            self._send(later, self._clock.now)
        session = self._trace.sessions[index]
        if session is not None:
            self._num_left[session] -= 1
            if not self._num_left[session]:
                self._scheduler.sessions.close(session)


def predecessors(trace: Trace, paths: PathTable) -> Ints:
    """[requests] for each request, the earlier one whose output, or the beginning of it, is in its
    prompt; -1: none.

    Of several, it is the one with the longest common prefix; of equals, the last one.
    """
    owners = np.full(len(paths.lengths), -1, np.int64)  # by segment: the request that generated it
    earlier = np.full(len(trace), -1, np.int64)
    for index in range(len(trace)):
        path = paths.path(index)
        before = owners[path[: paths.num_usable[index]]]
        known = before[before >= 0]
        if len(known):
            earlier[index] = known[-1]
        if trace.num_output[index] > 1:
            first = int(np.searchsorted(paths.starts[path], trace.num_prompt[index], "right")) - 1
            owners[path[first]] = owners[path[-1]] = index
    return earlier


def _max_overtaken(admitted: list[int]) -> int:
    """The most requests that were sent after a request and admitted before it. `admitted`: places
    in the order of sending, in order of admission."""
    before, most = SortedList(), 0
    for place in admitted:
        most = max(most, len(before) - before.bisect_right(place))
        before.add(place)
    return most


def recorded_samples(
    schedule: SchedulerOutput, outputs: Mapping[str, IntArray]
) -> tuple[SampleOutput | None, ...]:
    """The sampled token of each row: the recorded one, or 0 after the last of them; None for a row
    that does not sample. `outputs`: the recorded outputs by request id.

    Reads the schedule's columns, since making a `ScheduledRequest` for each row would take a sixth
    of a replay's time.
    """
    rows, samples = schedule.rows, list[SampleOutput | None]()
    for name, start, count, spec in zip(
        rows.request_ids, rows.starts, rows.num_tokens, rows.samples, strict=True
    ):
        if spec is None:
            samples.append(None)
            continue
        output, index = outputs[name], start + count - spec.num_prompt
        samples.append(SampleOutput(int(output[index]) if index < len(output) else 0, None, ()))
    return tuple(samples)
