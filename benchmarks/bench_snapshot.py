"""What a snapshot for the server's page costs: trees of several sizes, 200 running sequences.

    python benchmarks/bench_snapshot.py [--nodes 1000,100000] [--page-size 16] [--json]

Milliseconds of processor time that one takes (median of 15) and that its JSON takes, those of a
dump of 400 nodes beside them, and how often a page may move with all snapshots below 1 % of the
time.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from timeit import repeat

import numpy as np
from harness.arguments import parse
from harness.report import print_table

from radixserve.arrays import IntArray
from radixserve.cache import CacheSequence, RadixCache, SnapshotView
from radixserve.server.snapshots import EVERY_S, SHARE

RUNNING = 200
REPEATS = 15
COLUMNS = ("nodes", "pages", "snapshot ms", "JSON ms", "dump ms", "a page moves every, s")


def main() -> None:
    args = parse(__doc__, nodes=[1_000, 10_000, 100_000], page_size=16, json=False)
    rows = []
    for size in args.nodes:
        cache = grow(size, args.page_size)
        snapshot = milliseconds(partial(cache.snapshot, SnapshotView()))
        text = milliseconds(partial(json.dumps, cache.snapshot(SnapshotView())))
        dump = milliseconds(partial(cache.dump, 400))
        every = max(EVERY_S, (snapshot + text) / 1e3 / SHARE)
        rows.append([cache.gauges()["nodes"], cache.num_pages, snapshot, text, dump, every])
    print_table(args, COLUMNS, rows)


def grow(num_nodes: int, page_size: int) -> RadixCache:
    """Branches that leave others at random places; the last sequences go on."""
    rng = np.random.default_rng(0)
    cache = RadixCache(num_nodes * (3 + 40 // page_size), page_size)
    trunks: list[IntArray] = [rng.integers(0, 1000, 500).astype(np.int32)]
    running: list[CacheSequence] = []
    while cache.gauges()["nodes"] < num_nodes:
        trunk = trunks[rng.integers(len(trunks))]
        tail = rng.integers(0, 1000, rng.integers(5, 30))
        tokens = np.concatenate((trunk[: rng.integers(len(trunk))], tail)).astype(np.int32)
        sequence = cache.acquire(tokens)
        sequence.extend(tokens[sequence.cached_len :])
        sequence.commit(sequence.length)
        trunks = [*trunks[-2999:], tokens] if len(trunks) < 3000 else trunks
        running.append(sequence)
        if len(running) > RUNNING:
            running.pop(0).release()
    return cache


def milliseconds(call: Callable[[], object]) -> float:
    """Without the garbage collector, as in the engine."""
    return median(repeat(call, timer=time.thread_time, repeat=REPEATS, number=1)) * 1e3


if __name__ == "__main__":
    main()
