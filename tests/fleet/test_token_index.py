"""The token index against the caches whose events it is fed."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from radixserve.cache import EventBatch, EventSnapshot, HashBlockCache, RadixCache
from radixserve.cache.events import Event, Removed, Reset, Split, Stored, Truncated
from radixserve.fleet.token_index import Reservation, TokenIndex
from tests.cache.hash_world import HashWorld
from tests.cache.mirror import Prefix, contents, ids
from tests.cache.world import World, random_step, random_tokens


class Replica:
    """A cache and its events, which may reach the index late, twice, or not at all."""

    def __init__(self, index: TokenIndex, name: str, world: World) -> None:
        self.index, self.name, self.world = index, name, world
        self.log = world.cache.open_events()
        self.under_way: list[EventBatch] = []
        index.add(name)

    def send(self) -> None:
        self.under_way.append(self.log.take())

    def settle(self) -> None:
        self.send()
        for batch in self.under_way:
            self.index.take(self.name, batch)
        self.under_way.clear()
        if self.index.needs_snapshot(self.name):
            assert self.index.restart(self.name, self.log.snapshot())
        assert not self.index.needs_snapshot(self.name)

    def check(self) -> None:
        there = contents(self.world.cache)
        for namespace in ("", "b"):
            assert self.index.cached_paths(self.name, namespace) == longest(
                there.get(namespace, [])
            )

    def restart(self, world: World) -> None:
        """It died, and is back with another cache."""
        self.world = world
        self.under_way.clear()
        self.log = world.cache.open_events()


def longest(paths: list[Prefix]) -> list[Prefix]:
    """Those that are not the beginning of another one."""
    ends = [*sorted(set(paths)), ()]
    return [one for one, after in pairwise(ends) if after[: len(one)] != one]


def common(one: Prefix, other: Prefix) -> int:
    count = 0
    while count < min(len(one), len(other)) and one[count] == other[count]:
        count += 1
    return count


def matched(index: TokenIndex, names: list[str], tokens: Prefix, namespace: str) -> list[int]:
    lengths = np.full(16, -1, np.int32)
    index.match(ids(tokens), namespace, lengths)
    return [int(lengths[index.number(name)]) for name in names]


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("seed", range(12))
def test_the_index_knows_what_each_replica_holds(page_size: int, seed: int) -> None:
    rng = random.Random(seed)
    index, make = TokenIndex(), rng.choice([World, World, HashWorld])
    replicas = [Replica(index, f"r{n}", make(24, page_size)) for n in range(3)]
    names = [one.name for one in replicas]
    reserved: list[tuple[Prefix, str, str, Reservation]] = []
    for step in range(160):
        one = rng.choice(replicas)
        random_step(one.world, rng, 3 * page_size + 6)
        one.send()
        loss = rng.random()
        if loss < 0.03:
            one.under_way.pop()
        elif loss < 0.06:
            one.under_way += one.under_way[-2:]
        elif loss < 0.09:
            one.under_way.reverse()
        elif loss < 0.10:
            one.restart(make(24, page_size))
        if rng.random() < 0.5:
            one.settle()
            one.check()
        if rng.random() < 0.3:
            tokens, space = random_tokens(one.world, rng, 8), rng.choice(["", "b"])
            number = index.number(one.name)
            held = index.reserve(ids(tokens), space, number)
            reserved.append((tokens, space, one.name, held))
        while len(reserved) > 4 or (reserved and rng.random() < 0.2):
            index.release(reserved.pop(rng.randrange(len(reserved)))[3])
        if step % 10 == 0:
            for other in replicas:
                other.settle()
            index.check()
            held_now = [(r, path) for r in replicas for path in contents(r.world.cache).get("", [])]
            for _ in range(3):
                tokens = random_tokens(one.world, rng, 12)
                expected = [
                    max(
                        [common(p, tokens) for r, p in held_now if r.name == name]
                        + [
                            common(t, tokens)
                            for t, space, who, held in reserved
                            if (who, space) == (name, "")
                        ],
                        default=0,
                    )
                    for name in names
                ]
                assert matched(index, names, tokens, "") == expected
    for *_, held in reserved:
        index.release(held)
    for name in names:
        index.remove(name)
    index.add("last")
    index.restart("last", EventSnapshot(1, 0, []))
    for number in range(40):
        index.take("last", EventBatch(1, number, [Reset("")]))
    index.check()
    assert index.num_edges == index.num_tokens == 0


def feed(index: TokenIndex, name: str, *events: Event) -> None:
    index.take(name, EventBatch(1, index.next_event(name), events))


def make_index(*names: str) -> TokenIndex:
    index = TokenIndex()
    for name in names:
        index.add(name)
        assert index.restart(name, EventSnapshot(1, 0, []))
    return index


def test_one_edge_for_what_replicas_share() -> None:
    index = make_index("a", "b")
    feed(index, "a", Stored(1, 0, "", ids([1, 2, 3, 4])))
    feed(index, "b", Stored(7, 0, "", ids([1, 2, 3, 4])))
    assert (index.num_edges, index.num_tokens) == (1, 4)
    feed(index, "b", Split(7, 8, 2), Stored(9, 8, "", ids([5])))
    assert (index.num_edges, index.num_tokens) == (3, 5)
    assert matched(index, ["a", "b"], (1, 2, 5), "") == [2, 3]
    feed(index, "b", Removed(7, 2))
    assert matched(index, ["a", "b"], (1, 2, 3, 4), "") == [4, 2]
    feed(index, "a", Truncated(1, 3))
    assert matched(index, ["a", "b"], (1, 2, 3, 4), "") == [1, 2]
    index.check()


def test_a_removed_replica_is_not_found_any_more_and_its_number_is_used_again() -> None:
    index = make_index("a", "b")
    feed(index, "a", Stored(1, 0, "", ids([1, 2])))
    number = index.number("a")
    index.remove("a")
    assert matched(index, ["b"], (1, 2), "") == [0]
    index.add("c")
    assert index.number("c") != number, "its bits are still there"
    feed(index, "b", Stored(1, 0, "", ids([9])))
    index.add("d")
    assert index.number("d") == number
    assert matched(index, ["c", "d"], (1, 2), "") == [0, 0]
    assert index.num_tokens == 1


def test_events_count_from_a_snapshot_on() -> None:
    cache, index = RadixCache(8), TokenIndex()
    log = cache.open_events()
    index.add("a")
    index.take("a", EventBatch(log.epoch, 0, [Stored(1, 0, "", ids([1]))]))
    assert index.needs_snapshot("a")
    assert matched(index, ["a"], (1,), "") == [0]
    assert index.restart("a", log.snapshot())
    assert not index.restart("a", log.snapshot()), "nothing new"


def test_blocks_that_begin_alike_are_dropped_one_by_one() -> None:
    cache, index = HashBlockCache(8, 4), TokenIndex()
    log = cache.open_events()
    index.add("a")
    index.restart("a", log.snapshot())
    for tokens in ([1, 2, 3, 4], [1, 2, 5, 6]):
        with cache.acquire(tokens) as sequence:
            sequence.extend(tokens)
            sequence.commit(4)
    cache.evict(4)
    index.take("a", log.take())
    assert index.cached_paths("a", "") == [(1, 2, 5, 6)]


def test_more_replicas_than_a_machine_word_has_bits() -> None:
    names = [f"r{n}" for n in range(100)]
    index = make_index(*names)
    for number, name in enumerate(names):
        feed(index, name, Stored(1, 0, "", ids(range(number + 1))))
    lengths: Any = np.zeros(100, np.int32)
    index.match(ids(range(200)), "", lengths)
    assert lengths.tolist() == [*range(1, 101)]
