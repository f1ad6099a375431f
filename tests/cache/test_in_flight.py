"""Tokens that are computed while others of their sequence are committed, and ids that come late."""

from __future__ import annotations

import os
import random
from collections import Counter
from typing import Any, NamedTuple

import pytest

from radixserve.cache import HashBlockCache, OutOfPages, RadixCache
from radixserve.errors import InvalidRequest
from tests.cache.hash_world import HashWorld
from tests.cache.world import World, random_tokens

CACHES = [RadixCache, HashBlockCache]


@pytest.mark.parametrize("make", CACHES)
class TestUnknownTokens:
    def test_they_have_room_and_are_told_later(self, make: Any) -> None:
        cache = make(10, 4)
        seq = cache.acquire([1, 2, 3])
        seq.extend([1, 2, 3])
        seq.append_placeholders(2)
        assert (seq.length, seq.num_placeholders, len(seq.pages)) == (5, 2, 2)
        assert seq.tokens.tolist() == [1, 2, 3, -1, -1]
        seq.commit(3)
        cache.check()
        seq.fill([7])
        assert (seq.num_placeholders, seq.tokens.tolist()) == (1, [1, 2, 3, 7, -1])
        seq.commit(4)
        seq.fill([8])
        seq.commit(5)
        cache.check()
        seq.release()
        assert cache.lookup([1, 2, 3, 7, 8, 9]).cached_len == (5 if make is RadixCache else 4)

    def test_they_are_never_published(self, make: Any) -> None:
        cache = make(10, 1)
        seq = cache.acquire([1])
        seq.extend([1])
        seq.append_placeholders(1)
        with pytest.raises(InvalidRequest, match=r"between 0 .* and 1, got 2"):
            seq.commit(2)
        with pytest.raises(InvalidRequest, match="placeholders at the end: fill them"):
            seq.extend([5])
        with pytest.raises(InvalidRequest, match="up to 1 tokens"):
            seq.fill([5, 6])
        with pytest.raises(InvalidRequest):
            seq.append_placeholders(0)
        seq.commit(1)
        with pytest.raises(InvalidRequest, match="up to 0 tokens"):
            seq.fork().fill([1])
        seq.release()
        assert cache.lookup([1, 5, 5]).cached_len == 1
        cache.check()

    def test_known_and_unknown_ones_together(self, make: Any) -> None:
        cache = make(8, 2)
        seq = cache.acquire([1])
        seq.extend([1, 2])
        seq.append_placeholders(3)
        assert (seq.length, seq.num_placeholders, len(seq.pages)) == (5, 3, 3)
        assert seq.tokens.tolist() == [1, 2, -1, -1, -1]
        with pytest.raises(InvalidRequest, match="placeholders at the end: fill them"):
            seq.extend([5])
        seq.fill([7, 8, 9])
        seq.commit(5)
        seq.extend([5])
        for bad in (-1, None, 0.0, "2"):
            with pytest.raises(InvalidRequest, match="num_tokens must be"):
                seq.append_placeholders(bad)
        with pytest.raises(OutOfPages):
            seq.append_placeholders(11)
        assert (seq.length, seq.num_placeholders) == (6, 0)
        seq.append_placeholders(10)
        cache.check()
        seq.release()
        cache.check()

    def test_no_room_changes_nothing(self, make: Any) -> None:
        cache = make(3, 1)
        seq = cache.acquire([1])
        seq.extend([1])
        seq.append_placeholders(2)
        with pytest.raises(OutOfPages):
            seq.append_placeholders(1)
        assert (seq.length, seq.num_placeholders) == (3, 2)
        cache.check()
        seq.fill([4, 5])
        seq.commit(3)
        seq.release()
        cache.check()

    def test_a_cut_takes_them_from_the_end(self, make: Any) -> None:
        cache = make(20, 2)
        seq = cache.acquire([1])
        seq.extend([1, 2, 3])
        seq.append_placeholders(17)
        seq.truncate(5)
        assert seq.num_placeholders == 2
        seq.truncate(2)
        assert seq.num_placeholders == 0
        seq.commit(2)
        seq.extend([9])
        cache.check()


@pytest.mark.parametrize("make", CACHES)
def test_pages_are_told_by_what_changed(make: Any) -> None:
    cache = make(40, 2)
    first, second = (cache.acquire([1, 2, 3, 4, 5]) for _ in range(2))
    for seq in (first, second):
        seq.extend([1, 2, 3, 4, 5])
        assert seq.take_page_table_delta()[1] == 0
        pages, start = seq.take_page_table_delta()
        assert (pages.tolist(), start) == (seq.pages.tolist(), 3)
    told = second.take_page_table_delta()[0]
    before = told.tolist()
    first.commit(5)
    second.commit(5)  # takes over the whole pages
    assert second.pages[:2].tolist() == first.pages[:2].tolist() != before[:2]
    assert told.tolist() == before  # until it is told again
    second.extend([6, 7])
    pages, first = second.take_page_table_delta()
    assert (pages.tolist(), first) == (second.pages.tolist(), 0)
    second.commit(7)
    second.truncate(4)
    second.extend([8, 8, 8])
    pages, first = second.take_page_table_delta()
    assert (pages.tolist(), first) == (second.pages.tolist(), 2)


class InFlightChunk(NamedTuple):
    """A row that was launched and is not computed yet."""

    seq: Any
    start: int
    end: int
    pages: list[int]
    cow_copies: list[tuple[int, int, int]]


class FlightWorld(World):
    """Rows are computed in the order of their launch, each as late as the next one's commit.

    A sequence goes on behind its row in flight. One that is let go of meanwhile leaves a row that
    writes nevertheless, whoever may have its pages by then.
    """

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.chunks: list[InFlightChunk] = []
        self.copied: set[int] = set()  # sequences whose copies are launched
        self.told: dict[int, list[int]] = {}
        self.seen: Counter[str] = Counter()

    def copy_page_prefixes(self, seq: Any) -> None:
        """With the first row."""

    def launch(self, seq: Any, count: int, *, is_known: bool) -> None:
        start = seq.length
        try:
            if is_known and not seq.num_placeholders:
                seq.extend([self.now_token() for _ in range(count)])
            else:
                seq.append_placeholders(count)
        except OutOfPages:
            assert seq.length == start
            return
        copies = [] if id(seq) in self.copied else list(seq.cow_copies)
        self.copied.add(id(seq))
        self.chunks.append(InFlightChunk(seq, start, seq.length, self.tell(seq), copies))

    def tell(self, seq: Any) -> list[int]:
        pages, first = seq.take_page_table_delta()
        table = [*self.told.get(id(seq), [])[:first], *pages.tolist()[first:]]
        assert table == seq.pages.tolist()
        self.told[id(seq)] = table
        return table

    def now_token(self) -> int:
        return sum(self.seen.values()) % 2

    def land(self) -> None:
        flight = self.chunks.pop(0)
        seq, shared = flight.seq, self.shared_cells()
        for source, target, count in flight.cow_copies:
            for slot in range(count):
                self.cells[target, slot] = self.cells[source, slot]
        known = seq.length - seq.num_placeholders
        if not seq.is_released and known < flight.end:  # the row before has told its token
            seq.fill([self.now_token() for _ in range(flight.end - known)])
        tokens = tuple(seq.tokens.tolist())
        for position in range(flight.start, flight.end):
            cell = flight.pages[position // self.page_size], position % self.page_size
            assert cell not in shared, "a slot that others may read would be overwritten"
            self.cells[cell] = (-9,) if seq.is_released else tokens[: position + 1]
        self.seen["dead" if seq.is_released else "alive"] += 1
        if not seq.is_released:
            behind = seq.length > flight.end
            pages = seq.pages.tolist()
            self.commit(seq, flight.end)
            self.seen["switched"] += behind and pages != seq.pages.tolist()

    def in_flight(self, seq: Any) -> int:
        return sum(flight.seq is seq for flight in self.chunks)

    def step(self, rng: random.Random) -> None:
        action = rng.choices(
            ["acquire", "launch", "land", "fork", "release", "evict", "reset"],
            [6, 14, 14, 1.5, 3, 2, 0.2],
        )[0]
        seq = rng.choice(self.open) if self.open else None
        if action == "acquire" and len(self.open) < 8:
            self.acquire(random_tokens(self, rng, 30), rng.choice(["", "", "b"]))
        elif action == "land" and self.chunks:
            self.land()
        elif action == "evict":
            self.cache.evict(rng.randrange(2 * self.page_size + 8))
        elif action == "reset":
            self.reset(rng.choice([None, "", "b"]))
        elif seq is None:
            return
        elif action == "launch" and self.in_flight(seq) < 2:
            self.launch(seq, rng.randint(1, 5), is_known=rng.random() < 0.5)
        elif action == "fork":
            self.fork(seq)
        elif action == "release":
            self.release(seq)
            self.told.pop(id(seq), None)

    def drain(self) -> None:
        while self.chunks:
            self.land()
        super().drain()

    def add_sequence(self, seq: Any, namespace: str) -> None:
        self.copied.discard(id(seq))
        self.told.pop(id(seq), None)
        super().add_sequence(seq, namespace)


class HashFlightWorld(FlightWorld, HashWorld):
    pass


def program(make: type[FlightWorld], seed: int, steps: int) -> Counter[str]:
    rng = random.Random(seed)
    page_size = rng.choice([1, 2, 3, 16])
    world = make(max(4, rng.choice([20, 60, 200]) // page_size), page_size)
    for _ in range(steps):
        world.step(rng)
        world.check()
    world.drain()
    return world.seen


@pytest.mark.parametrize("make", [FlightWorld, HashFlightWorld])
def test_random_programs(make: type[FlightWorld]) -> None:
    seen: Counter[str] = Counter()
    for seed in range(8):
        seen += program(make, seed, 150)
    assert min(seen[event] for event in ("alive", "dead", "switched")) > 3


@pytest.mark.long
@pytest.mark.timeout(36_000)
def test_many_random_programs() -> None:
    """RADIXSERVE_FUZZ_SEEDS sets how many (default 1,000):

    RADIXSERVE_FUZZ_SEEDS=100 python -m pytest -m long tests/cache/test_in_flight.py
    """
    for seed in range(100, 100 + int(os.environ.get("RADIXSERVE_FUZZ_SEEDS", "1000"))):
        program((FlightWorld, HashFlightWorld)[seed % 3 == 0], seed, 300)
