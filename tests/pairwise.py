"""Few of all combinations of a test's parameters, such that each two values meet in one of them.

A test marked `pairs` runs these by default; its other combinations are long runs. Parameters are
those of `parametrize` and of its fixtures. With two parameters every combination is needed.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence
from itertools import combinations
from typing import Any

import pytest

Combination = Sequence[Hashable]  # a value of each parameter, in the same order in all of them


def cover(all_of_them: Sequence[Combination]) -> list[int]:
    """Places of some, ascending: any two values that meet in one of all meet in one of these.

    The next one is always one with the most pairs that are new, the first of equals.
    """
    pairs = [set(combinations(enumerate(values), 2)) for values in all_of_them]
    queue = [(-len(new), place) for place, new in enumerate(pairs)]
    heapq.heapify(queue)
    chosen, seen = [], set[tuple[tuple[int, Hashable], ...]]()
    while queue:
        known, place = heapq.heappop(queue)
        new = pairs[place] - seen
        if len(new) < -known:
            heapq.heappush(queue, (-len(new), place))
        elif new or not seen:
            chosen.append(place)
            seen |= new
    return sorted(chosen)


def values_of(item: pytest.Function) -> Combination:
    return [(type(value), key_of(value)) for value in item.callspec.params.values()]


def key_of(value: Any) -> Hashable:
    """Items share the values of a parameter: those that cannot be hashed are known by identity."""
    try:
        hash(value)
    except TypeError:
        return id(value)
    return value  # type: ignore[no-any-return]


def mark_long_runs(items: Sequence[pytest.Item]) -> None:
    """Mark what is not in the cover of a test marked `pairs`. What this machine cannot run covers
    nothing of what it can."""
    tests: dict[tuple[str, bool], list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("pairs"):
            is_skipped = any(mark.args[0] for mark in item.iter_markers("skipif"))
            name = item.nodeid.partition("[")[0]
            tests.setdefault((name, is_skipped), []).append(item)
    for found in tests.values():
        chosen = set(cover([values_of(item) for item in found]))
        for place, item in enumerate(found):
            if place not in chosen:
                item.add_marker(pytest.mark.long)
