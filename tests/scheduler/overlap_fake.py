"""A device that computes later than it is told to, and a driver that works ahead of it.

A launched step is computed at some moment before it is collected: at once, or when everything that
the host does meanwhile is done. Steps are computed in order. The device knows nothing but what its
rows said when they were launched and what it sampled itself.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from radixserve.output import RequestOutput
from radixserve.schedule import (
    PLACEHOLDER,
    ModelRunnerOutput,
    SampleOutput,
    SampleSpec,
    ScheduledRequest,
    ScheduledRows,
    SchedulerOutput,
    WindowLayers,
)
from tests.scheduler.fake import DeviceFailed, Driver, FakeRunner, prefix_hashes

_GARBAGE = 0xBAD
_NOTHING = SampleOutput(0, None, ())  # of a row that is not to be computed; replaced below


class Launched:
    """A step as its rows described it when it was launched."""

    def __init__(self, schedule: SchedulerOutput, runner: DelayedRunner) -> None:
        rows = ScheduledRows.of(_snapshot(row) for row in schedule.rows)
        copies = [*runner.owed_copies, *schedule.state_copies]
        self.schedule = schedule._replace(
            rows=rows, cow_copies=schedule.cow_copies.copy(), state_copies=copies
        )
        self.late_windows = runner.owed_windows  # schedules whose window pages come first
        runner.owed_copies, runner.owed_windows = [], []
        names = [row.request_id for row in rows]
        self.tokens = {name: runner.known(name) for name in names}
        self.serials = {name: runner.serials[name] for name in names}
        self.namespaces = {name: runner.namespaces[name] for name in names}
        self.output: ModelRunnerOutput | None = None
        self.error: Exception | None = None


def _snapshot(row: ScheduledRequest) -> ScheduledRequest:
    return row._replace(
        token_ids=row.token_ids.copy(),
        page_ids=row.page_ids.copy(),
        sample=None if row.sample is None else _snapshot_spec(row.sample),
        logprob_targets=None if row.logprob_targets is None else row.logprob_targets.copy(),
    )


def _snapshot_spec(spec: SampleSpec) -> SampleSpec:
    return spec._replace(token_ids=spec.token_ids.copy())


class DelayedRunner(FakeRunner):
    """`pace` says how often a step that could be computed is, wherever that is asked."""

    overlap_depth = 1

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        rng: random.Random,
        pace: float,
        windows: WindowLayers | None = None,
    ) -> None:
        super().__init__(num_pages, page_size, windows)
        self.rng = rng
        self.pace = pace
        self.owed_copies: list[tuple[int, int]] = []  # of states, by steps that failed to launch
        self.owed_windows: list[SchedulerOutput] = []  # the same of window pages
        self.queue: list[Launched] = []  # not collected yet
        self.log: list[tuple[str, int]] = []  # ("launch" or "collect", step)
        # What a test may do, or have happen.
        self.before_collect: Callable[[], None] = lambda: None
        self.fails_to_launch: Callable[[], bool] = lambda: False
        self.fails_to_compute: Callable[[], bool] = lambda: False
        # What the driver tells.
        self.untold: dict[str, list[int]] = {}  # collected, and not yet the driver's
        self.length: Callable[[str], int] = lambda _: 0  # of what the host has of a request
        self.serials: dict[str, int] = {}  # an id may be used again
        self._last: Launched | None = None  # computed
        self._lost: set[int] = set()  # of those whose K/V or last token the last step has spoilt

    def launch(self, schedule: SchedulerOutput) -> Launched:
        with self.noticing():
            return self._launch(schedule)

    def collect(self, pending: Launched) -> ModelRunnerOutput:
        with self.noticing():
            return self._collect(pending)

    def _launch(self, schedule: SchedulerOutput) -> Launched:
        self.before_launch(schedule)
        if self.fails_to_launch():
            self.owed_copies += schedule.state_copies
            self.owed_windows.append(schedule)
            raise DeviceFailed("the launch failed")
        assert len(self.queue) < 2, "more than two steps are in flight"
        self.log.append(("launch", schedule.step))
        self.read_pages(schedule)
        self.queue.append(Launched(schedule, self))
        self.tick()
        return self.queue[-1]

    def known(self, name: str) -> list[int]:
        """The tokens of a request; what was sampled for nobody is not among them."""
        return (self.tokens[name] + self.untold.get(name, []))[: self.length(name)]

    def tick(self) -> None:
        """Some time passes: perhaps the device has come further."""
        for launched in self.queue:
            if launched.output is None and launched.error is None:
                if self.rng.random() >= self.pace:
                    return
                self._compute_step(launched)

    def _collect(self, pending: Launched) -> ModelRunnerOutput:
        self.before_collect()
        assert pending is self.queue[0], "steps are collected in the order of their launch"
        if pending.output is None and pending.error is None:
            self._compute_step(pending)
        self.tick()
        self.queue.pop(0)
        self.log.append(("collect", pending.schedule.step))
        if pending.error is not None:
            raise pending.error
        assert pending.output is not None
        schedule, sampled = pending.schedule, pending.output.outputs
        for one, output in zip(schedule.rows, sampled, strict=True):
            if output is not None and output.token_id >= 0:
                self.untold[one.request_id] = [output.token_id]
        return pending.output

    def _compute_step(self, launched: Launched) -> None:
        lost, self._lost = self._lost, set()
        before, self._last = self._last, launched
        schedule = launched.schedule
        self.copy_states(schedule)
        for one in (*launched.late_windows, schedule):
            self.update_windows(one)
        if self.fails_to_compute():
            launched.error = DeviceFailed("the device failed")
            self._lost = set(launched.serials.values())
            return
        rows = [self._with_source(row, launched, before, lost) for row in schedule.rows]
        sound = {at: row for at, row in enumerate(rows) if row is not None}
        alive = self.tokens, self.namespaces
        self.tokens, self.namespaces, self.hashes = launched.tokens, launched.namespaces, {}
        sampled = iter(self.run(_with_rows(schedule, sound)).outputs)
        self.tokens, self.namespaces = alive
        outputs = [next(sampled) if at in sound else _NOTHING for at in range(len(rows))]
        for at, row in enumerate(schedule.rows):
            is_answered = row.sample is not None or row.logprob_targets is not None
            if rows[at] is None or (is_answered and self.broken_rows(row)):
                self._lost.add(launched.serials[row.request_id])
                for cell in self._slots(row, row.start, row.end):
                    self.cells[cell] = _GARBAGE
                if is_answered:
                    outputs[at] = SampleOutput(-1, None, (), "the best logit is nan")
        launched.output = ModelRunnerOutput(tuple(outputs), {})

    def _with_source(
        self, row: ScheduledRequest, launched: Launched, before: Launched | None, lost: set[int]
    ) -> ScheduledRequest | None:
        """The row with its last token; None if that, or what it reads, is not to be had."""
        if launched.serials[row.request_id] in lost:
            return None
        known = launched.tokens[row.request_id]
        if row.future_index < 0:
            assert PLACEHOLDER not in row.token_ids.tolist()
            return row
        assert before is not None
        assert before.schedule.step == launched.schedule.step - 1
        assert before.output is not None
        assert row.token_ids.tolist() == [PLACEHOLDER]
        assert before.schedule.rows[row.future_index].request_id == row.request_id
        assert len(known) == row.start, "the host knows more or less than it thinks"
        source = before.output.outputs[row.future_index]
        assert source is not None
        known.append(source.token_id)
        return row._replace(token_ids=np.array([source.token_id], np.int32))


def _with_rows(schedule: SchedulerOutput, rows: dict[int, ScheduledRequest]) -> SchedulerOutput:
    """Only those rows."""
    return schedule._replace(rows=ScheduledRows.of(rows.values()))


@dataclass
class OverlapDriver(Driver):
    """A driver whose engine launches one step ahead."""

    pace: float = 0.4  # see DelayedRunner
    serials: list[str] = field(default_factory=list)
    stopped: set[str] = field(default_factory=set)  # from outside

    def make_runner(self) -> DelayedRunner:
        rng = random.Random(
            self.num_pages * 1_000 + self.page_size * 100 + self.chunked_prefill_size
        )
        runner = DelayedRunner(self.num_pages, self.page_size, rng, self.pace, self.windows)
        runner.length = lambda name: len(self.states[name].tokens)
        return runner

    def add(self, name: str, *args: Any, **more: Any) -> None:
        super().add(name, *args, **more)
        self.runner.serials[name] = len(self.serials)
        self.serials.append(name)

    def finish(self, name: str) -> None:
        """At a stop string, say."""
        output = self.engine.finish(name, "stop")
        if output is not None:
            self.stopped.add(name)
            self.collect_outputs([output])

    def forget(self, name: str) -> None:
        """One that has ended, so that its id can be used again."""
        for one in (self.prompts, self.requests, self.finished, self.beams):
            one.pop(name, None)
        self.stopped.discard(name)

    def step(self) -> SchedulerOutput | None:
        if not self.has_work:
            return None
        self.runner.tick()
        super().step()
        self.runner.untold.clear()
        self.runner.tick()
        return self.schedules[-1]

    @property
    def has_work(self) -> bool:
        return self.engine.has_work()

    def name_beams(self) -> None:
        super().name_beams()
        for name, state in self.states.items():
            if state.group is not None:
                head = state.group.leader.request_id
                self.runner.serials[name] = self.runner.serials[head]

    def collect_outputs(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            assert output.request_id not in self.finished, "outputs of a request that has ended"
        super().collect_outputs(outputs)

    def drain(self) -> None:
        while self.has_work:  # a step of requests that have all ended
            self.step()
        super().drain()
        assert not self.scheduler._in_flight
        self.check_ends()

    def check_ends(self) -> None:
        """Every request says what it would say alone, to the very token where it has to end."""
        for name, finish in self.finished.items():
            request = self.requests[name]
            if request.beams is not None or (
                request.logprob_targets is not None and not request.also_generate
            ):
                continue
            output = self.output(name)
            expected, reason = self.reference(name)
            if finish.reason in ("stop", "length") and name not in self.stopped:
                assert (output, finish.reason) == (expected, reason), name
            else:
                assert output == expected[: len(output)], name

    def reference(self, name: str) -> tuple[list[int], str]:
        """What a request says, and why it ends, by the rules alone."""
        request = self.requests[name]
        params, tokens = request.params, list(self.prompts[name])
        hashes = prefix_hashes(tokens)
        while True:
            tokens.append(self.runner.next_token(hashes, self.seeds[name]))
            hashes = prefix_hashes(tokens, hashes)
            count = len(tokens) - len(self.prompts[name])
            if tokens[-1] in request.end_ids and count > params.min_tokens:
                return tokens[-count:], "stop"
            if count >= params.max_tokens or len(tokens) >= request.max_len:
                return tokens[-count:], "length"
