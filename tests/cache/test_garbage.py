"""Large caches stay out of full garbage collections, and give back what they froze."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest

from radixserve.cache import HashBlockCache, RadixCache, garbage

SMALL = 64  # nodes from which these caches are frozen, and as many between two freezes


@pytest.fixture(scope="module", autouse=True)
def frozen_as_before() -> Iterator[None]:
    """See tests/conftest.py."""
    yield
    gc.freeze()


@pytest.fixture(autouse=True)
def few_nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(garbage, "LEAST_NODES", SMALL)
    monkeypatch.setattr(garbage, "EVERY", SMALL)
    gc.unfreeze()
    yield
    gc.unfreeze()


def make(kind: str, **options: Any) -> Any:
    if kind == "hash":
        return HashBlockCache(10_000, 1, **options)
    return RadixCache(10_000, 1, **options)


def grow(cache: Any, first: int, count: int) -> None:
    for number in range(first, first + count):
        with cache.acquire([number, number]) as sequence:
            sequence.extend([number, number][sequence.cached_len :])
            sequence.commit(2)


def num_collected(kind: str) -> int:
    """Nodes that a full collection would visit."""
    name = "Block" if kind == "hash" else "Node"
    return sum(type(visited).__name__ == name for visited in gc.get_objects())


@pytest.mark.parametrize("kind", ["radix", "hash"])
def test_a_full_collection_visits_the_newest_nodes_only(kind: str) -> None:
    cache = make(kind, freeze_garbage=True)
    grow(cache, 0, 20 * SMALL)
    assert cache.stats()["nodes"] >= 20 * SMALL
    assert num_collected(kind) <= 2 * SMALL
    cache.check()


@pytest.mark.parametrize("kind", ["radix", "hash"])
def test_frozen_nodes_are_freed_by_eviction(kind: str) -> None:
    cache = make(kind, freeze_garbage=True)
    grow(cache, 0, 20 * SMALL)
    num_frozen = gc.get_freeze_count()
    cache.evict(15 * SMALL * 2)
    assert gc.get_freeze_count() < num_frozen - 10 * SMALL


def test_what_is_frozen_is_given_back_when_the_cache_is_closed() -> None:
    cache = make("radix", freeze_garbage=True)
    grow(cache, 0, 4 * SMALL)
    num_frozen = gc.get_freeze_count()
    assert num_frozen > 0
    cache.reset()
    assert gc.get_freeze_count() > 0, "what the process froze at its start stays frozen"
    cache.close()
    cache.close()
    assert gc.get_freeze_count() == 0


def test_nothing_is_frozen_for_a_small_cache_nor_unless_it_is_asked_for() -> None:
    small, plain = make("radix", freeze_garbage=True), make("radix")
    grow(plain, 0, 4 * SMALL)
    for first in range(0, 8 * SMALL, SMALL // 2):
        grow(small, first, SMALL // 2)
        small.evict(SMALL)
    assert gc.get_freeze_count() == 0
