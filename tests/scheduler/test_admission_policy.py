"""Policies that plug into the scheduler: a worked example of admission and one of order."""

from __future__ import annotations

import numpy as np
import pytest

from radixserve.cache import RadixCache
from radixserve.request import Request, SamplingParams
from radixserve.scheduler import Scheduler
from radixserve.scheduler.policy import AdmissionPolicy, SchedulerView
from radixserve.scheduler.queue_order import QueueOrder, SortedOrder
from radixserve.scheduler.request_state import RequestState


class OneLongPrompt(AdmissionPolicy):
    """Holds a prompt of 32 tokens or more while another such prompt runs."""

    holds_requests = True

    def attach(self, view: SchedulerView) -> None:
        self._running = view.running

    def may_start(self, state: RequestState, order: QueueOrder) -> bool:
        del order
        return state.num_prompt < 32 or all(other.num_prompt < 32 for other in self._running)


class ShortestFirst(AdmissionPolicy):
    """The shortest prompt comes first."""

    def make_order(self, schedule_policy: str) -> QueueOrder:
        del schedule_policy
        return SortedOrder(lambda state: (state.num_prompt, state.arrival))


def scheduler_with(policy: AdmissionPolicy, **settings: int) -> Scheduler:
    return Scheduler(RadixCache(400), admission=policy, chunked_prefill_size=400, **settings)


def add(scheduler: Scheduler, *sizes: int) -> None:
    for size in sizes:
        token_ids = np.arange(size * 1_000, size * 1_001, dtype=np.int32)
        params = SamplingParams(max_tokens=4)
        scheduler.add(Request(f"{size}", token_ids, params, 0, frozenset(), size + 4))


def started(scheduler: Scheduler) -> list[str]:
    schedule = scheduler.schedule()
    assert schedule is not None
    return list(schedule.rows.request_ids)


def test_a_policy_holds_requests_and_lets_others_pass() -> None:
    policy = OneLongPrompt()
    scheduler = scheduler_with(policy)
    add(scheduler, 40, 50, 10)
    assert sorted(started(scheduler)) == ["10", "40"]
    assert policy.num_held == scheduler.num_held == 1
    scheduler.check()


def test_a_policy_brings_its_own_order() -> None:
    scheduler = scheduler_with(ShortestFirst(), max_running_requests=2)
    add(scheduler, 40, 50, 10)
    assert started(scheduler) == ["10", "40"]
    scheduler.check()


@pytest.mark.parametrize("max_overtake", [0, 1])
def test_the_overtake_bound_holds_under_an_order_of_ones_own(max_overtake: int) -> None:
    scheduler = scheduler_with(ShortestFirst(), max_running_requests=2, max_overtake=max_overtake)
    add(scheduler, 40, 50, 10)
    assert started(scheduler) == (["40", "50"] if not max_overtake else ["10", "40"])


def test_a_held_request_starts_once_it_has_reached_the_bound() -> None:
    scheduler = scheduler_with(OneLongPrompt(), max_overtake=0)
    add(scheduler, 40, 50)
    assert sorted(started(scheduler)) == ["40", "50"]  # none may be overtaken, so none is held
