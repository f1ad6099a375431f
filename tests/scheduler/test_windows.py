"""The scheduler on a cache with window pages: what is computed, counted, admitted and preempted."""

from __future__ import annotations

from typing import Any

import pytest

from radixserve.request import BeamParams
from radixserve.schedule import WindowLayers
from tests.scheduler.fake import Driver

HEAD = [5 + n % 40 for n in range(80)]


def make(num_window_pages: int, page_size: int = 1, **options: Any) -> Driver:
    windows = WindowLayers(num_window_pages // page_size, 10)
    return Driver(1600 // page_size, page_size, windows=windows, **options)


@pytest.mark.parametrize("page_size", [1, 8])
def test_counts_are_exact(page_size: int) -> None:
    driver = make(num_window_pages=48, page_size=page_size)
    assert driver.serve("cold", HEAD) == (0, 80)
    assert driver.serve("same", HEAD) == (79, 1)
    answer = driver.output("cold")
    assert driver.serve("turn", [*HEAD, *answer[:-1], 7, 7]) == (83, 2)
    assert driver.serve("early", [*HEAD[:20], 3, 3, 3]) == (0, 23)  # its windows were dropped
    miss = driver.finished["early"].miss
    assert miss is not None
    assert miss[:3] == (0, "window_evicted", 20)
    assert driver.serve("again", [*HEAD[:20], 4, 4]) == (20, 2)
    driver.drain()


def test_a_long_request_needs_a_window_and_a_chunk() -> None:
    driver = make(num_window_pages=30)
    tokens = [5 + n % 43 for n in range(1500)]
    assert driver.serve("long", tokens) == (0, 1500)
    assert driver.scheduler.stats()["preemptions"] == 0
    driver.drain()


def test_requests_run_together_as_far_as_window_pages_go() -> None:
    driver = make(num_window_pages=60, chunked_prefill_size=64)
    for name in range(8):
        driver.add(f"r{name}", [2 + name, *HEAD[:30]], max_tokens=20, ignore_eos=True)
    driver.run()
    assert max(len(schedule.rows) for schedule in driver.schedules) > 1
    for name in range(8):
        assert driver.output(f"r{name}") == driver.expected(f"r{name}", 20)
    assert driver.scheduler.stats()["preemptions"] < 8
    driver.drain()


def test_few_are_preempted_for_window_pages() -> None:
    driver = Driver(2_000, windows=WindowLayers(60, 40))
    for name in range(20):
        driver.add(f"r{name}", [2 + name, *HEAD[:29]], max_tokens=60, ignore_eos=True)
    driver.run()
    assert len(driver.finished) == 20
    assert driver.scheduler.stats()["preemptions"] < 20
    driver.drain()


@pytest.mark.parametrize("is_cached", [False, True])
def test_what_requests_share_is_computed_once(is_cached: bool) -> None:
    """Also where it is cached, but cannot be used without windows that were dropped."""
    driver = Driver(1600, chunked_prefill_size=256, windows=WindowLayers(270, 10))
    if is_cached:
        driver.serve("first", [*HEAD[:50], 7, 7, 7])
        for name in range(3):
            driver.serve(f"other {name}", [2 + n % (40 + name) for n in range(200)])
        assert driver.cache.lookup([*HEAD[:50], 3])[:3] == (0, "window_evicted", 50)
    for name in range(6):
        driver.add(f"r{name}", [*HEAD[:50], 2 + name, 3, 4], max_tokens=1)
    driver.run()
    computed = [driver.finished[f"r{name}"].usage.computed_tokens for name in range(6)]
    assert sorted(computed) == [3, 3, 3, 3, 3, 53]
    driver.drain()


def test_waiters_find_the_window_where_they_leave_their_producer() -> None:
    driver = make(num_window_pages=60, chunked_prefill_size=16)
    for name in range(8):
        driver.add(f"r{name}", [*HEAD, 2 + name, *HEAD[:60]], max_tokens=4, ignore_eos=True)
    driver.run()
    computed = [driver.finished[f"r{name}"].usage.computed_tokens for name in range(8)]
    assert computed.count(61) >= 6  # the others waited too long for window pages
    driver.drain()


def test_short_window_pages_are_counted_once_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """That costs O(window pages): not for each of the waiting requests."""
    driver, num_counts = make(num_window_pages=40), 0
    count = driver.cache.num_obtainable

    def num_obtainable(wanted: int) -> int:
        nonlocal num_counts
        num_counts += 1
        return count(wanted)

    monkeypatch.setattr(driver.cache, "num_obtainable", num_obtainable)
    for name in range(200):
        driver.add(f"r{name}", [2 + name % 40, 2 + name // 40, *HEAD[:30]], max_tokens=3)
    for _ in range(40):
        driver.step()
    assert num_counts < 400


def test_beams_fork_inside_of_a_page() -> None:
    plain, driver = Driver(1600 // 8, 8), make(num_window_pages=160, page_size=8)
    for one in (plain, driver):
        one.add("b", HEAD[:37], beams=BeamParams(width=4), max_tokens=12, ignore_eos=True)
        one.run()
    assert driver.beams == plain.beams
    driver.drain()
