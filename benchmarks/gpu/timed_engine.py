"""An engine on the device whose every step is timed there: what the figures are measured on.

Contexts are computed, chunk by chunk, from random tokens.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from gpu.bench import Bench, Clock, Event, Times
from gpu.jobs import Skip
from harness.step_loop import StepLoop

from radixserve.arrays import IntArray
from radixserve.config import EngineConfig
from radixserve.runner.cuda_runner import CudaModelRunner
from radixserve.schedule import SchedulerOutput

STEADY = 3  # steps of all rows before the first that counts
SPARE = 64  # tokens of a request beyond the timed ones
LEAST_HOLD_S = 2e-3


@dataclass(frozen=True)
class Step:
    """A launched step."""

    before: Event
    after: Event
    host_s: float  # of its launch
    is_held: bool  # the device waited until the host had queued all of it
    num_rows: int
    num_prefill: int  # tokens
    num_keys: int  # of all rows together


class TimedRunner:
    """A runner that records when its steps ran."""

    def __init__(self, runner: CudaModelRunner, clock: Clock) -> None:
        self._runner, self._clock = runner, clock
        self.steps: list[Step] = []
        self.hold_s = 0.0  # the device waits so long before each step

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def launch(self, schedule: SchedulerOutput) -> Any:
        if self.hold_s:
            self._clock.hold(self.hold_s)
        before, began = self._clock.record(), time.perf_counter()
        pending = self._runner.launch(schedule)
        after = self._clock.record()
        host_s = time.perf_counter() - began
        is_held = self.hold_s > 0 and not (self._clock.is_cuda and before.query())
        num_keys = sum(row.end for row in schedule.rows)
        counts = len(schedule.rows), schedule.num_prefill_tokens, num_keys
        self.steps.append(Step(before, after, host_s, is_held, *counts))
        return pending


@dataclass(frozen=True)
class DecodeFigures:
    """Steps of one token for each of the same rows."""

    step: Times  # from the end of a step to the end of the next one, host and all
    device: Times  # of a step that is queued as a whole before it begins
    host_s: float  # median of what its launch takes
    num_rows: int
    num_keys: float  # of a row, on average

    @property
    def host_share(self) -> float:
        """The part of a step in which the device waits for the host."""
        return max(0.0, 1 - self.device.median / self.step.median)

    @staticmethod
    def of(clock: Clock, timed: list[Step], held: list[Step], num_rows: int) -> DecodeFigures:
        """timed: steps one after the other. held: steps before which the device waited."""
        assert all(step.num_rows == num_rows and not step.num_prefill for step in (*timed, *held))
        whole = [clock.seconds(a.after, b.after) for a, b in pairwise(timed)]
        alone = [clock.seconds(one.before, one.after) for one in held if one.is_held]
        if not alone:
            raise RuntimeError("no step was queued before the device began it")
        return DecodeFigures(
            step=Times.of(whole),
            device=Times.of(alone),
            host_s=median(step.host_s for step in timed),
            num_rows=num_rows,
            num_keys=sum(step.num_keys for step in timed) / len(timed) / num_rows,
        )


class TimedEngine(StepLoop):
    """One engine. Use it as a context manager: it takes most of the card's memory."""

    def __init__(self, bench: Bench, model: str, **settings: Any) -> None:
        self._clock = bench.clock
        config = EngineConfig(**bench.engine_settings(**settings))
        bench.check_memory(model, config.num_pages or 0)
        runner = CudaModelRunner(bench.model(model), config)
        self.resolved_config = runner.resolved_config
        self.capacity = runner.num_pages * config.page_size  # tokens
        self.timed = TimedRunner(runner, bench.clock)
        super().__init__(self.timed, config, runner.info.vocab_size)
        self._prompts: dict[int, list[IntArray]] = {}  # by length
        bench.note(f"{self.resolved_config}; pool of {self.capacity:,} tokens")

    def __enter__(self) -> TimedEngine:
        return self

    def __exit__(self, *error: object) -> None:
        del self.timed, self.engine
        gc.collect()
        if self._clock.is_cuda:
            torch.cuda.empty_cache()

    def prompts(self, count: int, length: int) -> list[IntArray]:
        """The first `count` random prompts of this length: always the same."""
        known = self._prompts.setdefault(length, [])
        while len(known) < count:
            known.append(self.tokens(length))
        return known[:count]

    def check_room(self, num_tokens: int, what: str) -> None:
        """Raise Skip where the pool has no room for so many."""
        if num_tokens > self.capacity:
            has = f"the pool has {self.capacity:,}"
            raise Skip(f"{what} need room for {num_tokens:,} tokens, {has}")

    def abort_all(self) -> None:
        super().abort_all()
        self._clock.wait()
        self.timed.steps.clear()

    def first_token(self, prompt: IntArray) -> tuple[float, int]:
        """Seconds from adding a request to its first token, and how much of it was cached."""
        self._clock.wait()
        began = time.perf_counter()
        name = self.add(prompt, 1)
        found: list[Any] = []
        while not found:
            found = [o.finish for o in self.step() if o.request_id == name and o.finish is not None]
        spent = time.perf_counter() - began
        self.drain()
        return spent, found[0].usage.cached_tokens

    def start(self, prompts: Sequence[IntArray], num_steps: int) -> None:
        """Only these requests run, all of them decode, and go on for `num_steps` at least."""
        self.abort_all()
        num_rows, steps = len(prompts), self.timed.steps
        for prompt in prompts:  # the first ones decode while the others' prompts are computed
            self.add(prompt, num_steps + num_rows + SPARE)
        self.step_until(lambda: _is_steady(steps[-STEADY:], num_rows))

    def decode(self, prompts: Sequence[IntArray], num_steps: int, num_held: int) -> DecodeFigures:
        """Compute all prompts, or take them from the cache, then time steps of all rows.

        num_held: steps before which the device waits, to tell its own time from the host's.
        """
        steps = self.timed.steps
        self.start(prompts, num_steps + num_held)
        first = len(steps)
        self.step_until(lambda: len(steps) >= first + num_steps + 1)
        timed = steps[first:]
        # Longer than any launch takes, so that all of a step is queued when the wait ends.
        self.timed.hold_s = 4 * median(step.host_s for step in timed) + LEAST_HOLD_S
        held_from = len(steps)
        try:
            self.step_until(lambda: len(steps) >= held_from + num_held)
        finally:
            self.timed.hold_s = 0.0
        held = steps[held_from:]
        self._clock.wait()
        figures = DecodeFigures.of(self._clock, timed, held, len(prompts))
        self.abort_all()
        return figures


def _is_steady(last: list[Step], num_rows: int) -> bool:
    is_all = all(step.num_rows == num_rows and not step.num_prefill for step in last)
    return len(last) == STEADY and is_all
