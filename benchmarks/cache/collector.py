"""Case J: how long Python's garbage collector stops a thread whose cache grows to many leaves.

Beside the cache as the engine makes it, one that leaves its nodes to the collector.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from typing import Any

from cache.cases import LEAF, Bench
from cache.contenders import Contender, PagedTree
from cache.timing import Figure

from radixserve.cache import RadixCache

_PART = 1_000  # prompts made at a time, outside the clock


def collector_pauses(bench: Bench) -> Iterator[Figure]:
    """The worst pause, and the share of the time spent in the collector."""
    leaves = bench.sizes.leaves[-1]
    for name, is_frozen in (("radix", True), ("radix, all collected", False)):
        make = _maker(is_frozen)
        pauses, spent = _grow(bench, Contender(name, make), leaves)
        for key, what, value, unit in (
            ("worst", "the worst pause", max(pauses, default=0.0) * 1e3, "ms"),
            ("share", "share of the time, %", 100 * sum(pauses) / spent, "ms"),
        ):
            line = f"{what}, {leaves:,} leaves of {LEAF}"
            yield Figure(f"J.{key}", line, name, value, unit, value, value)


def _maker(is_frozen: bool) -> Any:
    return lambda pages: PagedTree(RadixCache(pages, freeze_garbage=is_frozen))


def _grow(bench: Bench, contender: Contender, leaves: int) -> tuple[list[float], float]:
    """Seconds of each collection of the thread's time, and of all that it did."""
    pauses: list[float] = []
    begun = 0.0

    def note(phase: str, _: dict[str, int]) -> None:
        nonlocal begun
        if phase == "start":
            begun = time.thread_time()
        else:
            pauses.append(time.thread_time() - begun)

    tree, spent = contender.tree(*[LEAF] * leaves), 0.0
    gc.collect()
    gc.freeze()  # what the benchmark itself holds
    gc.enable()
    gc.callbacks.append(note)
    try:
        for first in range(0, leaves, _PART):
            rows = bench.tokens(min(_PART, leaves - first), LEAF, vocab=2**31 - 1)
            start = time.thread_time()
            for row in rows:
                tree.request(row)
            spent += time.thread_time() - start
    finally:
        gc.callbacks.remove(note)
        gc.disable()
        gc.unfreeze()
    return pauses, spent
