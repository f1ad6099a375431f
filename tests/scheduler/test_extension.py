"""What plugs into the scheduler: worked examples of an extension and of a group of requests."""

# ruff: noqa: ARG002  (a group has methods that this one needs no argument of)

from __future__ import annotations

import numpy as np
import pytest

from radixserve.cache import CacheSequence, RadixCache
from radixserve.output import RequestOutput
from radixserve.request import Request, SamplingParams
from radixserve.schedule import ModelRunnerOutput, SampleOutput
from radixserve.scheduler import Scheduler
from radixserve.scheduler.extension import RequestGroup, SchedulerExtension, SchedulerParts
from radixserve.scheduler.request_state import RequestState


class Reserve(SchedulerExtension):
    """Holds pages until no request can continue without them."""

    def __init__(self, name: str, num_pages: int, log: list[str]) -> None:
        self._name, self._num_pages, self._log = name, num_pages, log
        self._held: CacheSequence | None = None

    def attach(self, parts: SchedulerParts) -> None:
        self._held = parts.cache.acquire([])
        self._held.extend(list(range(1000, 1000 + self._num_pages)))

    def make_room(self, state: RequestState | None) -> bool:
        if state is not None or self._held is None:
            return False
        self._log.append(self._name)
        self._held.release()
        self._held = None
        return True


class Rhyme(SchedulerExtension):
    """Requests that continue with the same token: that of the first one."""

    def __init__(self) -> None:
        self.couplet = Couplet()

    def attach(self, parts: SchedulerParts) -> None:
        self.couplet.parts = parts

    def on_arrival(self, state: RequestState) -> None:
        state.group = self.couplet
        self.couplet.members.append(state)


class Couplet(RequestGroup):
    parts: SchedulerParts

    def __init__(self) -> None:
        self.members: list[RequestState] = []
        self.tokens: list[int] = []

    @property
    def num_output(self) -> int:
        return self.members[0].num_output

    def take_sample(self, state: RequestState, sample: SampleOutput) -> None:
        self.tokens.append(sample.token_id)

    def end_step(self) -> None:
        if len(self.tokens) == len(self.members):
            for state in self.members:
                state.tokens.append(self.tokens[0])
            self.tokens = []

    def end(self, reason: str, error: BaseException | None = None) -> RequestOutput:
        first, *others = self.members
        for state in others:
            self.parts.close(state, reason, error)
        return first.output(None, self.parts.close(first, reason, error))

    def unpark(self, state: RequestState) -> None:
        raise AssertionError("none is parked")

    def may_rest(self, state: RequestState) -> bool:
        return False


def request(name: str, num_tokens: int, first: int) -> Request:
    tokens = np.arange(first, first + num_tokens, dtype=np.int32)
    return Request(name, tokens, SamplingParams(max_tokens=4), 0, frozenset(), num_tokens + 4)


def run(scheduler: Scheduler) -> None:
    while (schedule := scheduler.schedule()) is not None:
        samples = (None if spec is None else SampleOutput(7) for spec in schedule.rows.samples)
        scheduler.update(schedule, ModelRunnerOutput(tuple(samples), {}))
        scheduler.check()


@pytest.mark.parametrize("names", [["cheap", "dear"], ["dear", "cheap"]])
def test_extensions_give_up_pages_in_the_order_of_plugging_in(names: list[str]) -> None:
    """One after the other, and only as many as are needed."""
    scheduler, given = Scheduler(RadixCache(100)), list[str]()
    for name in names:
        scheduler.plug_in(Reserve(name, 40, given))
    for name, num_tokens, expected in (("small", 10, []), ("large", 50, names[:1])):
        scheduler.add(request(name, num_tokens, 100 * num_tokens))
        run(scheduler)
        assert given == expected
    scheduler.add(request("larger", 90, 0))
    run(scheduler)
    assert given == names


def test_a_group_decides_what_follows_its_samples() -> None:
    scheduler, rhyme = Scheduler(RadixCache(100)), Rhyme()
    scheduler.plug_in(rhyme)
    scheduler.add(request("a", 10, 0))
    scheduler.add(request("b", 10, 50))
    for number in range(3):
        schedule = scheduler.schedule()
        assert schedule is not None
        sampled = tuple(SampleOutput(7 + number + row) for row in range(2))
        assert not scheduler.update(schedule, ModelRunnerOutput(sampled, {}))
        scheduler.check()
    assert [state.tokens.view()[10:].tolist() for state in rhyme.couplet.members] == [[7, 8, 9]] * 2
    output = scheduler.finish("b", "stop")
    assert output is not None
    assert output.request_id == "a"
    assert not scheduler.has_work
    scheduler.check()
