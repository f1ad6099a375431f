"""Runs engines on the same work, each in a process of its own, in turns.

The processes of a case are open together and take turns, one run at a time, so that noise of the
machine reaches all of them alike. Every run begins with nothing cached.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

from engine.base import Answer, Engine, Setup, Unavailable, open_engine
from harness.machine import read_status, reset_peak
from harness.processes import Child, Processes


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
        return [answer.token_ids for answer in self.samples[0].answers]

    @property
    def cpu_s(self) -> float:
        return median(sample.cpu_s for sample in self.samples)

    @property
    def wall_s(self) -> float:
        return median(sample.wall_s for sample in self.samples)

    @property
    def num_computed(self) -> int:
        return int(median(sample.num_computed for sample in self.samples))

    @property
    def peak_bytes(self) -> int | None:
        peaks = [sample.peak_bytes for sample in self.samples if sample.peak_bytes is not None]
        return max(peaks, default=None)


def take_turns(
    processes: Processes, engines: Mapping[str, str], setup: Setup, repeats: int
) -> tuple[dict[str, Record], dict[str, str]]:
    """Open all, warm up, run. `engines`: the name in `open_engine` of each label.

    Returns the records and, of engines that cannot run here, the reasons, by label.
    """
    children: dict[str, Child] = {}
    records: dict[str, Record] = {}
    absent: dict[str, str] = {}
    for label, name in engines.items():
        child = processes.start(label, _serve_turns, name, setup)
        opened = child.receive()
        if isinstance(opened, str):
            absent[label] = opened
        else:
            children[label], records[label] = child, Record([], opened[0])
    for turn in range(repeats):
        for label in children if turn % 2 == 0 else reversed(children):
            children[label].send(True)
            records[label].samples.append(children[label].receive())
    for child in children.values():
        child.send(False)
        child.join()
    return records, absent


def _serve_turns(pipe: Connection, name: str, setup: Setup) -> None:
    """Of an engine's process: tells the resident bytes or why it cannot run, then each sample."""
    base_bytes = read_status("VmRSS")
    try:
        engine = open_engine(name, setup)
    except Unavailable as error:
        pipe.send(str(error))
        return
    engine.reset()
    setup.work.warm_up().run(engine)
    gc.freeze()  # no collection walks the libraries' objects while a case runs
    pipe.send((base_bytes,))
    while pipe.recv():
        pipe.send(measure(engine, setup.work))
    engine.close()


def measure(engine: Engine, work: Any) -> Sample:
    """One run with nothing cached."""
    engine.reset()
    gc.collect()
    reset_peak()
    before = engine.stats()
    cpu, wall = time.process_time(), time.perf_counter()
    answers = work.run(engine)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    steps = {name: value - before[name] for name, value in engine.stats().items()}
    return Sample(cpu, wall, answers, engine.num_computed, read_status("VmHWM"), steps)
