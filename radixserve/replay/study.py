"""`Study`: one trace through many caches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import numpy as np

from radixserve.replay.bounds import (
    ReuseDistances,
    clairvoyant_hits,
    reuse_distances,
    reuse_spans,
)
from radixserve.replay.caches import CacheSpec, ReplayResult
from radixserve.replay.direct import replay_direct
from radixserve.replay.paths import PathTable, build_paths
from radixserve.replay.scheduled import replay_scheduled
from radixserve.replay.serving import ScheduledResult, Serving
from radixserve.replay.trace import Floats, Trace

# Opens a progress bar: its title and the number of requests; inside, a call counts one request.
Watch = Callable[[str, int], AbstractContextManager[Callable[[], object]]]
Kind = tuple[str, int]  # label and page size of a cache, without its size

_CURVE_POINTS = 48  # of the clairvoyant bound over the cache size, for the plot
_SHARE_STEPS = 100


def unwatched(_title: str, _total: int) -> AbstractContextManager[Callable[[], object]]:
    """A `Watch` that shows nothing."""
    return nullcontext(lambda: None)


@dataclass(frozen=True, slots=True)
class Study:
    """The replays of one trace. Token counts are of prompts unless the name says otherwise."""

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
        """[101] percentiles over the requests of: reusable part of the prompt, 0.0 to 1.0."""
        shares = self.paths.reusable / self.trace.num_prompt
        return np.percentile(shares, np.linspace(0, 100, _SHARE_STEPS + 1))

    def bound_curve(self, low: float, high: float) -> tuple[Floats, Floats]:
        """Cache sizes between the two, evenly on a log scale, and the clairvoyant hit rates."""
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
    """Replay the trace through each cache; and through a scheduler for each of `servings`.

    `specs` may be a function of the trace's paths, when the sizes depend on the trace.
    """
    with watch("reading", len(trace)) as step:
        paths = build_paths(trace, on_request=step)
    caches = specs(paths) if callable(specs) else specs
    sizes = sorted({spec.cache_tokens for spec in caches})
    bounds = {s: int(clairvoyant_hits(paths, trace.num_kept, s).sum()) for s in sizes}
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
    """Five sizes up to all distinct tokens, from a hundredth or the longest request's length."""
    most = paths.distinct_tokens
    least = max(1, min(most, max(trace.longest, most // 100)))
    sizes = {_rounded_up(float(size)) for size in np.geomspace(least, max(most, least), 5)}
    return sorted(sizes)


def _rounded_up(size: float) -> int:
    """To two digits."""
    unit: int = 10 ** max(0, len(str(int(size))) - 2)
    return int(-(-size // unit)) * unit


def _title(spec: CacheSpec) -> str:
    return f"{spec.label}, page {spec.page_size}, {spec.cache_tokens:,} tokens"
