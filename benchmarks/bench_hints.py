"""What a hint costs on the engine's thread, beside a look-up of the same prompt.

    python benchmarks/bench_hints.py [--prompts N] [--tokens N] [--shared N] [--json]

One owner has `prompts` prompts of `tokens` tokens, the first `shared` of which are the same, and
gives each verb for each of them. Medians and the slowest tenth, in microseconds. No model.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from timeit import timeit

import numpy as np
from harness.machine import describe_machine

from radixserve.arrays import IntArray
from radixserve.cache import RadixCache
from radixserve.hint import Hint, HintLimits
from radixserve.scheduler.hints import Hints
from radixserve.scheduler.sessions import Sessions

VERBS = ("retain", "pin", "demote", "share")


def measure(num_prompts: int, num_tokens: int, num_shared: int) -> dict[str, list[float]]:
    """{verb: [median, 90th percentile] in us}."""
    rng = np.random.default_rng(0)
    shared = rng.integers(0, 50_000, num_shared, dtype=np.int32)
    size = num_tokens - num_shared
    prompts = [
        np.concatenate([shared, rng.integers(0, 50_000, size, dtype=np.int32)])
        for _ in range(num_prompts)
    ]
    cache = RadixCache(4 * (num_shared + num_prompts * size))
    for tokens in prompts:
        with cache.acquire(tokens) as sequence:
            sequence.extend(tokens[sequence.cached_len :])
            sequence.commit(len(tokens))
    hints = Hints(cache, Sessions(cache), HintLimits())

    def give(verb: str, tokens: IntArray) -> None:
        answer = hints.apply(Hint(verb, tokens, owner="one", budget_tokens=10**9))
        assert answer.answer == "accepted", answer

    operations = {"look-up": cache.lookup, **{verb: partial(give, verb) for verb in VERBS}}
    found = {
        name: np.quantile([timeit(partial(call, one), number=1) for one in prompts], (0.5, 0.9))
        for name, call in operations.items()
    }
    cache.check()
    return {name: (1e6 * both).round(1).tolist() for name, both in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--prompts", type=int, default=75)
    parser.add_argument("--tokens", type=int, default=12_000)
    parser.add_argument("--shared", type=int, default=2_000)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found = measure(args.prompts, args.tokens, args.shared)
    if args.json:
        print(json.dumps({**describe_machine(), **vars(args), "us": found}))
        return
    print(f"{args.prompts} prompts of {args.tokens} tokens, {args.shared} shared; us")
    for name, (median, slow) in found.items():
        print(f"{name:10} median {median:8.1f}   p90 {slow:8.1f}")


if __name__ == "__main__":
    main()
