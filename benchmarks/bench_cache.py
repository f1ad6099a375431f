"""What the prefix cache costs a request, in microseconds of one thread.

    python benchmarks/bench_cache.py [--json] [--only A,C] [--quick] [--page-size P]

Every case runs several times; the median is shown, and its ratio to a plain reference measured in
the same run: numpy equality over 4,096 tokens and one copy of 4,096 page ids. A request is
everything that an engine calls: acquire, extend, commit, release.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np

from radixserve import __version__
from radixserve.arrays import IntArray
from radixserve.cache import RadixCache
from radixserve.request import Request, SamplingParams
from radixserve.schedule import RowOutput, Schedule, StepOutput
from radixserve.scheduler import Scheduler

VOCAB = 32_000
PROMPT = 4_096


@dataclass(frozen=True)
class Figure:
    """One line of the table: microseconds of one operation."""

    case: str
    what: str
    micros: float


@dataclass(frozen=True)
class Bench:
    """Settings of a run and the means to measure."""

    page_size: int
    repeats: int
    is_quick: bool
    rng: np.random.Generator

    def tokens(self, *shape: int, low: int = 0) -> IntArray:
        return self.rng.integers(low, low + VOCAB, shape).astype(np.int32)

    def cache(self, num_tokens: int) -> RadixCache:
        return RadixCache(-(-num_tokens // self.page_size) + 64, self.page_size)

    def median(self, operation: Callable[[], None], count: int = 50) -> float:
        """Median over the repeats of the mean of `count` calls, in microseconds."""
        samples = []
        for _ in range(self.repeats):
            start = time.perf_counter()
            for _ in range(count):
                operation()
            samples.append((time.perf_counter() - start) / count * 1e6)
        return statistics.median(samples)


def serve(cache: RadixCache, tokens: IntArray) -> None:
    """All that one request asks of the cache."""
    sequence = cache.acquire(tokens)
    sequence.extend(tokens[sequence.cached_len :])
    sequence.commit(len(tokens))
    sequence.release()


def timed(operation: Callable[[], None]) -> float:
    start = time.perf_counter()
    operation()
    return (time.perf_counter() - start) * 1e6


def reference(bench: Bench) -> Iterator[Figure]:
    left, pages = bench.tokens(PROMPT), np.arange(PROMPT, dtype=np.int32)
    right = left.copy()

    def compare_and_copy() -> None:
        assert (left == right).all()
        pages.copy()

    micros = bench.median(compare_and_copy)
    yield Figure("ref", "numpy: compare 4,096 tokens, copy as many ids", micros)


def miss_and_hit(bench: Bench) -> Iterator[Figure]:
    prompts = 200 if bench.is_quick else 2_000
    cache = bench.cache(prompts * 512 + 2 * PROMPT)
    for row in bench.tokens(prompts, 512):
        serve(cache, row)
    unknown = bench.tokens(PROMPT, low=VOCAB)
    known = bench.tokens(PROMPT + 1, low=2 * VOCAB)
    serve(cache, known)
    for case, name, prompt in (("A", "miss", unknown), ("B", "hit in one edge", known)):
        micros = bench.median(partial(look, cache, prompt))
        yield Figure(case, f"{name}: look-up", micros)
        micros = bench.median(partial(take, cache, prompt))
        yield Figure(case, f"{name}: acquire, release", micros)


def look(cache: RadixCache, prompt: IntArray) -> None:
    cache.probe(prompt).close()


def take(cache: RadixCache, prompt: IntArray) -> None:
    cache.acquire(prompt).release()


def chat(bench: Bench) -> Iterator[Figure]:
    sessions, turns = (20, 10) if bench.is_quick else (200, 30)
    samples = []
    for _ in range(min(3, bench.repeats)):
        cache = bench.cache(sessions * turns * 150)
        said = bench.tokens(sessions, turns * 150)
        spent = 0.0
        for turn in range(1, turns + 1):
            spent += sum(timed(partial(serve, cache, row[: turn * 150])) for row in said)
        samples.append(spent / (sessions * turns))
    name = f"chat: a request, {sessions} sessions x {turns} turns of 150"
    yield Figure("C", name, statistics.median(samples))


def churn(bench: Bench) -> Iterator[Figure]:
    requests = 1_000 if bench.is_quick else 20_000
    cache = bench.cache(512 + 60 * requests // 10)
    shared, own = bench.tokens(512), bench.tokens(requests, 60)
    prompts = [np.concatenate((shared, row)) for row in own]
    spent = sum(timed(partial(serve, cache, prompt)) for prompt in prompts)
    assert cache.stats()["evicted_tokens"] > 0
    yield Figure("D", "churn: a request, 512 shared + 60 own, always evicting", spent / requests)


def eviction(bench: Bench) -> Iterator[Figure]:
    for leaves in (1_000, 10_000) if bench.is_quick else (1_000, 10_000, 100_000):
        cache = bench.cache(leaves * max(16, bench.page_size))
        for row in bench.rng.integers(0, 2**31 - 1, (leaves, 16)).astype(np.int32):
            serve(cache, row)
        micros = bench.median(partial(evict, cache, bench.page_size), 10)
        yield Figure("E", f"evict a page of {leaves:,} leaves", micros)
        micros = statistics.median(timed(partial(evict, cache, 1_000)) for _ in range(5))
        yield Figure("E", f"evict 1,000 tokens of {leaves:,} leaves", micros)


def evict(cache: RadixCache, num_tokens: int) -> None:
    cache.evict(num_tokens)


def passes(bench: Bench) -> Iterator[Figure]:
    """A running request decodes; the waiting ones find no room."""
    for waiting in (128, 500) if bench.is_quick else (128, 2_000, 20_000):
        scheduler = Scheduler(RadixCache(3_000), chunk_size=4_096)
        scheduler.add(_request("running", bench.tokens(1_500)))
        for _ in range(2):
            _answer(scheduler, scheduler.schedule())
        for i, row in enumerate(bench.tokens(waiting, 1_500)):
            scheduler.add(_request(f"r{i}", row))
        samples = []
        for _ in range(bench.repeats + 1):
            start = time.perf_counter()
            schedule = scheduler.schedule()
            samples.append((time.perf_counter() - start) * 1e6)
            _answer(scheduler, schedule)
        first, rest = samples[0], statistics.median(samples[1:])
        yield Figure("I", f"schedule, {waiting:,} waiting, all new", first)
        yield Figure("I", f"schedule, {waiting:,} waiting, a token decoded since", rest)


def _request(name: str, tokens: IntArray) -> Request:
    params = SamplingParams(max_tokens=1_000, ignore_eos=True)
    return Request(name, tokens, params, seed=0, end_ids=frozenset(), max_len=3_000)


def _answer(scheduler: Scheduler, schedule: Schedule | None) -> None:
    assert schedule is not None
    drawn = tuple(None if row.sample is None else RowOutput(5, None, ()) for row in schedule.rows)
    scheduler.update(schedule, StepOutput(drawn, {}))


CASES: dict[str, Callable[[Bench], Iterator[Figure]]] = {
    "A": miss_and_hit,
    "C": chat,
    "D": churn,
    "E": eviction,
    "I": passes,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--only", default=",".join(CASES), help="cases, such as A,C (A has B too)")
    parser.add_argument("--quick", action="store_true", help="small sizes, three repeats")
    parser.add_argument("--page-size", type=int, default=1, help="tokens a page (default: 1)")
    args = parser.parse_args()
    repeats = 3 if args.quick else 9
    bench = Bench(args.page_size, repeats, args.quick, np.random.default_rng(0))
    wanted = args.only.split(",")
    unknown = set(wanted) - set(CASES)
    if unknown:
        parser.error(f"no such case: {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    figures = list(reference(bench))
    unit = figures[0].micros
    for name in wanted:
        figures += CASES[name](bench)
    setting = {
        "radixserve": __version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "machine": platform.machine(),
        "page_size": args.page_size,
        "repeats": repeats,
    }
    if args.json:
        rows = [{**asdict(f), "ratio": f.micros / unit} for f in figures]
        print(json.dumps({"setting": setting, "figures": rows}, indent=2))
        return
    print(", ".join(f"{key} {value}" for key, value in setting.items()))
    for f in figures:
        print(f"{f.case:>4}  {f.what:<58} {f.micros:>10,.1f} us  {f.micros / unit:>8.1f} x ref")


if __name__ == "__main__":
    main()
