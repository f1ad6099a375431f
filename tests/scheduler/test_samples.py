"""Samples of one prompt (n > 1): in-batch prefix sharing computes it once, whatever happens to the
first of them."""

from __future__ import annotations

import random

import pytest

from radixserve.errors import EngineDead
from tests.scheduler.fake import VOCAB, Driver, random_prompt

PROMPT = list(range(2, 35))  # 33 tokens


def add_group(driver: Driver, name: str, prompt: list[int], count: int, **params: int) -> list[str]:
    names = [f"{name}.{number}" for number in range(count)]
    for seed, one in enumerate(names):
        driver.add(one, prompt, seed=seed, **params)
    return names


def check_outputs(driver: Driver, names: list[str]) -> None:
    for name in names:
        if driver.finished[name].reason in ("stop", "length"):
            output = driver.output(name)
            assert output == driver.expected(name, len(output)), name


@pytest.mark.parametrize("kind", ["radix", "hash"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("chunked_prefill_size", [5, 64])
class TestOnce:
    def test_a_prompt_is_computed_once(
        self, kind: str, page_size: int, chunked_prefill_size: int
    ) -> None:
        driver = Driver(200, page_size, chunked_prefill_size=chunked_prefill_size, kind=kind)
        names = add_group(driver, "a", PROMPT, 6, max_tokens=9, ignore_eos=True)
        driver.run()
        check_outputs(driver, names)
        usages = [driver.finished[name].usage for name in names]
        assert [u.computed_tokens for u in usages] == [len(PROMPT), 1, 1, 1, 1, 1]
        assert [u.cached_tokens for u in usages[1:]] == [len(PROMPT) - 1] * 5
        stats = driver.scheduler.stats()
        assert stats["prefilled_tokens"] == len(PROMPT) + 5
        assert stats["decoded_tokens"] == 6 * 8
        assert stats["prompted_tokens"] == stats["reused_tokens"] + stats["computed_tokens"]
        driver.drain()

    def test_more_of_them_than_may_run(
        self, kind: str, page_size: int, chunked_prefill_size: int
    ) -> None:
        driver = Driver(
            200,
            page_size,
            chunked_prefill_size=chunked_prefill_size,
            kind=kind,
            max_running_requests=3,
        )
        names = add_group(driver, "a", PROMPT, 8, max_tokens=7, ignore_eos=True)
        driver.run()
        check_outputs(driver, names)
        usages = [driver.finished[name].usage for name in names]
        if page_size == 1:
            assert [u.computed_tokens for u in usages] == [len(PROMPT)] + [1] * 7
        driver.drain()

    def test_one_token_each(self, kind: str, page_size: int, chunked_prefill_size: int) -> None:
        driver = Driver(
            60,
            page_size,
            chunked_prefill_size=chunked_prefill_size,
            kind=kind,
            max_running_requests=2,
        )
        names = add_group(driver, "a", PROMPT, 5, max_tokens=1, ignore_eos=True)
        driver.run()
        check_outputs(driver, names)
        assert driver.scheduler.stats()["prefilled_tokens"] == len(PROMPT) + 4
        driver.drain()


class TestEnds:
    @pytest.mark.parametrize("steps", [0, 1, 3])
    def test_another_one_takes_the_place_of_an_aborted_first(self, steps: int) -> None:
        driver = Driver(200, 1, chunked_prefill_size=5)
        names = add_group(driver, "a", PROMPT, 4, max_tokens=5, ignore_eos=True)
        for _ in range(steps):
            driver.step()
        driver.abort("a.0")
        driver.run()
        check_outputs(driver, names)
        assert [driver.finished[name].reason for name in names] == ["abort"] + ["length"] * 3
        assert driver.scheduler.stats()["prefilled_tokens"] == len(PROMPT) + 2
        driver.drain()

    def test_an_aborted_sample_is_gone(self) -> None:
        driver = Driver(200, 1, chunked_prefill_size=5)
        names = add_group(driver, "a", PROMPT, 3, max_tokens=5, ignore_eos=True)
        driver.step()
        driver.abort("a.1")
        driver.run()
        check_outputs(driver, names)
        usage = driver.finished["a.1"].usage
        assert usage.cached_tokens == usage.computed_tokens == usage.prompt_tokens == 0
        driver.drain()

    def test_a_late_sample_is_a_request_like_others(self) -> None:
        driver = Driver(200, 1)
        driver.add("first", PROMPT, max_tokens=20, ignore_eos=True)
        for _ in range(5):
            driver.step()
        driver.add("late", PROMPT, max_tokens=5, ignore_eos=True)
        driver.run()
        check_outputs(driver, ["first", "late"])
        assert driver.finished["late"].usage.cached_tokens == len(PROMPT) - 1
        driver.drain()

    def test_aborted_producers_do_not_hide_who_was_overtaken(self) -> None:
        bound = 2
        driver = Driver(
            100,
            1,
            policy="fcfs",
            chunked_prefill_size=64,
            max_running_requests=16,
            max_overtake=bound,
        )
        driver.add("blocker", [49] * 60, max_tokens=38, ignore_eos=True)
        driver.step()
        names = add_group(driver, "a", PROMPT * 2, 6, max_tokens=5, ignore_eos=True)
        driver.add("large", [45] * 60, max_tokens=5, ignore_eos=True)
        for number in range(30):  # small ones fit beside the blocker, `large` does not
            if number % 5 == 4 and names:
                driver.abort(names.pop(0))
            driver.add(f"small {number}", [46, number + 2], max_tokens=1, ignore_eos=True)
            driver.step()
        driver.run()
        before = driver.admitted[: driver.admitted.index("large")]
        assert sum(name.startswith("small") for name in before) <= bound
        driver.drain()

    def test_higher_priorities_come_first(self) -> None:
        driver = Driver(2000, 1, policy="fcfs", chunked_prefill_size=10, max_running_requests=8)
        add_group(driver, "a", PROMPT, 16, max_tokens=50, ignore_eos=True)
        driver.step()
        driver.add("urgent", [45] * 5, max_tokens=5, ignore_eos=True, priority=10)
        for _ in range(6):
            driver.step()
        assert "urgent" in driver.admitted
        assert driver.scheduler.stats()["waiting"] == 16 - 7 + driver.scheduler.stats()["finished"]
        driver.run()
        driver.drain()

    def test_none_passes_one_that_found_no_room(self) -> None:
        driver = Driver(
            500, 1, policy="fcfs", chunked_prefill_size=200, max_running_requests=3, max_overtake=0
        )
        names = add_group(driver, "a", PROMPT, 3, max_tokens=5, ignore_eos=True)
        names += add_group(driver, "b", PROMPT[::-1], 3, max_tokens=5, ignore_eos=True)
        driver.run()
        check_outputs(driver, names)
        others = [name for name in driver.admitted if not name.endswith(".0")]
        assert others == ["a.1", "a.2", "b.1", "b.2"]
        driver.drain()

    def test_a_failed_step_ends_all_that_were_in_it(self) -> None:
        driver = Driver(200, 1, chunked_prefill_size=64)
        names = add_group(driver, "a", PROMPT, 3, max_tokens=5, ignore_eos=True)
        schedule = driver.scheduler.schedule()
        assert schedule is not None
        assert [row.request_id for row in schedule.rows] == ["a.0"]
        ended = driver.scheduler.fail(schedule, EngineDead("no luck"))
        assert [output.request_id for output in ended] == ["a.0"]
        driver.run()  # the others compute the prompt themselves, once
        check_outputs(driver, names[1:])
        assert driver.scheduler.stats()["prefilled_tokens"] == len(PROMPT) + 1
        driver.drain()

    def test_everything_may_be_failed_at_any_time(self) -> None:
        driver = Driver(200, 1, chunked_prefill_size=5)
        add_group(driver, "a", PROMPT, 4)
        driver.step()
        assert len(driver.scheduler.fail_all(EngineDead("closed"))) == 4
        assert not driver.scheduler.has_work
        driver.drain()


@pytest.mark.pairs
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("kind", ["radix", "hash"])
@pytest.mark.parametrize("seed", range(4))
def test_storm(seed: int, kind: str, page_size: int) -> None:
    """Groups and single requests, aborts, and a pool in which few of them fit."""
    rng = random.Random(seed)
    driver = Driver(
        160 // page_size, page_size, kind=kind, chunked_prefill_size=7, max_running_requests=5
    )
    known: list[list[int]] = []
    names: list[str] = []
    for at in range(25):
        prompt = random_prompt(rng, known, 60)
        known.append(prompt)
        params = {"max_tokens": rng.randint(1, 12), "ignore_eos": rng.random() < 0.5}
        names += add_group(driver, str(at), prompt, rng.randint(1, 5), max_len=100, **params)
        for _ in range(rng.randint(0, 9)):
            driver.step()
            driver.cache.check()
            if rng.random() < 0.1:
                driver.abort(rng.choice(names))
    driver.run()
    assert set(driver.finished) == set(names)
    assert {finish.reason for finish in driver.finished.values()} <= {"stop", "length", "abort"}
    check_outputs(driver, names)
    for name in names:
        assert all(0 <= token < VOCAB for token in driver.output(name))
        usage = driver.finished[name].usage
        assert usage.cached_tokens + usage.computed_tokens == usage.prompt_tokens
    driver.drain()
