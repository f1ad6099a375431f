"""`study_trace`: replays a trace through many caches; `study_document`: the results as JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from radixserve.replay.bounds import (
    ReuseDistances,
    clairvoyant_hits,
    reuse_distances,
    reuse_spans,
)
from radixserve.replay.caches import GIB, CacheSpec, ReplayResult, none_if_nan
from radixserve.replay.direct import replay_direct
from radixserve.replay.paths import PathTable, build_paths
from radixserve.replay.scheduled import ScheduledResult, Serving, replay_scheduled
from radixserve.replay.trace import Floats, Trace

# Opens a progress bar: its title and the number of requests; inside, a call counts one request.
Watch = Callable[[str, int], AbstractContextManager[Callable[[], object]]]
Kind = tuple[str, int]  # the label and the page size of a cache

_CURVE_POINTS = 48  # of the plot of the clairvoyant bound over the cache size
_SHARE_STEPS = 100


def unwatched(_title: str, _total: int) -> AbstractContextManager[Callable[[], object]]:
    """A `Watch` that shows nothing."""
    return nullcontext(lambda: None)


@dataclass(frozen=True, slots=True)
class Study:
    """The replays of one trace. Counts are prompt tokens, unless their names say otherwise."""

    trace: Trace
    paths: PathTable
    reuse: ReuseDistances
    bounds: dict[int, int]  # by cache size: tokens that a clairvoyant cache reuses
    direct: list[ReplayResult] = field(default_factory=list)
    scheduled: list[ScheduledResult] = field(default_factory=list)

    @property
    def ideal_rate(self) -> float:
        """The hit rate of an unlimited cache."""
        return self.paths.reusable_tokens / self.trace.prompt_tokens

    def bound_rate(self, cache_tokens: int) -> float:
        return self.bounds[cache_tokens] / self.trace.prompt_tokens

    def reusable_shares(self) -> Floats:
        """[101] percentiles, over the requests, of the reusable part of the prompt, 0.0 to 1.0."""
        shares = self.paths.reusable / self.trace.num_prompt
        return np.percentile(shares, np.linspace(0, 100, _SHARE_STEPS + 1))

    def bound_curve(self, low: float, high: float) -> tuple[Floats, Floats]:
        """Cache sizes from `low` to `high`, evenly spaced on a log scale, and their clairvoyant hit
        rates."""
        sizes = np.unique(np.geomspace(low, high, _CURVE_POINTS).round())
        kept = self.trace.num_kept
        hits = [clairvoyant_hits(self.paths, kept, int(size)).sum() for size in sizes]
        return sizes, np.asarray(hits) / self.trace.prompt_tokens

    def by_kind(self) -> dict[Kind, dict[int, ReplayResult]]:
        """The direct replays by kind of cache, then by size."""
        kinds: dict[Kind, dict[int, ReplayResult]] = {}
        for result in self.direct:
            spec = result.spec
            kinds.setdefault((spec.label, spec.page_size), {})[spec.cache_tokens] = result
        return kinds


def study_trace(
    trace: Trace,
    specs: Sequence[CacheSpec] | Callable[[PathTable], Sequence[CacheSpec]],
    servings: Sequence[Serving] = (),
    *,
    lease_s: float | None = None,
    watch: Watch = unwatched,
) -> Study:
    """Replay the trace through each cache and, for each of `servings`, through the scheduler.

    specs    the caches; or a function of the trace's paths that returns them
    lease_s  of the caches' sessions, in seconds of the trace; None: the cache's default
    watch    opens a progress bar
    """
    with watch("reading", len(trace)) as step:
        paths = build_paths(trace, on_request=step)
    caches = specs(paths) if callable(specs) else specs
    sizes = sorted({spec.cache_tokens for spec in caches})
    bounds = {size: int(clairvoyant_hits(paths, trace.num_kept, size).sum()) for size in sizes}
    study = Study(trace, paths, reuse_distances(reuse_spans(paths)), bounds)
    for spec in caches:
        with watch(_title(spec), len(trace)) as step:
            study.direct.append(replay_direct(trace, spec, lease_s=lease_s, on_request=step))
    for serving in servings:
        for spec in caches:
            with watch(f"{serving.order}, {_title(spec)}", len(trace)) as step:
                study.scheduled.append(
                    replay_scheduled(trace, paths, spec, serving, lease_s=lease_s, on_request=step)
                )
    return study


def default_sizes(paths: PathTable, trace: Trace) -> list[int]:
    """Five cache sizes: from a hundredth of the distinct tokens, or the longest request's length,
    to all distinct tokens."""
    most = paths.distinct_tokens
    least = max(1, min(most, max(trace.longest, most // 100)))
    sizes = {_rounded_up(float(size)) for size in np.geomspace(least, max(most, least), 5)}
    return sorted(sizes)


def _rounded_up(size: float) -> int:
    """`size` rounded up to two digits."""
    unit: int = 10 ** max(0, len(str(int(size))) - 2)
    return int(-(-size // unit)) * unit


def _title(spec: CacheSpec) -> str:
    return f"{spec.label}, page {spec.page_size}, {spec.cache_tokens:,} tokens"


Rows = list[dict[str, Any]]


def study_document(study: Study, bytes_per_token: int) -> dict[str, Any]:
    """A study as a JSON document. Counts are prompt tokens, unless their names say otherwise; rates
    are 0.0 to 1.0."""
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
    times = {f"ttft_p{percent}_s": result.ttft_at(percent) for percent in (50, 95, 99)}
    times["ttft_mean_s"] = result.mean_ttft_s
    counts = ("computed_tokens", "needed_tokens", "repeated_tokens", "max_overtaken")
    return {
        **_run(result),
        **asdict(result.serving),
        **{name: none_if_nan(value) for name, value in times.items()},
        **{name: getattr(result, name) for name in (*counts, "preemptions", "steps", "span_s")},
        "compute_once_ratio": result.compute_ratio,
    }


def next_gigabyte(study: Study, bytes_per_token: int) -> Rows:
    """How many more tokens a larger cache reuses: for each cache and for the clairvoyant bound,
    from each size to the next."""
    kinds = study.by_kind().items()
    hits = {
        kind: {size: result.hit_tokens for size, result in runs.items()} for kind, runs in kinds
    }
    hits["clairvoyant", 1] = study.bounds
    rows = []
    for (label, page_size), by_size in hits.items():
        for low, high in pairwise(sorted(by_size)):
            gib, gained = (high - low) * bytes_per_token / GIB, by_size[high] - by_size[low]
            row = {"label": label, "page_size": page_size, "from_tokens": low, "to_tokens": high}
            rows.append({**row, "gib": gib, "hit_tokens": gained, "tokens_per_gib": gained / gib})
    return rows


def page_losses(study: Study) -> Rows:
    """How many hits a cache loses by its pages, blocks or states: compared with page size 1 and the
    same policy (LRU for a hash cache), without states. Negative: it gains. [] if page size 1 was
    not replayed."""
    results = {result.spec: result for result in study.direct}
    rows = []
    for spec, result in results.items():
        exact = CacheSpec(spec.cache_tokens, spec.policy, use_sessions=spec.use_sessions)
        if exact in results and exact != spec and spec.index != "off":
            lost = results[exact].hit_tokens - result.hit_tokens
            row = {"label": spec.label, "page_size": spec.page_size}
            row |= {"cache_tokens": spec.cache_tokens, "hit_tokens": lost}
            rows.append({**row, "rate": lost / study.trace.prompt_tokens})
    return rows


def best_fits(study: Study) -> Rows:
    """For each size, the cache with the most hits, the first of equals; `gap`: to the bound."""
    rows = []
    for size in sorted(study.bounds):
        results = [result for result in study.direct if result.spec.cache_tokens == size]
        best = max(results, key=lambda result: result.hit_tokens)
        row = {"cache_tokens": size, "label": best.spec.label, "page_size": best.spec.page_size}
        rates = {"hit_rate": best.hit_rate, "bound": study.bound_rate(size)}
        rows.append({**row, **rates, "gap": rates["bound"] - rates["hit_rate"]})
    return rows


def mean_gaps(study: Study) -> Rows:
    """For each kind of cache, the mean gap to the bound over all sizes; smallest first."""
    rows = []
    for (label, page_size), by_size in study.by_kind().items():
        gaps = [study.bound_rate(size) - result.hit_rate for size, result in by_size.items()]
        rows.append({"label": label, "page_size": page_size, "gap": sum(gaps) / len(gaps)})
    return sorted(rows, key=lambda row: row["gap"])
