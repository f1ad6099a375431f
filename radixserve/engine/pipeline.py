"""`Pipeline`: the host schedules the next step while the device computes the present one.

    host     schedule 1, launch 1 | schedule 2, launch 2, update 1 | schedule 3, launch 3, update 2
    device                        | step 1                         | step 2

The token that a row of step 1 draws goes into step 2 on the device; the host sees it in update 1.
Where a step cannot be planned before the answer to the one in flight, that one is waited for first.
"""

from __future__ import annotations

import time
from typing import Any, Protocol, TypeGuard

from radixserve.errors import EngineDead
from radixserve.output import RequestOutput
from radixserve.schedule import ModelRunnerOutput, SchedulerOutput
from radixserve.scheduler import Scheduler


class Runner(Protocol):
    """The computing wing, as the engine sees it: `ModelRunner`, or a fake in tests.

    One with a true `can_overlap` is an `OverlapRunner`.
    """

    num_pages: int

    def execute(self, schedule: SchedulerOutput) -> ModelRunnerOutput: ...


class OverlapRunner(Runner, Protocol):
    """A runner whose device computes while the host does something else.

    Up to two steps are launched and not collected; they are collected in the order of their launch.
    """

    @property
    def can_overlap(self) -> bool: ...

    def launch(self, schedule: SchedulerOutput) -> Any:
        """Queue the step on the device and return at once, with what `collect` needs.

        Where it raises, nothing of the step is computed.
        """
        ...

    def collect(self, pending: Any) -> ModelRunnerOutput:
        """Wait for the step. Its seconds: prepare is what `launch` took."""
        ...


class Pipeline:
    """Turns the crank of a scheduler and an overlapping runner; at most one step is in flight
    between two calls."""

    def __init__(
        self, scheduler: Scheduler, runner: OverlapRunner, seconds: dict[str, float]
    ) -> None:
        """`seconds` by part of the step are added to; "hidden" is what the host did of them while a
        step was in flight."""
        self._scheduler = scheduler
        self._runner = runner
        self._seconds = seconds
        self._in_flight: list[tuple[SchedulerOutput, Any]] = []  # the older one first

    @property
    def is_idle(self) -> bool:
        """No step is in flight."""
        return not self._in_flight

    def step(self) -> list[RequestOutput]:
        """Launch a step, behind the one in flight where that can be; then answer the older one."""
        has_older = bool(self._in_flight)
        news = self._launch()
        if has_older:
            news += self._collect()
            if not self._in_flight:
                news += self._launch()
        return news

    def drain(self) -> None:
        """Wait for what is in flight and drop it: its requests have ended."""
        while self._in_flight:
            assert not self._collect(), "a request has not ended"

    def _launch(self) -> list[RequestOutput]:
        start = time.perf_counter()
        is_hidden = bool(self._in_flight)
        schedule = self._scheduler.schedule()
        spent = time.perf_counter() - start
        self._seconds["schedule"] += spent
        if is_hidden:
            self._seconds["hidden"] += spent
        if schedule is None:
            return []
        try:
            pending = self._runner.launch(schedule)
        except Exception as error:
            return self._scheduler.fail(schedule, step_failed(error))
        if is_hidden:
            self._seconds["hidden"] += time.perf_counter() - start - spent
        self._in_flight.append((schedule, pending))
        return []

    def _collect(self) -> list[RequestOutput]:
        schedule, pending = self._in_flight.pop(0)
        try:
            output = self._runner.collect(pending)
        except Exception as error:
            return self._scheduler.fail(schedule, step_failed(error))
        for part, seconds in output.seconds.items():
            self._seconds[part] += seconds
        start = time.perf_counter()
        news = self._scheduler.update(schedule, output)
        spent = time.perf_counter() - start
        self._seconds["commit"] += spent
        if self._in_flight:
            self._seconds["hidden"] += spent
        return news


def is_overlapping(runner: Runner) -> TypeGuard[OverlapRunner]:
    return getattr(runner, "can_overlap", False) is True


def step_failed(cause: BaseException) -> EngineDead:
    """The error that a request's caller sees when its step failed."""
    if isinstance(cause, EngineDead):  # of a runner that knows better
        return cause
    error = EngineDead(f"the step that computed this request failed: {cause!r}")
    error.__cause__ = cause
    return error
