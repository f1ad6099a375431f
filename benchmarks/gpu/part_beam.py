"""Beam search of the Llama-3-8B shapes through `Runtime`; few prompts first, then many."""

from __future__ import annotations

import time

import numpy as np
from gpu.bench import LLAMA, Bench
from gpu.limits import beams_s

from radixserve import Runtime

PUBLISHED = 551.8  # tokens a second on an H100, 100 prompts of the same lengths
WIDTH = 4


def run(bench: Bench, group: str) -> None:
    del group
    prompt, new = bench.pick((256, 256), (5, 4))
    with bench.open_runtime(
        LLAMA,
        max_running_requests=bench.pick(256, 8),
        max_seq_len=prompt + new + 8,
        pool=bench.pick(262_144, 1_024),
    ) as rt:
        bench.note(f"{rt.resolved_config}")
        bench.note("tok/s counts the best answer of each prompt alone; the beams of one make four")
        for count in bench.pick((2, 16, 100), (1, 2)):
            with bench.case(name := f"{count} prompts, {prompt} in, {new} out"):
                _measure(bench, rt, name, count, prompt, new)


def _measure(bench: Bench, rt: Runtime, name: str, count: int, prompt: int, new: int) -> None:
    rng = np.random.default_rng([bench.settings.seed, count])
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
    check = bench.at_least("tok/s of the best answers", rate, PUBLISHED)
    details = {"preemptions": rt.cache_stats().get("preemptions", 0) - before}
    checks = [check] if count >= 24 or bench.is_dry else []
    bench.row(name, cells, *checks, failed=failed, details=details)
