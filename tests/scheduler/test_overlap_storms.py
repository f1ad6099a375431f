"""Overlap where things fail: a lost step, aborts, and random storms."""

from __future__ import annotations

import os
import random
from collections import Counter
from typing import Any

import pytest

from radixserve.errors import EngineDead, RequestFailed
from radixserve.request import BeamParams
from radixserve.schedule import WindowLayers
from tests.beams import test_beams
from tests.scheduler import (
    test_prompt_scores,
    test_samples,
    test_scheduler,
    test_scores,
    test_storm,
)
from tests.scheduler.fake import counters, random_prompt
from tests.scheduler.overlap_fake import OverlapDriver
from tests.scheduler.test_overlap import KINDS, overlapped  # noqa: F401
from tests.scheduler.test_scheduler import prompt


class TestFailures:
    def driver(self) -> OverlapDriver:
        driver = OverlapDriver(1000, 2, chunked_prefill_size=16, max_running_requests=4, pace=0.3)
        for i in range(3):
            driver.add(f"r{i}", prompt(i, 12), max_tokens=9, ignore_eos=True)
        return driver

    def test_a_failed_launch(self) -> None:
        driver = self.driver()
        for _ in range(3):
            driver.step()
        driver.runner.fails_to_launch = lambda: True
        driver.step()
        driver.runner.fails_to_launch = lambda: False
        driver.add("later", prompt(9, 12), max_tokens=9)
        driver.run()
        reasons = {name: finish.reason for name, finish in driver.finished.items()}
        assert [reasons[f"r{i}"] for i in range(3)] == ["error"] * 3
        assert reasons["later"] in ("stop", "length")
        assert isinstance(driver.finished["r0"].error, RequestFailed)
        driver.drain()

    def test_a_failed_step_with_another_behind_it(self) -> None:
        driver = self.driver()
        for _ in range(3):
            driver.step()
        failing = iter([True])
        driver.runner.tick()
        driver.runner.fails_to_compute = lambda: next(failing, False)
        driver.add("new", prompt(9, 12), max_tokens=9)  # its first row may be behind the failed one
        driver.run()
        reasons = Counter(finish.reason for finish in driver.finished.values())
        assert reasons["error"] >= 3
        assert driver.scheduler.stats()["discarded_tokens"] > 0
        driver.drain()

    def test_a_broken_row_takes_its_successor_with_it(self) -> None:
        driver = self.driver()
        broken = iter([True])
        for _ in range(3):
            driver.step()
        driver.runner.broken_rows = lambda row: row.request_id == "r1" and next(broken, False)
        driver.run()
        reasons = {name: finish.reason for name, finish in driver.finished.items()}
        assert reasons == {"r0": "length", "r1": "error", "r2": "length"}
        assert driver.scheduler.stats()["discarded_tokens"] == 1
        driver.drain()

    def test_everything_may_be_failed_with_a_step_in_flight(self) -> None:
        driver = self.driver()
        for _ in range(4):
            driver.step()
        assert len(driver.runner.queue) == 1
        driver.collect_outputs(driver.engine.fail_all(EngineDead("closed")))
        assert not driver.engine.has_work()
        assert not driver.runner.queue
        driver.drain()


@pytest.mark.usefixtures("overlapped")
class TestStorms:
    """Those of the other tests."""

    @pytest.mark.parametrize("kind", KINDS)
    def test_requests(self, kind: str) -> None:
        seen: Counter[str] = Counter()
        for seed in range(6):
            seen += test_storm.storm(seed, 100, kind)
        for event in ("aborted", "evicted", "steps_ahead", "discarded_tokens"):
            assert seen[event] > 0, f"the storms had no {event}"

    @pytest.mark.parametrize(("page_size", "kind"), [(1, "radix"), (2, "hash"), (16, "radix")])
    def test_others(self, kind: str, page_size: int) -> None:
        seen: Counter[str] = Counter()
        for seed in range(3):
            seen += test_beams.storm(seed, 60, page_size, kind)
        assert seen["steps_ahead"] > 0
        test_storm.test_no_step_ends_inside_an_uncut_part(kind)
        test_samples.test_storm(page_size, kind, page_size)
        test_prompt_scores.storm(page_size, page_size)
        test_scores.test_storm(page_size, page_size)


class Storm:
    """Everything at once, at any moment: between two turns, and between a launch and an answer."""

    def __init__(self, seed: int, *, has_windows: bool = False) -> None:
        self.rng = rng = random.Random(seed)
        page_size = rng.choice([1, 2, 3, 16])
        chunk, windows = rng.choice([1, 7, 16, 64]), None
        if has_windows:
            size = rng.choice([1, 3, 10, 30])
            windows = WindowLayers(-(-(size + chunk) // page_size) + rng.choice([3, 8, 20]), size)
        self.driver = driver = OverlapDriver(
            max(4, rng.choice([40, 70, 120, 500]) // page_size),
            page_size,
            policy=rng.choice(test_scheduler.POLICIES),
            chunked_prefill_size=chunk,
            max_running_requests=rng.choice([1, 3, 8]),
            max_overtake=rng.choice([0, 2, 8]),
            reuse=rng.random() < 0.85,
            kind="radix" if has_windows else rng.choice(["radix", "radix", "hash"]),
            pace=rng.choice([0.0, 0.2, 0.6, 1.0]),
            num_states=0 if has_windows else rng.choice([0, 0, 12, 60]),
            windows=windows,
        )
        self.searches: dict[str, BeamParams] = {}
        self.reasons: Counter[str] = Counter()  # of ends
        self.is_over = False
        driver.runner.before_collect = self.interrupt
        if rng.random() < 0.5:
            driver.runner.broken_rows = lambda _: rng.random() < 0.01
            driver.runner.fails_to_compute = lambda: rng.random() < 0.01
            driver.runner.fails_to_launch = lambda: rng.random() < 0.01

    def run(self, turns: int) -> Counter[str]:
        driver, rng = self.driver, self.rng
        for _ in range(turns):
            if rng.random() < 0.4:
                self.add()
            if rng.random() < 0.1:
                self.interrupt()
            driver.step()
            driver.cache.check()
        self.is_over = True
        driver.run()
        driver.drain()
        self.check_others()
        for name in driver.finished:
            self.note_end(name)
        stats = driver.scheduler.stats()
        assert stats["prompted_tokens"] == stats["reused_tokens"] + stats["computed_tokens"]
        driver.scheduler.check()
        return counters(stats) + self.reasons

    def interrupt(self) -> None:
        """As somebody outside would, or the cache's owner."""
        driver, rng, names = self.driver, self.rng, list(self.driver.prompts)
        what = rng.random()
        if names and what < 0.1:
            driver.abort(rng.choice(names[-8:]))
        elif names and what < 0.15:
            driver.finish(rng.choice(names[-8:]))
        elif what < 0.2:
            driver.cache.evict(rng.randrange(30))
        elif what < 0.21:
            driver.cache.reset(rng.choice([None, "", "b"]))
        elif what < 0.25:
            test_storm.change_sessions(driver, rng)
        elif what < 0.35:
            self.add()
        elif what < 0.4:
            driver.cache.check()

    def add(self) -> None:
        driver, rng = self.driver, self.rng
        names = list(driver.prompts)
        if self.is_over or len(names) - len(driver.finished) > 12:
            return
        name = f"r{len(driver.serials)}"
        if driver.finished and rng.random() < 0.2:
            name = self.reused_name()
        known = [driver.runner.tokens[one] for one in names[-30:]]
        tokens = random_prompt(rng, known, min(driver.num_pages * driver.page_size - 2, 60))
        params: dict[str, Any] = {
            "max_tokens": rng.randint(1, 30),
            "priority": rng.choice([0, 0, 0, 1]),
            "namespace": rng.choice(["", "", "b"]),
            "ignore_eos": rng.random() < 0.5,
            "seed": rng.choice([0, 0, len(driver.serials)]),
        }
        params["min_tokens"] = rng.choice([0, 0, rng.randint(0, params["max_tokens"])])
        what = rng.random()
        if what < 0.6:
            params |= rng.choice([{}, {"logprobs": 0}, {"temperature": 0}, {"presence_penalty": 1}])
            driver.add(name, tokens, session=rng.choice(["", "", *test_storm.SESSIONS]), **params)
        elif what < 0.75:
            driver.add(name, tokens, **params)
            for number in range(rng.randint(1, 3)):
                params["seed"] = number + 1
                driver.add(f"r{len(driver.serials)}", tokens, **params)
        elif what < 0.85:
            self.searches[name] = test_beams.random_beams(rng)
            driver.add(name, tokens, beams=self.searches[name], **params)
        elif what < 0.95:
            test_prompt_scores.add(driver, name, tokens, **params)
        elif len(tokens) > 1:
            cut = rng.randint(1, len(tokens) - 1)
            driver.add(name, tokens[:-1], logprob_targets=tokens[cut:])

    def reused_name(self) -> str:
        """Of one that has ended, perhaps with a row in flight."""
        driver = self.driver
        self.check_others()
        driver.check_ends()
        name = self.rng.choice(list(driver.finished)[-2:])
        self.note_end(name)
        self.searches.pop(name, None)
        driver.forget(name)
        return name

    def check_others(self) -> None:
        """Searches and scores; OverlapDriver checks the rest."""
        driver = self.driver
        for name, finish in driver.finished.items():
            usage = finish.usage
            assert usage.cached_tokens + usage.computed_tokens == usage.prompt_tokens
            if finish.reason == "error" or name in driver.stopped:
                continue
            if name in self.searches:
                test_beams.check_search(driver, name, self.searches[name])
            elif driver.requests[name].also_generate:
                test_prompt_scores.check(driver, name)

    def note_end(self, name: str) -> None:
        self.reasons[f"ends by {self.driver.finished[name].reason}"] += 1


@pytest.mark.parametrize(
    "block", [0, *(pytest.param(block, marks=pytest.mark.long) for block in range(1, 4))]
)
def test_storms(block: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(block * 12, block * 12 + 12):
        seen += Storm(seed).run(40)
    events = ["steps_ahead", "discarded_tokens", "preemptions", "recomputed_tokens"]
    events += [f"ends by {reason}" for reason in ("abort", "stop", "length", "error")]
    for event in events:
        assert seen[event] > 0, f"the storm had no {event}"


def test_storms_with_windows() -> None:
    seen: Counter[str] = Counter()
    for seed in range(8):
        seen += Storm(seed, has_windows=True).run(40)
    for event in ("steps_ahead", "discarded_tokens", "preemptions", "ends by error"):
        assert seen[event] > 0, f"the storm had no {event}"


def test_the_same_seed_gives_the_same_run() -> None:
    assert Storm(7).run(40) == Storm(7).run(40)


@pytest.mark.long
@pytest.mark.timeout(36_000)
def test_many_storms() -> None:
    """RADIXSERVE_FUZZ_SEEDS sets how many (default 3,000):

    RADIXSERVE_FUZZ_SEEDS=300 python -m pytest -m long tests/scheduler/test_overlap.py
    """
    for seed in range(1_000, 1_000 + int(os.environ.get("RADIXSERVE_FUZZ_SEEDS", "3000"))):
        Storm(seed, has_windows=seed % 4 == 0).run(120)
