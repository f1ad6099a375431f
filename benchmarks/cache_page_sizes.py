"""Case G: cases A to E at larger pages, each as a ratio to page size 1."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from cache_cases import Bench, chat, churn, evict_from, miss_and_hit
from cache_contenders import radix
from stopwatch import Figure

SIZES = (1, 16, 64, 256)
COLUMNS = tuple(f"page {size}" for size in SIZES)


def page_sizes(bench: Bench) -> Iterator[Figure]:
    """The leaves of E are as long as the largest page, so that everyone evicts the same tokens."""
    contenders = tuple(radix(size, name) for size, name in zip(SIZES, COLUMNS, strict=True))
    part = replace(bench, contenders=contenders)
    leaf, leaves = SIZES[-1], min(10_000, bench.sizes.leaves[-1])
    figures = [*miss_and_hit(part), *chat(part), *churn(part)]
    figures += evict_from(part, leaves, leaf, ((str(leaf), leaf), ("1024", 1_024)))
    bases = {figure.key: figure.value for figure in figures if figure.contender == COLUMNS[0]}
    for figure in figures:
        base = bases[figure.key]
        yield replace(
            figure,
            key=f"G.{figure.key}",
            what=f"{figure.key[0]} {figure.what}",
            value=figure.value / base,
            low=figure.low / base,
            high=figure.high / base,
            unit="x",
        )
