"""Throughput through `Runtime`, of requests that are all sent at once.

lengths    Qwen3-0.6B shapes, 256 requests of 100 to 1,024 random tokens, 100 to 1,024 new ones
           each, temperature 0.6: the setting in which nano-vLLM measures itself
workloads  the same shapes, workloads that share much, little or nothing; runs with the cache on and
           off take turns. Every run's prompts are new ones, and the cache is never emptied: K and V
           of earlier runs are evicted on the way
sharegpt   Llama-3-8B shapes, 1,000 requests with lengths from log-normal distributions with the
           means that the paper on PagedAttention (Kwon et al., 2023, figure 11) gives for ShareGPT:
           161 tokens in, 338 out; tokens are random, so that nothing is shared. Published for
           Llama-3.1-8B in bf16 on one H100, 1,000 prompts of ShareGPT offline, output tokens a
           second: SGLang 16,215, LMDeploy 16,132, vLLM 12,553
beam       Llama-3-8B shapes, beam searches of 256 tokens in and out; few prompts first, then many
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from statistics import fmean, median
from typing import Any, NamedTuple

import numpy as np
from engine.runtime_engine import RuntimeEngine
from engine.serving import serving
from gpu.bench import LLAMA, QWEN, SEED, Bench, Times
from gpu.limits import beams_s, serving_s
from harness.processes import take_turns
from harness.workloads import QUICK, Size, Workload, ideal_computed, make_workload

from radixserve import Runtime, SamplingParams

MEANS, SPREADS, MOST = (161, 338), (1.2, 0.9), (2_048, 1_024)  # tokens in and out; of logarithms
PUBLISHED = 16_215
MOST_LOSS = 0.01  # of time, where nothing is shared
NEAR_IDEAL = 1e-3  # of what an ideal cache leaves to compute, either way
UNSHARED = "W4"
CACHE_SECTION = "cache on and off"
FULL = {
    "W1": Size(1_024, 128, 256, 64),
    "W2": Size(0, 256, 64, 64, rounds=4),
    "W3": Size(2_048, 64, 128, 16),
    "W4": Size(0, 1_024, 256, 64),
}
PUBLISHED_BEAMS = 551.8  # tokens a second on an H100, 100 prompts of the same lengths
WIDTH = 4  # of a beam search


def run(bench: Bench, group: str) -> None:
    if group == "workloads":
        measure_workloads(bench)
    elif group == "beam":
        measure_beams(bench)
    elif group == "sharegpt":
        lengths = draw_lengths(bench.pick(1_000, 4))
        if bench.is_dry:
            lengths = [(min(a, 12), min(b, 6)) for a, b in lengths]
        what = f"{len(lengths):,} requests, {np.mean(lengths, 0).round().astype(int)} in and out"
        settings = _settings(bench, 400_000) | {"max_seq_len": bench.pick(sum(MOST) + 8, 256)}
        with bench.open_runtime(LLAMA, **settings) as rt:
            measure_lengths(bench, rt, LLAMA, lengths, what, turns=2, target=PUBLISHED)
    else:
        count, least, most = bench.pick((256, 100, 1_024), (4, 3, 8))
        rng = np.random.default_rng(SEED)
        lengths = [(int(a), int(b)) for a, b in rng.integers(least, most + 1, (count, 2))]
        with bench.open_runtime(QWEN, **_settings(bench)) as rt:
            what = f"{count} x {least}-{most:,} in, {least}-{most:,} out"
            measure_lengths(bench, rt, QWEN, lengths, what, turns=3)


def draw_lengths(count: int) -> list[tuple[int, int]]:
    """(prompt, new) tokens of each request, as long as ShareGPT's."""
    spread = np.array(SPREADS)
    location = np.log(MEANS) - spread**2 / 2  # the mean of a log-normal has half the variance more
    drawn = np.random.default_rng(SEED).lognormal(location, spread, (count, 2))
    return [(int(a), int(b)) for a, b in np.clip(drawn, 4, MOST)]


def _settings(bench: Bench, pool: int = 294_912) -> dict[str, Any]:
    """pool: tokens; two of them and the weights fit 80 GB."""
    rows, length, size = bench.pick((256, 4_096, pool), (4, 256, 2_048))
    return {"max_running_requests": rows, "max_seq_len": length, "pool": size}


def measure_lengths(
    bench: Bench,
    rt: Runtime,
    model: str,
    lengths: Sequence[tuple[int, int]],
    what: str,
    *,
    turns: int,
    target: float | None = None,
) -> None:
    """Requests of (prompt, new) random tokens, all at once; `turns` times after a first one that
    warms up. target: output tokens a second."""
    rng = np.random.default_rng(SEED)
    params = [
        SamplingParams(max_tokens=new, temperature=0.6, ignore_eos=True, seed=at)
        for at, (_, new) in enumerate(lengths)
    ]
    samples = []
    for _ in range(bench.pick(1 + turns, 1)):
        rt.flush_cache()
        vocab = min(10_000, rt.model.vocab_size)
        prompts = [rng.integers(0, vocab, prompt).tolist() for prompt, _ in lengths]
        began = time.perf_counter()
        outs = rt.generate(prompts, params, progress=False)
        samples.append(time.perf_counter() - began)
        assert [len(out.token_ids) for out in outs] == [new for _, new in lengths]
    times = Times.of(samples[bench.pick(1, 0) :])
    limit = serving_s(bench.shape(model), bench.ceilings, lengths)
    num_in, num_out = (sum(side) for side in zip(*lengths, strict=True))
    rate = num_out / times.median
    cells = {
        "s": times.median,
        "+-": f"{times.spread:.1%}",
        "limit s": limit,
        "of limit": f"{limit / times.median:.0%}",
        "tok/s out": rate,
        "tok/s all": (num_out + num_in) / times.median,
    }
    checks = () if target is None else (bench.at_least("tok/s out", rate, target),)
    details = {"preemptions": rt.cache_stats().get("preemptions"), "limit_tok_s": num_out / limit}
    bench.row(what, cells, *checks, section="random lengths", details=details)
    bench.note(f"random lengths: {rt.resolved_config}")


def measure_workloads(bench: Bench) -> None:
    settings = _settings(bench)
    with (
        bench.open_runtime(QWEN, cache="radix", engines=2, **settings) as on,
        bench.open_runtime(QWEN, cache="off", **settings) as off,
    ):
        engines = {"on": RuntimeEngine(on), "off": RuntimeEngine(off)}
        for name, size in FULL.items():
            with bench.case(name, CACHE_SECTION):
                _compare(bench, name, bench.pick(size, QUICK[name]), engines, on.model.vocab_size)


class RunResult(NamedTuple):
    """One run of a workload."""

    seconds: float
    num_computed: int  # prompt tokens that were not found cached
    first_s: float  # mean time to the first token


def _run(engine: RuntimeEngine, workloads: Sequence[Workload], pair: int) -> RunResult:
    workload = workloads[pair]
    before, began = engine.num_computed, time.perf_counter()
    answers = serving(workload, workload, is_burst=True).run(engine)
    spent = time.perf_counter() - began
    first_s = fmean(answer.first_s for answer in answers)
    return RunResult(spent, engine.num_computed - before, first_s)


def _compare(
    bench: Bench, name: str, size: Size, engines: dict[str, RuntimeEngine], vocab: int
) -> None:
    """A workload with the cache and without it, in turns; the first pair warms up."""
    warm_up, turns = bench.pick((1, 9 if name == UNSHARED else 3), (0, 1))
    workloads = [make_workload(name, size, vocab, 1_000 + at) for at in range(warm_up + turns)]
    runners = {label: partial(_run, engine, workloads) for label, engine in engines.items()}
    runs = take_turns(runners, turns, warm_up)
    on, off = (sorted(runs[label])[turns // 2] for label in ("on", "off"))
    ideal = map(ideal_computed, workloads[warm_up:])
    excess = [one.num_computed / least for one, least in zip(runs["on"], ideal, strict=True)]
    gains = [off.seconds / on.seconds for on, off in zip(runs["on"], runs["off"], strict=True)]
    workload = workloads[-1]
    num_out = workload.num_requests * workload.num_new
    cells = {
        "on s": on.seconds,
        "off s": off.seconds,
        "off / on": f"{median(gains):.3f}",
        "on tok/s": num_out / on.seconds,
        "off tok/s": num_out / off.seconds,
        "on first ms": on.first_s * 1e3,
        "off first ms": off.first_s * 1e3,
        "computed": f"{on.num_computed / off.num_computed:.1%}",
        "of ideal": f"{max(excess):.3f}",
    }
    loss = 1 / median(gains) - 1
    check = bench.at_most("loss without reuse", loss, MOST_LOSS)
    bench.row(
        workload.what,
        cells,
        *([check] if name == UNSHARED else []),
        section=CACHE_SECTION,
        failed=judge(excess, bench),
        details={label: [one.seconds for one in results] for label, results in runs.items()},
    )


def judge(excess: list[float], bench: Bench) -> str:
    """The fault of the tokens computed, given over those that an ideal cache leaves."""
    if max(excess) > 1 + NEAR_IDEAL:
        return "tokens that were cached were computed again"
    if min(excess) < 1 - NEAR_IDEAL and not bench.is_dry:  # few tokens in all, which may repeat
        return "tokens of other runs were found cached"
    return ""


def measure_beams(bench: Bench) -> None:
    prompt, new = bench.pick((256, 256), (5, 4))
    rows, pool = bench.pick((256, 262_144), (8, 1_024))
    lengths = {"max_running_requests": rows, "max_seq_len": prompt + new + 8, "pool": pool}
    with bench.open_runtime(LLAMA, **lengths) as rt:
        bench.note(f"{rt.resolved_config}")
        bench.note("tok/s counts the best answer of each prompt alone; the beams of one make four")
        for count in bench.pick((2, 16, 100), (1, 2)):
            with bench.case(name := f"{count} prompts, {prompt} in, {new} out"):
                _search(bench, rt, name, count, prompt, new)


def _search(bench: Bench, rt: Runtime, name: str, count: int, prompt: int, new: int) -> None:
    rng = np.random.default_rng([SEED, count])
    prompts = rng.integers(0, rt.model.vocab_size, (count, prompt)).tolist()
    before = rt.cache_stats().get("preemptions", 0)
    began = time.perf_counter()
    answers = rt.beam_search(prompts, beam_width=WIDTH, max_tokens=new, ignore_eos=True)
    spent = time.perf_counter() - began
    lengths = {len(one.token_ids) for found in answers for one in found}
    widths = {len(found) for found in answers}
    scores = [[one.score for one in found] for found in answers]
    failed = ""
    if lengths != {new} or widths != {WIDTH}:
        failed = f"answers of {sorted(lengths)} tokens, {sorted(widths)} of a prompt"
    elif any(sorted(found, reverse=True) != found for found in scores):
        failed = "answers are not in the order of their scores"
    limit = beams_s(bench.shape(LLAMA), bench.ceilings, count, WIDTH, prompt, new)
    rate = count * new / spent
    cells = {"s": spent, "limit s": limit, "of limit": f"{limit / spent:.0%}", "tok/s": rate,
             "all beams": WIDTH * rate}  # fmt: skip
    check = bench.at_least("tok/s of the best answers", rate, PUBLISHED_BEAMS)
    details = {"preemptions": rt.cache_stats().get("preemptions", 0) - before}
    checks = [check] if count >= 24 or bench.is_dry else []
    bench.row(name, cells, *checks, failed=failed, details=details)
