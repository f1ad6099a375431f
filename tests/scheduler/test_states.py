"""The scheduler on a cache with recurrent states: what is computed, and that it is counted."""

from __future__ import annotations

import pytest

from tests.scheduler.fake import Driver

HEAD = [5 + n % 40 for n in range(40)]


@pytest.mark.parametrize("page_size", [1, 16])
def test_counts_are_exact(page_size: int) -> None:
    driver = Driver(640 // page_size, page_size, num_states=30)  # a checkpoint every 9 tokens
    assert driver.serve("cold", HEAD) == (0, 40)
    assert driver.serve("same", HEAD) == (39, 1)
    answer = driver.output("cold")
    turn = [*HEAD, *answer[:-1], 7, 7]
    assert driver.serve("turn", turn) == (43, 2)
    other = [*HEAD[:25], 3, 3, 3]
    assert driver.serve("other", other) == (18, 10)
    assert driver.serve("third", [*HEAD[:25], 4, 4]) == (25, 2)
    miss = driver.finished["other"].miss
    assert miss is not None
    assert miss[:3] == (18, "no_checkpoint", 25)
    driver.drain()


def test_those_that_arrive_together_compute_the_head_once() -> None:
    driver = Driver(600, 1, num_states=30, chunked_prefill_size=64)
    for name in range(4):
        driver.add(f"r{name}", [*HEAD, 2 + name, 3, 3], max_tokens=3, ignore_eos=True)
    driver.run()
    counts = [driver.finished[f"r{name}"].usage.computed_tokens for name in range(4)]
    assert sorted(counts) == [3, 3, 3, 43]
    assert max(driver.runner.computed.values()) == 1
    driver.drain()


def test_a_preempted_request_goes_on_from_where_it_was() -> None:
    driver = Driver(60, 1, num_states=30)
    for name in range(3):
        driver.add(f"r{name}", HEAD[10 * name :][:10], max_tokens=30, ignore_eos=True)
    driver.run()
    stats = driver.scheduler.stats()
    assert stats["preemptions"] > 0
    for name in range(3):
        assert driver.output(f"r{name}") == driver.expected(f"r{name}", 30)
    driver.drain()


def test_a_single_state_is_enough() -> None:
    driver = Driver(200, 1, num_states=1)
    for name in range(3):
        driver.add(f"r{name}", HEAD[name:], max_tokens=5, ignore_eos=True)
    driver.run()
    assert [driver.output(f"r{n}") for n in range(3)] == [
        driver.expected(f"r{n}", 5) for n in range(3)
    ]
    driver.drain()
