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
    prompt, new = bench.pick((256, 256), (256, 128), (5, 4))
    with bench.open_runtime(
        LLAMA,
        max_running_requests=bench.pick(256, 256, 8),
        chunked_prefill_size=bench.pick(8_192, 8_192, 64),
        max_seq_len=prompt + new + 8,
        num_pages=bench.pick(262_144, 131_072, 1_024) // bench.settings.page_size,
    ) as rt:
        bench.note(f"{rt.resolved_config}")
        bench.note("tok/s counts the best answer of each prompt alone; the beams of one make four")
        for count in bench.pick((2, 16, 100), (2, 24), (1, 2)):
            with bench.case(f"{count} prompts, {prompt} in, {new} out"):
                _measure(bench, rt, count, prompt, new)


def _measure(bench: Bench, rt: Runtime, count: int, prompt: int, new: int) -> None:
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
    cells = {
        "s": spent,
        "limit s": limit,
        "of limit": f"{limit / spent:.0%}",
        "tok/s": rate,
        "all beams": WIDTH * rate,
    }
    checks = (
        [bench.at_least("tok/s of the best answers", rate, PUBLISHED)]
        if count >= 24 or bench.is_dry
        else []
    )
    details = {"preemptions": rt.cache_stats().get("preemptions", 0) - before}
    name = f"{count} prompts, {prompt} in, {new} out"
    bench.row(name, cells, checks=tuple(checks), failed=failed, details=details)
