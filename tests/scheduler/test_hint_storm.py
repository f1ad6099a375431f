"""Storms of hints among requests, aborts, small pools, preemptions, resets: no law is broken, and
every request that fits the pool alone completes."""

from __future__ import annotations

import os
import random
from collections import Counter

import pytest

from radixserve.config import EVICTION_POLICIES
from tests.scheduler.fake import counters, random_prompt
from tests.scheduler.hint_driver import AheadHintDriver, HintDriver, random_hint
from tests.scheduler.test_storm import SESSIONS, add_random, change_sessions


def storm(seed: int, steps: int, kind: str = "radix", *, ahead: bool = False) -> Counter[str]:
    """`ahead`: one step is launched before the one before it is collected."""
    rng = random.Random(seed)
    page_size = rng.choice([1, 1, 2, 16])
    driver = (AheadHintDriver if ahead else HintDriver)(
        max(2, rng.choice([30, 60, 90, 400]) // page_size),
        page_size,
        policy=rng.choice(["lpm", "fcfs", "dfs-weight"]),
        chunked_prefill_size=rng.choice([1, 7, 16, 64]),
        max_running_requests=rng.choice([1, 3, 8]),
        max_overtake=rng.choice([0, 2, 8]),
        kind=kind,
        eviction=rng.choice(EVICTION_POLICIES),
        max_hint_share=rng.choice([0.0, 0.5, 1.0]),
    )
    seen: Counter[str] = Counter()
    names: list[str] = []
    for _ in range(steps):
        if rng.random() < 0.4 and len(names) - len(driver.finished) < 20:
            names.append(f"r{len(names)}")
            add_random(driver, rng, names[-1], 0.5)
        if names and rng.random() < 0.05:
            driver.abort(rng.choice(names[-20:]))
        if rng.random() < 0.03:
            driver.cache.evict(rng.randrange(30))
        if rng.random() < 0.1:
            change_sessions(driver, rng)
        if rng.random() < 0.4:
            random_hint(driver, rng, SESSIONS, seen)
        driver.now += rng.choice([0.0, 0.3, 5.0])
        if rng.random() < 0.01:
            driver.engine.reset_cache(rng.choice([None, "", "b"]))
        driver.step()
        driver.engine.check()
    # Whatever is pinned: a request that fits the pool alone completes.
    capacity = driver.num_pages * driver.page_size
    names.append("big")
    driver.add("big", random_prompt(rng, [], capacity - 2), max_tokens=capacity, ignore_eos=True)
    driver.run()
    assert len(driver.finished) == len(names)
    assert driver.finished["big"].reason in ("length", "stop")
    for name, finish in driver.finished.items():
        usage = finish.usage
        assert usage.cached_tokens + usage.computed_tokens == usage.prompt_tokens
        assert driver.output(name) == driver.expected(name, usage.completion_tokens)
    seen += counters(driver.scheduler.stats())
    seen["retained_evicted"] += driver.cache.stats()["retained_evicted_pages"]
    driver.now += 1e5  # every hint's time is over
    driver.scheduler.stats()
    assert driver.cache.stats()["pages_retained"] == driver.cache.stats()["pages_pinned"] == 0
    driver.drain()
    return seen


def test_hints_break_no_law() -> None:
    seen: Counter[str] = Counter()
    for seed in range(6):
        seen += storm(seed, 100)
    events = ("preemptions", "aborted", "broken_pins", "retained_evicted", "prefetched_tokens")
    for event in (*events, "shared_tokens"):
        assert seen[event] > 0, f"the storm had no {event}"
    for verb in ("pin", "retain", "share"):
        for answer in ("accepted", "clipped", "rejected", "missing"):
            assert seen[f"{verb} {answer}"] > 0, f"no {verb} was {answer}"
    for pair in ("demote accepted", "demote rejected", "prefetch accepted", "prefetch deferred"):
        assert seen[pair] > 0, f"no {pair}"


def test_hash_blocks_are_not_disturbed() -> None:
    seen: Counter[str] = Counter()
    for seed in range(2):
        seen += storm(seed, 100, "hash")
    assert seen["prefetched_tokens"] > 0
    assert not seen["pin accepted"]


def test_hints_while_steps_are_in_flight() -> None:
    seen: Counter[str] = Counter()
    for seed in range(3, 6):
        seen += storm(seed, 100, ahead=True)
    for event in ("steps_ahead", "broken_pins", "prefetched_tokens", "shared_tokens"):
        assert seen[event] > 0, f"the storm had no {event}"


@pytest.mark.long
def test_many_storms_of_hints() -> None:
    """RADIXSERVE_FUZZ_SEEDS sets how many (default 3,000)."""
    for seed in range(1_000, 1_000 + int(os.environ.get("RADIXSERVE_FUZZ_SEEDS", "3000"))):
        storm(seed, 200, "hash" if seed % 6 == 0 else "radix", ahead=seed % 2 == 1)
