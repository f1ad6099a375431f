"""The time to the first token by the length of the cached prefix.

    python benchmarks/bench_first_token.py [--model smollm2] [--lengths 16,128,512,1000,4000]
        [--threads 1] [--repeats 5] [--json]

Each prompt is a prefix of random tokens and 16 more. It is sent twice, with other tokens behind the
prefix: at first nothing of it is cached, then the prefix is. The medians of the repeats are
printed, and what caching saved of the first.
"""

from __future__ import annotations

import json
import statistics

import numpy as np
from harness.arguments import parse

from radixserve import Runtime, SamplingParams

REST = 16  # tokens behind the prefix


def measure(runtime: Runtime, length: int, repeats: int) -> dict[str, float]:
    """A row of the table. One further repeat comes before, and is not counted."""
    rng = np.random.default_rng(length)
    high = runtime.model.vocab_size - 1
    params = SamplingParams(max_tokens=1, temperature=0.0)
    times: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(repeats + 1):
        prefix = rng.integers(300, high, length).tolist()
        for is_cached in (False, True):
            out = runtime.generate(prefix + rng.integers(300, high, REST).tolist(), params)
            expected = length if is_cached else 0
            assert abs(out.usage.cached_tokens - expected) <= 4, "a random token occurred again"
            assert out.metrics.ttft_s is not None
            times[is_cached].append(out.metrics.ttft_s)
    cold, warm = (statistics.median(each[1:]) for each in times.values())
    return {"prefix_tokens": length, "cold_s": cold, "cached_s": warm, "saved": 1 - warm / cold}


def main() -> None:
    args = parse(
        __doc__,
        model="smollm2",
        lengths=[16, 128, 512, 1000, 4000],
        threads=1,
        repeats=5,
        json=False,
    )
    import torch

    torch.set_num_threads(args.threads)
    with Runtime(args.model, device="cpu", max_seq_len=max(args.lengths) + 64) as runtime:
        rows = [measure(runtime, length, args.repeats) for length in args.lengths]
    if args.json:
        print(json.dumps(rows))
        return
    print("prefix  not cached    cached   saved")
    for row in rows:
        print(
            f"{row['prefix_tokens']:6,} {1000 * row['cold_s']:8.1f} ms "
            f"{1000 * row['cached_s']:6.1f} ms  {100 * row['saved']:4.0f} %"
        )


if __name__ == "__main__":
    main()
