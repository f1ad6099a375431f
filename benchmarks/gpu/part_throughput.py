"""Throughput of the Qwen3-0.6B shapes through `Runtime`, with the cache and without it.

lengths    256 requests of 100 to 1,024 random tokens, 100 to 1,024 new ones each, temperature
           0.6: the setting in which nano-vLLM measures itself
the rest   workloads that share much, little or nothing; runs with the cache on and off take
           turns. Every run's prompts are new ones, and the cache is never emptied: K and V of
           earlier runs are evicted on the way
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any

import numpy as np
from engine.runtime_engine import RuntimeEngine
from engine.serving import serving
from gpu.bench import QWEN, Bench
from gpu.clock import Times
from gpu.limits import serving_s
from harness.shapes import Shape
from harness.workloads import Size, Workload, ideal_computed, make_workload

from radixserve import Runtime, SamplingParams

MOST_LOSS = 0.01  # of time, where nothing is shared
NEAR_IDEAL = 1e-3  # of what an ideal cache leaves to compute, either way
POOL = 294_912  # tokens; two of them and the weights fit 80 GB
UNSHARED = "W4"
CACHE_SECTION = "cache on and off"
FULL = {
    "W1": Size(1_024, 128, 256, 64),
    "W2": Size(0, 256, 64, 64, rounds=4),
    "W3": Size(2_048, 64, 128, 16),
    "W4": Size(0, 1_024, 256, 64),
}
QUICK = {k: replace(one, count=one.count // 2, new=one.new // 2) for k, one in FULL.items()}
DRY = {
    "W1": Size(16, 4, 4, 3),
    "W2": Size(0, 6, 2, 3, rounds=2),
    "W3": Size(24, 2, 2, 2),
    "W4": Size(0, 12, 4, 3),
}


def run(bench: Bench, group: str) -> None:
    if group == "workloads":
        measure_workloads(bench)
        return
    count, least, most = bench.pick((256, 100, 1_024), (64, 100, 512), (4, 3, 8))
    rng = np.random.default_rng(bench.settings.seed)
    lengths = [(int(a), int(b)) for a, b in rng.integers(least, most + 1, (count, 2))]
    with bench.open_runtime(QWEN, **_settings(bench)) as rt:
        what = f"{count} x {least}-{most:,} in, {least}-{most:,} out"
        turns = bench.pick(3, 1, 1)
        measure_lengths(bench, rt, bench.shape(QWEN), lengths, what, turns=turns)


def _settings(bench: Bench) -> dict[str, Any]:
    return {
        "max_running_requests": bench.pick(256, 256, 4),
        "chunked_prefill_size": bench.pick(8_192, 8_192, 64),
        "max_seq_len": bench.pick(4_096, 4_096, 256),
        "num_pages": bench.pick(POOL, POOL, 2_048) // bench.settings.page_size,
    }


def measure_lengths(
    bench: Bench,
    rt: Runtime,
    shape: Shape,
    lengths: Sequence[tuple[int, int]],
    what: str,
    *,
    turns: int,
    temperature: float = 0.6,
    target: float | None = None,
) -> None:
    """Requests of (prompt, new) random tokens, all at once; `turns` times after a first one that
    warms up. target: output tokens a second."""
    rng = np.random.default_rng(bench.settings.seed)
    params = [
        SamplingParams(max_tokens=new, temperature=temperature, ignore_eos=True, seed=at)
        for at, (_, new) in enumerate(lengths)
    ]
    samples = []
    for turn in range(0 if bench.is_dry else -1, turns):
        rt.flush_cache()
        vocab = min(10_000, rt.model.vocab_size)
        prompts = [rng.integers(0, vocab, prompt).tolist() for prompt, _ in lengths]
        began = time.perf_counter()
        outs = rt.generate(prompts, params, progress=False)
        spent = time.perf_counter() - began
        assert [len(out.token_ids) for out in outs] == [new for _, new in lengths]
        samples += [spent] if turn >= 0 else []
    times, limit = Times.of(samples), serving_s(shape, bench.ceilings, lengths)
    num_in, num_out = (sum(side) for side in zip(*lengths, strict=True))
    cells = {
        "s": times.median,
        "+-": f"{times.spread:.1%}",
        "limit s": limit,
        "of limit": f"{limit / times.median:.0%}",
        "tok/s out": num_out / times.median,
        "tok/s all": (num_out + num_in) / times.median,
    }
    rate = num_out / times.median
    checks = () if target is None else (bench.at_least("tok/s out", rate, target),)
    details = {
        "preemptions": rt.cache_stats().get("preemptions"),
        "limit_tok_s": num_out / limit,
    }
    bench.row(what, cells, checks=checks, section="random lengths", details=details)
    bench.note(f"random lengths: {rt.resolved_config}")


def measure_workloads(bench: Bench) -> None:
    sizes = bench.pick(FULL, QUICK, DRY)
    with (
        bench.open_runtime(QWEN, cache="radix", engines=2, **_settings(bench)) as on,
        bench.open_runtime(QWEN, cache="off", **_settings(bench)) as off,
    ):
        vocab = on.model.vocab_size
        engines = RuntimeEngine(on), RuntimeEngine(off)
        for name, size in sizes.items():
            with bench.case(name, CACHE_SECTION):
                _compare(bench, name, size, engines, vocab)


def _compare(
    bench: Bench, name: str, size: Size, engines: tuple[RuntimeEngine, ...], vocab: int
) -> None:
    """A workload with the cache and without it, in turns."""
    pairs = bench.pick(9 if name == UNSHARED else 3, 3 if name == UNSHARED else 2, 1)
    first = 0 if bench.is_dry else -1  # one pair to warm up
    found, excess = [], []
    for pair in range(first, pairs):
        workload = make_workload(name, size, vocab, seed=1_000 + pair)
        order = engines[::-1] if pair % 2 else engines
        runs = [_play(engine, workload) for engine in order]
        found.append(tuple(runs[::-1] if pair % 2 else runs))
        excess.append(found[-1][0].num_computed / ideal_computed(workload))
    _report(bench, workload, found[-pairs:], excess[-pairs:])


@dataclass(frozen=True)
class Played:
    """One run of a workload."""

    seconds: float
    num_computed: int  # prompt tokens that were not found cached
    first_s: float  # mean time to the first token


def _play(engine: RuntimeEngine, workload: Workload) -> Played:
    before, began = engine.num_computed, time.perf_counter()
    answers = serving(workload, workload, is_burst=True).run(engine)
    spent = time.perf_counter() - began
    first_s = fmean(answer.first_s for answer in answers)
    return Played(spent, engine.num_computed - before, first_s)


def _report(
    bench: Bench, workload: Workload, found: list[tuple[Played, ...]], excess: list[float]
) -> None:
    """found: pairs of runs with the cache and without, over the same prompts. excess: tokens
    computed with it over those that an ideal cache leaves."""
    gain = median(off.seconds / on.seconds for on, off in found)
    on, off = (
        sorted(side, key=lambda one: one.seconds)[len(side) // 2]
        for side in zip(*found, strict=True)
    )
    num_out = workload.num_requests * workload.num_new
    cells = {
        "on s": on.seconds,
        "off s": off.seconds,
        "off / on": f"{gain:.3f}",
        "on tok/s": num_out / on.seconds,
        "off tok/s": num_out / off.seconds,
        "on first ms": on.first_s * 1e3,
        "off first ms": off.first_s * 1e3,
        "computed": f"{on.num_computed / off.num_computed:.1%}",
        "of ideal": f"{max(excess):.3f}",
    }
    checks = []
    if workload.name == UNSHARED:
        loss = median(on.seconds / off.seconds for on, off in found) - 1
        checks.append(bench.at_most("loss without reuse", loss, MOST_LOSS))
    details = {"pairs_s": [[on.seconds, off.seconds] for on, off in found]}
    bench.row(
        workload.what,
        cells,
        checks=tuple(checks),
        section=CACHE_SECTION,
        failed=judge(excess, bench),
        details=details,
    )


def judge(excess: list[float], bench: Bench) -> str:
    """The fault of the tokens computed, given over those that an ideal cache leaves."""
    if max(excess) > 1 + NEAR_IDEAL:
        return "tokens that were cached were computed again"
    if min(excess) < 1 - NEAR_IDEAL and not bench.is_dry:  # few tokens in all, which may repeat
        return "tokens of other runs were found cached"
    return ""
