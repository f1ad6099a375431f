"""A study as plain data: what `--json` prints, and what the tables of `report` are made from."""

from __future__ import annotations

import math
from dataclasses import asdict
from itertools import pairwise
from typing import Any

from radixserve.replay.caches import GIB, CacheSpec, ReplayResult
from radixserve.replay.serving import ScheduledResult
from radixserve.replay.study import Study

Rows = list[dict[str, Any]]


def study_document(study: Study, bytes_per_token: int) -> dict[str, Any]:
    """Counts are tokens of prompts unless the name says otherwise; rates are 0.0 to 1.0."""
    trace, paths = study.trace, study.paths
    return {
        "trace": trace.name,
        "requests": len(trace),
        "sessions": trace.num_sessions,
        "sessions_inferred": trace.sessions_inferred,
        "has_times": trace.has_times,
        "span_s": float(trace.times[-1]),
        "prompt_tokens": trace.prompt_tokens,
        "output_tokens": int(trace.num_output.sum()),
        "longest_request": trace.longest,
        "distinct_tokens": paths.distinct_tokens,
        "reusable_tokens": paths.reusable_tokens,
        "ideal_hit_rate": study.ideal_rate,
        "bounds": [
            {"cache_tokens": size, "hit_tokens": hits, "hit_rate": study.bound_rate(size)}
            for size, hits in sorted(study.bounds.items())
        ],
        "runs": [_run(result) for result in study.direct],
        "scheduled": [_scheduled(result) for result in study.scheduled],
        "reusable_share_percentiles": study.reusable_shares().tolist(),
        "reuse_distance": {
            "tokens": study.reuse.edges[1:].tolist(),
            "reused_within": study.reuse.tokens.cumsum().tolist(),
        },
        "answers": {
            "bytes_per_token": bytes_per_token,
            "next_gigabyte": next_gigabyte(study, bytes_per_token),
            "page_loss": page_losses(study),
            "best": best_fits(study),
            "mean_gap": mean_gaps(study),
        },
    }


def _run(result: ReplayResult) -> dict[str, Any]:
    return {
        "label": result.spec.label,
        **asdict(result.spec),
        "hit_tokens": result.hit_tokens,
        "hit_rate": result.hit_rate,
        "too_large_requests": result.num_too_large,
        "evicted_tokens": result.evicted_tokens,
        "seconds": result.seconds,
    }


def _scheduled(result: ScheduledResult) -> dict[str, Any]:
    times = {f"ttft_p{at}_s": result.ttft_at(at) for at in (50, 95, 99)}
    times["ttft_mean_s"] = result.mean_ttft_s
    counts = ("computed_tokens", "needed_tokens", "repeated_tokens", "max_overtaken")
    return {
        **_run(result),
        **asdict(result.serving),
        **{name: None if math.isnan(value) else value for name, value in times.items()},
        **{name: getattr(result, name) for name in (*counts, "preemptions", "steps", "span_s")},
        "compute_once_ratio": result.compute_ratio,
    }


def next_gigabyte(study: Study, bytes_per_token: int) -> Rows:
    """The tokens that more memory saves: for each cache, and for the clairvoyant bound, between
    each two neighbouring sizes."""
    kinds = study.by_kind().items()
    hits = {kind: {size: one.hit_tokens for size, one in runs.items()} for kind, runs in kinds}
    hits["clairvoyant", 1] = study.bounds
    rows = []
    for (label, page_size), by_size in hits.items():
        for low, high in pairwise(sorted(by_size)):
            gib, gained = (high - low) * bytes_per_token / GIB, by_size[high] - by_size[low]
            row = {"label": label, "page_size": page_size, "from_tokens": low, "to_tokens": high}
            rows.append({**row, "gib": gib, "hit_tokens": gained, "tokens_per_gib": gained / gib})
    return rows


def page_losses(study: Study) -> Rows:
    """The hits that pages, blocks or states lose against page size 1 of the same policy (a hash
    cache: of LRU) without states; negative: they gain. Empty without that size."""
    found = {result.spec: result for result in study.direct}
    rows = []
    for spec, result in found.items():
        exact = CacheSpec(spec.cache_tokens, spec.policy, use_sessions=spec.use_sessions)
        if exact in found and exact != spec:
            lost = found[exact].hit_tokens - result.hit_tokens
            row = {"label": spec.label, "page_size": spec.page_size}
            row |= {"cache_tokens": spec.cache_tokens, "hit_tokens": lost}
            rows.append({**row, "rate": lost / study.trace.prompt_tokens})
    return rows


def best_fits(study: Study) -> Rows:
    """The cache with most hits at each size, the first one among equals; gap: to the bound."""
    rows = []
    for size in sorted(study.bounds):
        results = [result for result in study.direct if result.spec.cache_tokens == size]
        best = max(results, key=lambda result: result.hit_tokens)
        row = {"cache_tokens": size, "label": best.spec.label, "page_size": best.spec.page_size}
        rates = {"hit_rate": best.hit_rate, "bound": study.bound_rate(size)}
        rows.append({**row, **rates, "gap": rates["bound"] - rates["hit_rate"]})
    return rows


def mean_gaps(study: Study) -> Rows:
    """By kind of cache: the mean distance to the bound over all sizes, smallest first."""
    rows = []
    for (label, page_size), by_size in study.by_kind().items():
        gaps = [study.bound_rate(size) - one.hit_rate for size, one in by_size.items()]
        rows.append({"label": label, "page_size": page_size, "gap": sum(gaps) / len(gaps)})
    return sorted(rows, key=lambda row: row["gap"])
