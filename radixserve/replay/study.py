"""`Study`: one trace through many caches, and the answers in its numbers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from radixserve.replay.bounds import (
    ReuseDistances,
    clairvoyant_hits,
    reuse_distances,
    reuse_spans,
)
from radixserve.replay.caches import GIB, CacheSpec, ReplayResult
from radixserve.replay.direct import replay_direct
from radixserve.replay.paths import PathTable, build_paths
from radixserve.replay.scheduled import replay_scheduled
from radixserve.replay.serving import ScheduledResult, Serving
from radixserve.replay.trace import Floats, Trace

# Opens a progress bar: its title and the number of requests; inside, a call counts one request.
Watch = Callable[[str, int], AbstractContextManager[Callable[[], object]]]
Kind = tuple[str, int]  # label and page size of a cache, without its size

_CURVE_POINTS = 48  # of the clairvoyant bound over the cache size, for the picture
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

    def lru_rate(self, cache_tokens: float) -> float:
        """The hit rate of token-exact LRU by its reuse distances, if every request fits."""
        return self.reuse.share_within(cache_tokens) * self.ideal_rate

    def reusable_shares(self) -> Floats:
        """[101] percentiles over the requests of: reusable part of the prompt, 0.0 to 1.0."""
        shares = self.paths.reusable / self.trace.num_prompt
        return np.percentile(shares, np.linspace(0, 100, _SHARE_STEPS + 1))

    def bound_curve(self, low: float, high: float) -> tuple[Floats, Floats]:
        """Cache sizes between the two, evenly on a log scale, and the clairvoyant hit rates."""
        sizes = np.unique(np.geomspace(low, high, _CURVE_POINTS).round())
        hits = [
            clairvoyant_hits(self.paths, self.trace.num_kept, int(size)).sum() for size in sizes
        ]
        return sizes, np.asarray(hits) / self.trace.prompt_tokens

    def by_kind(self) -> dict[Kind, dict[int, ReplayResult]]:
        """The direct replays by kind of cache, then by size."""
        kinds: dict[Kind, dict[int, ReplayResult]] = defaultdict(dict)
        for result in self.direct:
            spec = result.spec
            kinds[spec.label, spec.page_size][spec.cache_tokens] = result
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


# -- answers --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Gain:
    """The tokens that more memory saves with one kind of cache."""

    label: str
    page_size: int
    from_tokens: int
    to_tokens: int
    gib: float  # added
    hit_tokens: int  # gained over the whole trace

    @property
    def tokens_per_gib(self) -> float:
        return self.hit_tokens / self.gib


@dataclass(frozen=True, slots=True)
class PageLoss:
    """The hits that pages or blocks lose against the same policy at page size 1."""

    label: str
    page_size: int
    cache_tokens: int
    hit_tokens: int  # fewer; negative: more
    rate: float  # difference of the hit rates; 0.01 is a point


@dataclass(frozen=True, slots=True)
class Fit:
    """The best cache of one size, and its distance from the bound. Rates are 0.0 to 1.0."""

    cache_tokens: int
    label: str
    page_size: int
    hit_rate: float
    bound: float

    @property
    def gap(self) -> float:
        return self.bound - self.hit_rate


def next_gigabyte(study: Study, bytes_per_token: int) -> list[Gain]:
    """For each cache, between each two neighbouring sizes; and for the clairvoyant bound."""
    hits: dict[Kind, dict[int, int]] = {
        kind: {size: result.hit_tokens for size, result in by_size.items()}
        for kind, by_size in study.by_kind().items()
    }
    hits["clairvoyant", 1] = study.bounds
    return [
        Gain(*kind, low, high, (high - low) * bytes_per_token / GIB, by_size[high] - by_size[low])
        for kind, by_size in hits.items()
        for low, high in pairwise(sorted(by_size))
    ]


def page_losses(study: Study) -> list[PageLoss]:
    """Against page size 1 of the same policy (a hash cache: LRU); empty without that size."""
    found = {result.spec: result for result in study.direct}
    losses = []
    for spec, result in found.items():
        exact = CacheSpec(spec.cache_tokens, spec.policy, use_sessions=spec.use_sessions)
        if exact in found and exact != spec:
            lost = found[exact].hit_tokens - result.hit_tokens
            rate = lost / study.trace.prompt_tokens
            losses.append(PageLoss(spec.label, spec.page_size, spec.cache_tokens, lost, rate))
    return losses


def best_fits(study: Study) -> list[Fit]:
    """The cache with most hits at each size; the first one among equals."""
    fits = []
    for size in sorted(study.bounds):
        results = [result for result in study.direct if result.spec.cache_tokens == size]
        best = max(results, key=lambda result: result.hit_tokens)
        bound = study.bound_rate(size)
        fits.append(Fit(size, best.spec.label, best.spec.page_size, best.hit_rate, bound))
    return fits


def mean_gaps(study: Study) -> dict[Kind, float]:
    """By kind of cache: the mean distance to the bound over all sizes, smallest first."""
    gaps = {
        kind: sum(study.bound_rate(size) - one.hit_rate for size, one in by_size.items())
        / len(by_size)
        for kind, by_size in study.by_kind().items()
    }
    return dict(sorted(gaps.items(), key=lambda item: item[1]))
