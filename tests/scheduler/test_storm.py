"""Long random runs of the real scheduler and cache: aborts, preemptions, evictions, resets."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from radixserve.config import EVICTION_POLICIES
from radixserve.schedule import SchedulerOutput, WindowLayers
from tests.scheduler.fake import Driver, counters, random_prompt

SESSIONS = ["chat", "agent", "tenant"]


def storm(
    seed: int,
    steps: int,
    kind: str = "radix",
    prepare: Callable[[Driver, random.Random], None] = lambda _driver, _rng: None,
) -> Counter[str]:
    """Random requests and interruptions; `check()` after every step; returns what happened."""
    rng = random.Random(seed)
    page_size = rng.choice([1, 2, 16, 64])
    pages = max(2, rng.choice([30, 60, 90, 400]) // page_size)
    chunk = rng.choice([1, 7, 16, 64])
    windows = None
    if kind == "windows":
        size = rng.choice([3, 10, 30])
        windows = WindowLayers(-(-(size + chunk) // page_size) + rng.choice([3, 8, 20]), size)
    driver = Driver(
        pages,
        page_size,
        policy=rng.choice(["lpm", "fcfs", "dfs-weight"]),
        chunked_prefill_size=chunk,
        max_running_requests=rng.choice([1, 3, 8]),
        max_overtake=rng.choice([0, 2, 8]),
        reuse=rng.random() < 0.85,
        kind="hash" if kind == "hash" else "radix",
        eviction=rng.choice(EVICTION_POLICIES),
        num_states=rng.choice([2, 5, 40]) if kind == "states" else 0,
        windows=windows,
        clock=lambda: 0.0,  # measured times would differ each time
    )
    prepare(driver, rng)
    share_plain = rng.choice([0.5, 1.0])
    names: list[str] = []
    for _ in range(steps):
        if rng.random() < 0.4 and len(names) - len(driver.finished) < 20:
            names.append(f"r{len(names)}")
            add_random(driver, rng, names[-1], share_plain)
        if names and rng.random() < 0.05:
            driver.abort(rng.choice(names[-20:]))
        if rng.random() < 0.03:
            driver.cache.evict(rng.randrange(30))
        if rng.random() < 0.1:
            change_sessions(driver, rng)
        driver.now += rng.choice([0.0, 0.3, 5.0])
        if rng.random() < 0.01:
            driver.cache.reset(rng.choice([None, "", "b"]))
        driver.step()
        driver.cache.check()
    driver.run()
    assert len(driver.finished) == len(names)
    for name, finish in driver.finished.items():
        usage = finish.usage
        assert usage.cached_tokens + usage.computed_tokens == usage.prompt_tokens
        assert usage.completion_tokens == len(driver.output(name))
        assert driver.output(name) == driver.expected(name, usage.completion_tokens)
    driver.drain()
    return counters(driver.scheduler.stats()) + Counter(
        evicted=driver.cache.stats()["evicted_tokens"],
        dropped=driver.cache.stats().get("evicted_window_pages", 0),
    )


def add_random(driver: Driver, rng: random.Random, name: str, share_plain: float) -> None:
    capacity = driver.num_pages * driver.page_size
    known = list(driver.runner.tokens.values())
    driver.add(
        name,
        random_prompt(rng, known, min(capacity - 2, 60)),
        max_tokens=rng.randint(1, 40),
        priority=rng.choice([0, 0, 0, 1]),
        namespace=rng.choice(["", "", "b"]),  # type: ignore[arg-type]
        ignore_eos=rng.random() < 0.5,
        session=rng.choice(["", "", *SESSIONS]),
        temperature=0.0 if rng.random() < share_plain else 1.0,
    )


def with_uncut_parts(driver: Driver, rng: random.Random) -> None:
    """Give prompts parts inside which no step may end, and see that none does."""
    add, note = driver.add, driver.runner.before_launch
    # All of a part has window pages at once.
    most = driver.chunked_prefill_size if driver.windows else 30

    def add_with_parts(name: str, tokens: list[int], **options: Any) -> None:
        parts, start = [], rng.randint(0, 9)
        while most > 1 and (end := start + rng.randint(2, most)) <= len(tokens):
            parts.append((start, end))
            start = end + rng.choice([0, 0, 3])
        add(name, tokens, uncut=parts, **options)

    def look(schedule: SchedulerOutput) -> None:
        note(schedule)
        for row in schedule.rows:
            for start, end in driver.requests[row.request_id].uncut:
                assert not start < row.end < end

    driver.add, driver.runner.before_launch = add_with_parts, look  # type: ignore[method-assign]


@pytest.mark.parametrize("kind", ["radix", "hash", "windows"])
def test_no_step_ends_inside_an_uncut_part(kind: str) -> None:
    seen: Counter[str] = Counter()
    for seed in range(3):
        seen += storm(seed, 80, kind, with_uncut_parts)
    assert seen["preemptions"] > 0
    assert seen["evicted"] > 0


def change_sessions(driver: Driver, rng: random.Random) -> None:
    name = rng.choice(SESSIONS)
    if rng.random() < 0.5:
        driver.scheduler.sessions.open(name, lease_s=rng.choice([0.0, 2.0, 100.0]))
    else:
        driver.scheduler.sessions.close(name)


@pytest.mark.parametrize("kind", ["radix", "hash", "states", "windows"])
@pytest.mark.parametrize(
    "seeds",
    [
        range(1, 6),
        *(pytest.param(range(n, n + 10), marks=pytest.mark.long) for n in range(0, 50, 10)),
    ],
    ids=str,
)
def test_many_steps(seeds: Sequence[int], kind: str) -> None:
    """With every kind of interruption, audited after each."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        seen += storm(seed, 120, kind)
    assert seen["steps"] >= 100 * len(seeds)
    events = ("aborted", "preemptions", "evicted", "recomputed_tokens", "reused_tokens")
    for event in (*events, "dropped") if kind == "windows" else events:
        assert seen[event] > 0, f"the storm had no {event}"


@pytest.mark.parametrize("kind", ["radix", "hash"])
@pytest.mark.parametrize("steps", [1_500, pytest.param(5_000, marks=pytest.mark.long)])
def test_one_long_run(steps: int, kind: str) -> None:
    seen = storm(4, steps, kind)
    assert seen["steps"] >= steps
    assert seen["preemptions"] > steps // 500
    assert seen["aborted"] > steps // 500
    assert seen["evicted"] > steps // 50


def test_the_same_seed_gives_the_same_run() -> None:
    assert storm(11, 150) == storm(11, 150)


@pytest.mark.long
def test_many_storms() -> None:
    """RADIXSERVE_FUZZ_SEEDS sets how many (default 5,000)."""
    for seed in range(1_000, 1_000 + int(os.environ.get("RADIXSERVE_FUZZ_SEEDS", "5000"))):
        storm(seed, 200, ("hash", "radix", "states", "windows")[seed % 4])
