"""What `HashBlockCache` promises beside the contract: hashing once, and no trust in hashes."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from radixserve.cache import HashBlockCache, HashSequence, Namespace, OutOfPages
from radixserve.cache.hash import hash_cache
from radixserve.cache.hash.block import Block
from radixserve.cache.hash.block_hash import BlockChain, ChainMemo, make_digest
from radixserve.cache.hash.block_pool import BlockPool
from radixserve.cache.page_pool import PagePool
from radixserve.errors import InvalidRequest
from tests.cache.hash_world import LateHashWorld
from tests.cache.world import picture, random_step


def put(cache: HashBlockCache, tokens: list[int], namespace: str = "") -> HashSequence:
    """A sequence with all of `tokens` committed, still held."""
    seq = cache.acquire(tokens, namespace)
    seq.extend(tokens[seq.cached_len :])
    seq.commit(len(tokens))
    cache.check()
    return seq


def array(tokens: list[int]) -> Any:
    return np.asarray(tokens, np.int32)


class TestKeys:
    def test_a_key_stands_for_all_up_to_its_blocks_end(self) -> None:
        digest = make_digest("sha256")
        first, second = (
            BlockChain(digest, b"root", array(t).tobytes(), 8) for t in ([1, 2], [1, 2])
        )
        assert (
            first.key(0)
            == second.key(0)
            == hashlib.sha256(b"root" + array([1, 2]).tobytes()).digest()
        )
        longer = BlockChain(digest, b"root", array([1, 2, 5, 6]).tobytes(), 8)
        other = BlockChain(digest, b"root", array([3, 4, 5, 6]).tobytes(), 8)
        assert longer.key(0) == first.key(0)
        assert longer.key(1) != other.key(1), "the same block behind another one"
        assert BlockChain(digest, b"other", array([1, 2]).tobytes(), 8).key(0) != first.key(0)

    def test_names(self) -> None:
        with pytest.raises(
            InvalidRequest, match=r"hash_algorithm must be one of sha256, xxh3.*'md5'"
        ):
            HashBlockCache(10, hash_algorithm="md5")
        for bad in (0, -1, 1.5, None):
            with pytest.raises(InvalidRequest, match="block_size"):
                HashBlockCache(10, bad)  # type: ignore[arg-type]
        assert HashBlockCache(10).page_size == 16

    def test_a_missing_package_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "xxhash", None)
        with pytest.raises(InvalidRequest, match=r'xxhash.*"sha256" needs none'):
            HashBlockCache(10, hash_algorithm="xxh3")


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What was hashed since the cache was made."""
    seen: list[bytes] = []
    digest = make_digest("sha256")

    def counted(data: bytes) -> bytes:
        seen.append(data)
        return digest(data)

    monkeypatch.setattr(hash_cache, "make_digest", lambda _: counted)
    return seen


class TestHashingOnce:
    def test_a_request_hashes_each_block_once(self, hashed: list[bytes]) -> None:
        cache = HashBlockCache(1000, 16)
        tokens = list(range(330))
        put(cache, tokens).release()
        hashed.clear()
        watch = cache.watch(array(tokens))
        assert len(hashed) == 1, "blocks that follow each other are found by their first one's hash"
        cache.lookup(tokens)
        seq = cache.acquire(tokens)
        cache.changed_watches()
        watch.refresh()
        assert len(hashed) == 1, "the chain of a waiting prompt was hashed again"
        watch.close()
        seq.extend(list(range(seq.cached_len, 400)))
        for length in range(seq.cached_len, 401):
            seq.commit(length)
        assert len(hashed) == 6
        seq.fork().release()
        seq.truncate(100)
        seq.release()
        assert len(hashed) == 6
        branch = cache.acquire([*range(160), *range(500, 600)])
        branch.extend(list(range(500, 600)))
        branch.commit(260)
        assert len(hashed) == 6 + 1 + 1 + 6  # the first one, the one that differs, the new ones

    def test_a_miss_hashes_one_block(self, hashed: list[bytes]) -> None:
        cache = HashBlockCache(1000, 16)
        put(cache, [7] * 64).release()
        hashed.clear()
        assert cache.lookup(list(range(500))).cached_len == 0
        assert len(hashed) == 1

    def test_a_match_that_grew_hashes_only_what_is_new(self, hashed: list[bytes]) -> None:
        cache = HashBlockCache(1000, 16)
        tokens = list(range(330))
        seq = cache.acquire(tokens)
        seq.extend(tokens)
        watch = cache.watch(array(tokens))
        for length in (100, 330):
            seq.commit(length)
            hashed.clear()
            assert cache.changed_watches() == [watch]
            assert len(hashed) == (length < 330)
        assert watch.cached_len == 320
        watch.close()

    def test_nothing_is_kept_of_a_prompt_without_a_holder(self, hashed: list[bytes]) -> None:
        cache = HashBlockCache(1000, 16)
        watch = cache.watch(array(list(range(100))))
        cache.lookup(list(range(100)))
        cache.acquire(list(range(200, 300))).release()
        for num_hashed in (0, 1):
            hashed.clear()
            cache.lookup(list(range(100)))
            assert len([data for data in hashed if data != b"namespace "]) == num_hashed
            if not num_hashed:
                watch.close()
                del watch


class TestWeakHashes:
    """Keys of a few values: nearly every block meets another one under its key."""

    @pytest.fixture(autouse=True)
    def weak(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def digest(data: bytes) -> bytes:
            return bytes([hashlib.sha256(data).digest()[0] % 5])

        monkeypatch.setattr(hash_cache, "make_digest", lambda _: digest)

    def test_equal_keys_never_give_the_wrong_blocks(self) -> None:
        cache = HashBlockCache(400, 2)
        for first in range(60):
            put(cache, [first] * 7).release()
        assert 0 < cache.stats()["nodes"] <= 5
        for first in range(60):
            answer = cache.lookup([first] * 8)
            assert answer.cached_len in (0, 2, 4, 6)
            seq = cache.acquire([first] * 8)
            assert seq.tokens.tolist() == [first] * answer.cached_len
            seq.release()

    def test_the_same_block_behind_another_one_is_another_block(self) -> None:
        """A key and tokens that agree prove nothing when an earlier block differs."""
        cache = HashBlockCache(400, 1)
        first, second = twins_of_one_key(cache)
        put(cache, [first, 7, 7]).release()
        put(cache, [second, 7, 7]).release()
        assert cache.lookup([first, 7, 7, 7, 0]).cached_len > 0
        assert cache.lookup([second, 7, 7, 7, 0]).cached_len == 0
        cache.check()

    def test_random_programs(self) -> None:
        lost = 0
        for seed in range(40):
            rng = random.Random(seed)
            world = WeakWorld(rng.choice([4, 8, 20, 60]), rng.choice([1, 2, 4]))
            for _ in range(100):
                random_step(world, rng, 14)
                world.check()
            world.drain()
            lost += world.num_lost
        assert lost > 0, "no two blocks met under one key"


def twins_of_one_key(cache: HashBlockCache) -> tuple[int, int]:
    """Two tokens whose first blocks have the same key."""
    seen: dict[bytes, int] = {}
    chains = ChainMemo(hash_cache.make_digest("weak"), cache.page_size * 4)
    for token in range(100):
        key = chains.get(chains.root_key(""), array([token]).tobytes()).key(0)
        if key in seen:
            return seen[key], token
        seen[key] = token
    raise AssertionError("no two tokens have the same key")


class WeakWorld(LateHashWorld):
    """A block whose key is taken is not found; all else holds."""

    num_lost = 0

    def commit(self, seq: Any, length: int) -> None:
        self.copy_page_prefixes(seq)
        seq.commit(length)
        self.verify(seq)
        if id(seq) not in self.stale:
            cached = self.longest_cached(tuple(seq.tokens[:length]), self.spaces[id(seq)])
            assert cached <= self.whole(length)
            self.num_lost += cached < self.whole(length)


class TestSharedHeads:
    """A page that is not full is one sequence's own, until a fork has to copy its head."""

    def test_the_page_is_not_private_any_more(self) -> None:
        cache = HashBlockCache(10, 16)
        seq = put(cache, list(range(21)))
        assert seq.num_private == 1
        forked = seq.fork()
        assert (seq.num_private, forked.num_private) == (0, 1)
        assert forked.cow_copies == [(int(seq.pages[1]), int(forked.pages[1]), 5)]
        assert cache.stats()["nodes"] == 1  # and no look-up finds it
        seq.extend(list(range(21, 32)))  # behind the head that is still to be copied
        seq.commit(32)
        cache.check()
        assert cache.stats()["nodes"] == 2
        seq.release()
        cache.evict(1000)
        assert cache.stats()["nodes"] == 2, "the source of a copy was dropped"
        forked.commit(21)
        cache.evict(1000)
        assert cache.stats()["nodes"] == 1
        forked.release()
        cache.check()

    def test_a_fork_of_a_fork_copies_from_the_first_page(self) -> None:
        cache = HashBlockCache(10, 16)
        seq = put(cache, list(range(21)))
        forked = seq.fork()
        third = forked.fork()  # the fork's own page is still empty
        assert third.cow_copies[0][0] == forked.cow_copies[0][0] == seq.pages[1]
        for sequence in (seq, forked, third):
            sequence.release()
            cache.check()
        assert cache.stats()["pages_free"] == 9

    def test_rolling_back_into_a_shared_head_does_not_overwrite_it(self) -> None:
        cache = HashBlockCache(10, 16)
        seq = put(cache, list(range(21)))
        forked = seq.fork()
        seq.truncate(18)
        assert seq.pages[1] not in (forked.cow_copies[0][0], forked.pages[1])
        assert seq.cow_copies == [(forked.cow_copies[0][0], int(seq.pages[1]), 2)]
        cache.check()
        forked.commit(21)
        seq.commit(18)
        cache.check()
        page = int(forked.pages[1])
        forked.truncate(17)  # no other sequence reads it
        assert forked.cow_copies == []
        assert int(forked.pages[1]) == page

    def test_another_sequence_may_fill_the_block_first(self) -> None:
        cache = HashBlockCache(10, 16)
        seq = put(cache, list(range(21)))
        forked = seq.fork()
        for sequence in (forked, seq):
            sequence.extend(list(range(21, 64)))
            sequence.commit(64)
        assert seq.pages.tolist() == forked.pages.tolist()
        assert cache.stats()["duplicate_tokens"] == 48
        assert cache.stats()["pages_tree"] == 4
        cache.check()

    def test_a_head_that_is_filled_after_a_reset_stays_unknown(self) -> None:
        cache = HashBlockCache(10, 16)
        seq = put(cache, list(range(21)))
        forked = seq.fork()
        cache.reset()
        for sequence in (seq, forked):
            sequence.extend(list(range(21, 40)))
            sequence.commit(40)
            cache.check()
        assert cache.lookup(list(range(40))).cached_len == 0
        seq.release()
        forked.release()
        cache.check()
        assert cache.stats()["pages_free"] == 10

    def test_no_room_for_a_head_changes_nothing(self) -> None:
        cache = HashBlockCache(3, 16)
        seq = put(cache, list(range(40)))
        before = picture(cache), seq.pages.tolist()
        for call in (seq.fork, lambda: seq.truncate(20)):
            with pytest.raises(OutOfPages):
                call()
            assert (picture(cache), seq.pages.tolist()) == before
        seq.truncate(33)
        seq.truncate(16)
        cache.check()


class TestOrder:
    def test_many_uses_of_a_chain_keep_the_order(self) -> None:
        cache = HashBlockCache(400, 1)
        chain = list(range(300))
        put(cache, [1_000, 1_001]).release()
        put(cache, chain).release()
        put(cache, [2_000, 2_001]).release()
        for length in [300] * 40 + [200, 100] * 40:  # far more uses than there are blocks
            cache.acquire(chain[:length], allow_full=True).release()
        cache.check()
        order = [entry["tokens"][0] for entry in cache.eviction_preview(400)]
        wanted = [1_001, 1_000, *range(299, 199, -1)]  # as used the last time
        assert order[:2] == wanted[:2]
        assert order[2:4] == [2_001, 2_000]
        assert order[4:104] == wanted[2:]
        assert order[104:] == [*range(199, 99, -1), *range(99, -1, -1)]
        assert cache.evict(104) == 104
        assert cache.lookup([*chain, 0]).cached_len == 200

    def test_pages_that_hold_nothing_are_taken_before_cached_ones(self) -> None:
        cache = HashBlockCache(10, 16)
        put(cache, list(range(64))).release()
        seq = cache.acquire([9])
        seq.extend([9] * 96)
        assert cache.lookup(list(range(65))).cached_len == 64
        seq.extend([9])
        assert cache.lookup(list(range(65))).cached_len == 48

    def test_blocks_of_several_requests_go_in_the_order_of_their_release(self) -> None:
        cache = HashBlockCache(12, 16)
        for first in range(3):
            put(cache, [first] * 48).release()
        cache.acquire([0] * 33).release()  # its first two blocks are used again
        left = []
        for _ in range(9):
            cache.evict(16)
            left.append([cache.lookup([first] * 49).cached_len // 16 for first in range(3)])
        assert left[:7] == [
            [2, 3, 3], [2, 2, 3], [2, 1, 3], [2, 0, 3], [2, 0, 2], [2, 0, 1], [2, 0, 0],
        ]  # fmt: skip
        assert left[7:] == [[1, 0, 0], [0, 0, 0]]

    def test_no_more_is_remembered_of_evicted_blocks_than_said(self) -> None:
        cache = HashBlockCache(64, 1)
        for first in range(200):
            put(cache, [first] * 40).release()
        evicted = [cache.lookup([first] * 41).reason == "evicted" for first in range(200)]
        # each prompt's first block is evicted last: 4,096 / 40 of them are remembered
        assert evicted == [False] * 96 + [True] * 103 + [False]
        cache.reset()
        assert cache.lookup([190] * 41).reason == "never_seen"

    def test_a_reset_forgets_what_was_evicted_in_that_namespace_only(self) -> None:
        cache = HashBlockCache(64, 4)
        for name in ("a", "b"):
            put(cache, list(range(40)), name).release()
        cache.evict(1000)
        assert cache.stats()["namespaces"] == 0
        cache.reset("a")
        assert cache.lookup(list(range(40)), "a").reason == "never_seen"
        assert cache.lookup(list(range(40)), "b").reason == "evicted"


def test_a_million_tokens_need_no_recursion() -> None:
    cache = HashBlockCache(62_501, 16)
    tokens = np.zeros(1_000_000, np.int32)
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(120)
    try:
        seq = cache.acquire(tokens)
        seq.extend(tokens)
        seq.commit(len(tokens))
        seq.release()
        assert cache.lookup(tokens).cached_len == 999_984
        cache.check()
        cache.dump()
        cache.evict(1_000_000)
    finally:
        sys.setrecursionlimit(limit)
    assert cache.stats()["pages_free"] == 62_501


@dataclass
class Parts:
    """What a cache is made of, and a sequence that is in use."""

    pages: PagePool
    pool: BlockPool
    seq: HashSequence

    @property
    def locked(self) -> list[Block]:
        return [
            block
            for block in self.pool.open_namespace(Namespace()).blocks.values()
            if block.lock_ref
        ]


DAMAGE: dict[str, Callable[[Parts], object]] = {
    "belongs to": lambda parts: parts.pages.free(parts.pages.allocate(1) * 2),
    "have no owner": lambda parts: parts.pages.allocate(1),
    "has 2 locks, not 1": lambda parts: parts.pool.lock(parts.locked[-1:]),
    "blocks evictable": lambda parts: parts.pool.evictable.forget(1),
    "wrong key": lambda parts: setattr(parts.locked[0], "tokens", b"x" * 16),
    "not where it says": lambda parts: setattr(parts.locked[0], "is_listed", False),
    "another page than": lambda parts: parts.seq._pages.__setitem__(0, int(parts.seq.pages[1])),
    "not published all": lambda parts: setattr(parts.seq, "committed_len", 12),
    "miscounts its sequences": lambda parts: setattr(
        parts.pool.open_namespace(Namespace()), "num_sequences", 5
    ),
    "does not protect its copy": lambda parts: parts.seq.cow_copies.append((0, 1, 2)),
}


@pytest.mark.parametrize("says", DAMAGE)
def test_the_audit_finds_what_is_wrong(says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, Any] = {}
    for part in (PagePool, BlockPool):
        monkeypatch.setattr(hash_cache, part.__name__, recorded(part, made))
    cache = HashBlockCache(30, 4)
    put(cache, list(range(40))).release()
    seq = put(cache, [5] * 18)
    seq.extend([6])
    cache.check()
    DAMAGE[says](Parts(made["PagePool"], made["BlockPool"], seq))
    with pytest.raises(AssertionError, match=says):
        cache.check()


def recorded(make: Callable[..., Any], made: dict[str, Any]) -> Callable[..., Any]:
    """`make`, which also puts what it returns into `made`."""

    def call(*args: Any) -> Any:
        made[make.__name__] = make(*args)
        return made[make.__name__]

    return call
