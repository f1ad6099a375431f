"""Runs engines on the same work, each in a process of its own.

The processes of a case are open together and take turns, one run at a time, so that noise of the
machine reaches all of them alike. Every run begins with nothing cached.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from statistics import fmean, median

from engine.base import Answer, Engine, Setup, Unavailable, Work, open_engine
from harness.machine import cpu_s, read_status, reset_peak
from harness.processes import Processes, Resident, take_turns


@dataclass(frozen=True)
class Sample:
    """One run of the work."""

    cpu_s: float  # of all threads of the process
    wall_s: float
    answers: list[Answer]
    num_computed: int
    peak_bytes: int | None  # most resident memory while it ran; None where it is not told
    steps: dict[str, float]  # how many and the seconds of their parts; see Engine.stats


@dataclass(frozen=True)
class Record:
    """All runs of one engine."""

    samples: list[Sample]
    base_bytes: int | None  # resident before the model was loaded

    @property
    def outputs(self) -> list[list[int]]:
        """Token ids of the first run."""
        return [answer.token_ids for answer in self.samples[0].answers]

    @property
    def num_computed(self) -> int:
        return int(median(sample.num_computed for sample in self.samples))

    @property
    def cpu_s(self) -> float:
        return median(sample.cpu_s for sample in self.samples)

    @property
    def wall_s(self) -> float:
        return median(sample.wall_s for sample in self.samples)

    @property
    def first_s(self) -> float:
        """Mean time to the first token."""
        return median(fmean(answer.first_s for answer in sample.answers) for sample in self.samples)

    @property
    def peak_mib(self) -> int | None:
        peaks = [sample.peak_bytes for sample in self.samples if sample.peak_bytes is not None]
        return round(max(peaks) / 2**20) if peaks else None


def run_engines(
    processes: Processes, engines: Mapping[str, str], setup: Setup, works: Sequence[Work]
) -> tuple[dict[str, Record], dict[str, str]]:
    """Open all, warm up, run each of `works`. `engines`: the name in `open_engine` of each label.

    Returns the records and, of engines that cannot run here, the reasons, by label.
    """
    opened: dict[str, Resident] = {}
    absent: dict[str, str] = {}
    with ExitStack() as stack:
        for label, name in engines.items():
            try:
                engine = Resident(processes, _open, name, setup)
                opened[label] = stack.enter_context(engine)
            except Unavailable as error:
                absent[label] = str(error)
        base_bytes = {
            label: engine.call(attrgetter("base_bytes")) for label, engine in opened.items()
        }
        turns = {label: partial(_turn, engine, works) for label, engine in opened.items()}
        samples = take_turns(turns, len(works))
    return {label: Record(samples[label], base) for label, base in base_bytes.items()}, absent


def _turn(engine: Resident, works: Sequence[Work], number: int) -> Sample:
    return engine.call(_measure, works[number])


def _open(name: str, setup: Setup) -> Engine:
    """Raises Unavailable."""
    base_bytes = read_status("VmRSS")
    engine = open_engine(name, setup)
    engine.base_bytes = base_bytes
    engine.reset()
    setup.work.warm_up(engine)
    gc.freeze()  # no collection walks the libraries' objects while a case runs
    return engine


def _measure(engine: Engine, work: Work) -> Sample:
    """One run with nothing cached."""
    engine.reset()
    gc.collect()
    reset_peak(engine.pid)
    before = engine.stats()
    cpu, wall = cpu_s(engine.pid), time.perf_counter()
    answers = work.run(engine)
    cpu, wall = cpu_s(engine.pid) - cpu, time.perf_counter() - wall
    steps = {name: value - before[name] for name, value in engine.stats().items()}
    peak = read_status("VmHWM", engine.pid)
    return Sample(cpu, wall, answers, engine.num_computed, peak, steps)
