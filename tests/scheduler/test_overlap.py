"""The host works a step ahead of a device that computes late: nothing of what it says changes."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from radixserve.request import BeamParams
from radixserve.schedule import ScheduledRequest, SchedulerOutput
from tests.beams import test_beams
from tests.scheduler import (
    test_prompt_scores,
    test_samples,
    test_scheduler,
    test_scores,
    test_storm,
)
from tests.scheduler.fake import EOS, Driver, random_prompt
from tests.scheduler.overlap_fake import OverlapDriver
from tests.scheduler.test_scheduler import prompt

KINDS = ["radix", "hash"]
PAGE_SIZES = [1, 2, 16]


@pytest.fixture
def overlapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other tests' programs run on the device that is late."""
    modules: list[ModuleType] = [
        test_beams, test_prompt_scores, test_scheduler, test_scores, test_storm, test_samples,
    ]  # fmt: skip
    for module in modules:
        monkeypatch.setattr(module, "Driver", OverlapDriver)


class TestAhead:
    def test_in_a_steady_decode_every_step_is_launched_before_the_last_is_collected(self) -> None:
        driver = OverlapDriver(1000, 1, chunked_prefill_size=64)
        for i in range(6):
            driver.add(f"r{i}", [i + 2, *prompt(i, 8)], max_tokens=40, ignore_eos=True)
        driver.run()
        log = driver.runner.log
        order = [("launch", 0)]
        for step in range(1, 40):
            order += [("launch", step), ("collect", step - 1)]
        assert log == [*order, ("collect", 39)]
        stats = driver.scheduler.stats()
        assert (stats["steps"], stats["steps_ahead"]) == (40, 39)
        assert stats["discarded_tokens"] == 0  # where a length ends is known before
        assert stats["decoded_tokens"] == 6 * 39
        assert all(len(schedule.rows) == 6 for schedule in driver.schedules)
        driver.drain()

    def test_rows_take_their_token_from_the_step_before(self) -> None:
        driver = OverlapDriver(1000, 4, chunked_prefill_size=64)
        for i in range(3):
            driver.add(
                f"r{i}", [i + 2, *prompt(i, 8)], max_tokens=8 - 2 * i, ignore_eos=True, logprobs=0
            )
        driver.run()
        before: SchedulerOutput | None = None
        for schedule in driver.schedules:
            for row in schedule.rows:
                assert (row.future_index < 0) == (before is None)
                if before is not None:
                    assert before.rows[row.future_index].request_id == row.request_id
                    assert row.sample is not None
                    assert row.sample.num_placeholders == 1
            before = schedule
        driver.drain()

    def test_an_end_that_nobody_foresees_costs_one_row(self) -> None:
        driver = OverlapDriver(1000, 1)
        for i in range(20):
            driver.add(f"r{i}", prompt(i, 9), max_tokens=200)
        driver.run()
        reasons = Counter(finish.reason for finish in driver.finished.values())
        assert reasons["stop"] > 10
        assert driver.scheduler.stats()["discarded_tokens"] == reasons["stop"]
        driver.drain()

    def test_min_tokens_bans_by_count(self) -> None:
        driver = OverlapDriver(500, 1)
        driver.add("a", prompt(0, 10), max_tokens=9, min_tokens=4, ignore_eos=False)
        driver.run()
        banned = [row.sample.banned_ids for s in driver.schedules for row in s.rows if row.sample]
        assert banned[:4] == [(EOS,)] * 4
        assert set(banned[4:]) <= {()}
        driver.drain()

    def test_slots_of_those_that_end_are_given_away_at_once(self) -> None:
        driver = OverlapDriver(1000, 1, chunked_prefill_size=30, max_running_requests=2)
        for i in range(12):
            driver.add(f"r{i}", [i + 2, *prompt(i, 9)], max_tokens=1)
        driver.run()
        assert len(driver.schedules) == 6  # two in each, none without work
        assert max(len(schedule.rows) for schedule in driver.schedules) == 2
        assert driver.scheduler.stats()["steps_ahead"] == 5
        driver.drain()

    def test_chunks_of_a_prefill_follow_each_other(self) -> None:
        driver = OverlapDriver(1000, 16, chunked_prefill_size=10)
        driver.add("a", prompt(0, 95), max_tokens=5, ignore_eos=True)
        driver.run()
        stats = driver.scheduler.stats()
        assert (stats["steps"], stats["steps_ahead"]) == (10 + 4, 10 + 3)
        driver.drain()

    def test_penalties(self) -> None:
        driver = OverlapDriver(1000, 1, chunked_prefill_size=8)
        driver.add("other", prompt(1, 20), max_tokens=20, ignore_eos=True)
        more: dict[str, Any] = {"repetition_penalty": 1.3}
        driver.add("a", prompt(0, 20), max_tokens=9, ignore_eos=True, **more)
        driver.run()
        stats = driver.scheduler.stats()
        assert stats["steps_ahead"] == stats["steps"] - 1
        driver.drain()

    def test_scores(self) -> None:
        driver = OverlapDriver(1000, 1, chunked_prefill_size=8)
        test_prompt_scores.add(driver, "a", prompt(0, 30), max_tokens=9, ignore_eos=True)
        driver.add("b", prompt(1, 30), logprob_targets=prompt(2, 20))
        driver.run()
        stats = driver.scheduler.stats()
        assert stats["steps_ahead"] == stats["steps"] - 1
        test_prompt_scores.check(driver, "a")
        driver.drain()


class TestDrains:
    """Steps whose answer the host needs first."""

    def check(
        self, driver: OverlapDriver, is_needed: Callable[[SchedulerOutput, ScheduledRequest], bool]
    ) -> None:
        note = driver.runner.before_launch

        def look(schedule: SchedulerOutput) -> None:
            note(schedule)
            for launched in driver.runner.queue:
                one = launched.schedule
                assert not any(is_needed(one, row) for row in one.rows)

        driver.runner.before_launch = look
        driver.run()
        driver.drain()
        needed = [any(is_needed(one, row) for row in one.rows) for one in driver.schedules]
        assert needed.count(True) > 1

    def test_beams(self) -> None:
        driver = OverlapDriver(1000, 1, chunked_prefill_size=32)
        beams = BeamParams(width=3)
        driver.add("a", prompt(0, 20), beams=beams, max_tokens=9, ignore_eos=True)
        self.check(driver, lambda _, row: bool(row.sample and row.sample.num_candidates))
        test_beams.check_search(driver, "a", beams)
        log = [kind for kind, _ in driver.runner.log]
        assert log == ["launch"] + ["collect", "launch"] * (len(log) // 2 - 1) + ["collect"]

    @pytest.mark.parametrize("page_size", PAGE_SIZES)
    def test_no_room(self, page_size: int) -> None:
        """Nobody is preempted while a step is in flight; the scheduler asserts it."""
        driver = OverlapDriver(128 // page_size, page_size, chunked_prefill_size=32)
        for i in range(6):
            driver.add(f"r{i}", prompt(i, 15), max_tokens=60, ignore_eos=True)
        driver.run()
        stats = driver.scheduler.stats()
        assert stats["preemptions"] > 0
        assert 0 < stats["steps_ahead"] < stats["steps"] - 1
        assert stats["finished"] == 6
        driver.drain()


class TestSamples:
    def test_one_that_comes_while_the_first_draws_is_a_request_like_others(self) -> None:
        driver = OverlapDriver(200, 1, chunked_prefill_size=64, pace=0.0)
        driver.add("first", prompt(0, 20), max_tokens=9, ignore_eos=True)
        driver.step()  # launched, not collected
        driver.add("late", prompt(0, 20), seed=3, max_tokens=9, ignore_eos=True)
        driver.run()
        assert driver.finished["late"].usage.cached_tokens == 19
        driver.drain()

    @pytest.mark.parametrize("aborted", ["a.0", "a.1"])
    def test_aborts_while_the_prompt_is_computed(self, aborted: str) -> None:
        driver = OverlapDriver(200, 1, chunked_prefill_size=64, pace=0.0)
        names = test_samples.add_group(driver, "a", prompt(0, 20), 4, max_tokens=5)
        driver.step()
        driver.abort(aborted)
        driver.run()
        test_samples.check_outputs(driver, names)
        assert [driver.finished[n].reason for n in names if n != aborted] == ["length"] * 3
        driver.drain()


@pytest.mark.usefixtures("overlapped")
class TestPromises:
    """Those of the plain loop, by its own tests."""

    once = test_scheduler.TestComputeOnce()
    order = test_scheduler.TestOrder()

    @pytest.mark.parametrize(
        ("policy", "page_size", "chunked_prefill_size"),
        [("lpm", 1, 64), ("fcfs", 2, 1024), ("dfs-weight", 16, 64), ("lpm", 64, 37)],
    )
    def test_what_is_shared_is_computed_once(
        self, policy: str, page_size: int, chunked_prefill_size: int
    ) -> None:
        self.once.test_requests_that_arrive_at_once_compute_the_shared_part_once(
            policy, page_size, chunked_prefill_size
        )

    @pytest.mark.parametrize("policy", test_scheduler.POLICIES)
    @pytest.mark.parametrize("shared", [1, 2, 31])
    def test_followers_wait(self, policy: str, shared: int) -> None:
        self.once.test_followers_wait_at_any_match_length(policy, shared)

    def test_the_rest(self) -> None:
        self.once.test_identical_prompts_recompute_only_their_last_token()
        self.once.test_counts_are_the_true_common_prefixes(16)
        self.once.test_a_stale_leader_is_not_waited_for()
        self.order.test_lpm_takes_the_longest_cached_prefix_first()
        self.order.test_dfs_weight_takes_the_heaviest_branch_in_one_piece()
        self.order.test_without_the_bound_lpm_starves()

    @pytest.mark.parametrize("policy", test_scheduler.POLICIES)
    @pytest.mark.parametrize("bound", [0, 5])
    def test_order(self, policy: str, bound: int) -> None:
        self.order.test_priority_comes_first(policy)
        self.order.test_nobody_is_overtaken_more_often_than_the_bound(policy, bound)

    @pytest.mark.parametrize("after", range(12))
    @pytest.mark.parametrize("page_size", [1, 16])
    def test_an_abort_at_every_point_of_a_life(self, after: int, page_size: int) -> None:
        test_scheduler.TestAbort().test_at_every_point_of_a_life(after, page_size)


def mixed_program(driver: Driver, seed: int) -> None:
    """Requests of every kind that share prefixes, arriving while others run; none is disturbed."""
    rng = random.Random(seed)
    known: list[list[int]] = []
    for number in range(16):
        tokens = random_prompt(rng, known, 60)
        known.append(tokens)
        name, what = f"r{number}", rng.random()
        params: dict[str, Any] = {
            "max_tokens": rng.randint(1, 25),
            "ignore_eos": rng.random() < 0.5,
            "namespace": rng.choice(["", "", "b"]),
            "priority": rng.choice([0, 0, 1]),
        }
        if what < 0.6:
            params |= rng.choice([{}, {"logprobs": 0}, {"temperature": 0}, {"min_tokens": 1}])
            driver.add(name, tokens, seed=number, **params)
        elif what < 0.7:
            test_samples.add_group(driver, name, tokens, 3, **params)
        elif what < 0.8:
            driver.add(name, tokens, presence_penalty=1, **params)
        elif what < 0.9:
            driver.add(name, tokens, beams=BeamParams(width=3), **params)
        else:
            test_prompt_scores.add(driver, name, tokens, **params)
        for _ in range(rng.randint(0, 4)):
            driver.step()
            driver.cache.check()
    driver.run()
    driver.drain()


@pytest.mark.parametrize("kind", [*KINDS, "off"])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_the_same_answers_as_the_plain_loop(kind: str, page_size: int) -> None:
    steps_ahead = 0
    for seed, num_tokens in enumerate((160, 4000)):
        common: dict[str, Any] = {
            "num_pages": num_tokens // page_size,
            "page_size": page_size,
            "kind": "hash" if kind == "hash" else "radix",
            "reuse": kind != "off",
            "chunked_prefill_size": (5, 16)[seed],
        }
        plain, late = Driver(**common), OverlapDriver(**common)
        for driver in (plain, late):
            mixed_program(driver, seed)
        assert set(plain.finished) == set(late.finished)
        for name, finish in plain.finished.items():
            other = late.finished[name]
            assert late.output(name) == plain.output(name), name
            assert (finish.reason, finish.prompt_scores) == (other.reason, other.prompt_scores)
            assert finish.usage.prompt_tokens == other.usage.prompt_tokens
            assert finish.usage.completion_tokens == other.usage.completion_tokens
        assert plain.beams == late.beams
        steps_ahead += late.scheduler.stats()["steps_ahead"]
    assert steps_ahead > 10


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_pages_are_switched_under_a_step_in_flight(kind: str, page_size: int) -> None:
    """Two that say the same, one a step behind the other: the second gives its own pages back
    while its next row, which was told of them, is computed."""
    driver = OverlapDriver(
        800 // page_size, page_size, kind=kind, chunked_prefill_size=64, pace=0.2
    )
    switched = 0
    for i in range(3):
        driver.add(f"r{i}", prompt(0, 33), max_tokens=70, ignore_eos=True)
    while (schedule := driver.step()) is not None:
        driver.cache.check()
        switched += sum(row.first_new_page < len(row.page_ids) - 1 for row in schedule.rows)
    assert driver.cache.stats()["duplicate_tokens"] > 20
    assert switched > 10
    driver.drain()


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_head_is_copied_once(kind: str) -> None:
    driver = OverlapDriver(100, 16, kind=kind, chunked_prefill_size=5)
    driver.add("first", prompt(0, 40), max_tokens=2, ignore_eos=True)
    driver.run()
    driver.add("again", [*prompt(0, 40)[:37], *prompt(1, 30)], max_tokens=3, ignore_eos=True)
    driver.run()
    assert sum(len(schedule.cow_copies) for schedule in driver.schedules) == (kind == "radix")
    driver.drain()


@pytest.mark.parametrize("steps", range(1, 7))
@pytest.mark.parametrize("page_size", [1, 4])
def test_an_id_is_used_again_while_a_row_of_its_last_owner_is_in_flight(
    steps: int, page_size: int
) -> None:
    driver = OverlapDriver(200, page_size, chunked_prefill_size=9, pace=0.0)
    driver.add("a", prompt(0, 20), max_tokens=9, ignore_eos=True)
    for _ in range(steps):
        driver.step()
    for seed in range(1, 4):
        driver.abort("a")
        driver.check_ends()
        driver.forget("a")
        driver.add("a", [*prompt(0, 5), *prompt(seed, 15)], max_tokens=9, ignore_eos=True)
        driver.step()
    driver.run()
    assert driver.finished["a"].usage.completion_tokens == 9
    driver.drain()
