"""Rows and a table of clusters on a trace, beside one cache of the same size in all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from radixserve.replay.caches import CacheSpec
from radixserve.replay.cluster import Cluster
from radixserve.replay.direct import replay_direct
from radixserve.replay.replicas import ClusterResult, replay_replicas
from radixserve.replay.report import Finding, format_tokens
from radixserve.replay.study import Watch, unwatched
from radixserve.replay.trace import Trace


def replay_clusters(
    trace: Trace,
    specs: Sequence[CacheSpec],
    clusters: Sequence[Cluster],
    *,
    watch: Watch = unwatched,
) -> list[dict[str, Any]]:
    """A row for each cluster with each cache, beside one cache of the size of all, which is never
    lost; with autoscaling of as many as there were on average."""
    rows: list[dict[str, Any]] = []
    whole: dict[int, float] = {}  # hit rate of one cache, by its size
    for spec, cluster in product(specs, clusters):
        with watch(f"{cluster.router}, {cluster.num_replicas} replicas", len(trace)) as step:
            result = replay_replicas(trace, spec, cluster, on_request=step)
        number = cluster.num_replicas
        if cluster.autoscaling is not None:
            number = max(1, round(result.mean_replicas))
        size = spec.cache_tokens * number
        if size not in whole:
            one = replace(spec, cache_tokens=size)
            with watch(f"one cache, {size:,} tokens", len(trace)) as step:
                whole[size] = replay_direct(trace, one, on_request=step).hit_rate
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
        if not cluster.is_fixed:
            rows[-1] |= _changes(result)
    return rows


def _changes(result: ClusterResult) -> dict[str, Any]:
    """What only failures and autoscaling change."""
    return {
        "mean_replicas": result.mean_replicas,
        "failures": result.num_failures,
        "moved_requests": result.num_moved,
        "failed_requests": result.num_failed,
        "recomputed_tokens": result.recomputed_tokens,
        "lost_tokens": result.lost_tokens,
        "ttft_p95_s": result.ttft_p95_s,
    }


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


def changes_finding(document: dict[str, Any]) -> Finding | None:
    """What failures and autoscaling did; None where replicas were fixed."""
    heads = ("router", "replicas", "mean", "failures", "moved", "failed", "again", "lost", "TTFT")
    rows = [
        (
            row["router"],
            str(row["replicas"]),
            f"{row['mean_replicas']:.2f}",
            *(str(row[name]) for name in ("failures", "moved_requests", "failed_requests")),
            *(format_tokens(row[name]) for name in ("recomputed_tokens", "lost_tokens")),
            f"{row['ttft_p95_s']:.2f} s",
        )
        for row in document["replicas"]
        if "mean_replicas" in row
    ]
    lines = [
        "replicas, mean: at the beginning, over the trace; TTFT: modelled, 95 % are less",
        "moved: requests lost their replica and went on elsewhere; failed: they lost three, or "
        "waited too long",
        "again: tokens that these had computed and computed again, taken off the hits above; "
        "lost: tokens cached in lost replicas",
        "load above: over an equal part of the work that came while the replica was there",
    ]
    return Finding("replicas come and go", heads, rows, lines) if rows else None
