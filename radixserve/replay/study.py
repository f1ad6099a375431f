"""`Study`: one trace through many caches, and what was learned about the trace itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import numpy as np

from radixserve.replay.bounds import clairvoyant_hits
from radixserve.replay.caches import CacheSpec
from radixserve.replay.direct import DirectResult, replay_direct
from radixserve.replay.paths import PathTable, build_paths
from radixserve.replay.reuse import ReuseDistances, reuse_distances, reuse_spans
from radixserve.replay.scheduled import replay_scheduled
from radixserve.replay.serving import ScheduledResult, Serving
from radixserve.replay.trace import Floats, Trace, TraceRequest

# Opens a progress bar: its title and how many requests; inside, a call says that one more is done.
Watch = Callable[[str, int], AbstractContextManager[Callable[[], object]]]

_CURVE_POINTS = 48  # of the clairvoyant bound over the cache size, for the picture
_SHARE_STEPS = 100


def unwatched(_title: str, _total: int) -> AbstractContextManager[Callable[[], object]]:
    """A `Watch` that shows nothing."""
    return nullcontext(lambda: None)


@dataclass(frozen=True, slots=True)
class Study:
    """What is known of one trace. Token counts are of prompts unless the name says otherwise."""

    trace: Trace
    paths: PathTable
    reuse: ReuseDistances
    bounds: dict[int, int]  # by cache size: tokens that a clairvoyant cache reuses
    direct: list[DirectResult] = field(default_factory=list)
    scheduled: list[ScheduledResult] = field(default_factory=list)

    @property
    def ideal_rate(self) -> float:
        """The hit rate of a cache without end."""
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
        paths = build_paths(trace, _watched(trace, step))
    caches = specs(paths) if callable(specs) else specs
    sizes = sorted({spec.cache_tokens for spec in caches})
    bounds = {s: int(clairvoyant_hits(paths, trace.num_kept, s).sum()) for s in sizes}
    study = Study(trace, paths, reuse_distances(reuse_spans(paths)), bounds)
    for spec in caches:
        with watch(_title(spec), len(trace)) as step:
            requests = _watched(trace, step)
            study.direct.append(replay_direct(trace, spec, lease_s=lease_s, requests=requests))
    for serving in servings:
        for spec in caches:
            with watch(f"{serving.order}, {_title(spec)}", len(trace)) as step:
                study.scheduled.append(
                    replay_scheduled(trace, paths, spec, serving, lease_s=lease_s, on_finish=step)
                )
    return study


def default_sizes(paths: PathTable, trace: Trace) -> list[int]:
    """Five sizes up to all distinct tokens, from a hundredth or what the longest request needs."""
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


def _watched(trace: Trace, step: Callable[[], object]) -> Iterator[TraceRequest]:
    for request in trace:
        yield request
        step()
