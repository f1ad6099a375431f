"""An engine on the device whose every step is timed there: what the figures are measured on.

Nothing is simulated: requests go through `Engine`, scheduler and cache, and `CudaModelRunner`.
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

import numpy as np
import torch
from gpu_bench import Bench
from gpu_clock import Clock, Mark, Times
from gpu_jobs import Skip

from radixserve.arrays import IntArray
from radixserve.config import EngineConfig
from radixserve.engine.engine import Engine
from radixserve.output import RequestOutput
from radixserve.request import Request, SamplingParams
from radixserve.runner.cuda_runner import CudaModelRunner
from radixserve.schedule import ModelRunnerOutput, SchedulerOutput

MOST_STEPS = 100_000  # without progress something is broken
STEADY = 3  # steps of all rows before the first that counts
SPARE = 64  # tokens of a request that nobody waits for
LEAST_HOLD_S = 2e-3


@dataclass(frozen=True)
class Step:
    """A launched step."""

    before: Mark
    after: Mark
    host_s: float  # of its launch
    is_held: bool  # the device waited until the host had queued all of it
    num_rows: int
    num_prefill: int  # tokens
    num_keys: int  # of all rows together


class TimedRunner:
    """A CudaModelRunner that remembers when its steps ran."""

    def __init__(self, runner: CudaModelRunner, clock: Clock) -> None:
        self._runner, self._clock = runner, clock
        self.num_pages = runner.num_pages
        self.steps: list[Step] = []
        self.hold_s = 0.0  # the device waits so long before each step

    @property
    def overlap_depth(self) -> int:
        return self._runner.overlap_depth

    def launch(self, schedule: SchedulerOutput) -> Any:
        if self.hold_s:
            self._clock.hold(self.hold_s)
        before, began = self._clock.mark(), time.perf_counter()
        pending = self._runner.launch(schedule)
        after = self._clock.mark()
        step = Step(
            before,
            after,
            host_s=time.perf_counter() - began,
            is_held=bool(self.hold_s) and not self._clock.is_passed(before),
            num_rows=len(schedule.rows),
            num_prefill=schedule.num_prefill_tokens,
            num_keys=sum(row.end for row in schedule.rows),
        )
        self.steps.append(step)
        return pending

    def collect(self, pending: Any) -> ModelRunnerOutput:
        return self._runner.collect(pending)


@dataclass(frozen=True)
class DecodeFigures:
    """Of steps of one token for each of the same rows."""

    step: Times  # from the end of a step to the end of the next one, host and all
    device: Times  # of a step that is queued as a whole before it begins
    host_s: float  # median of what its launch takes
    num_rows: int
    num_keys: float  # of a row, on average

    @property
    def host_share(self) -> float:
        """Of a step, in which the device waits for the host."""
        return max(0.0, 1 - self.device.median / self.step.median)


class Stage:
    """One engine. Use it as a context manager: it takes most of the card's memory."""

    def __init__(self, bench: Bench, model: str, **settings: Any) -> None:
        self._bench = bench
        self.config = EngineConfig(**{**bench.engine_settings, **settings})
        bench.check_engine(model, self.config.num_pages or 0)
        runner = CudaModelRunner(bench.model(model), self.config)
        self.info, self.resolved_config = runner.info, runner.resolved_config
        self.capacity = runner.num_pages * self.config.page_size  # tokens
        self.timed = TimedRunner(runner, bench.clock)
        self.engine = Engine(self.timed, self.config)
        self._rng = np.random.default_rng(bench.settings.seed)
        self._num_requests = 0
        self._open: set[str] = set()
        self._prompts: dict[int, list[IntArray]] = {}  # by length

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *error: object) -> None:
        self.timed = self.engine = None  # type: ignore[assignment]
        gc.collect()
        if self._bench.device.type == "cuda":
            torch.cuda.empty_cache()

    def tokens(self, length: int) -> IntArray:
        """Random ones."""
        return self._rng.integers(0, self.info.vocab_size, length).astype(np.int32)

    def prompts(self, count: int, length: int) -> list[IntArray]:
        """The first `count` random prompts of this length: always the same."""
        known = self._prompts.setdefault(length, [])
        while len(known) < count:
            known.append(self.tokens(length))
        return known[:count]

    def check_room(self, num_tokens: int, what: str) -> None:
        """Raise Skip where the pool has no room for so many."""
        if num_tokens > self.capacity:
            raise Skip(
                f"{what} need room for {num_tokens:,} tokens, the pool has {self.capacity:,}"
            )

    def add(self, prompt: IntArray, num_new: int) -> str:
        """Queue a greedy request that ends after `num_new` tokens."""
        self._num_requests += 1
        request = Request(
            request_id=f"r{self._num_requests}",
            token_ids=prompt,
            params=SamplingParams(max_tokens=num_new, temperature=0.0, ignore_eos=True),
            seed=0,
            end_ids=frozenset(),
            max_len=len(prompt) + num_new + 1,
        )
        self.engine.add(request)
        self._open.add(request.request_id)
        return request.request_id

    def step(self) -> list[RequestOutput]:
        """A step of the engine; raises the error of a request that failed."""
        news = self.engine.step()
        for one in news:
            if one.finish is not None:
                self._open.discard(one.request_id)
                if one.finish.error is not None:
                    raise one.finish.error
        return news

    def drain(self) -> None:
        """Until nothing is left to do."""
        for _ in range(MOST_STEPS):
            if not self.engine.has_work():
                return
            self.step()
        raise RuntimeError(f"not done after {MOST_STEPS} steps")

    def abort_all(self) -> None:
        """End all requests; what they computed stays cached."""
        for request_id in sorted(self._open):
            self.engine.abort(request_id)
        self._open.clear()
        self.drain()
        self._bench.clock.wait()
        self.timed.steps.clear()

    def first_token(self, prompt: IntArray) -> tuple[float, int]:
        """Seconds from adding a request to its first token, and how much of it was cached."""
        self._bench.clock.wait()
        began = time.perf_counter()
        name = self.add(prompt, 1)
        for _ in range(MOST_STEPS):
            for one in self.step():
                if one.request_id == name and one.finish is not None:
                    spent = time.perf_counter() - began
                    self.drain()
                    return spent, one.finish.usage.cached_tokens
        raise RuntimeError(f"no token after {MOST_STEPS} steps")

    def start(self, prompts: Sequence[IntArray], num_steps: int) -> None:
        """Nothing but these requests runs, all of them decode, and go on for `num_steps` at least.

        Prompts are computed or taken from the cache.
        """
        self.abort_all()
        num_rows, steps = len(prompts), self.timed.steps
        for prompt in prompts:  # the first ones decode while the others' prompts are computed
            self.add(prompt, num_steps + num_rows + SPARE)
        self._run_until(lambda: _is_steady(steps[-STEADY:], num_rows))

    def decode(self, prompts: Sequence[IntArray], num_steps: int, num_held: int) -> DecodeFigures:
        """Compute all prompts, or take them from the cache, then time steps of all rows.

        num_held: steps before which the device waits, to tell its own time from the host's.
        """
        num_rows, steps = len(prompts), self.timed.steps
        self.start(prompts, num_steps + num_held)
        first = len(steps)
        self._run_until(lambda: len(steps) >= first + num_steps + 1)
        timed = steps[first:]
        # Behind the wait: longer than any launch takes, so that all of a step is queued by then.
        self.timed.hold_s = 4 * median(step.host_s for step in timed) + LEAST_HOLD_S
        first = len(steps)
        self._run_until(lambda: len(steps) >= first + num_held)
        self.timed.hold_s = 0.0
        held = steps[first:]
        self._bench.clock.wait()
        figures = self._figures(timed, held, num_rows)
        self.abort_all()
        return figures

    def _figures(self, timed: list[Step], held: list[Step], num_rows: int) -> DecodeFigures:
        assert all(step.num_rows == num_rows and not step.num_prefill for step in (*timed, *held))
        clock, on_cuda = self._bench.clock, self._bench.device.type == "cuda"
        whole = [clock.seconds(a.after, b.after) for a, b in pairwise(timed)]
        alone = [clock.seconds(s.before, s.after) for s in held if s.is_held or not on_cuda]
        if not alone:
            raise RuntimeError("no step was queued before the device began it")
        return DecodeFigures(
            step=Times.of(whole),
            device=Times.of(alone),
            host_s=median(step.host_s for step in timed),
            num_rows=num_rows,
            num_keys=sum(step.num_keys for step in timed) / len(timed) / num_rows,
        )

    def _run_until(self, is_there: Any) -> None:
        for _ in range(MOST_STEPS):
            if is_there():
                return
            self.step()
        raise RuntimeError(f"not steady after {MOST_STEPS} steps")


def _is_steady(last: list[Step], num_rows: int) -> bool:
    is_all = all(step.num_rows == num_rows and not step.num_prefill for step in last)
    return len(last) == STEADY and is_all
