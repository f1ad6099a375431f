"""A radix tree of a million tokens, and its dump."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from radixserve.cache import RadixCache
from tests.cache.test_radix_cache import PAGE_SIZES, put, put_fast


class TestSize:
    def test_a_million_token_path_needs_no_recursion(self) -> None:
        cache = RadixCache(1_000_001)
        tokens = np.zeros(1_000_000, np.int32)
        for end in range(1000, 1_000_001, 1000):  # a thousand nodes deep
            seq = cache.acquire(tokens[:end])
            seq.extend(tokens[seq.cached_len : end])
            seq.commit(end)
            fork = seq.fork()  # keeps the next one from growing this leaf in place
            seq.release()
            fork.release()
        limit = sys.getrecursionlimit()
        sys.setrecursionlimit(120)
        try:
            assert cache.lookup(tokens).cached_len == 999_999
            cache.dump()
            cache.check()
            cache.reset()
            cache.evict(1_000_000)
        finally:
            sys.setrecursionlimit(limit)
        assert cache.stats()["pages_free"] == 1_000_001

    def test_a_deep_chain_of_nodes(self) -> None:
        cache = RadixCache(10_000)
        tokens = list(range(3_000))
        for end in range(3_000, 0, -1):  # each one splits the node before it
            put_fast(cache, [*tokens[:end], 5_000 + end])
        cache.check()
        assert cache.stats()["nodes"] >= 3_000
        assert cache.lookup(tokens).cached_len == 2_999

    @pytest.mark.parametrize("size", PAGE_SIZES)
    def test_many_leaves_below_one_node(self, size: int) -> None:
        cache = RadixCache(2048 // size, size)
        count = min(1_000, cache.num_pages - 1)
        for branch in range(count):
            put_fast(cache, [7] * (size - 1) + [branch])
        answer = cache.lookup([7] * (size - 1) + [3, 3])
        assert answer.cached_len == size
        cache.check()


class TestDump:
    def test_shows_the_tree(self) -> None:
        cache = RadixCache(100)
        seq = put(cache, [1, 2, 3, 4])
        put(cache, [1, 2, 9]).release()
        root = cache.dump()["namespaces"][""]
        (top,) = root["children"]
        assert (top["tokens"], top["sequences"], top["start"]) == ([1, 2], 1, 0)
        assert sorted(child["tokens"] for child in top["children"]) == [[3, 4], [9]]
        seq.release()
        assert cache.dump()["namespaces"][""]["children"][0]["sequences"] == 0

    def test_is_cut_at_max_nodes(self) -> None:
        cache = RadixCache(100)
        for first in range(10):
            put(cache, [first, 1]).release()
        assert len(cache.dump(max_nodes=4)["namespaces"][""]["children"]) == 4
        assert cache.dump(max_nodes=4)["truncated"]
        assert not cache.dump()["truncated"]
