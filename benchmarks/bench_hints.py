"""What a hint costs on the engine's thread, beside a look-up of the same prompt.

    python benchmarks/bench_hints.py [--prompts N] [--tokens N] [--shared N] [--json]

One owner has `prompts` prompts of `tokens` tokens, the first `shared` of which are the same, and
gives each verb for each of them. Medians and 90th percentiles, in microseconds. No model.
"""

from __future__ import annotations

from functools import partial
from timeit import timeit

import numpy as np
from cache.contenders import PagedTree
from harness.arguments import parse
from harness.report import print_table

from radixserve.arrays import IntArray
from radixserve.cache import RadixCache
from radixserve.hint import Hint, HintLimits
from radixserve.scheduler.hints import Hints
from radixserve.scheduler.sessions import Sessions

VERBS = ("retain", "pin", "demote", "share")


def main() -> None:
    args = parse(__doc__, prompts=75, tokens=12_000, shared=2_000, json=False)
    rng, num_own = np.random.default_rng(0), args.tokens - args.shared
    shared = rng.integers(0, 50_000, args.shared, dtype=np.int32)
    own = rng.integers(0, 50_000, (args.prompts, num_own), dtype=np.int32)
    prompts = [np.concatenate([shared, one]) for one in own]
    cache = RadixCache(4 * (args.shared + args.prompts * num_own))
    tree = PagedTree(cache)
    for tokens in prompts:
        tree.request(tokens)
    hints = Hints(cache, Sessions(cache), HintLimits())

    def give(verb: str, tokens: IntArray) -> None:
        answer = hints.apply(Hint(verb, tokens, owner="one", budget_tokens=10**9))
        assert answer.answer == "accepted", answer

    operations = {"look-up": cache.lookup, **{verb: partial(give, verb) for verb in VERBS}}
    rows = []
    for name, call in operations.items():
        seconds = [timeit(partial(call, one), number=1) for one in prompts]
        rows.append([name, *(1e6 * np.quantile(seconds, (0.5, 0.9))).round(1).tolist()])
    cache.check()
    print_table(args, ("us", "median", "p90"), rows)


if __name__ == "__main__":
    main()
