"""Events: a mirror fed by them equals the cache, whatever is lost, doubled or late."""

from __future__ import annotations

import random
import sys
from collections import deque
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

import radixserve.cache.events as events
from radixserve.cache import EventBatch, EventCursor, EventSnapshot, HashBlockCache, RadixCache
from radixserve.cache.events import Appended, Removed, Reset, Split, Stored, Truncated
from radixserve.errors import InvalidRequest
from tests.cache.hash_world import HashWorld
from tests.cache.mirror import Mirror, contents, ids
from tests.cache.test_oracle import CacheMachine
from tests.cache.world import World, random_step
from tests.cache_layers.state_world import StateWorld
from tests.cache_layers.window_world import WindowWorld


class Line:
    """A connection that loses, doubles and reorders batches, and a mirror at its end."""

    def __init__(self, cache: Any) -> None:
        self.log = cache.open_events(epoch=1)
        self.exact, self.mirror = Mirror(), Mirror()
        self.exact.restart(self.log.snapshot())
        self.under_way: deque[EventBatch] = deque()

    def send(self) -> None:
        batch = self.log.take()
        self.exact.take(batch)
        assert not self.exact.cursor.is_lost
        self.under_way.append(batch)

    def deliver(self) -> None:
        if self.under_way:
            self.mirror.take(self.under_way.popleft())

    def check(self, cache: Any) -> None:
        self.send()
        there = contents(cache)
        assert self.exact.contents() == there
        if not self.mirror.cursor.is_lost and self.mirror.cursor.end == self.log.first:
            assert self.mirror.contents() == there, "the mirror does not know that it is behind"

    def settle(self, cache: Any) -> None:
        """All arrives; a mirror that has lost something asks for a snapshot."""
        self.send()
        while self.under_way:
            self.deliver()
        if self.mirror.cursor.is_lost:
            self.mirror.restart(self.log.snapshot())
        assert not self.mirror.cursor.is_lost
        assert self.mirror.contents() == contents(cache)


class EventMachine(CacheMachine):
    @initialize(
        page_size=st.sampled_from([1, 2, 16]),
        pages=st.integers(3, 40),
        make=st.sampled_from([World, World, HashWorld]),
    )
    def start(self, page_size: int, pages: int, make: type[World]) -> None:  # type: ignore
        self.world = make(pages, page_size)
        self.line = Line(self.world.cache)

    @rule()
    def deliver(self) -> None:
        self.line.deliver()

    @rule()
    def lose(self) -> None:
        if self.line.under_way:
            self.line.under_way.popleft()

    @rule()
    def double(self) -> None:
        if self.line.under_way:
            self.line.under_way.append(self.line.under_way[0])

    @rule()
    def reorder(self) -> None:
        self.line.under_way.reverse()

    @rule()
    def ask(self) -> None:
        self.line.mirror.restart(self.line.log.snapshot())

    @rule()
    def settle(self) -> None:
        self.line.settle(self.world.cache)

    def laws_hold(self) -> None:
        super().laws_hold()
        if hasattr(self, "line"):
            self.line.check(self.world.cache)

    def teardown(self) -> None:
        if hasattr(self, "line"):
            self.line.settle(self.world.cache)
            super().teardown()
            self.line.settle(self.world.cache)
            assert self.line.mirror.contents() == {}


TestEventMachine = EventMachine.TestCase
TestEventMachine.settings = settings(max_examples=30, stateful_step_count=40)


@pytest.mark.parametrize("make", [World, HashWorld, StateWorld, WindowWorld])
def test_random_programs(make: type[World]) -> None:
    for seed in range(40):
        rng = random.Random(seed)
        world = make(rng.choice([8, 20, 60]), rng.choice([1, 2, 4, 16]))
        line = Line(world.cache)
        for _ in range(80):
            random_step(world, rng, 3 * world.page_size + 4)
            line.check(world.cache)
            if rng.random() < 0.1 and line.under_way:
                line.under_way.popleft()
            elif rng.random() < 0.5:
                line.deliver()
        line.settle(world.cache)


def put(cache: Any, tokens: list[int], namespace: str = "") -> None:
    with cache.acquire(tokens, namespace) as sequence:
        sequence.extend(tokens[sequence.cached_len :])
        sequence.commit(len(tokens))


def test_the_events_of_a_tree() -> None:
    cache = RadixCache(8)
    log = cache.open_events()
    put(cache, [1, 2, 3])
    put(cache, [1, 2, 4], "b")
    put(cache, [1, 2, 4])
    assert log.take().events == [
        Stored(1, 0, "", ids([1, 2, 3])),
        Stored(2, 0, "b", ids([1, 2, 4])),
        Split(1, 3, 1),
        Stored(4, 3, "", ids([4])),
    ]
    cache.reset("b")
    cache.evict(4)
    batch = log.take()
    assert batch.first == 4
    assert batch.events == [Reset("b"), Removed(1, 1), Removed(4, 1), Removed(3, 2)]
    assert log.take().events == []


def test_tokens_of_one_node_are_one_event_until_something_else_happens_to_it() -> None:
    cache = RadixCache(8)
    log = cache.open_events()
    sequence = cache.acquire([1, 2])
    for token in (1, 2, 3, 4):
        sequence.extend([token])
        sequence.commit(sequence.length)
    assert log.take().events == [Stored(1, 0, "", ids([1, 2, 3, 4]))]
    sequence.extend([5])
    sequence.commit(5)
    sequence.release()
    cache.evict(2)
    assert log.take().events == [Appended(1, ids([5])), Truncated(1, 2)]


def test_a_snapshot_holds_what_is_pending_and_no_event_afterwards_changes_the_past() -> None:
    cache = RadixCache(8)
    log, mirror = cache.open_events(), Mirror()
    sequence = cache.acquire([1, 2])
    sequence.extend([1])
    sequence.commit(1)
    mirror.restart(log.snapshot())
    sequence.extend([2])
    sequence.commit(2)
    mirror.take(log.take())
    assert mirror.contents() == {"": [(1, 2)]}


def test_a_page_that_a_sibling_holds_in_part_is_said_to_stay() -> None:
    cache = RadixCache(8, page_size=4)
    log = cache.open_events()
    put(cache, [1, 2, 3, 4])
    put(cache, [1, 2, 5, 6])
    log.take()
    cache.evict(4)
    assert log.take().events == [Removed(1, 2)]


def test_events_that_are_not_taken_are_bounded_and_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "_MAX_PENDING_BYTES", 1_000)
    cache = RadixCache(100)
    log, mirror = cache.open_events(), Mirror()
    mirror.restart(log.snapshot())
    for token in range(40):
        put(cache, [token, 1])
    batch = log.take()
    assert batch.end == 40
    assert len(batch.events) < 16
    mirror.take(batch)
    assert mirror.cursor.is_lost
    mirror.restart(log.snapshot())
    assert mirror.contents() == contents(cache)


def test_one_log_at_a_time() -> None:
    for cache in (RadixCache(8), HashBlockCache(8, 1)):
        log = cache.open_events()
        with pytest.raises(InvalidRequest, match="open already"):
            cache.open_events()
        put(cache, [1])
        log.close()
        put(cache, [2])
        assert log.take().events == []
        again = cache.open_events()
        log.close()
        put(cache, [3])
        assert len(again.take().events) == 1
        assert again.epoch > log.epoch


def test_a_later_epoch_needs_its_own_snapshot_and_an_earlier_one_is_over() -> None:
    cursor = EventCursor()
    assert cursor.restart(EventSnapshot(5, 7, []))
    event = Reset("")
    assert cursor.accept(EventBatch(4, 7, [event])) == ()
    assert cursor.accept(EventBatch(5, 6, [event, event])) == [event]
    assert not cursor.restart(EventSnapshot(5, 7, [])), "an old snapshot"
    assert not cursor.restart(EventSnapshot(4, 90, []))
    assert cursor.accept(EventBatch(6, 0, [event])) == ()
    assert cursor.is_lost
    assert not cursor.restart(EventSnapshot(5, 9, [])) or cursor.epoch == 5
    assert cursor.accept(EventBatch(6, 1, [event])) == ()
    assert cursor.is_lost
    assert cursor.restart(EventSnapshot(6, 2, []))
    assert cursor.accept(EventBatch(6, 2, [event])) == [event]


def test_a_cache_without_reuse_has_no_events() -> None:
    cache = RadixCache(8, reuse=False)
    log = cache.open_events()
    put(cache, [1, 2])
    assert log.take().events == []


def test_without_a_log_nothing_of_the_events_runs() -> None:
    called = set()

    def note(frame: FrameType, kind: str, _: object) -> None:
        if kind == "call":
            called.add(Path(frame.f_code.co_filename).stem)

    for make in (World, HashWorld):
        world, rng = make(20, 4), random.Random(0)
        sys.setprofile(note)
        try:
            for _ in range(200):
                random_step(world, rng, 20)
        finally:
            sys.setprofile(None)
    assert {"radix_tree", "block_pool"} <= called
    assert "events" not in called
