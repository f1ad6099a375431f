"""A study as plain data, for JSON."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from radixserve.replay.answers import best_fits, mean_gaps, next_gigabyte, page_losses
from radixserve.replay.caches import CacheSpec
from radixserve.replay.direct import DirectResult
from radixserve.replay.serving import ScheduledResult
from radixserve.replay.study import Study


def study_document(study: Study, bytes_per_token: int) -> dict[str, Any]:
    """Counts are tokens of prompts unless the name says otherwise; rates are 0.0 to 1.0."""
    trace, paths = study.trace, study.paths
    reached = study.reuse.tokens.cumsum()
    return {
        "trace": trace.name,
        "requests": len(trace),
        "sessions": trace.num_sessions,
        "sessions_inferred": trace.sessions_inferred,
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
        "runs": [_direct(result) for result in study.direct],
        "scheduled": [_scheduled(result) for result in study.scheduled],
        "reusable_share_percentiles": study.reusable_shares().tolist(),
        "reuse_distance": {
            "tokens": study.reuse.edges[1:].tolist(),
            "reused_within": reached.tolist(),
        },
        "answers": {
            "bytes_per_token": bytes_per_token,
            "next_gigabyte": [
                {**asdict(gain), "tokens_per_gib": gain.tokens_per_gib}
                for gain in next_gigabyte(study, bytes_per_token)
            ],
            "page_loss": [asdict(loss) for loss in page_losses(study)],
            "best": [{**asdict(fit), "gap": fit.gap} for fit in best_fits(study)],
            "mean_gap": [
                {"label": label, "page_size": page_size, "gap": gap}
                for (label, page_size), gap in mean_gaps(study).items()
            ],
        },
    }


def _spec(spec: CacheSpec) -> dict[str, Any]:
    return {"label": spec.label, **asdict(spec)}


def _direct(result: DirectResult) -> dict[str, Any]:
    return {
        **_spec(result.spec),
        "hit_tokens": result.hit_tokens,
        "hit_rate": result.hit_rate,
        "too_large_requests": result.num_too_large,
        "evicted_tokens": result.evicted_tokens,
        "seconds": result.seconds,
    }


def _scheduled(result: ScheduledResult) -> dict[str, Any]:
    return {
        **_spec(result.spec),
        **asdict(result.serving),
        "hit_tokens": result.hit_tokens,
        "hit_rate": result.hit_rate,
        "ttft_mean_s": _number(result.mean_ttft_s),
        "ttft_p50_s": _number(result.ttft_at(50)),
        "ttft_p95_s": _number(result.ttft_at(95)),
        "ttft_p99_s": _number(result.ttft_at(99)),
        "computed_tokens": result.computed_tokens,
        "needed_tokens": result.needed_tokens,
        "repeated_tokens": result.repeated_tokens,
        "compute_once_ratio": result.compute_ratio,
        "too_large_requests": result.num_too_large,
        "max_overtaken": result.max_overtaken,
        "preemptions": result.preemptions,
        "steps": result.steps,
        "span_s": result.span_s,
        "evicted_tokens": result.evicted_tokens,
        "seconds": result.seconds,
    }


def _number(value: float) -> float | None:
    """JSON knows no nan."""
    return None if math.isnan(value) else value
