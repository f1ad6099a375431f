"""Tenants share the engine by computed tokens: no queue, priority or answer holds up another."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Mapping

import pytest

from radixserve.config import EngineConfig
from radixserve.errors import InvalidRequest
from radixserve.request import BeamParams
from radixserve.scheduler.step_costs import StepCosts
from radixserve.tenants.running import by_least_served_tenant
from radixserve.tenants.virtual_time import VirtualTimes
from tests.scheduler.fake import Driver, random_prompt
from tests.scheduler.test_priced_admission import PricedDriver
from tests.scheduler.test_scheduler import prompt

POLICIES = ["lpm", "fcfs", "dfs-weight"]


def flood(driver: Driver, tenant: str, count: int, **settings: object) -> None:
    """Queue many requests of one tenant."""
    options = {"max_tokens": 4, "ignore_eos": True, **settings}
    for number in range(count):
        tokens = prompt(number, 12)
        driver.add(f"{tenant}{number}", tokens, namespace=tenant, **options)  # type: ignore[arg-type]


def computed(driver: Driver) -> Counter[str]:
    """Tokens computed so far, by namespace."""
    return Counter(
        {
            namespace: sum(
                row.end - row.start
                for schedule in driver.schedules
                for row in schedule.rows
                if driver.runner.namespaces[row.request_id] == namespace
            )
            for namespace in set(driver.runner.namespaces.values())
        }
    )


def steps_to_end(driver: Driver, name: str, most: int) -> int:
    for step in range(most):
        driver.step()
        if name in driver.finished:
            return step + 1
    raise AssertionError(f"{name} has not ended after {most} steps")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("priority", [0, 10**6])
def test_a_long_queue_and_its_priority_hold_up_nobody(policy: str, priority: int) -> None:
    """The time of a request beside 10,000 others is nearly that beside none."""
    driver = Driver(600, 1, policy, chunked_prefill_size=32, max_running_requests=4)
    flood(driver, "busy", 10_000 if policy == "lpm" else 500, priority=priority)
    for _ in range(10):
        driver.step()
    driver.add("small", prompt(77, 12), namespace="quiet", max_tokens=4, ignore_eos=True)  # type: ignore[arg-type]
    assert steps_to_end(driver, "small", 20) <= 12  # 4 steps alone


def test_slots_of_long_answers_are_taken_back() -> None:
    """One request of the tenant with most is preempted, and it costs no token again."""
    driver = Driver(900, 1, chunked_prefill_size=64, max_running_requests=4)
    flood(driver, "busy", 40, max_tokens=200)
    for _ in range(10):
        driver.step()
    driver.add("small", prompt(77, 12), namespace="quiet", max_tokens=4, ignore_eos=True)  # type: ignore[arg-type]
    assert steps_to_end(driver, "small", 60) <= 30
    counts = driver.scheduler.counts
    assert counts.preemptions == 1
    assert counts.recomputed_tokens == 0
    for name in list(driver.prompts):
        driver.abort(name)
    driver.drain()


def test_pages_of_long_answers_are_taken_back() -> None:
    driver = Driver(100, 1, chunked_prefill_size=64, max_running_requests=8)
    flood(driver, "busy", 40, max_tokens=60)
    for _ in range(10):
        driver.step()
    driver.add("large", prompt(77, 40), namespace="quiet", max_tokens=4, ignore_eos=True)  # type: ignore[arg-type]
    assert steps_to_end(driver, "large", 60) <= 30
    for name in list(driver.prompts):
        driver.abort(name)
    driver.drain()


@pytest.mark.parametrize("weights", [{}, {"b": 3.0}, {"a": 2.0, "b": 0.5}])
def test_tenants_that_wait_get_their_shares(weights: Mapping[str, float]) -> None:
    """Computed tokens are as the weights, within a few requests; the sizes of requests and
    priorities do not count."""
    driver = Driver(
        2000,
        1,
        chunked_prefill_size=32,
        max_running_requests=4,
        tenant_weights=weights,
        clock=lambda: 0.0,  # chunks of measured sizes would differ
    )
    for number in range(400):
        small, large = prompt(2 * number, 10), prompt(2 * number + 1, 30)
        driver.add(f"a{number}", small, namespace="a", max_tokens=3, ignore_eos=True, priority=5)  # type: ignore[arg-type]
        driver.add(f"b{number}", large, namespace="b/salt", max_tokens=6, ignore_eos=True)  # type: ignore[arg-type]
    for _ in range(250):
        driver.step()
    tokens = computed(driver)
    shares = [tokens["a"] / weights.get("a", 1.0), tokens["b/salt"] / weights.get("b", 1.0)]
    assert max(shares) - min(shares) <= 4 * 36 / min(weights.values(), default=1.0)
    rows = [len(schedule.rows) for schedule in driver.schedules]
    assert sum(rows) >= 0.95 * 4 * len(rows)  # no slot is left empty for it


def test_prompts_take_no_longer_than_the_tokens_of_another_tenant(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the tokens that take as long as a decode step are 40, a step computes no more."""
    driver = Driver(3000, 1, chunked_prefill_size=256, max_running_requests=4)
    monkeypatch.setattr(StepCosts, "tokens_beside_decodes", lambda _, most: min(most, 40))

    def longest_chunk(name: str) -> int:
        num_before = len(driver.schedules)
        while name not in driver.finished:
            driver.step()
        return max(schedule.num_prefill_tokens for schedule in driver.schedules[num_before:])

    driver.add("alone", prompt(0, 600), namespace="bob", max_tokens=2)
    assert longest_chunk("alone") == 256
    driver.add("ann", prompt(1, 4), namespace="ann", max_tokens=200, ignore_eos=True)  # type: ignore[arg-type]
    driver.step()
    driver.step()
    driver.add("beside", prompt(2, 600), namespace="bob", max_tokens=2)
    assert longest_chunk("beside") == 40
    driver.abort("ann")
    driver.drain()


def test_costs_are_measured_from_steps() -> None:
    """Decode steps of 4 s, and 0.1 s more for each prefilled token."""
    now = 1.0
    costs = StepCosts(lambda: now)
    assert costs.tokens_beside_decodes(256) == 256  # not known yet
    for num_tokens in (*(0 for _ in range(100)), 100, 30, 0, 256):
        begun_at, now = now, now + 4.0 + 0.1 * num_tokens
        costs.unread.append((begun_at, now, num_tokens, 1))
    assert costs.prefill_token_s == pytest.approx(0.1, rel=1e-3)
    assert costs.decode_step_s == pytest.approx(4.0, rel=1e-3)
    assert [costs.tokens_beside_decodes(most) for most in (256, 64, 20)] == [40, 40, 20]


def test_a_request_that_does_not_fit_is_passed_a_bounded_number_of_times() -> None:
    """A steady stream of small requests of another tenant cannot starve a large one."""
    driver = Driver(100, 1, chunked_prefill_size=64, max_running_requests=8, max_overtake=5)
    number = 0

    def send() -> None:
        nonlocal number
        driver.add(f"s{number}", prompt(number, 20), namespace="b", max_tokens=9, ignore_eos=True)  # type: ignore[arg-type]
        number += 1

    for _ in range(3):
        send()
    driver.step()
    driver.add("large", prompt(999, 80), namespace="a", max_tokens=2, ignore_eos=True)  # type: ignore[arg-type]
    started = len(driver.admitted)
    while "large" not in driver.admitted:
        send()
        driver.step()
        assert len(driver.admitted) - started <= 5 + 1
        assert number < 100


def test_what_a_tenant_left_unused_is_not_kept_for_it() -> None:
    """A tenant that was idle does not hold up the others when it comes back."""
    times = VirtualTimes()
    busy, idle = times.enter("busy"), times.enter("idle")
    times.begin_waiting(busy, [])
    busy.charge(1_000)
    times.begin_waiting(idle, [busy])
    assert idle.virtual_time == busy.virtual_time == 1_000
    idle.charge(500)
    times.leave(idle)
    again = times.enter("idle")
    times.begin_waiting(again, [busy])
    assert again is idle  # what it has used beyond its share counts against it
    assert again.virtual_time == 1_500


def test_a_policy_reads_the_cache_anew_before_a_turn_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What would be evicted has changed since the pass of the step before."""
    driver = PricedDriver(200, chunked_prefill_size=16, max_running_requests=2)
    policy, counts, read_at = driver.pricing, driver.scheduler.counts, [0]
    begin_pass, is_short = policy.begin_pass, policy.is_short

    def begin_pass_noted() -> None:
        read_at.append(counts.steps)
        begin_pass()

    def is_short_checked(num_needed: int) -> bool:
        assert read_at[-1] == counts.steps
        return is_short(num_needed)

    monkeypatch.setattr(policy, "begin_pass", begin_pass_noted)
    monkeypatch.setattr(policy, "is_short", is_short_checked)
    flood(driver, "a", 6)
    flood(driver, "b", 6)
    driver.run()
    driver.drain()


def test_many_tenants_are_forgotten() -> None:
    times = VirtualTimes()
    for number in range(30_000):
        tenant = times.enter(f"t{number}")
        times.begin_waiting(tenant, [])
        tenant.charge(10)
        times.end_waiting(tenant)
        times.leave(tenant)
    assert len(times.idle) <= 10_000


def run_alone(driver: Driver, seed: int, namespace: str) -> list[list[tuple[str, int, int]]]:
    """Random requests of one tenant; the rows of each step."""
    rng, start = random.Random(seed), len(driver.schedules)
    known: list[list[int]] = [[2, 3]]
    for number in range(60):
        name = f"r{number}"
        tokens = random_prompt(rng, known, 40)
        driver.add(
            name,
            tokens,
            max_tokens=rng.choice([1, 3, 12, 60]),
            priority=rng.choice([0, 0, 1]),
            namespace=namespace,  # type: ignore[arg-type]
            beams=BeamParams(width=2) if rng.random() < 0.05 else None,
        )
        known = [*known[-20:], tokens]
        for _ in range(rng.choice([0, 1, 3])):
            driver.step()
    driver.run()
    return [
        [(row.request_id, row.start, row.end) for row in schedule.rows]
        for schedule in driver.schedules[start:]
    ]


@pytest.mark.parametrize("policy", POLICIES)
def test_one_tenant_is_scheduled_as_without_tenants(policy: str) -> None:
    """Weights, and tenants that came before, change nothing for a tenant that is alone."""

    def make(**settings: object) -> Driver:
        return Driver(150, 1, policy, max_running_requests=4, **settings)  # type: ignore[arg-type]

    for seed in range(2):
        plain = run_alone(make(), seed, "")
        assert run_alone(make(tenant_weights={"t": 7.0}), seed, "t") == plain
        after = make()
        flood(after, "before", 10)
        after.run()
        after.cache.reset()
        assert run_alone(after, seed, "t") == plain


def test_chunks_go_to_the_tenant_that_was_served_least() -> None:
    driver = Driver(900, 1, chunked_prefill_size=500, max_running_requests=4)
    for name, tenant in (("a1", "a"), ("a2", "a"), ("b1", "b")):
        driver.add(
            name, prompt(len(driver.prompts), 100), namespace=tenant, max_tokens=2, ignore_eos=True
        )  # type: ignore[arg-type]
    states = dict(driver.states)
    driver.step()
    states = {name: state for name, state in states.items() if state.sequence is not None}
    assert len(states) == 3
    for state in states.values():
        state.tokens.append(1)
        state.share.virtual_time = {"a": 10.0, "b": 12.0}[state.share.name]
    order = by_least_served_tenant(list(states.values()), 64)
    assert [state.request_id for state in order] == ["a1", "a2", "b1"]
    states["a1"].share.virtual_time = 13.0
    order = by_least_served_tenant(list(states.values()), 64)
    assert [state.request_id for state in order] == ["b1", "a1", "a2"]


@pytest.mark.parametrize(
    "weights", [["a"], {"a": 0}, {"a": -1.0}, {"a": float("nan")}, {"a/b": 1.0}, {3: 1.0}]
)
def test_wrong_weights_are_refused(weights: object) -> None:
    with pytest.raises(InvalidRequest, match="tenant"):
        EngineConfig(tenant_weights=weights)  # type: ignore[arg-type]


def test_the_bound_on_overtaking_follows_the_admission() -> None:
    assert EngineConfig().max_overtake == 4096
    assert EngineConfig(admission="greedy").max_overtake == 64
    assert EngineConfig(admission="priced", max_overtake=3).max_overtake == 3


def storm(seed: int, steps: int) -> Counter[str]:
    """Bursts of several tenants with all kinds of requests and ends; an audit after each step."""
    rng = random.Random(seed)
    page_size = rng.choice([1, 2, 16])
    settings: dict[str, object] = {
        "policy": rng.choice(POLICIES),
        "chunked_prefill_size": rng.choice([1, 7, 16, 64]),
        "max_running_requests": rng.choice([1, 2, 4, 8]),
        "max_overtake": rng.choice([0, 2, 8, 40]),
        "max_wait_s": rng.choice([None, 3.0]),
        "tenant_weights": rng.choice([{}, {"a": 5.0}, {"b": 0.1, "c": 100.0}]),
    }
    pages = max(4, rng.choice([60, 120, 300]) // page_size)
    make = PricedDriver if rng.random() < 0.5 else Driver
    driver = make(pages, page_size, **settings)  # type: ignore[arg-type]
    names: list[str] = []
    known: list[list[int]] = [[2, 3]]
    for _ in range(steps):
        num_new = rng.choice([0, 0, 1, 1, 8]) if len(names) - len(driver.finished) < 25 else 0
        for _ in range(num_new):
            name, capacity = f"r{len(names)}", driver.num_pages * driver.page_size
            names.append(name)
            driver.add(
                name,
                random_prompt(rng, known, min(capacity - 20, 50)),
                max_tokens=rng.choice([1, 3, 12, 60]),
                priority=rng.choice([0, 0, 1, 10**6, -(2**31)]),
                namespace=rng.choice(["a", "a/x", "b", "c", f"n{rng.randrange(30)}"]),  # type: ignore[arg-type]
                session=rng.choice(["", "s1", "s2"]),
                beams=BeamParams(width=rng.choice([2, 3])) if rng.random() < 0.08 else None,
            )
        if names and rng.random() < 0.05:
            driver.abort(rng.choice(names[-20:]))
        if rng.random() < 0.03:
            driver.scheduler.sessions.close(rng.choice(["s1", "s2"]))
        if rng.random() < 0.01:
            driver.cache.reset(rng.choice([None, "a", "b"]))
        driver.now += rng.choice([0.01, 0.01, 0.5, 8.0])
        driver.step()
        driver.engine.check()
        known = [*known[-20:], *[driver.runner.tokens[name] for name in names[-3:]]]
    driver.run()
    assert len(driver.finished) == len(names)
    for name, finish in driver.finished.items():
        usage = finish.usage
        assert usage.cached_tokens + usage.computed_tokens == usage.prompt_tokens, name
    driver.drain()
    assert not driver.scheduler._shares.times.active
    counts = driver.scheduler.counts
    return Counter(steps=counts.steps, preemptions=counts.preemptions, aborted=counts.aborted)


def test_storms() -> None:
    seen: Counter[str] = Counter()
    for seed in range(4):
        seen += storm(seed, 60)
    assert seen["preemptions"] > 0
    assert seen["aborted"] > 0


@pytest.mark.long
def test_a_hundred_thousand_steps() -> None:
    """RADIXSERVE_FUZZ_STEPS sets how many."""
    steps, seed = 0, 1_000
    while steps < int(os.environ.get("RADIXSERVE_FUZZ_STEPS", "100000")):
        steps += storm(seed, 1_000)["steps"]
        seed += 1
