"""`replay_replicas`: a trace through the caches of several replicas, with a router.

As in `direct.py`, the cache serves a request at once when it arrives. Its time is modelled: a
replica runs one prefill after another, and decodes at the same time. A router knows the earlier
requests; the tree router also gets the caches' events, after a delay.

Replicas may be added and removed. A lost or removed replica loses its cache. Its requests continue
on other replicas, from the prompt and the tokens so far, as in `radixserve.fleet`.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import numpy as np

from radixserve.cache import EventBatch, EventLog, PrefixCache
from radixserve.checks import check_float, check_int
from radixserve.errors import InvalidRequest
from radixserve.fleet.autoscaling import Autoscaling
from radixserve.fleet.tree_router import MAX_LOST, WITHOUT_REPLICA_S, StepCosts, TreeRouter
from radixserve.replay.caches import CacheSpec, ReplayResult, TraceClock
from radixserve.replay.direct import serve
from radixserve.replay.scheduled import Serving, StepModel
from radixserve.replay.trace import Floats, Ints, Trace, TraceRequest

_MAX_REPLICAS = 1024
_MAX_S = 1e9
_EPSILON_S = 1e-6  # tolerance of delays, for rounding errors


@dataclass(frozen=True, slots=True)
class Failures:
    """When replicas are lost. It depends on the seed, but not on the router."""

    mean_s: float | None = None  # mean time from a replica's start to its failure; None: never
    at: tuple[tuple[float, int], ...] = ()  # additional failures: (seconds, replica)
    seed: int = 0

    def __post_init__(self) -> None:
        if self.mean_s is not None:
            check_float("mean_s", self.mean_s, 0.0, _MAX_S, open_low=True)

    def time_to_failure(self, replica: int, start: int) -> float:
        """Seconds from a replica's start to its failure. `start`: the start's number, from 0."""
        if self.mean_s is None:
            return math.inf
        return random.Random(f"{self.seed} {replica} {start}").expovariate(1.0 / self.mean_s)


class ReplayRouter(Protocol):
    """A router in a replay. A replica is known by its number from `add` to `remove`. A request that
    loses its replica is sent again as another attempt, with another number."""

    def add(self, replica: int, cache: PrefixCache) -> None:
        """Add a replica with this cache, which is empty."""
        ...

    def remove(self, replica: int) -> None: ...

    def choose(self, request: TraceRequest, attempt: int) -> int:
        """The replica for an attempt of a request. Called only if there is a replica."""
        ...

    def events(self, replica: int) -> Callable[[], object]:
        """Take the new events of a replica's cache. Returns the call that applies them, for the
        time when they arrive."""
        ...

    def start(self, attempt: int) -> None:
        """The first token has come. Ignored if the replica was removed meanwhile."""
        ...

    def end(self, attempt: int, num_output: int) -> None:
        """The attempt has ended. Ignored if the replica was removed meanwhile."""
        ...


class TreeReplayRouter:
    """A `TreeRouter` that gets the events of the replicas' caches."""

    def __init__(self, step: StepModel, clock: Callable[[], float]) -> None:
        self._router = TreeRouter(clock)
        self._costs = StepCosts(step.prefill_token_s, step.decode_row_s, step.kv_token_s)
        self._logs: dict[int, EventLog] = {}  # by number
        self._names: dict[int, str] = {}  # by number; a replica gets a new name at each start
        self._numbers: dict[str, int] = {}
        self._starts = itertools.count()

    def add(self, replica: int, cache: PrefixCache) -> None:
        name = f"{replica} {next(self._starts)}"
        log = self._logs[replica] = cache.open_events(1)
        self._names[replica], self._numbers[name] = name, replica
        self._router.add(name, self._costs)
        self._router.restart(name, log.snapshot())

    def remove(self, replica: int) -> None:
        name = self._names.pop(replica)
        del self._logs[replica], self._numbers[name]
        self._router.remove(name)

    def choose(self, request: TraceRequest, attempt: int) -> int:
        name = self._router.choose(str(attempt), request.prompt.tobytes(), request.namespace)
        assert name is not None
        return self._numbers[name]

    def events(self, replica: int) -> Callable[[], object]:
        return partial(self._take, self._names[replica], self._logs[replica].take())

    def _take(self, name: str, batch: EventBatch) -> None:
        if name in self._numbers:  # events of a lost replica are dropped
            self._router.take(name, batch)

    def start(self, attempt: int) -> None:
        self._router.start(str(attempt))

    def end(self, attempt: int, num_output: int) -> None:
        self._router.end(str(attempt), num_output)


# Makes a router without replicas for a cluster and a trace; the function is the trace's clock.
MakeRouter = Callable[["Cluster", Trace, Callable[[], float]], ReplayRouter]


def make_tree_router(
    cluster: Cluster,
    trace: Trace,  # noqa: ARG001
    clock: Callable[[], float],
) -> ReplayRouter:
    """The router of `radixserve serve --replicas`."""
    return TreeReplayRouter(cluster.step, clock)


@dataclass(frozen=True, slots=True)
class Cluster:
    """Equal replicas and their router. Raises InvalidRequest for values out of range."""

    num_replicas: int  # with autoscaling: at the beginning
    router: str = "tree"  # the router's name in tables
    event_delay_s: float = 0.1  # of cache events on the way to the router, in seconds of the trace
    step: StepModel = field(default_factory=StepModel)
    failures: Failures | None = None
    autoscaling: Autoscaling | None = None
    start_s: float = 60.0  # seconds until an added or lost replica serves, with an empty cache
    make_router: MakeRouter = make_tree_router

    def __post_init__(self) -> None:
        check_int("num_replicas", self.num_replicas, 1, _MAX_REPLICAS)
        check_float("event_delay_s", self.event_delay_s, 0.0, 1e6)
        check_float("start_s", self.start_s, 0.0, _MAX_S)
        rule = self.autoscaling
        if rule is not None:
            check_int("num_replicas", self.num_replicas, rule.min_replicas, rule.max_replicas)

    @property
    def is_fixed(self) -> bool:
        """Whether the replicas are the same from beginning to end."""
        return self.failures is None and self.autoscaling is None

    @property
    def most_replicas(self) -> int:
        return self.num_replicas if self.autoscaling is None else self.autoscaling.max_replicas


class Autoscaler:
    """Ray Serve's default policy. The number of replicas changes to the wanted one when that has
    been larger, or smaller, throughout the delay."""

    def __init__(self, rule: Autoscaling, num_replicas: int) -> None:
        self.num_replicas = num_replicas  # the number that was decided last
        self._rule = rule
        self._target = rule.target(Serving().max_running_requests)
        self._direction = 0
        self._since = 0.0

    def decide(self, now: float, num_ongoing: float) -> int:
        """The number of replicas from now on. `num_ongoing`: the ongoing requests of all replicas,
        as a mean over the look-back period."""
        rule = self._rule
        wanted = rule.num_wanted(num_ongoing, self._target)
        direction = (wanted > self.num_replicas) - (wanted < self.num_replicas)
        if direction != self._direction:
            self._direction, self._since = direction, now
        delay_s = rule.upscale_delay_s if direction > 0 else rule.downscale_delay_s
        if direction and now - self._since + _EPSILON_S >= delay_s:
            self.num_replicas, self._direction = wanted, 0
        return self.num_replicas


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterResult(ReplayResult):
    """The result of a replay through a cluster. `spec` is the cache of each replica. `hits` of a
    request that moved are those where its first tokens were computed; tokens that were computed
    again later are in `recomputed_tokens`."""

    cluster: Cluster
    replicas: Ints  # [requests] the last replica of each; -1: it did not fit, or failed
    work_s: Floats  # [replicas] modelled seconds of prefill and decode
    even_work_s: Floats  # [replicas] the same, if work were split equally among running replicas
    alive_s: Floats  # [replicas] how long each was running
    mean_replicas: float  # running ones, over the time of the trace
    ttft_s: Floats  # [requests] modelled time to first token; nan without a first token
    num_failures: int  # of replicas
    num_moved: int  # how often a request lost its replica and continued on another one
    num_failed: int  # requests that lost too many replicas, or waited too long for one
    recomputed_tokens: int  # tokens computed again after their request lost its replica
    lost_tokens: int  # cached tokens of replicas that were lost or removed

    @property
    def hit_rate(self) -> float:
        """The part of the prompt tokens that was not computed, minus tokens computed again."""
        return (self.hit_tokens - self.recomputed_tokens) / self.prompt_tokens

    @property
    def ttft_p95_s(self) -> float:
        known = self.ttft_s[~np.isnan(self.ttft_s)]
        return float(np.percentile(known, 95)) if len(known) else math.nan

    @property
    def max_load(self) -> float:
        """The work of the busiest replica over an equal share of all work; 1.0 at best."""
        if self.cluster.is_fixed:
            return float(self.work_s.max() / max(self.work_s.mean(), 1e-12))
        return float((self.work_s / np.maximum(self.even_work_s, 1e-12)).max())


@dataclass(slots=True, eq=False)
class _RequestState:
    """A request and its current attempt. Times are seconds of the trace."""

    request: TraceRequest  # its prompt ends with the output tokens of earlier attempts
    since: float  # when it arrived or last lost its replica
    known: int | None = None  # tokens whose K/V it had when it lost a replica; None: it has not
    num_lost: int = 0  # replicas that were lost while it ran there
    has_started: bool = False  # whether its first token has come
    attempt: int = -1  # number of the current attempt
    replica: int = -1
    cached: int = 0  # tokens found in the cache
    prefill_s: float = 0.0
    token_s: float = 0.0  # work per output token
    first: float = 0.0  # when its first token comes
    ends: float = 0.0  # when it ends


class _ClusterReplay:
    """A running replay: a simulation of events by time."""

    def __init__(self, trace: Trace, spec: CacheSpec, cluster: Cluster) -> None:
        self._trace, self._spec, self._cluster = trace, spec, cluster
        self._clock = TraceClock()
        size = cluster.most_replicas
        self._router = cluster.make_router(cluster, trace, self._clock)
        self._due: list[
            tuple[float, int, Callable[[], object]]
        ] = []  # a heap of (time, number, call)
        self._plans, self._attempts = itertools.count(), itertools.count()
        self._live: dict[int, PrefixCache] = {}  # running replicas, in order of their start
        self._wanted: set[int] = set()  # replicas that run or are starting
        self._starts = [0] * size  # how often each was started or stopped
        self._under_way: dict[int, _RequestState] = {}  # by attempt
        self._waiting: deque[_RequestState] = deque()  # for a replica
        self._ongoing_s = 0.0  # sum of the times of all requests, running or waiting
        rule = cluster.autoscaling
        self._autoscaler = None if rule is None else Autoscaler(rule, cluster.num_replicas)
        self._samples = deque([(0.0, 0.0)])  # time, _ongoing_s

        self._hits = np.zeros(len(trace), np.int64)
        self._fits = np.zeros(len(trace), np.bool_)
        self._replicas = np.full(len(trace), -1, np.int64)
        self._ttft_s = np.full(len(trace), np.nan)
        self._work_s, self._busy_until = np.zeros(size), np.zeros(size)
        self._even_s, self._alive_s, self._up_at = np.zeros(size), np.zeros(size), np.zeros(size)
        self._each_s = 0.0  # an equal share of all work for a replica that runs from the beginning
        self._evicted = self._failures = self._moved = self._failed = 0
        self._recomputed = self._lost_tokens = 0

    def run(self, on_request: Callable[[], object]) -> ClusterResult:
        start = time.perf_counter()
        for replica in range(self._cluster.num_replicas):
            self._wanted.add(replica)
            self._add(replica, 0)
        for seconds, replica in (self._cluster.failures or Failures()).at:
            self._plan(seconds, partial(self._fail, replica, None))
        if self._cluster.autoscaling is not None:
            self._plan(self._cluster.autoscaling.metrics_interval_s, self._scale)
        most = self._spec.num_pages * self._spec.page_size
        for request in self._trace:
            while self._due and self._due[0][0] <= request.time:
                self._next()
            self._advance(request.time)
            on_request()
            if len(request.kept) <= most:
                self._send(_RequestState(request, request.time))
        while self._waiting:
            self._next()
        for replica in list(self._live):
            self._note_gone(replica, self._live.pop(replica))
        now, alive_s = self._clock.now, float(self._alive_s.sum())
        return ClusterResult(
            spec=self._spec,
            cluster=self._cluster,
            hits=self._hits,
            is_served=self._fits,
            prompt_tokens=self._trace.prompt_tokens,
            evicted_tokens=self._evicted,
            seconds=time.perf_counter() - start,
            replicas=self._replicas,
            work_s=self._work_s,
            even_work_s=self._even_s,
            alive_s=self._alive_s,
            mean_replicas=alive_s / now if now else float(self._cluster.num_replicas),
            ttft_s=self._ttft_s,
            num_failures=self._failures,
            num_moved=self._moved,
            num_failed=self._failed,
            recomputed_tokens=self._recomputed,
            lost_tokens=self._lost_tokens,
        )

    # -- time ---------------------------------------------------------------------------------

    def _plan(self, due: float, call: Callable[[], object]) -> None:
        heapq.heappush(self._due, (due, next(self._plans), call))

    def _next(self) -> None:
        due, _, call = heapq.heappop(self._due)
        self._advance(due)
        call()

    def _advance(self, now: float) -> None:
        num_ongoing = len(self._under_way) + len(self._waiting)
        self._ongoing_s += (now - self._clock.now) * num_ongoing
        self._clock.now = now

    # -- requests -----------------------------------------------------------------------------

    def _send(self, state: _RequestState) -> None:
        now, step, request = self._clock.now, self._cluster.step, state.request
        if not self._live:
            self._waiting.append(state)
            self._plan(state.since + WITHOUT_REPLICA_S, partial(self._give_up, state))
            return
        attempt = state.attempt = next(self._attempts)
        replica = state.replica = self._router.choose(request, attempt)
        cached = serve(self._live[replica], request, None)
        num_prompt, num_output = len(request.prompt), len(request.output)
        state.cached = cached or 0
        state.prefill_s = prefill_s = (num_prompt - state.cached) * step.prefill_token_s
        state.token_s = token_s = step.decode_row_s + step.kv_token_s * num_prompt
        self._note_work(replica, prefill_s + num_output * token_s)
        self._busy_until[replica] = max(self._busy_until[replica], now) + prefill_s
        state.first = first = float(self._busy_until[replica])
        state.ends = first + num_output * (step.fixed_s + token_s)
        self._under_way[attempt] = state
        self._plan(now + self._cluster.event_delay_s, self._router.events(replica))
        self._plan(first, partial(self._router.start, attempt))
        last = max(state.ends, now + self._cluster.event_delay_s)
        self._plan(last, partial(self._end, attempt, num_output))
        if not state.has_started:
            self._ttft_s[request.index] = first - self._trace.times[request.index]
        if cached is not None:
            self._fits[request.index], self._replicas[request.index] = True, replica
        self._count(state, 1)

    def _count(self, state: _RequestState, sign: int) -> None:
        """Count the tokens that an attempt found cached; with `sign` -1, undo that."""
        if state.known is None:
            self._hits[state.request.index] += sign * state.cached
        else:
            self._recomputed += sign * (state.known - state.cached)

    def _note_work(self, replica: int, seconds: float) -> None:
        self._work_s[replica] += seconds
        self._each_s += seconds / len(self._live)

    def _end(self, attempt: int, num_output: int) -> None:
        self._under_way.pop(attempt, None)
        self._router.end(attempt, num_output)

    def _note_lost(self, state: _RequestState) -> None:
        """A request lost its replica: note how far it had come."""
        now, request, step = self._clock.now, state.request, self._cluster.step
        since_begin = now - (state.first - state.prefill_s)
        part, num_came = 0.0, 0
        if since_begin < 0.0:  # its prefill has not begun: its next attempt counts instead
            self._count(state, -1)
        else:
            part = min(since_begin / state.prefill_s, 1.0) if state.prefill_s else 1.0
            if now >= state.first:
                state.has_started = True
                num_came = int((now - state.first) / (step.fixed_s + state.token_s))
                num_came = min(num_came, len(request.output) - 1)
            num_done = int(part * (len(request.prompt) - state.cached))
            state.known = state.cached + num_done + max(num_came - 1, 0)
        undone = len(request.output) - num_came
        self._note_work(state.replica, -(1.0 - part) * state.prefill_s - undone * state.token_s)
        self._replicas[request.index] = -1
        if num_came:
            prompt = np.concatenate((request.prompt, request.output[:num_came]))
            state.request = replace(request, prompt=prompt, output=request.output[num_came:])
        state.since, state.num_lost = now, state.num_lost + 1

    def _give_up(self, state: _RequestState) -> None:
        """A request that has waited WITHOUT_REPLICA_S for a replica fails."""
        if state in self._waiting and self._clock.now >= state.since + WITHOUT_REPLICA_S:
            self._waiting.remove(state)
            self._note_failed(state)

    def _note_failed(self, state: _RequestState) -> None:
        self._failed += 1
        self._fits[state.request.index] = True
        if not state.has_started:
            self._ttft_s[state.request.index] = np.nan

    # -- replicas -----------------------------------------------------------------------------

    def _add(self, replica: int, start: int) -> None:
        """A replica runs from now on, unless it was stopped since. `start`: number of its start."""
        if self._starts[replica] != start:
            return
        now, failures = self._clock.now, self._cluster.failures
        self._live[replica] = cache = self._spec.make(self._clock)
        self._router.add(replica, cache)
        self._busy_until[replica] = self._up_at[replica] = now
        self._even_s[replica] -= self._each_s
        if failures is not None and failures.mean_s is not None:
            after = failures.time_to_failure(replica, start)
            self._plan(now + after, partial(self._fail, replica, start))
        waiting, self._waiting = self._waiting, deque()
        for state in waiting:
            self._send(state)

    def _note_gone(self, replica: int, cache: PrefixCache) -> None:
        cache.check()
        self._evicted += cache.stats()["evicted_tokens"]
        self._alive_s[replica] += self._clock.now - self._up_at[replica]
        self._even_s[replica] += self._each_s

    def _lose(self, replicas: Sequence[int]) -> None:
        """Lose all of them at once; their requests then continue on other replicas."""
        now = self._clock.now
        ours = [state for state in self._under_way.values() if state.replica in replicas]
        lost = [state for state in ours if state.ends > now]
        for state in ours:
            del self._under_way[state.attempt]
        for state in lost:
            self._note_lost(state)
        for replica in replicas:
            cache = self._live.pop(replica)
            self._lost_tokens += cache.stats()["pages_cached"] * cache.page_size
            self._note_gone(replica, cache)
            self._router.remove(replica)
        for state in lost:
            if state.num_lost < MAX_LOST:
                self._moved += 1
                self._send(state)
            else:
                self._note_failed(state)

    def _fail(self, replica: int, start: int | None) -> None:
        """A replica is lost. `start`: the start for which this was planned; None: any."""
        if replica in self._live and start in (None, self._starts[replica]):
            self._failures += 1
            self._start(replica)
            self._lose([replica])

    def _start(self, replica: int) -> None:
        self._starts[replica] += 1
        due = self._clock.now + self._cluster.start_s
        self._plan(due, partial(self._add, replica, self._starts[replica]))

    def _scale(self) -> None:
        rule, now = self._cluster.autoscaling, self._clock.now
        assert rule is not None
        assert self._autoscaler is not None
        self._samples.append((now, self._ongoing_s))
        while len(self._samples) > 2 and self._samples[1][0] <= now - rule.look_back_period_s:
            self._samples.popleft()
        before, ongoing_s = self._samples[0]
        mean = (self._ongoing_s - ongoing_s) / (now - before)
        num_wanted = self._autoscaler.decide(now, mean)
        while len(self._wanted) < num_wanted:
            replica = min(set(range(self._cluster.most_replicas)) - self._wanted)
            self._wanted.add(replica)
            self._start(replica)
        coming = sorted(self._wanted - set(self._live))
        gone = [*self._live, *coming][num_wanted:]  # starting replicas, then the newest ones
        for replica in gone:
            self._wanted.remove(replica)
            self._starts[replica] += 1
        self._lose([replica for replica in gone if replica in self._live])
        self._plan(now + rule.metrics_interval_s, self._scale)


def replay_replicas(
    trace: Trace,
    spec: CacheSpec,
    cluster: Cluster,
    *,
    on_request: Callable[[], object] = lambda: None,
) -> ClusterResult:
    """Replay a trace through a cluster. `spec`: the cache of each replica. Deterministic.

    All caches are audited, those of lost replicas included. Raises InvalidRequest for failures or
    autoscaling with a trace without times.
    """
    if not (cluster.is_fixed or trace.has_times):
        raise InvalidRequest(f"{trace.name} has no times, which failures and autoscaling need")
    return _ClusterReplay(trace, spec, cluster).run(on_request)
