"""Throughput of the Llama-3-8B shapes on requests as long as those of ShareGPT, all sent at once.

Lengths are drawn from log-normal distributions with the means that the paper on PagedAttention
(Kwon et al., 2023, figure 11) gives for ShareGPT: 161 tokens in, 338 out; tokens are random, so
that nothing is shared. Published for Llama-3.1-8B in bf16 on one H100, 1,000 prompts of ShareGPT
offline, output tokens a second: SGLang 16,215, LMDeploy 16,132, vLLM 12,553.
"""

from __future__ import annotations

import numpy as np
from gpu.bench import LLAMA, Bench
from gpu.part_throughput import measure_lengths

MEANS, SPREADS, MOST = (161, 338), (1.2, 0.9), (2_048, 1_024)  # tokens in and out; of logarithms
PUBLISHED = 16_215
POOL = 400_000  # tokens; fits 80 GB beside the weights


def run(bench: Bench, group: str) -> None:
    del group
    with bench.open_runtime(
        LLAMA,
        max_running_requests=bench.pick(256, 256, 4),
        chunked_prefill_size=bench.pick(8_192, 8_192, 64),
        max_seq_len=bench.pick(sum(MOST) + 8, sum(MOST) + 8, 256),
        num_pages=bench.pick(POOL, POOL, 2_048) // bench.settings.page_size,
    ) as rt:
        lengths = draw_lengths(bench.pick(1_000, 300, 4), bench.settings.seed)
        if bench.is_dry:
            lengths = [(min(a, 12), min(b, 6)) for a, b in lengths]
        what = f"{len(lengths):,} requests, {np.mean(lengths, 0).round().astype(int)} in and out"
        turns = bench.pick(2, 1, 1)
        shape = bench.shape(LLAMA)
        measure_lengths(bench, rt, shape, lengths, what, turns=turns, target=PUBLISHED)


def draw_lengths(count: int, seed: int) -> list[tuple[int, int]]:
    """(prompt, new) tokens of each request."""
    spread = np.array(SPREADS)
    location = np.log(MEANS) - spread**2 / 2  # the mean of a log-normal has half the variance more
    drawn = np.random.default_rng(seed).lognormal(location, spread, (count, 2))
    return [(int(a), int(b)) for a, b in np.clip(drawn, 4, MOST)]
