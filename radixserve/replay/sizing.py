"""`advise`: the cache that a trace's traffic needs, and what more of it, or another kind, is worth.

The hit rate of LRU is known for every size from one pass over the trace (`LruCurve`). The sizes and
kinds of caches that the advice names are replayed, so predictions can be compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from radixserve.replay.bounds import reuse_spans
from radixserve.replay.caches import GIB, CacheSpec, ReplayResult
from radixserve.replay.direct import replay_direct
from radixserve.replay.paths import PathTable, build_paths
from radixserve.replay.report import Finding, format_tokens
from radixserve.replay.scheduled import StepModel
from radixserve.replay.shared_prefixes import shared_prefixes
from radixserve.replay.study import Watch, unwatched
from radixserve.replay.trace import Floats, Ints, Trace

ENOUGH = 0.95  # part of the reusable tokens that the recommended size reuses
HEADROOM = 1.1  # it is this many times larger than the smallest size that does
SHARES = (0.5, 0.8, 0.9, 0.95, 0.99, 1.0)  # of the reusable tokens, in the table of sizes


class LruCurve:
    """The hits of an LRU cache of any size that every request fits into, one request after another.

    A token is reused if fewer tokens were used since its last use than the cache holds.
    """

    def __init__(self, trace: Trace, paths: PathTable) -> None:
        spans = reuse_spans(paths)
        self._requests, self._starts, self._counts = spans.T
        self.least = trace.longest  # the smallest size
        self.most = max(self.least, int((self._starts + self._counts).max(initial=1)))
        self._num_requests = len(trace)

    def hits(self, cache_tokens: int) -> Ints:
        """[requests] the reused prompt tokens with a cache of that size."""
        reused = np.clip(cache_tokens - self._starts, 0, self._counts)
        return np.bincount(self._requests, reused, self._num_requests).astype(np.int64)

    def total(self, cache_tokens: int) -> int:
        """The sum of `hits`."""
        return int(np.clip(cache_tokens - self._starts, 0, self._counts).sum())

    def smallest(self, hit_tokens: float) -> int:
        """The smallest size, from `least` to `most`, with so many hits; `most` if none has."""
        low, high = self.least, self.most
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self.total(middle) >= hit_tokens else (middle + 1, high)
        return low


@dataclass(frozen=True, slots=True, kw_only=True)
class Pricing:
    """What tokens cost: bytes of K/V, and the time of a step, with `chunk` prefill tokens."""

    bytes_per_token: int
    step: StepModel = field(default_factory=StepModel)
    chunk: int = 2048

    def first_token_s(self, num_prompt: Ints, hits: Ints) -> Floats:
        """[requests] seconds to the first token of a request that is alone."""
        step, chunk, computed = self.step, self.chunk, num_prompt - hits
        steps = -(-computed // chunk)
        # A step reads the hits and the chunks so far, its own included; the last one may be short.
        read = steps * hits + chunk * steps * (steps - 1) // 2 + computed
        seconds: Floats = (
            steps * step.fixed_s + computed * step.prefill_token_s + read * step.kv_token_s
        )
        return seconds

    def tokens_in(self, num_bytes: int) -> int:
        return num_bytes // self.bytes_per_token


@dataclass(frozen=True, slots=True)
class SizeRow:
    """A size of an LRU cache with pages of one token. Rates are parts of the prompt tokens."""

    cache_tokens: int
    gib: float
    predicted: float  # hit rate by `LruCurve`
    replayed: float | None  # by a replay; None: not replayed
    of_reusable: float  # predicted hits, as a part of what an unlimited cache reuses
    next_gib: float  # the hit rate that one GiB more adds
    first_token_s: float  # mean, of requests that are alone

    @property
    def error(self) -> float | None:
        """The predicted hit rate minus the replayed one."""
        return None if self.replayed is None else self.predicted - self.replayed


@dataclass(frozen=True, slots=True)
class KindRow:
    """Another kind of cache with the recommended number of tokens, or one page if that is more."""

    label: str
    page_size: int
    hit_rate: float
    gain: float  # of hit rate, over LRU with pages of one token
    first_token_s: float


@dataclass(frozen=True, slots=True)
class Advice:
    """The answers of `advise`."""

    trace: Trace
    paths: PathTable
    pricing: Pricing
    recommended: SizeRow
    in_flight_tokens: int  # most tokens of requests that run at the same time, by the step costs
    given: list[SizeRow]
    sizes: list[SizeRow]
    kinds: list[KindRow]

    @property
    def ideal_rate(self) -> float:
        return self.paths.reusable_tokens / self.trace.prompt_tokens


def advise(
    trace: Trace,
    pricing: Pricing,
    *,
    sizes: Sequence[int] = (),
    kinds: Sequence[tuple[str, str, int, bool]] = (),
    watch: Watch = unwatched,
) -> Advice:
    """Find the size that reuses ENOUGH of what is reusable, with HEADROOM, and replay it.

    sizes  further sizes, which are replayed too; a smaller one than the longest request is refused
           by no one, but its requests that do not fit count as not reused
    kinds  other kinds of caches: (index, policy, page size, whether sessions are opened)
    """
    with watch("reading", len(trace)) as step:
        paths = build_paths(trace, on_request=step)
    sizer = _Sizer(trace, paths, pricing, watch)
    enough = sizer.curve.smallest(ENOUGH * paths.reusable_tokens)
    in_flight = peak_in_flight(trace, paths, pricing)
    size = round(HEADROOM * max(enough, in_flight))
    recommended = sizer.row(size, is_replayed=True)
    table = sorted({sizer.curve.smallest(share * paths.reusable_tokens) for share in SHARES})
    return Advice(
        trace,
        paths,
        pricing,
        recommended,
        in_flight,
        [sizer.row(given, is_replayed=True) for given in sizes],
        [sizer.row(num_tokens, is_replayed=False) for num_tokens in table],
        [sizer.kind(size, *kind) for kind in kinds],
    )


class _Sizer:
    """Makes the rows of an advice."""

    def __init__(self, trace: Trace, paths: PathTable, pricing: Pricing, watch: Watch) -> None:
        self.curve = LruCurve(trace, paths)
        self._trace, self._pricing, self._watch = trace, pricing, watch
        self._reusable = max(1, paths.reusable_tokens)
        self._plain: dict[int, float] = {}  # replayed hit rates of LRU, by size

    def row(self, size: int, *, is_replayed: bool) -> SizeRow:
        trace, pricing = self._trace, self._pricing
        hits = self.curve.hits(size)
        more = self.curve.total(size + pricing.tokens_in(GIB)) - int(hits.sum())
        return SizeRow(
            size,
            size * pricing.bytes_per_token / GIB,
            int(hits.sum()) / trace.prompt_tokens,
            self._plain_rate(size) if is_replayed else None,
            int(hits.sum()) / self._reusable,
            more / trace.prompt_tokens,
            float(pricing.first_token_s(trace.num_prompt, hits).mean()),
        )

    def kind(
        self, size: int, index: str, policy: str, page_size: int, use_sessions: bool
    ) -> KindRow:
        spec = CacheSpec(max(size, page_size), policy, page_size, index, use_sessions)
        result = self._replay(spec)
        seconds = self._pricing.first_token_s(self._trace.num_prompt, result.hits)
        gain = result.hit_rate - self._plain_rate(size)
        return KindRow(spec.label, page_size, result.hit_rate, gain, float(seconds.mean()))

    def _plain_rate(self, size: int) -> float:
        if size not in self._plain:
            self._plain[size] = self._replay(CacheSpec(size)).hit_rate
        return self._plain[size]

    def _replay(self, spec: CacheSpec) -> ReplayResult:
        title = f"{spec.label}, page {spec.page_size}, {format_tokens(spec.cache_tokens)} tokens"
        with self._watch(title, len(self._trace)) as step:
            return replay_direct(self._trace, spec, on_request=step)


def peak_in_flight(trace: Trace, paths: PathTable, pricing: Pricing) -> int:
    """The most tokens that requests hold which run at the same time, if each took as long as it
    would take alone with all that is reusable cached; a shared prefix counts once. A trace without
    times counts its longest request."""
    if not trace.has_times:
        return trace.longest
    each = pricing.step.fixed_s + pricing.step.decode_row_s
    took = pricing.first_token_s(trace.num_prompt, paths.reusable) + each * trace.num_output
    times = np.concatenate((trace.times, trace.times + took))
    num_holders = np.zeros(len(paths.lengths), np.int64)  # by segment
    held = most = 0
    for event in np.argsort(times, kind="stable").tolist():
        is_begin = event < len(trace)
        path = paths.path(event if is_begin else event - len(trace))
        num_holders[path] += 1 if is_begin else -1
        changed = paths.lengths[path[num_holders[path] == is_begin]].sum()
        held += int(changed) if is_begin else -int(changed)
        most = max(most, held)
    return most


# -- as a document, as tables ---------------------------------------------------------------------


def advice_document(advice: Advice) -> dict[str, Any]:
    """An advice as JSON. Counts are tokens, rates 0.0 to 1.0."""
    trace, paths, recommended = advice.trace, advice.paths, advice.recommended
    return {
        "trace": trace.name,
        "requests": len(trace),
        "prompt_tokens": trace.prompt_tokens,
        "reusable_tokens": paths.reusable_tokens,
        "ideal_hit_rate": advice.ideal_rate,
        "bytes_per_token": advice.pricing.bytes_per_token,
        "prefixes": asdict(shared_prefixes(trace, paths)),
        "in_flight_tokens": advice.in_flight_tokens,
        "recommended": _row_document(recommended),
        "given": [_row_document(row) for row in advice.given],
        "sizes": [_row_document(row) for row in advice.sizes],
        "kinds": [asdict(row) for row in advice.kinds],
    }


def _row_document(row: SizeRow) -> dict[str, Any]:
    return {**asdict(row), "error": row.error}


def advice_findings(document: dict[str, Any]) -> list[Finding]:
    """The tables and sentences of an advice's document."""
    best = document["recommended"]
    lines = [
        f"{format_tokens(best['cache_tokens'])} tokens = {best['gib']:.2f} GiB reuse "
        f"{100 * best['of_reusable']:.1f} % of what is reusable: "
        f"hits {_percent(best['predicted'])} % of {_percent(document['ideal_hit_rate'])} %; "
        f"replayed: {_percent(best['replayed'])} %",
        f"one GiB more: {100 * best['next_gib']:+.2f} points",
        f"requests that run at the same time hold at most "
        f"{format_tokens(document['in_flight_tokens'])} tokens",
    ]
    shared = document["prefixes"]
    lines.append(
        f"prompts: {shared['shared_blocks']:,} of {shared['distinct_blocks']:,} blocks of "
        f"{shared['block_size']} are shared; mean shared prefix "
        f"{shared['mean_shared_prefix']:,.1f} tokens, mean rest {shared['mean_unique']:,.1f}"
    )
    findings = [
        Finding(f"{document['trace']}: the cache that this traffic needs", lines=lines),
        _size_finding("LRU by size", document["sizes"]),
    ]
    if document["given"]:
        findings.append(_size_finding("the given sizes, replayed", document["given"]))
    if document["kinds"]:
        findings.append(_kind_finding(document))
    return findings


def _size_finding(title: str, rows: Sequence[dict[str, Any]]) -> Finding:
    heads = ["tokens", "GiB", "hit %", "of reusable %", "next GiB", "first token"]
    is_replayed = rows[0]["replayed"] is not None
    heads += ["replayed %", "error"] if is_replayed else []
    table = []
    for row in rows:
        cells = [
            f"{row['cache_tokens']:,}",
            f"{row['gib']:.2f}",
            _percent(row["predicted"]),
            f"{100 * row['of_reusable']:.1f}",
            f"{100 * row['next_gib']:+.2f}",
            _seconds(row["first_token_s"]),
        ]
        if is_replayed:
            cells += [_percent(row["replayed"]), f"{100 * row['error']:+.2f}"]
        table.append(cells)
    lines = ["first token: mean of requests that are alone, by the step costs"]
    return Finding(title, heads, table, lines)


def _kind_finding(document: dict[str, Any]) -> Finding:
    best = document["recommended"]
    plain = ("lru", "1", _percent(best["replayed"]), "", _seconds(best["first_token_s"]))
    rows = [
        (
            row["label"],
            str(row["page_size"]),
            _percent(row["hit_rate"]),
            f"{100 * row['gain']:+.2f}",
            _seconds(row["first_token_s"]),
        )
        for row in document["kinds"]
    ]
    title = f"other caches of {format_tokens(best['cache_tokens'])} tokens"
    return Finding(title, ("cache", "page", "hit %", "points", "first token"), [plain, *rows])


def _percent(rate: float) -> str:
    return f"{100 * rate:.2f}"


def _seconds(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"
