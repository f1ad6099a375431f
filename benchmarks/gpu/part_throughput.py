"""Throughput of the Qwen3-0.6B shapes through `Runtime`, with the cache and without it.

lengths    256 requests of 100 to 1,024 random tokens, 100 to 1,024 new ones each, temperature
           0.6: the setting in which nano-vLLM measures itself
the rest   workloads that share much, little or nothing; runs with the cache on and off take
           turns. Every run's prompts are new ones, and nothing is forgotten: what earlier runs
           left is evicted on the way
"""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import numpy as np
from gpu_bench import QWEN, Bench
from gpu_clock import Times
from gpu_limits import serving_s
from gpu_runtime import open_runtime
from gpu_workloads import DRY, FULL, KINDS, QUICK, Played, ideal_computed, make, play

from radixserve import Runtime, SamplingParams

MOST_LOSS = 0.01  # of time, where nothing is shared
NEAR_IDEAL = 1e-3  # of what an ideal cache leaves to compute, either way
POOL = 327_680  # tokens


def run(bench: Bench, group: str) -> None:
    {"lengths": measure_lengths, "workloads": measure_workloads}[group](bench)


def _settings(bench: Bench) -> dict[str, Any]:
    return {
        "max_running_requests": bench.pick(256, 256, 4),
        "chunked_prefill_size": bench.pick(8_192, 8_192, 64),
        "max_seq_len": bench.pick(4_096, 4_096, 256),
        "num_pages": bench.pick(POOL, POOL, 2_048) // bench.settings.page_size,
    }


def measure_lengths(bench: Bench) -> None:
    count, least, most = bench.pick((256, 100, 1_024), (64, 100, 512), (4, 3, 8))
    rng = np.random.default_rng(bench.settings.seed)
    lengths = [(int(a), int(b)) for a, b in rng.integers(least, most + 1, (count, 2))]
    params = [
        SamplingParams(max_tokens=new, temperature=0.6, ignore_eos=True, seed=at)
        for at, (_, new) in enumerate(lengths)
    ]
    with open_runtime(bench, QWEN, **_settings(bench)) as rt:
        samples = []
        for turn in range(bench.pick(4, 2, 1)):
            rt.flush_cache()
            prompts = [
                rng.integers(0, min(10_000, rt.model.vocab_size), prompt).tolist()
                for prompt, _ in lengths
            ]
            began = time.perf_counter()
            outs = rt.generate(prompts, params, progress=False)
            spent = time.perf_counter() - began
            assert [len(out.token_ids) for out in outs] == [new for _, new in lengths]
            if turn or bench.is_dry:  # the first one warms up
                samples.append(spent)
        stats, choices = rt.cache_stats(), rt.resolved_config
    times = Times.of(samples)
    limit = serving_s(bench.shape(QWEN), bench.ceilings, lengths)
    num_out = sum(new for _, new in lengths)
    cells = {
        "s": times.median,
        "+-": f"{times.spread:.1%}",
        "limit s": limit,
        "of limit": f"{limit / times.median:.0%}",
        "tok/s out": num_out / times.median,
        "tok/s all": (num_out + sum(prompt for prompt, _ in lengths)) / times.median,
    }
    details = {"preemptions": stats.get("preemptions"), "limit_tok_s": num_out / limit}
    what = f"{count} x {least}-{most:,} in, {least}-{most:,} out"
    bench.row(what, cells, section="random lengths", details=details)
    bench.note(f"random lengths: {choices}")


def measure_workloads(bench: Bench) -> None:
    sizes = bench.pick(FULL, QUICK, DRY)
    with (
        open_runtime(bench, QWEN, cache="radix", engines=2, **_settings(bench)) as on,
        open_runtime(bench, QWEN, cache="off", **_settings(bench)) as off,
    ):
        for name in KINDS:
            pairs = bench.pick(9 if name == "random" else 3, 3 if name == "random" else 2, 1)
            _compare(bench, name, (on, off), sizes, pairs)


def _compare(
    bench: Bench, name: str, runtimes: tuple[Runtime, Runtime], sizes: Any, pairs: int
) -> None:
    """Pairs of runs with the cache and without, over the same prompts, taking turns."""
    found: list[tuple[Played, Played]] = []
    excess: list[float] = []
    what = ""
    for pair in range(0 if bench.is_dry else -1, pairs):  # one to warm up
        workload = make(name, sizes, runtimes[0].model.vocab_size, seed=1_000 + pair)
        runs = [play(rt, workload) for rt in (runtimes[::-1] if pair % 2 else runtimes)]
        if pair % 2:
            runs.reverse()
        what = workload.what
        if pair >= 0:
            found.append((runs[0], runs[1]))
            excess.append(runs[0].num_computed / ideal_computed(workload))
    gain = median(off.seconds / on.seconds for on, off in found)
    on, off = (
        sorted(side, key=lambda one: one.seconds)[len(side) // 2]
        for side in zip(*found, strict=True)
    )
    cells = {
        "on s": on.seconds,
        "off s": off.seconds,
        "off / on": f"{gain:.3f}",
        "on tok/s": on.num_out / on.seconds,
        "off tok/s": off.num_out / off.seconds,
        "on first ms": on.first_s * 1e3,
        "off first ms": off.first_s * 1e3,
        "computed": f"{on.num_computed / on.num_prompt:.1%}",
        "of ideal": f"{max(excess):.3f}",
    }
    failed = _judge(excess, bench)
    checks = []
    if name == "random":
        loss = median(on.seconds / off.seconds for on, off in found) - 1
        checks.append(bench.at_most("loss without reuse", loss, MOST_LOSS))
    details = {"pairs_s": [[on.seconds, off.seconds] for on, off in found]}
    row = f"{name}: {what}"
    section = "cache on and off"
    bench.row(row, cells, checks=tuple(checks), section=section, failed=failed, details=details)


def _judge(excess: list[float], bench: Bench) -> str:
    """What is wrong with the tokens computed, over those that an ideal cache leaves."""
    if max(excess) > 1 + NEAR_IDEAL:
        return "tokens that were cached were computed again"
    if min(excess) < 1 - NEAR_IDEAL and not bench.is_dry:  # few tokens in all, which may repeat
        return "tokens of other runs were found cached"
    return ""
