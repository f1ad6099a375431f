"""A trace through the caches of several replicas, each request where a router sends it.

As in `direct` a request is served at once when it arrives; its time is modelled: prefills of a
replica follow each other, answers are drawn beside them. Routers know what has happened until now,
and the tree router what the caches' events say, which come late.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from radixserve.checks import check_choice, check_float, check_int
from radixserve.replay.caches import CacheSpec, ReplayResult, TraceClock
from radixserve.replay.direct import replay_direct, serve
from radixserve.replay.report import Finding, format_tokens
from radixserve.replay.routers import ROUTERS, make_router
from radixserve.replay.serving import StepModel
from radixserve.replay.study import Watch, unwatched
from radixserve.replay.trace import Floats, Ints, Trace


@dataclass(frozen=True, slots=True)
class Cluster:
    """Equal replicas and their router. InvalidRequest for what there is not."""

    num_replicas: int
    router: str = "tree"
    event_delay_s: float = 0.1  # from a cache to the router, in time of the trace
    step: StepModel = field(default_factory=StepModel)

    def __post_init__(self) -> None:
        check_int("num_replicas", self.num_replicas, 1, 1024)
        check_choice("router", self.router, tuple(ROUTERS))
        check_float("event_delay_s", self.event_delay_s, 0.0, 1e6)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterResult(ReplayResult):
    """`spec` is the cache of one replica."""

    cluster: Cluster
    replicas: Ints  # [requests] where each went; -1: it did not fit
    work_s: Floats  # [replicas] modelled seconds of prefill and decode

    @property
    def max_load(self) -> float:
        """Work of the busiest replica over the mean; 1.0 at best."""
        return float(self.work_s.max() / max(self.work_s.mean(), 1e-12))


def replay_replicas(
    trace: Trace,
    spec: CacheSpec,
    cluster: Cluster,
    *,
    on_request: Callable[[], object] = lambda: None,
) -> ClusterResult:
    """`spec`: the cache of each replica. Audits all caches at the end. Deterministic."""
    start, clock, step = time.perf_counter(), TraceClock(), cluster.step
    caches = [spec.make(clock) for _ in range(cluster.num_replicas)]
    router = make_router(cluster.router, caches, trace, step, clock)
    hits, replicas = np.zeros(len(trace), np.int64), np.full(len(trace), -1, np.int64)
    work_s, busy_until = np.zeros(len(caches)), np.zeros(len(caches))
    due: list[tuple[float, int, Callable[[], object]]] = []  # a heap
    numbers = itertools.count()

    def plan(at: float, call: Callable[[], object]) -> None:
        heapq.heappush(due, (at, next(numbers), call))

    for request in trace:
        while due and due[0][0] <= request.time:
            clock.now, _, call = heapq.heappop(due)
            call()
        clock.now = request.time
        on_request()
        if len(request.kept) > spec.num_pages * spec.page_size:
            continue
        number = router.choose(request)
        cached = serve(caches[number], request, None)
        num_prompt, num_output = len(request.prompt), len(request.output)
        prefill_s = (num_prompt - (cached or 0)) * step.prefill_token_s
        token_s = step.decode_row_s + step.kv_token_s * num_prompt
        work_s[number] += prefill_s + num_output * token_s
        busy_until[number] = first = max(busy_until[number], clock.now) + prefill_s
        plan(clock.now + cluster.event_delay_s, router.events(number))
        plan(first, partial(router.start, request.index))
        last = first + num_output * (step.fixed_s + token_s)
        last = max(last, clock.now + cluster.event_delay_s)
        plan(last, partial(router.end, request.index, num_output))
        if cached is not None:
            hits[request.index], replicas[request.index] = cached, number
    for cache in caches:
        cache.check()
    return ClusterResult(
        spec=spec,
        cluster=cluster,
        hits=hits,
        is_served=replicas >= 0,
        replicas=replicas,
        work_s=work_s,
        prompt_tokens=trace.prompt_tokens,
        evicted_tokens=sum(cache.stats()["evicted_tokens"] for cache in caches),
        seconds=time.perf_counter() - start,
    )


def replay_clusters(
    trace: Trace,
    specs: Sequence[CacheSpec],
    clusters: Sequence[Cluster],
    *,
    watch: Watch = unwatched,
) -> list[dict[str, Any]]:
    """A row for each cluster with each cache, beside one cache of the same size in all."""
    rows: list[dict[str, Any]] = []
    whole: dict[int, float] = {}  # hit rate of one cache, by its size
    for spec, cluster in product(specs, clusters):
        size = spec.cache_tokens * cluster.num_replicas
        if size not in whole:
            one = replace(spec, cache_tokens=size)
            with watch(f"one cache, {size:,} tokens", len(trace)) as step:
                whole[size] = replay_direct(trace, one, on_request=step).hit_rate
        with watch(f"{cluster.router}, {cluster.num_replicas} replicas", len(trace)) as step:
            result = replay_replicas(trace, spec, cluster, on_request=step)
        rows.append(
            {
                "cache_tokens": spec.cache_tokens,
                "replicas": cluster.num_replicas,
                "router": cluster.router,
                "event_delay_s": cluster.event_delay_s,
                "hit_rate": result.hit_rate,
                "one_cache_hit_rate": whole[size],
                "max_load": result.max_load,
                "too_large_requests": result.num_too_large,
                "seconds": result.seconds,
            }
        )
    return rows


def cluster_finding(document: dict[str, Any]) -> Finding:
    heads = ("router", "replicas", "tokens each", "hit %", "one cache %", "ratio", "max/mean load")
    rows = [
        (
            row["router"],
            str(row["replicas"]),
            format_tokens(row["cache_tokens"]),
            f"{100 * row['hit_rate']:.2f}",
            f"{100 * row['one_cache_hit_rate']:.2f}",
            f"{row['hit_rate'] / max(row['one_cache_hit_rate'], 1e-9):.3f}",
            f"{row['max_load']:.2f}",
        )
        for row in document["replicas"]
    ]
    lines = ["load: modelled seconds of prefill and decode over the whole trace"]
    title = f"{document['trace']}, {document['requests']:,} requests"
    return Finding(title, heads, rows, lines)
