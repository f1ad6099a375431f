"""Priced admission in the scheduler: what it measures, whom it holds, and that nobody starves."""

from __future__ import annotations

import math
import os
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from radixserve.admission_policies.priced import PricedAdmission
from radixserve.config import EngineConfig
from radixserve.errors import InvalidRequest
from radixserve.request import BeamParams
from radixserve.schedule import WindowLayers
from radixserve.scheduler.step_costs import StepCosts
from tests.scheduler.fake import Driver, random_prompt
from tests.scheduler.test_scheduler import prompt


class PricedDriver(Driver):
    """Steps are measured on the driver's clock, so a run depends on nothing else."""

    def __post_init__(self) -> None:
        self.admission, self.clock = "priced", self.tick
        super().__post_init__()
        assert isinstance(self.scheduler.policy, PricedAdmission)
        self.pricing = self.scheduler.policy

    def tick(self) -> float:
        self.now += 0.001  # between the beginning and the end of a step, too
        return self.now

    def fix_costs(self, prefill_share: float, prefill_token_s: float = 0.005) -> None:
        """Have the steps cost this from now on, whatever they take."""
        self.pricing.costs = FixedCosts(prefill_share, prefill_token_s)


class FixedCosts(StepCosts):
    prefill_share = prefill_token_s = decode_step_s = 0.0

    def __init__(self, prefill_share: float, prefill_token_s: float) -> None:
        super().__init__(lambda: 0.0)
        self.prefill_share, self.prefill_token_s = prefill_share, prefill_token_s
        self.decode_step_s = 10.0  # so that running together pays


class HotSessions:
    """Sessions that come back in the step after their answer, for ever."""

    def __init__(self, driver: Driver, count: int, size: int) -> None:
        self.driver = driver
        self.texts = {f"hot{number}": prompt(number, size) for number in range(count)}
        self.turns: Counter[str] = Counter()
        for name in self.texts:
            self.send(name)

    def send(self, name: str) -> None:
        self.turns[name] += 1
        self.driver.add(
            f"{name}-{self.turns[name]}",
            self.texts[name],
            max_tokens=2,
            ignore_eos=True,
            session=name,
        )

    def step(self) -> None:
        self.driver.step()
        self.driver.now += 0.01
        for name in self.texts:
            last = f"{name}-{self.turns[name]}"
            if last in self.driver.finished:
                self.texts[name] = self.texts[name] + self.driver.output(last)
                if len(self.texts[name]) > 60:  # a text with the same beginning would supersede it
                    self.texts[name] = prompt(1_000 + self.turns.total(), 30)
                self.send(name)


def test_a_cold_session_is_held_and_never_starves() -> None:
    """The bound in requests: later ones that are hot overtake it no more often."""
    driver = PricedDriver(130, max_running_requests=4, max_overtake=30, chunked_prefill_size=64)
    driver.pricing.max_wait_s = lambda _: math.inf
    hot = HotSessions(driver, 3, 30)
    for _ in range(60):
        hot.step()
    driver.add("cold", prompt(50, 60), max_tokens=2, ignore_eos=True, session="cold")
    later = 0
    while "cold" not in driver.admitted:
        before = len(driver.admitted)
        hot.step()
        later += len(driver.admitted) - before
        assert later <= 30 + 2 * 4  # those of its own step, and those that waited before it
    assert driver.scheduler.num_held > 0


def test_a_cold_session_waits_no_longer_than_max_wait_s() -> None:
    driver = PricedDriver(
        130, max_running_requests=4, max_overtake=10_000, chunked_prefill_size=64, max_wait_s=0.5
    )
    driver.pricing.max_wait_s = lambda _: math.inf
    hot = HotSessions(driver, 3, 30)
    for _ in range(60):
        hot.step()
    driver.add("cold", prompt(50, 60), max_tokens=2, ignore_eos=True, session="cold")
    sent_at = driver.now
    while "cold" not in driver.admitted:
        hot.step()
        assert driver.now - sent_at <= 0.5 + 0.2  # and what runs ends
    assert driver.scheduler.num_held > 0


def test_a_cold_session_waits_no_longer_than_the_waiting_tokens_take() -> None:
    driver = PricedDriver(130, max_running_requests=4, max_overtake=10_000, chunked_prefill_size=64)
    hot = HotSessions(driver, 3, 30)
    for _ in range(60):
        hot.step()
    driver.fix_costs(prefill_share=1.0)
    driver.add("cold", prompt(50, 60), max_tokens=2, ignore_eos=True, session="cold")
    sent_at = driver.now
    while "cold" not in driver.admitted:
        hot.step()
        most = 60 + 3 * 64  # tokens that are to be computed of waiting requests
        assert driver.now - sent_at <= 16 * most * 0.005 + 0.2  # and what runs ends
    assert driver.now - sent_at >= 16 * 60 * 0.005
    assert driver.scheduler.num_held > 0


def test_the_oldest_session_starts_at_a_price_that_holds_others() -> None:
    driver = PricedDriver(130, max_running_requests=4, max_overtake=10_000, chunked_prefill_size=64)
    driver.pricing.max_wait_s = lambda _: math.inf
    hot = HotSessions(driver, 3, 30)
    for _ in range(60):
        hot.step()
    while driver.step() is not None:
        driver.now += 0.001
    driver.add("cold", prompt(50, 60), max_tokens=2, ignore_eos=True, session="cold")
    pricing = driver.pricing
    state = driver.states["cold"]
    seen = set()
    for exponent in range(81):
        driver.fix_costs(prefill_share=0.7**exponent)
        pricing.begin_pass()
        seen.add((pricing.is_worth(state), pricing.is_worth(state, is_oldest=True)))
    assert seen == {(True, True), (False, True), (False, False)}


def test_while_requests_are_held_the_oldest_session_comes_first() -> None:
    driver = PricedDriver(130, max_running_requests=4, max_overtake=10_000, chunked_prefill_size=64)
    waiting = driver.scheduler._waiting
    driver.pricing.max_wait_s = lambda _: math.inf
    driver.add("old-1", prompt(50, 2), max_tokens=2, ignore_eos=True, session="old")
    hot = HotSessions(driver, 3, 30)
    for _ in range(60):
        hot.step()
    driver.fix_costs(prefill_share=1.0)
    text = driver.prompts["old-1"] + driver.output("old-1") + prompt(51, 60)
    driver.add("small", prompt(52, 12), max_tokens=2, ignore_eos=True, session="small")
    driver.add("old-2", text, max_tokens=2, ignore_eos=True, session="old")

    def order() -> list[str]:
        waiting.begin_pass()
        names = [state.request.request_id for state in waiting.candidates()]
        return [name for name in names if name in ("small", "old-2")]

    assert order() == ["small", "old-2"]
    num_held = driver.scheduler.num_held
    while driver.scheduler.num_held == num_held:
        hot.step()
    assert order() == ["old-2", "small"]


@pytest.mark.parametrize(("pages", "order"), [(400, ["match", "short"]), (170, ["short", "match"])])
def test_the_shortest_job_comes_first_where_waiting_requests_do_not_fit(
    pages: int, order: list[str]
) -> None:
    """Otherwise the longest match, as with greedy admission."""
    driver = PricedDriver(pages, max_running_requests=1, chunked_prefill_size=256)
    driver.add("first", prompt(1, 80), max_tokens=1)
    driver.run()
    driver.add("running", prompt(2, 10), max_tokens=4, ignore_eos=True, session="chat")
    driver.step()
    driver.add("match", prompt(1, 80) + prompt(3, 70), max_tokens=1)
    driver.add("short", prompt(4, 10), max_tokens=1)
    driver.run()
    assert driver.admitted[2:] == order


def test_small_requests_that_are_held_do_not_keep_a_returning_session_waiting() -> None:
    """They come before it as shorter jobs, but it loses its cached prefix if it waits."""
    driver = PricedDriver(160, max_running_requests=4, max_overtake=10_000, chunked_prefill_size=64)
    driver.pricing.max_wait_s = lambda _: math.inf
    driver.add("cold-1", prompt(9, 2), max_tokens=1, session="cold0")  # the oldest session
    driver.run()
    driver.add("warm-1", prompt(1, 90), max_tokens=1, session="warm")
    driver.run()
    driver.add("running", prompt(2, 10), max_tokens=60, ignore_eos=True, session="running")
    driver.step()
    driver.fix_costs(prefill_share=1.0)
    for number in range(20):
        driver.add(f"{number}", prompt(10 + number, 12), max_tokens=2, session=f"cold{number}")
    text = driver.prompts["warm-1"] + driver.output("warm-1")
    driver.add("warm-2", text + prompt(3, 35), max_tokens=1, session="warm")
    for _ in range(10):
        driver.step()
    assert driver.scheduler.num_held > 0
    assert "warm-2" in driver.admitted


def test_room_is_worth_nothing_while_the_machine_prefills_all_the_time() -> None:
    held = []
    for share in (0.0, 1.0):
        driver = PricedDriver(
            130, max_running_requests=4, max_overtake=10_000, chunked_prefill_size=64
        )
        driver.pricing.max_wait_s = lambda _: math.inf
        hot = HotSessions(driver, 3, 30)
        for _ in range(60):
            hot.step()
        driver.fix_costs(prefill_share=share)
        before = driver.scheduler.num_held
        for number in range(4):
            driver.add(f"cold{number}", prompt(60 + number, 60), max_tokens=2, session=f"c{number}")
            for _ in range(20):
                hot.step()
        held.append(driver.scheduler.num_held - before)
    assert held[0] == 0
    assert held[1] > 0


def test_the_share_of_prefill_is_that_of_the_last_minute() -> None:
    now = 0.0
    costs = StepCosts(lambda: now)
    assert costs.prefill_share == 0.0
    for num_prefill, seconds in [(0, 0.01)] * 100 + [(512, 1.01)] * 5:
        begun_at = now
        now += seconds
        costs.unread.append((begun_at, now, num_prefill, 1))
    assert costs.prefill_share == pytest.approx(5 / 6.05, rel=0.05)
    for _ in range(2_000):
        begun_at = now
        now += 0.1
        costs.unread.append((begun_at, now, 0, 1))
    assert costs.prefill_share < 0.02


def test_costs_are_measured_where_prompts_are_short_and_steps_mixed() -> None:
    """A step of 2 ms, and 0.5 ms for each token, prefilled or decoded."""
    now, rng = 0.0, random.Random(1)
    costs = StepCosts(lambda: now)
    for _ in range(400):
        num_prefill, num_decode = rng.choice([0, 0, 0, 11, 40, 200]), rng.randrange(1, 6)
        begun_at = now
        now += 0.002 + 0.0005 * (num_prefill + num_decode)
        costs.unread.append((begun_at, now, num_prefill, num_decode))
    assert costs.prefill_token_s == pytest.approx(0.0005, rel=0.1)
    assert costs.shared_step_s == pytest.approx(0.002, rel=0.15)


def unshared_steps(driver: PricedDriver) -> None:
    """Have no request gain by running beside another."""
    driver.fix_costs(prefill_share=0.5)
    driver.pricing.costs.decode_step_s = 0.0


def test_a_first_wave_without_names_is_held_until_32_requests_have_ended() -> None:
    driver = PricedDriver(200, chunked_prefill_size=512)
    unshared_steps(driver)
    for number in range(40):
        driver.add(f"r{number}", prompt(number, 50), max_tokens=2, ignore_eos=True)
    most_running = Counter[bool]()
    while driver.step() is not None:
        has_learned = len(driver.finished) >= 32
        most_running[has_learned] = max(most_running[has_learned], driver.scheduler.num_running)
    assert most_running == {False: 1, True: 3}


def test_held_requests_start_one_by_one_though_the_last_ones_fit() -> None:
    """Six do not fit beside their growth, three do; what comes after them starts at once."""
    driver = PricedDriver(300, chunked_prefill_size=512)
    unshared_steps(driver)
    for number in range(6):
        driver.add(
            f"r{number}", prompt(number, 40), max_tokens=2, ignore_eos=True, session=f"{number}"
        )
    driver.step()
    for number in range(3, 6):
        driver.abort(f"r{number}")
    while driver.step() is not None:
        assert driver.scheduler.num_running <= 1
    for number in range(6, 8):
        driver.add(f"r{number}", prompt(number, 5), max_tokens=2, ignore_eos=True)
    driver.step()
    assert driver.scheduler.num_running == 2


def test_sessions_that_share_most_of_their_prompts_are_not_held() -> None:
    """32 sessions with 90 % in common: a shared prefix counts once."""
    driver = PricedDriver(1_800, max_running_requests=32, chunked_prefill_size=256)
    driver.fix_costs(prefill_share=0.9)
    common = prompt(999, 180)
    texts = [common + prompt(number, 20) for number in range(32)]  # 820 tokens, not 6,400
    for turn in range(4):
        for number, text in enumerate(texts):
            driver.add(
                f"{number}-{turn}", text, max_tokens=2, ignore_eos=True, session=f"s{number}"
            )
        while driver.step() is not None:
            driver.now += 0.01
        driver.now += 0.05
        texts = [
            text + driver.output(f"{number}-{turn}") + prompt(32 * turn + number + 500, 1)
            for number, text in enumerate(texts)
        ]
    assert driver.scheduler.num_held == 0
    assert driver.scheduler.counts.preemptions == 0
    computed = [driver.finished[f"{number}-3"].usage.computed_tokens for number in range(32)]
    assert max(computed) <= 3
    driver.drain()


@pytest.mark.parametrize("count", [200, pytest.param(2_000, marks=pytest.mark.long)])
def test_many_sessions_at_once_all_end(count: int) -> None:
    """Of two turns each, in a room for about fifteen; the books are at zero afterwards."""
    driver = PricedDriver(600, max_running_requests=16, chunked_prefill_size=512)
    for number in range(count):
        driver.add(f"{number}-0", prompt(number, 30), max_tokens=2, session=f"s{number}")
    num_steps = 0
    continued: set[str] = set()
    while driver.step() is not None:
        driver.now += 0.01
        num_steps += 1
        for name in list(driver.finished)[len(continued) :] if num_steps % 4 == 0 else ():
            continued.add(name)
            number, turn = name.split("-")
            if turn == "0":
                text = driver.prompts[name] + driver.output(name) + [7, 8]
                driver.add(f"{number}-1", text, max_tokens=2, session=f"s{number}")
    for name in list(driver.finished)[len(continued) :]:
        assert name.endswith("-1"), "a session was not continued"
    assert len(driver.finished) == 2 * count
    assert {finish.reason for finish in driver.finished.values()} <= {"length", "stop"}
    for number in range(count):
        driver.scheduler.sessions.close(f"s{number}")
    driver.drain()


def test_a_finished_session_tells_the_cache_when_it_comes_back() -> None:
    driver = PricedDriver(800)
    text = prompt(0, 20)
    for turn in range(8):
        driver.add(f"t{turn}", text, max_tokens=2, ignore_eos=True)  # found by its tokens
        driver.run()
        text = text + driver.output(f"t{turn}") + prompt(turn + 1, 64)
        estimates = [estimate for _, estimate in driver.cache.victims()]
        driver.now += 5.0
    assert estimates[0] is not None
    assert estimates[0].is_regular
    assert estimates[0].seconds_left(driver.now - 5.0) == pytest.approx(5.0, rel=0.1)


def test_until_think_times_are_known_sessions_are_kept_by_leases() -> None:
    """A chat beside prompts that are sent once, the first of both kinds."""
    driver = PricedDriver(400)
    text = prompt(0, 60)
    driver.add("chat", text, max_tokens=2, ignore_eos=True, session="chat")
    driver.run()
    assert [lease["session"] for lease in driver.cache.stats()["leases"]] == ["chat"]
    for number in range(30):
        driver.add(f"{number}", prompt(100 + number, 50), max_tokens=1)
        driver.run()
    text = text + driver.output("chat") + prompt(1, 5)
    driver.add("chat-1", text, max_tokens=2, ignore_eos=True, session="chat")
    driver.run()
    assert driver.finished["chat-1"].usage.cached_tokens == 61
    for turn in range(2, 8):
        driver.now += 1.0
        text = text + driver.output(f"chat-{turn - 1}") + prompt(turn, 5)
        driver.add(f"chat-{turn}", text, max_tokens=2, ignore_eos=True, session="chat")
        driver.run()
    assert driver.cache.stats()["leases"] == []
    estimates = [estimate for _, estimate in driver.cache.victims()]
    assert any(estimate is not None and estimate.is_regular for estimate in estimates)


def test_prompts_that_never_come_again_are_told_from_named_sessions() -> None:
    """Unnamed prompts that are sent once make no session less likely to return."""
    driver = PricedDriver(4_000)
    text = prompt(0, 70)
    for turn in range(30):
        driver.add(f"t{turn}", text, max_tokens=2, ignore_eos=True, session="agent")
        driver.run()
        text = text + driver.output(f"t{turn}") + prompt(turn + 1, 5)
        for number in range(3):
            driver.add(f"{turn}-{number}", prompt(100 + 3 * turn + number, 20), max_tokens=1)
            driver.run()
        driver.now += 1.0
    estimates = [estimate for _, estimate in driver.cache.victims()]
    current = [one for one in estimates if one is not None and one.late_at > driver.now]
    assert {estimate.is_regular for estimate in current} == {False, True}
    for estimate in current:
        assert estimate.probability > 0.8 if estimate.is_regular else estimate.probability < 0.1


def test_a_session_that_begins_counts_with_its_mean_turn() -> None:
    """Not with its first one, which is the longest; any other request counts as it is."""
    driver = PricedDriver(2_000)
    returns, text = driver.pricing.returns, prompt(0, 70)
    driver.add("first", prompt(1, 70), max_tokens=2, ignore_eos=True, session="other")
    assert returns.mean_turn(driver.states["first"], 72) == 72  # no growth is known
    driver.abort("first")
    for turn in range(8):
        driver.add(f"t{turn}", text, max_tokens=2, ignore_eos=True, session="agent")
        driver.run()
        text = text + driver.output(f"t{turn}") + prompt(turn + 2, 5)
        driver.now += 1.0
    driver.add("later", text, max_tokens=2, ignore_eos=True, session="agent")
    assert returns.mean_turn(driver.states["later"], 9) == 9
    driver.add("new", prompt(90, 70), max_tokens=2, ignore_eos=True, session="new")
    mean = returns.mean_turn(driver.states["new"], 72)
    assert 5 < mean < 72 / 2
    for number in range(30):  # sent once, without names
        driver.add(f"once{number}", prompt(100 + number, 70), max_tokens=2, ignore_eos=True)
        driver.run()
        driver.now += 100.0
    driver.add("once", prompt(200, 70), max_tokens=2, ignore_eos=True)
    assert returns.mean_turn(driver.states["once"], 72) == 72


def test_think_times_stay_regular_while_they_vary_a_little_more() -> None:
    """So that of two sessions of one kind neither is kept for the other."""
    driver = PricedDriver(1_000)
    returns, text = driver.pricing.returns, prompt(0, 20)
    seen = []
    for turn in range(180):
        driver.add(f"t{turn}", text, max_tokens=1, ignore_eos=True, session="agent")
        driver.run()
        expected = returns.typical(driver.now)
        seen.append(expected is not None and expected.is_regular)
        spread = (1.0, 1.65, 2.5)[turn // 60]
        driver.now += spread if turn % 2 else 1.0 / spread
    assert all(seen[10:110])
    assert not any(seen[170:])


def test_priced_admission_needs_its_order_of_eviction() -> None:
    assert EngineConfig(admission="priced").eviction == "expected-return"
    for wrong in ({"eviction": "lru"}, {"cache": "hash"}, {"cache": "off"}):
        with pytest.raises(InvalidRequest, match="priced"):
            EngineConfig(admission="priced", **wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="greedy"):
        EngineConfig(admission="cheap")


def test_priced_admission_is_the_default_where_nothing_else_is_asked_for() -> None:
    priced, greedy = ("priced", "expected-return", 4096), ("greedy", "lru", 64)
    for settings, expected in [
        ({}, priced),
        ({"eviction": "expected-return"}, priced),
        ({"max_overtake": 7}, (*priced[:2], 7)),
        ({"admission": "greedy"}, greedy),
        ({"admission": "greedy", "eviction": "expected-return"}, ("greedy", "expected-return", 64)),
        ({"eviction": "lru"}, greedy),
        ({"eviction": "lfu"}, ("greedy", "lfu", 64)),
        ({"cache": "hash"}, greedy),
        ({"cache": "off"}, greedy),
    ]:
        config = EngineConfig(**settings)  # type: ignore[arg-type]
        assert (config.admission, config.eviction, config.max_overtake) == expected, settings
    assert "admission" not in repr(EngineConfig())
    assert "admission='greedy'" in repr(EngineConfig(admission="greedy"))


def roomy_schedules(admission: str, policy: str) -> list[object]:
    """The steps of sessions, branches of one prompt, tenants, priorities and aborts, where the pool
    has room for all."""
    driver = Driver(20_000, policy=policy, admission=admission, clock=lambda: 0.0)
    rng = random.Random(5)
    texts, names = [prompt(number, 40) for number in range(12)], list[str]()
    for _ in range(60):
        for _ in range(rng.choice([0, 0, 0, 1, 5])):
            number, name = rng.randrange(12), f"r{len(names)}"
            if number < 8:
                texts[number] = texts[number] + prompt(len(names), rng.randrange(1, 30))
            params = {"priority": rng.choice([0, 0, 1]), "namespace": rng.choice(["", "b/x"])}
            session = f"s{number}" if number % 2 else ""
            driver.add(
                name, texts[number], max_tokens=rng.randrange(1, 9), session=session, **params
            )
            names.append(name)
        if rng.random() < 0.05 and names:
            driver.abort(rng.choice(names[-5:]))
        if rng.random() < 0.05:
            driver.scheduler.sessions.close(f"s{rng.randrange(12)}")
        driver.now += rng.choice([0.0, 0.1, 5.0])
        driver.step()
    driver.run()
    assert driver.cache.stats()["evicted_tokens"] == 0
    return [
        (rows.request_ids, rows.starts, rows.num_tokens, rows.slots, list(rows.input_ids))
        for rows in (schedule.rows for schedule in driver.schedules)
    ]


@pytest.mark.parametrize("policy", ["lpm", "fcfs", "dfs-weight"])
def test_where_all_fits_the_schedules_are_those_of_greedy_admission(policy: str) -> None:
    greedy, priced = (roomy_schedules(name, policy) for name in ("greedy", "priced"))
    assert max(len(step[0]) for step in greedy) == 8  # slots are short at times
    assert priced == greedy


class Traffic:
    """Kinds of requests that priced admission starts as greedy admission does. Tokens are so dear
    that no request would run beside another, if sessions that return grew beyond the pool."""

    def __init__(
        self, admission: str, num_pages: int, policy: str = "lpm", num_first: int = 32
    ) -> None:
        self.driver = driver = Driver(
            num_pages, admission=admission, policy=policy, clock=lambda: 0.0, max_overtake=4_096
        )
        self.count = 0
        if admission == "priced":
            costs = FixedCosts(0.9, 1.0)
            costs.decode_step_s = 0.0
            driver.scheduler.policy.costs = costs  # type: ignore[attr-defined]
        for number in range(num_first):  # until 32 have ended each could be a session's
            self.send([1, 2 + number], 1)
            self.run()

    def send(self, tokens: list[int], max_tokens: int = 4, **fields: Any) -> str:
        self.count += 1
        name = f"r{self.count}"
        self.driver.add(name, tokens, max_tokens=max_tokens, ignore_eos=True, **fields)
        return name

    def run(self) -> None:
        while self.driver.step() is not None:
            self.driver.now += 0.01
        self.driver.now += 0.01

    def nothing_shared(self) -> None:
        for _ in range(16):
            self.send([2 + self.count % 40, *prompt(1_000 + self.count, 50)])
        self.run()

    def system_prompt(self) -> None:
        head = prompt(1, 60)
        for _ in range(24):
            self.send(head + prompt(2_000 + self.count, 5))
        self.run()

    def system_prompt_one_by_one(self) -> None:
        for _ in range(12):
            self.send(prompt(2, 60) + prompt(3_000 + self.count, 20))
            self.driver.step()
            self.driver.now += 0.01
        self.run()

    def branches(self) -> None:
        self.send(prompt(3, 80), 1)
        self.run()
        for number in range(16):
            self.send([*prompt(3, 80), 5 + number], 20)
        self.run()

    def samples(self) -> None:
        """Several of one prompt (n > 1), and of a second one."""
        for number in range(12):
            self.send(prompt(4 + number % 2, 60), 10, seed=number)
        self.run()

    def beams(self) -> None:
        for number in range(4):
            self.send(prompt(6 + number, 40), 6, beams=BeamParams(width=3))
        self.run()

    def tree_search(self) -> None:
        """Each node is a named session, which is forked, scored, and closed."""
        level = [prompt(7, 60)]
        for _ in range(3):
            names = {
                name: self.send(text, 6, seed=number, session=name)
                for text in level
                for number in range(4)
                for name in [f"node-{self.count}"]
            }
            self.run()
            texts = [self.driver.runner.tokens[request] for request in names.values()]
            for text in texts:
                self.send([*text, 3, 4], 1, logprob_targets=[3, 4], max_len=len(text) + 3)
            self.run()
            for name in names:
                self.driver.scheduler.sessions.close(name)
            level = [list(text) for text in texts[:4]]

    def chats(self, num_turns: int = 5) -> None:
        """Eight chats without names, all at once, with the same think time."""
        texts = [[49, *prompt(4_000 + self.count + number, 70)] for number in range(8)]
        for _ in range(num_turns):
            names = [self.send(text) for text in texts]
            self.run()
            texts = [self.driver.runner.tokens[name] + prompt(self.count, 10) for name in names]
            self.driver.now += 1.0

    def schedules(self) -> list[object]:
        rows = (schedule.rows for schedule in self.driver.schedules)
        return [(row.request_ids, row.starts, row.num_tokens, list(row.input_ids)) for row in rows]


ONCE = (
    Traffic.nothing_shared,
    Traffic.system_prompt,
    Traffic.system_prompt_one_by_one,
    Traffic.branches,
    Traffic.samples,
    Traffic.beams,
)


@pytest.mark.pairs
@pytest.mark.parametrize("policy", ["lpm", "fcfs", "dfs-weight"])
@pytest.mark.parametrize("num_pages", [100, 250, 600, 3_000])
@pytest.mark.parametrize("kind", ONCE, ids=lambda kind: kind.__name__)
def test_what_is_sent_once_has_the_schedules_of_greedy_admission(
    kind: Callable[[Traffic], None], num_pages: int, policy: str
) -> None:
    """In pools that are short and in others, twice."""
    schedules = []
    for admission in ("greedy", "priced"):
        traffic = Traffic(admission, num_pages, policy)
        kind(traffic)
        kind(traffic)
        schedules.append(traffic.schedules())
        assert traffic.driver.scheduler.num_held == 0
    assert schedules[0] == schedules[1]


@pytest.mark.parametrize("kind", [*ONCE, Traffic.tree_search], ids=lambda kind: kind.__name__)
def test_growth_of_sessions_that_have_gone_holds_nothing(kind: Callable[[Traffic], None]) -> None:
    """Chats that all fit, then other requests that fit, too; chats again while they wait."""
    schedules = []
    for admission in ("greedy", "priced"):
        traffic = Traffic(admission, 10_000)
        for _ in range(2):
            kind(traffic)
            traffic.chats()
            traffic.driver.now += 10.0  # they are late
            kind(traffic)
        schedules.append(traffic.schedules())
        assert traffic.driver.scheduler.num_held == 0
    assert schedules[0] == schedules[1]


@pytest.mark.parametrize("num_pages", [1_100, 2_000])
def test_chats_that_fit_to_their_end_have_the_schedules_of_greedy_admission(num_pages: int) -> None:
    """They need 1,048 pages. In the beginning they are expected to grow beyond both pools: that may
    hold requests while sessions wait for their first one."""
    schedules = []
    for admission in ("greedy", "priced"):
        traffic = Traffic(admission, num_pages, num_first=0)
        traffic.chats()
        schedules.append(traffic.schedules())
        assert traffic.driver.cache.stats()["evicted_tokens"] == 0
    assert schedules[0] == schedules[1]


def test_after_the_chats_prompts_in_a_short_pool_start_as_they_fit() -> None:
    schedules = []
    for admission in ("greedy", "priced"):
        traffic = Traffic(admission, 1_000)
        traffic.chats(3)
        traffic.driver.now += 10.0
        traffic.driver.schedules.clear()
        num_held = traffic.driver.scheduler.num_held
        traffic.nothing_shared()
        traffic.nothing_shared()
        schedules.append(traffic.schedules())
        assert traffic.driver.scheduler.num_held == num_held
    assert schedules[0] == schedules[1]


def test_a_tree_search_has_the_schedules_of_greedy_admission() -> None:
    for num_pages in (600, 1_500):
        schedules = []
        for admission in ("greedy", "priced"):
            traffic = Traffic(admission, num_pages, num_first=0)
            traffic.tree_search()
            traffic.tree_search()
            schedules.append(traffic.schedules())
        assert schedules[0] == schedules[1]


def test_growth_of_sessions_that_return_holds_prompts() -> None:
    """The costs of `Traffic`, with chats that still come back: prompts wait for them."""
    traffic = Traffic("priced", 1_000)
    traffic.chats(3)
    traffic.nothing_shared()
    assert traffic.driver.scheduler.num_held > 0


def storm(seed: int, steps: int) -> Counter[str]:
    """Bursts, tenants, sessions that never return or close in mid-flight, beams, aborts,
    preemptions and resets, with layers beside K/V every second time; an audit after each step."""
    rng = random.Random(seed)
    page_size = rng.choice([1, 2, 16])
    num_pages = max(4, rng.choice([60, 120, 300]) // page_size)
    driver = PricedDriver(
        num_pages,
        page_size,
        num_states=4 * (seed % 4 == 1),
        windows=WindowLayers(max(4, num_pages // 2), 12) if seed % 4 == 2 else None,
        policy=rng.choice(["lpm", "fcfs", "dfs-weight"]),
        chunked_prefill_size=rng.choice([7, 16, 64]),
        max_running_requests=rng.choice([2, 4, 8]),
        max_overtake=rng.choice([2, 8, 40]),
        max_wait_s=rng.choice([None, 3.0]),
    )
    if seed % 2:  # costs that fit the clock below
        driver.fix_costs(0.5, prefill_token_s=0.5)
    names: list[str] = []
    known: list[list[int]] = [[2, 3]]
    for _ in range(steps):
        num_new = rng.choice([0, 0, 1, 1, 6]) if len(names) - len(driver.finished) < 20 else 0
        for _ in range(num_new):
            name, capacity = f"r{len(names)}", driver.num_pages * driver.page_size
            tokens = random_prompt(rng, known, min(capacity - 20, 50))
            names.append(name)
            driver.add(
                name,
                tokens,
                max_tokens=rng.choice([1, 3, 12, 60]),
                priority=rng.choice([0, 0, 0, 1]),
                namespace=rng.choice(["", "b"]),  # type: ignore[arg-type]
                session=rng.choice(["", "s1", "s2", "s3"]),
                beams=BeamParams(width=2) if rng.random() < 0.05 else None,
            )
        if names and rng.random() < 0.05:
            driver.abort(rng.choice(names[-20:]))
        if rng.random() < 0.05:
            driver.scheduler.sessions.close(rng.choice(["s1", "s2", "s3"]))
        if rng.random() < 0.01:
            driver.cache.reset(rng.choice([None, "b"]))
        driver.now += rng.choice([0.01, 0.01, 0.5, 8.0])
        driver.step()
        driver.engine.check()
        known = [*known[-20:], *[driver.runner.tokens[name] for name in names[-3:]]]
    driver.run()
    assert len(driver.finished) == len(names)
    driver.drain()
    counts = driver.scheduler.counts
    return Counter(
        steps=counts.steps, preemptions=counts.preemptions, held=driver.scheduler.num_held
    )


def test_storms() -> None:
    seen: Counter[str] = Counter()
    for seed in range(4, 9):
        seen += storm(seed, 60)
    assert seen["held"] > 0
    assert seen["preemptions"] > 0


@pytest.mark.long
@pytest.mark.timeout(3_600)
def test_a_hundred_thousand_steps() -> None:
    """RADIXSERVE_FUZZ_STEPS sets how many."""
    steps, seed = 0, 1_000
    while steps < int(os.environ.get("RADIXSERVE_FUZZ_STEPS", "100000")):
        steps += storm(seed, 1_000)["steps"]
        seed += 1
