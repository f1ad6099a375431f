"""Inputs that break trees: very long, very wide, all equal, nested, at the limits of int32."""

from __future__ import annotations

import random
import sys

import numpy as np
import pytest

from radixserve.arrays import IntArray
from radixserve.cache import RadixCache
from radixserve.config import EVICTION_POLICIES

MIN, MAX = 0, 2**31 - 1


def serve(cache: RadixCache, tokens: IntArray | list[int]) -> int:
    seq = cache.acquire(tokens)
    seq.extend(tokens[seq.cached_len :])
    seq.commit(len(tokens))
    cached_len = seq.cached_len
    seq.release()
    return cached_len


@pytest.mark.parametrize(
    ("page_size", "leaves"),
    [
        (1, 100_000),
        (16, 100_000),
        *[pytest.param(size, 1_000_000, marks=pytest.mark.long) for size in (1, 16)],
    ],
)
def test_many_leaves_below_one_node(page_size: int, leaves: int) -> None:
    head = np.arange(16, dtype=np.int32)
    cache = RadixCache(16 // page_size + leaves + 64, page_size)
    row = np.empty(17, np.int32)
    row[:16] = head
    for name in range(leaves):
        row[16] = name
        serve(cache, row)
    stats = cache.stats()
    assert stats["nodes"] == leaves + 1
    assert stats["matched_tokens"] == 16 * (leaves - 1)
    row[16] = leaves // 2
    assert cache.lookup(row, allow_full=True).cached_len == 17
    row[16] = leaves + 1
    answer = cache.lookup(row, allow_full=True)
    assert (answer.cached_len, answer.reason) == (16, "diverged")
    assert cache.evict(1_000 * page_size) == 1_000 * page_size
    row[16] = 5
    assert cache.lookup(row, allow_full=True).reason == "evicted"


@pytest.mark.parametrize("eviction", EVICTION_POLICIES)
def test_a_long_path_in_many_nodes(eviction: str) -> None:
    """A million tokens, with other policies than "lru" a tenth of them in as many nodes."""
    size = 1_000_000 if eviction == "lru" else 100_000
    tokens = np.random.default_rng(0).integers(0, 1000, size).astype(np.int32)
    cache = RadixCache(size + size // 10, eviction=eviction)
    serve(cache, tokens)
    for cut in range(size // 100, size, size // 100):  # every branch cuts the path once more
        assert serve(cache, np.append(tokens[:cut], [5000, cut])) == cut
    assert cache.stats()["nodes"] == 199
    assert cache.lookup(tokens, allow_full=True).cached_len == size
    assert sys.getrecursionlimit() < 10_000
    assert cache.evict(size // 2) == size // 2
    cache.check()
    cache.reset()
    assert serve(cache, tokens) == 0
    cache.check()


@pytest.mark.parametrize("page_size", [1, 2, 16])
def test_every_prefix_of_one_sequence(page_size: int) -> None:
    tokens = list(range(200))
    order = list(range(1, 201))
    random.Random(page_size).shuffle(order)
    cache, longest = RadixCache(2_000, page_size), 0
    for end in order:
        assert serve(cache, tokens[:end]) == min(longest, end - 1)
        longest = max(longest, end)
        cache.check()
    assert cache.stats()["nodes"] == 1
    assert cache.stats()["pages_tree"] == -(-200 // page_size)


@pytest.mark.parametrize("page_size", [1, 2, 16])
def test_all_tokens_equal(page_size: int) -> None:
    cache, longest = RadixCache(2_000, page_size), 0
    for size in (5, 1, 64, 3, 17, 64, 33, 200):
        assert serve(cache, [7] * size) == min(longest, size - 1)
        longest = max(longest, size)
        cache.check()
    assert cache.lookup([7] * 500).cached_len == 200


@pytest.mark.parametrize("page_size", [1, 2, 16])
def test_tokens_at_the_limits_of_int32(page_size: int) -> None:
    cache = RadixCache(100, page_size)
    tokens = [MIN, MAX, 2, 7, 1, MIN, MAX]
    assert serve(cache, tokens) == 0
    assert serve(cache, [*tokens, MIN]) == 7
    assert serve(cache, [*tokens, MAX]) == 7
    answer = cache.lookup([*tokens, 9, 3])
    assert (answer.cached_len, answer.reason, answer.found) == (7, "diverged", 9)
    assert answer.expected in (MIN, MAX)
    cache.check()


@pytest.mark.parametrize("page_size", [1, 16, 4096])
def test_prompts_shorter_than_a_page(page_size: int) -> None:
    cache = RadixCache(50, page_size)
    assert serve(cache, []) == 0
    assert serve(cache, [1]) == 0
    assert serve(cache, [1]) == 0  # its only token is always computed
    assert serve(cache, [1, 2]) == 1
    assert serve(cache, [1, 3, 4]) == 1
    assert serve(cache, [1, 3, 4, 5]) == 3
    cache.check()
    seq = cache.acquire([1], allow_full=True)
    assert seq.cached_len == 1
    seq.release()
    cache.check()


def test_thousands_of_pages_with_one_head() -> None:
    """Siblings that share all but the last token of a page: the index must not be searched."""
    size, count = 64, 3_000
    cache = RadixCache(count + 10, size)
    head = list(range(size - 1))
    for name in range(count):
        assert serve(cache, [*head, 1_000 + name, 1]) == (size - 1 if name else 0)
    answer = cache.lookup([*head, 1_000 + count // 2, 1, 1])
    assert answer.cached_len == size + 1
    cache.evict(size * 50)
    cache.check()
