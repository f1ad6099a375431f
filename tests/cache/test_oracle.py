"""Everything a user of the cache may do, in any order, against the plain oracle of `world`."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
from hypothesis import assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from radixserve.cache import RadixSequence
from radixserve.config import EVICTION_POLICIES
from radixserve.retention.sessions import RadixSession
from tests.cache.hash_world import LateWorld
from tests.cache.world import Prefix, World, random_step
from tests.cache_layers.state_world import CrowdedStateWorld, LateStateWorld, StateWorld
from tests.cache_layers.window_world import CrowdedWindowWorld, LateWindowWorld, WindowWorld

TOKENS = st.lists(st.integers(0, 2), max_size=40).map(tuple)
STATEFUL = (StateWorld, LateStateWorld, CrowdedStateWorld)
WINDOWED = (WindowWorld, LateWindowWorld, CrowdedWindowWorld)
NAMESPACES = st.sampled_from(["", "", "b"])


class CacheMachine(RuleBasedStateMachine):
    """Shrinks to the shortest program that breaks a law."""

    kinds: tuple[type[World], ...] = (World, LateWorld)
    world: World

    @initialize(
        page_size=st.sampled_from([1, 2, 16]),
        pages=st.integers(3, 80),
        reuse=st.sampled_from([True, True, True, False]),
        eviction=st.sampled_from(EVICTION_POLICIES),
        make=st.runner().flatmap(lambda machine: st.sampled_from(machine.kinds)),
    )
    def start(
        self, page_size: int, pages: int, reuse: bool, eviction: str, make: type[World]
    ) -> None:
        self.world = make(pages, page_size, reuse=reuse, eviction=eviction)

    def pick(self, data: st.DataObject) -> RadixSequence:
        assume(self.world.open)
        seq: RadixSequence = data.draw(st.sampled_from(self.world.open))
        return seq

    def pick_session(self, data: st.DataObject) -> RadixSession | None:
        return data.draw(st.sampled_from([None, *self.world.sessions]))

    @rule(data=st.data(), tokens=TOKENS, namespace=NAMESPACES, allow_full=st.booleans())
    def acquire(
        self, data: st.DataObject, tokens: Prefix, namespace: str, allow_full: bool
    ) -> None:
        assume(len(self.world.open) < 10)
        session, priority = self.pick_session(data), data.draw(st.integers(-2, 2))
        self.world.acquire(
            tokens, namespace, allow_full=allow_full, session=session, priority=priority
        )

    @rule(data=st.data(), tail=TOKENS, namespace=NAMESPACES)
    def acquire_known_head(self, data: st.DataObject, tail: Prefix, namespace: str) -> None:
        assume(len(self.world.open) < 10)
        seq = self.pick(data)
        head = tuple(seq.tokens.tolist())
        cut = data.draw(st.integers(0, len(head)))
        self.world.acquire(head[:cut] + tail, namespace, session=self.pick_session(data))

    @rule(lease_s=st.sampled_from([0.0, 1.0, 10.0, 1e9]))
    def open_session(self, lease_s: float) -> None:
        assume(len(self.world.sessions) < 8)
        self.world.open_session(lease_s)

    @rule(data=st.data())
    def close_session(self, data: st.DataObject) -> None:
        assume(self.world.sessions)
        data.draw(st.sampled_from(self.world.sessions)).close()

    @rule(seconds=st.sampled_from([0.5, 2.0, 20.0]))
    def wait(self, seconds: float) -> None:
        self.world.now += seconds

    @rule(data=st.data(), tokens=TOKENS)
    def extend(self, data: st.DataObject, tokens: Prefix) -> None:
        self.world.extend(self.pick(data), tokens)

    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        seq = self.pick(data)
        length = data.draw(st.integers(seq.committed_len, seq.length))
        self.world.commit(seq, length)

    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        assume(len(self.world.open) < 10)
        self.world.fork(self.pick(data))

    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        seq = self.pick(data)
        self.world.truncate(seq, data.draw(st.integers(0, seq.length)))

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.world.release(self.pick(data))

    @rule(count=st.integers(0, 50))
    def evict(self, count: int) -> None:
        self.world.evict(count)

    @rule(namespace=st.sampled_from([None, "", "b"]))
    def reset(self, namespace: str | None) -> None:
        self.world.reset(namespace)

    @invariant()
    def laws_hold(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.drain()


class StateMachine(CacheMachine):
    """The same with recurrent states."""

    kinds = STATEFUL


class WindowMachine(CacheMachine):
    """The same with windows."""

    kinds = WINDOWED


TestWindowMachine = WindowMachine.TestCase
TestStateMachine = StateMachine.TestCase
TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=12, stateful_step_count=40)


TestStateMachine.settings = settings(TestCacheMachine.settings, max_examples=6)
TestWindowMachine.settings = TestStateMachine.settings


def run_world(seed: int, steps: int, kinds: tuple[type[World], ...] = (World, LateWorld)) -> None:
    rng = random.Random(seed)
    page_size = rng.choice([1, 2, 3, 4, 16, 64])
    make = rng.choice(kinds)
    world = make(
        rng.choice([4, 8, 20, 60] if kinds is not WINDOWED else [20, 60, 200]),
        page_size,
        reuse=rng.random() < 0.9,
        eviction=rng.choice(EVICTION_POLICIES),
    )
    world.has_sessions = rng.random() < 0.6
    for _ in range(steps):
        random_step(world, rng, 3 * page_size + 4)
        world.check()
    world.drain()


def blocks(num_blocks: int, num_short: int = 1) -> list[Any]:
    """The first ones; the others are long runs."""
    return [
        pytest.param(block, marks=() if block < num_short else pytest.mark.long)
        for block in range(num_blocks)
    ]


@pytest.mark.parametrize("block", blocks(8, 3))
def test_random_programs(block: int) -> None:
    for seed in range(block * 20, block * 20 + 20):
        run_world(seed, 120)


@pytest.mark.parametrize("block", blocks(2))
def test_random_programs_with_states(block: int) -> None:
    for seed in range(block * 20, block * 20 + 20):
        run_world(seed, 120, STATEFUL)


@pytest.mark.parametrize("block", blocks(2))
def test_random_programs_with_windows(block: int) -> None:
    for seed in range(block * 20, block * 20 + 20):
        run_world(seed, 120, WINDOWED)


@pytest.mark.long
def test_many_random_programs() -> None:
    """RADIXSERVE_FUZZ_SEEDS sets how many (default 20,000, about ten minutes)."""
    for seed in range(10_000, 10_000 + int(os.environ.get("RADIXSERVE_FUZZ_SEEDS", "20000"))):
        run_world(seed, 150, ((World, LateWorld), STATEFUL, WINDOWED)[seed % 3])
