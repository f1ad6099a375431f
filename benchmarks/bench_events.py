"""What a cache's events cost: no log, a log that is taken, and vLLM's events over ZeroMQ.

    python benchmarks/bench_events.py [--prompts N] [--tokens N] [--repeats N] [--json]

A step computes a prompt that shares its first half with others and evicts as much; then the events
are taken. Processor microseconds a step: of the thread that owns the cache, and of all threads
together. Repeats are interleaved; medians. Needs radixserve[kv-events]. No model.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from functools import partial

import numpy as np
from cache.contenders import PagedTree
from harness.arguments import parse
from harness.processes import take_turns
from harness.report import print_table

from radixserve.arrays import IntArray
from radixserve.cache import RadixCache
from radixserve.kv_events.publisher import KVEventPublisher

COLUMNS = ("us a step", "owner's thread", "all threads")
KINDS = {"none": "no log", "log": "a log, taken", "published": "published in blocks of 16"}


def make_prompts(count: int, num_tokens: int) -> list[IntArray]:
    rng = np.random.default_rng(0)
    half = num_tokens // 2
    heads = rng.integers(0, 50_000, (16, half), dtype=np.int32)
    own = rng.integers(0, 50_000, (count, num_tokens - half), dtype=np.int32)
    return [np.concatenate([heads[at % 16], one]) for at, one in enumerate(own)]


def run(prompts: list[IntArray], kind: str, _turn: int) -> tuple[float, float]:
    """Processor microseconds a step: of this thread, of all."""
    cache = RadixCache(40 * len(prompts[0]))
    tree = PagedTree(cache)
    hand_on: Callable[[], object] | None = None
    with tempfile.TemporaryDirectory() as folder:
        publisher = None
        if kind == "log":
            hand_on = cache.open_events().take
        elif kind == "published":
            publisher = KVEventPublisher(cache.open_events(), f"ipc://{folder}/pub")
            hand_on = publisher.publish
        mine, all_threads = time.thread_time(), time.process_time()
        for tokens in prompts:
            tree.request(tokens)
            if hand_on is not None:
                hand_on()
        mine = time.thread_time() - mine
        if publisher is not None:
            publisher.close()  # when all is sent
        all_threads = time.process_time() - all_threads
    return 1e6 * mine / len(prompts), 1e6 * all_threads / len(prompts)


def main() -> None:
    args = parse(__doc__, prompts=1_000, tokens=2_000, repeats=9, json=False)
    prompts = make_prompts(args.prompts, args.tokens)
    runs = take_turns({kind: partial(run, prompts, kind) for kind in KINDS}, args.repeats)
    rows = [[KINDS[kind], *np.median(found, axis=0).tolist()] for kind, found in runs.items()]
    print_table(args, COLUMNS, rows, ("msgspec",))


if __name__ == "__main__":
    main()
