"""What a fork of a long branch costs: microseconds, and bytes of K and V that are moved."""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median

from branching.work import random_prompt

from radixserve import Runtime, SamplingParams
from radixserve.api.branch import generate_all

SPARE_TOKENS = 1_024  # of the pool, beside the branch
NUM_CONTINUED = 8  # forks that go on, each another way


def measure_forks(
    folder: Path, dtype: str, length: int, page_size: int, repeats: int
) -> dict[str, float]:
    """Forking a branch of `length` tokens whose K and V is cached, then going on from its forks."""
    pages = (length + SPARE_TOKENS) // page_size
    with Runtime(folder, dtype=dtype, page_size=page_size, num_pages=pages) as rt:
        each = rt.memory.kv_bytes_per_token
        params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
        with rt.branch(list(random_prompt(length - 1, rt.model.vocab_size, seed=0))) as root:
            computed = root.generate(params).usage.computed_tokens
            root.truncate(length)
            before = rt.cache_stats()
            forks, samples = [], []  # kept until all are made: closing is not what is measured
            for _ in range(repeats):
                start = time.perf_counter()
                forks += root.fork()
                samples.append((time.perf_counter() - start) * 1e6)
            forked = rt.cache_stats()
            assert forked["steps"] == before["steps"], "a fork asks nothing of the engine"
            continued, forks = forks[:NUM_CONTINUED], []
            for number, fork in enumerate(continued):
                fork.extend([number])
            outs = generate_all(continued, params)
            after = rt.cache_stats()
            return {
                "page_size": page_size,
                "fork_us": median(samples),
                "computed_before": computed,
                "moved_by_forks": (forked["copied_tokens"] - before["copied_tokens"]) * each,
                "computed_after": sum(out.usage.computed_tokens for out in outs),
                "moved_after": (after["copied_tokens"] - forked["copied_tokens"]) * each,
                "bytes_per_token": each,
            }
