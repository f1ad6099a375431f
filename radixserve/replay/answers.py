"""What the numbers of a study say: the next gigabyte, the page size, the policy."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise

from radixserve.replay.caches import CacheSpec
from radixserve.replay.direct import DirectResult
from radixserve.replay.kv_bytes import GIB
from radixserve.replay.study import Study


@dataclass(frozen=True, slots=True)
class Gain:
    """What more memory brings to one kind of cache."""

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
    """What pages or blocks lose against the same policy at page size 1."""

    label: str
    page_size: int
    cache_tokens: int
    hit_tokens: int  # fewer; negative: more
    rate: float  # of the hit rate, 0.01 is a point


@dataclass(frozen=True, slots=True)
class Fit:
    """The best cache of one size, and how far it is from the bound. Rates are 0.0 to 1.0."""

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
    gains = []
    for (label, page_size), by_size in _by_kind(study).items():
        hits = {size: result.hit_tokens for size, result in by_size.items()}
        gains += _gains(label, page_size, hits, bytes_per_token)
    return gains + _gains("clairvoyant", 1, study.bounds, bytes_per_token)


def page_losses(study: Study) -> list[PageLoss]:
    """Against page size 1 of the same policy (a hash cache: LRU); empty without that size."""
    found = {result.spec: result for result in study.direct}
    losses = []
    for spec, result in found.items():
        reference = found.get(
            CacheSpec(spec.cache_tokens, spec.policy, 1, "radix", spec.use_holders)
        )
        if reference is None or reference is result:
            continue
        lost = reference.hit_tokens - result.hit_tokens
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


def mean_gaps(study: Study) -> dict[tuple[str, int], float]:
    """By label and page size: the mean distance to the bound over all sizes, smallest first."""
    gaps = {
        kind: sum(study.bound_rate(size) - one.hit_rate for size, one in by_size.items())
        / len(by_size)
        for kind, by_size in _by_kind(study).items()
    }
    return dict(sorted(gaps.items(), key=lambda item: item[1]))


def _gains(label: str, page_size: int, hits: dict[int, int], bytes_per_token: int) -> list[Gain]:
    return [
        Gain(
            label,
            page_size,
            low,
            high,
            (high - low) * bytes_per_token / GIB,
            hits[high] - hits[low],
        )
        for low, high in pairwise(sorted(hits))
    ]


def _by_kind(study: Study) -> dict[tuple[str, int], dict[int, DirectResult]]:
    kinds: dict[tuple[str, int], dict[int, DirectResult]] = defaultdict(dict)
    for result in study.direct:
        kinds[result.spec.label, result.spec.page_size][result.spec.cache_tokens] = result
    return kinds
