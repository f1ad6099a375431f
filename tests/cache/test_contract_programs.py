"""The contract of both caches: eviction, and random programs beside an oracle."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest

from radixserve.cache import CacheSequence, HashBlockCache, OutOfPages, PrefixCache, RadixCache
from tests.cache.hash_world import HashWorld, LateHashWorld
from tests.cache.kinds import HASHES, Kind, put
from tests.cache.world import World, picture, random_step


class TestEviction:
    def test_never_more_than_asked_rounded_up_to_a_page(self, kind: Kind) -> None:
        cache = kind.for_tokens(1024)
        put(cache, list(range(1000))).release()
        for asked in (0, 1, 5, 64, 100):
            before = cache.stats()
            pages = -(-asked // cache.page_size)
            assert cache.evict(asked) == pages * cache.page_size
            after = cache.stats()
            assert after["pages_free"] == before["pages_free"] + pages
            cache.check()
        assert cache.evict(10**6) < 10**6
        assert cache.stats()["pages_free"] == cache.num_pages
        assert cache.evict(1) == 0

    def test_the_tail_goes_before_the_head(self, kind: Kind) -> None:
        cache = kind.for_tokens(640)
        put(cache, list(range(640))).release()
        cache.evict(128)
        assert cache.lookup(list(range(641))).cached_len == 512

    def test_least_recently_used_goes_first(self, kind: Kind) -> None:
        cache = kind.for_tokens(200)
        for first in (1, 2, 3):
            put(cache, [first] * 48).release()
        cache.acquire([1] * 48, allow_full=True).release()  # used again
        cache.lookup([2] * 48)  # not a use
        cache.watch(np.asarray([2] * 48, np.int32)).close()
        cache.evict(48)
        lengths = [cache.lookup([first] * 49).cached_len for first in (1, 2, 3)]
        assert lengths == [48, 0, 48]

    def test_what_is_held_stays(self, kind: Kind) -> None:
        cache = kind.for_tokens(200)
        seq = put(cache, list(range(64)))
        put(cache, list(range(128))).release()
        cache.evict(10**6)
        assert cache.lookup([*range(64), 0]).cached_len == 64
        assert seq.length == 64
        assert cache.stats()["pages_locked"] == 64 // cache.page_size
        cache.check()

    def test_parents_outlive_their_children(self, kind: Kind) -> None:
        cache = kind.for_tokens(1000)
        for branch in range(5):
            put(cache, [*range(48), *[100 + branch] * 17]).release()
        for _ in range(5):
            cache.evict(1)
            cache.check()
        assert cache.lookup([*range(48), 0]).cached_len == 48

    def test_all_that_is_available_can_be_had_and_no_page_more(self, kind: Kind) -> None:
        cache = kind.for_tokens(256)
        put(cache, [7] * 100).release()
        held = put(cache, list(range(96)))
        seq = cache.acquire([9])
        room = cache.num_available * cache.page_size
        before = picture(cache)
        with pytest.raises(OutOfPages, match="evictable"):
            seq.extend([1] * (room + 1))
        assert picture(cache) == before
        seq.extend([1] * room)
        assert cache.num_available == cache.stats()["pages_free"] == 0
        assert held.tokens.tolist() == list(range(96))
        cache.check()

    def test_fork_and_truncate_without_room_change_nothing(self, kind: Kind) -> None:
        cache = kind.for_tokens(64)
        seq = put(cache, list(range(37)))
        other = cache.acquire([9])
        other.extend([9] * (cache.num_available * cache.page_size))
        cache.check()
        before = picture(cache)
        if cache.page_size > 1:
            for call in (seq.fork, lambda: seq.truncate(5)):
                with pytest.raises(OutOfPages):
                    call()
                if cache.page_size == 2:  # 37 ends inside a page, and 5 does
                    assert picture(cache) == before
                cache.check()
                assert seq.length == seq.committed_len == 37
        other.release()
        seq.fork().release()
        seq.truncate(5)
        cache.check()


@pytest.mark.parametrize("world", [World, HashWorld, LateHashWorld])
@pytest.mark.parametrize(
    "block", [0, *(pytest.param(block, marks=pytest.mark.long) for block in range(1, 5))]
)
def test_random_programs_under_the_page_oracle(world: type[World], block: int) -> None:
    for seed in range(block * 20, block * 20 + 20):
        run_world(world, seed, 100)


def run_world(make: type[World], seed: int, steps: int) -> None:
    rng = random.Random(seed)
    page_size = rng.choice([1, 2, 3, 4, 16])
    world = make(rng.choice([4, 8, 20, 60]), page_size)
    for _ in range(steps):
        random_step(world, rng, 3 * page_size + 4)
        world.check()
    world.drain()


@pytest.mark.parametrize("size", [1, 4, 16])
@pytest.mark.parametrize("hash_algorithm", HASHES)
def test_blocks_find_what_the_tree_finds_floored_to_blocks(size: int, hash_algorithm: str) -> None:
    for seed in range(8):
        run_both(
            seed,
            250,
            RadixCache(20_000, 1),
            HashBlockCache(20_000, size, hash_algorithm=hash_algorithm),
        )


def run_both(seed: int, steps: int, *caches: PrefixCache) -> None:
    """The same program for all of them, without eviction; the first one is the reference."""
    rng = random.Random(seed)
    known: list[list[int]] = [[]]
    open_ones: list[tuple[list[int], list[CacheSequence]]] = []
    for _ in range(steps):
        if len(open_ones) < 8 and rng.random() < 0.5:
            head = rng.choice(known[-40:])
            tokens = head[: rng.randint(0, len(head))] + [rng.randrange(3) for _ in range(30)]
            namespace = rng.choice(["", "", "b"])
            full = rng.random() < 0.3
            lengths = [c.lookup(tokens, namespace, allow_full=full).cached_len for c in caches]
            seqs = [c.acquire(tokens, namespace, allow_full=full) for c in caches]
            assert [seq.cached_len for seq in seqs] == lengths
            for cache, length in zip(caches[1:], lengths[1:], strict=True):
                assert length == lengths[0] - lengths[0] % cache.page_size
            for seq in seqs:
                seq.extend(tokens[seq.cached_len :])
            open_ones.append((tokens, seqs))
            known.append(tokens)
        elif open_ones:
            tokens, seqs = open_ones[rng.randrange(len(open_ones))]
            action = rng.random()
            if action < 0.5:
                least = max(seq.committed_len for seq in seqs)
                length = rng.randint(least, seqs[0].length)
                for seq in seqs:
                    seq.commit(length)
            elif action < 0.75:
                more = [rng.randrange(3) for _ in range(rng.randrange(20))]
                tokens += more
                for seq in seqs:
                    seq.extend(more)
            else:
                open_ones.remove((tokens, seqs))
                for seq in seqs:
                    seq.release()
    for cache in caches:
        assert cache.stats()["evicted_tokens"] == 0
        cache.check()


@pytest.mark.long
@pytest.mark.parametrize("world", [HashWorld, LateHashWorld])
def test_many_random_programs(world: type[World]) -> None:
    """RADIXSERVE_FUZZ_SEEDS sets how many (default 10,000)."""
    for seed in range(1_000, 1_000 + int(os.environ.get("RADIXSERVE_FUZZ_SEEDS", "10000"))):
        run_world(world, seed, 150)
