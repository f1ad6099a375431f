"""Several decode steps in one schedule: when there are, and that only the clock can tell."""

from __future__ import annotations

import random
from typing import Any
from unittest.mock import patch

import pytest

from radixserve.errors import EngineDead
from radixserve.schedule import RowOutput, Schedule, StepOutput
from tests.scheduler.fake import EOS, VOCAB, Driver, FakeRunner, prefix_hashes, random_prompt

GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


def made(most_steps: int = 8, **settings: Any) -> Driver:
    return Driver(**{"num_pages": 400, "most_steps": most_steps, **settings})


def start(driver: Driver, *names: str, num_new: int = 40, **params: Any) -> None:
    """Requests that have drawn one token each."""
    for at, name in enumerate(names):
        driver.add(name, [10 + at, 20 + at], max_tokens=num_new, **{**GREEDY, **params})
    driver.step()
    assert all(len(driver.output(name)) == 1 for name in names)


def take(driver: Driver) -> int:
    """The steps of the next schedule, 0 when there is nothing to do."""
    schedule = driver.step()
    driver.cache.check()
    return 0 if schedule is None else schedule.num_steps


def check_output(driver: Driver, name: str, count: int, reason: str = "length") -> None:
    assert driver.output(name) == driver.expected(name, count)
    assert driver.finished[name].reason == reason


def prompt_that_ends(count: int) -> list[int]:
    """One behind which an end token is drawn as the `count`-th."""
    runner = FakeRunner(1, 1)
    for first in range(2, VOCAB):
        for second in range(2, VOCAB):
            tokens = [first, second]
            for _ in range(count):
                tokens.append(runner.next_token(prefix_hashes(tokens)))
            if EOS in tokens and tokens.index(EOS) == len(tokens) - 1:
                return tokens[:2]
    raise AssertionError("there is none")


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("kind", ["radix", "hash"])
def test_up_to_the_most_and_to_the_next_end(kind: str, page_size: int) -> None:
    driver = made(kind=kind, page_size=page_size)
    start(driver, "a", num_new=30)
    driver.add("b", [30, 31], max_tokens=11, **GREEDY)
    driver.step()  # b's prompt beside a's second token
    assert [take(driver) for _ in range(6)] == [8, 2, 8, 8, 2, 0]
    check_output(driver, "a", 30)
    check_output(driver, "b", 11)
    stats = driver.scheduler.stats()
    assert stats["steps"] == 30
    assert (stats["decoded_tokens"], stats["generated_tokens"]) == (29 + 10, 41)
    assert stats["discarded_tokens"] == 0
    driver.drain()


def test_one_by_one_unless_asked() -> None:
    driver = made(most_steps=1)
    start(driver, "a", num_new=5)
    assert [take(driver) for _ in range(5)] == [1, 1, 1, 1, 0]


def test_none_follows_an_end_token() -> None:
    """Whoever draws it; what was reserved for the steps behind it is given back."""
    driver = made()
    driver.add("ends", prompt_that_ends(5), max_tokens=40, temperature=0.0)
    driver.add("goes on", [30, 31], max_tokens=20, **GREEDY)
    driver.step()
    before = driver.cache.stats()["pages_free"]
    assert take(driver) == 8
    check_output(driver, "ends", 5, "stop")
    assert len(driver.output("goes on")) == 5
    assert driver.cache.stats()["pages_free"] == before - 2 * 4
    driver.run()
    check_output(driver, "goes on", 20)
    assert driver.scheduler.stats()["discarded_tokens"] == 0
    assert driver.scheduler.stats()["steps"] == 20
    driver.drain()


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"logprobs": 0},
        {"presence_penalty": 0.5},
        {"stop": "x"},
        {"min_tokens": 9, "ignore_eos": False},
    ],
    ids=str,
)
def test_who_needs_more_than_its_best_token_goes_step_by_step(params: dict[str, Any]) -> None:
    driver = made()
    start(driver, "plain")
    driver.add("other", [30, 31], max_tokens=9, **{**GREEDY, **params})
    assert [take(driver) for _ in range(8)] == [1] * 8
    driver.abort("other")
    assert take(driver) == 8


def test_who_waits_and_could_start_is_not_kept_waiting() -> None:
    driver = made(chunk_size=4)
    start(driver, "a")
    driver.add("b", list(range(2, 12)), max_tokens=40, **GREEDY)
    assert [take(driver) for _ in range(3)] == [1, 1, 1]  # chunks of its prompt
    assert len(driver.output("b")) == 1
    assert take(driver) == 8


def test_who_waits_for_a_place_gets_it_at_once() -> None:
    driver = made(max_running=2)
    start(driver, "a", "b", num_new=20)
    driver.add("c", [30, 31], max_tokens=3, **GREEDY)
    driver.add("d", [32, 33], max_tokens=3, **GREEDY)
    assert [take(driver) for _ in range(3)] == [8, 8, 3]
    assert set(driver.finished) == {"a", "b"}
    assert take(driver) == 1
    assert driver.admitted[2:] == ["c", "d"]


def test_who_waits_for_room_does_not_end_it() -> None:
    driver = made(num_pages=50)
    start(driver, "a", num_new=40)
    driver.add("large", list(range(2, 45)), max_tokens=3, **GREEDY)
    assert take(driver) == 8
    driver.run()
    check_output(driver, "a", 40)
    check_output(driver, "large", 3)


def test_a_follower_is_not_kept_waiting() -> None:
    """It waits for what one that decodes is about to publish, and starts as soon as it is there."""
    driver = made()
    start(driver, "leader")
    head = driver.runner.tokens["leader"]
    driver.add("follower", [*head, 40, 41], max_tokens=3, **GREEDY)
    assert take(driver) == 1
    assert "follower" not in driver.admitted
    assert take(driver) == 1
    assert "follower" in driver.admitted


def test_without_room_for_all_of_them_step_by_step() -> None:
    driver = made(num_pages=24)
    start(driver, "a", "b", num_new=10)
    assert take(driver) == 8  # 4 + 16 pages
    driver = made(num_pages=19)
    start(driver, "a", "b", num_new=10)
    assert take(driver) == 1
    driver.run()
    check_output(driver, "a", 10)
    check_output(driver, "b", 10)
    driver.drain()


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_runner_may_answer_fewer(page_size: int) -> None:
    driver = made(page_size=page_size)
    start(driver, "a", "b", num_new=30)
    gives_up = iter([False, False, True])
    driver.runner.gives_up = lambda: next(gives_up, False)
    assert take(driver) == 8
    assert len(driver.output("a")) == len(driver.output("b")) == 4
    assert driver.scheduler.stats()["steps"] == 4
    private = 2 * (page_size > 1)  # the page that holds the latest token is not full
    assert driver.cache.stats()["pages_private"] <= private
    driver.run()
    check_output(driver, "a", 30)
    check_output(driver, "b", 30)
    assert driver.scheduler.stats()["steps"] == 30
    driver.drain()


def test_a_broken_row_ends_its_request_only() -> None:
    driver = made()
    start(driver, "a", "b", num_new=20)
    run_several = driver.runner.run_several
    gives_up = iter([True])
    driver.runner.gives_up = lambda: next(gives_up, False)

    def broken(schedule: Schedule) -> StepOutput:
        nothing = RowOutput(0, None, (), "no token can be drawn")
        return StepOutput((nothing, run_several(schedule).outputs[1]), {})

    with patch.object(driver.runner, "run_several", broken):
        assert take(driver) == 8
    assert driver.finished["a"].reason == "error"
    assert isinstance(driver.finished["a"].error, EngineDead)
    driver.run()
    check_output(driver, "b", 20)
    driver.drain()


def test_a_failed_schedule_ends_its_requests() -> None:
    driver = made()
    start(driver, "a", "b", num_new=20)
    schedule = driver.scheduler.schedule(8)
    assert schedule is not None
    assert schedule.num_steps == 8
    outputs = driver.scheduler.fail(schedule, EngineDead("burnt"))
    assert [output.finish.reason for output in outputs if output.finish] == ["error", "error"]
    driver.drain()


def test_one_aborted_meanwhile_is_let_go() -> None:
    driver = made()
    start(driver, "a", "b", num_new=20)
    schedule = driver.scheduler.schedule(8)
    assert schedule is not None
    driver.abort("a")
    driver._collect(driver.scheduler.update(schedule, driver.runner.execute(schedule)))
    assert driver.scheduler.stats()["discarded_tokens"] == 8
    assert driver.output("a") == driver.expected("a", 1)
    driver.run()
    check_output(driver, "b", 20)
    driver.drain()


@pytest.mark.parametrize("seed", range(20))
def test_nobody_starts_or_ends_later(seed: int) -> None:
    """With room for all, each request is admitted and ends at the same step as one by one."""

    def history(most_steps: int) -> tuple[dict[str, tuple[int, int]], int]:
        rng = random.Random(seed)
        driver = made(
            most_steps,
            num_pages=4_000,
            page_size=rng.choice([1, 4]),
            max_running=rng.choice([2, 5, 8]),
            chunk_size=rng.choice([8, 64]),
        )
        known: list[list[int]] = []
        for number in range(25):
            prompt = random_prompt(rng, known, 60)
            known.append(prompt)
            ends = {"temperature": 0.0, "ignore_eos": rng.random() < 0.5}
            driver.add(f"r{number}", prompt, max_tokens=rng.randint(1, 60), **ends)
        seen: dict[str, tuple[int, int]] = {}
        while (schedule := driver.scheduler.schedule(driver.most_steps)) is not None:
            began = driver.scheduler.stats()["steps"] - schedule.num_steps
            driver._collect(driver.scheduler.update(schedule, driver.runner.execute(schedule)))
            for row in schedule.rows:
                seen.setdefault(row.request_id, (began, -1))
            for name in driver.finished:
                if seen.get(name, (0, 0))[1] < 0:
                    seen[name] = seen[name][0], driver.scheduler.stats()["steps"]
            driver.schedules.append(schedule)
        for name, finish in driver.finished.items():
            check_output(driver, name, finish.usage.completion_tokens, finish.reason)
        driver.drain()
        return seen, len(driver.schedules)

    (one_by_one, count), (together, fewer) = history(1), history(8)
    assert one_by_one == together
    assert fewer < count
