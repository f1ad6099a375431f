"""Orders of eviction that the engine does not have: most recently used first, and random.

The cache makes an order by its name. `replaced` lets a name of `POLICIES` mean another class while
a benchmark runs.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

from radixserve.cache.radix.eviction import POLICIES, EvictionOrder, PathUse
from radixserve.cache.radix.eviction_policies import RankedEviction
from radixserve.cache.radix.node import Node


class MRUEviction(RankedEviction):
    """The node that became evictable last is evicted first, and so the rest of its session."""

    def reason(self, node: Node) -> str:
        del node
        return "used last"

    def rank(self, node: Node, tick: int) -> tuple[int, ...]:
        del node
        return (-tick,)

    def on_path_used(self, node: Node, use: PathUse) -> None:
        del node, use


class RandomEviction(MRUEviction):
    """Any evictable node, each equally likely."""

    def __init__(self, num_pages: int) -> None:
        super().__init__(num_pages)
        self._random = random.Random(0)

    def reason(self, node: Node) -> str:
        del node
        return "drawn at random"

    def rank(self, node: Node, tick: int) -> tuple[int, ...]:
        del node
        return (self._random.getrandbits(32), tick)


ORDERS: dict[str, type[EvictionOrder]] = {"mru": MRUEviction, "random": RandomEviction}


@contextmanager
def replaced(policy: str, order: type[EvictionOrder]) -> Iterator[None]:
    """Caches that are made with `policy` evict by `order` instead."""
    before = POLICIES[policy]
    POLICIES[policy] = order
    try:
        yield
    finally:
        POLICIES[policy] = before
