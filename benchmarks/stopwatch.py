"""Timing: repeats of all contenders in turn, each reduced to its median.

The clock is the thread's own CPU time, user and system. Nothing that is measured waits, so on a
machine at rest it says what the wall clock says; on a shared one the wall clock also counts other
people's work, and more of it the longer an operation takes, which would favour the faster side.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

Operation = Callable[[], object]

_SAMPLE_US = 2_000.0  # a sample repeats short operations for about so long
_MOST_CALLS = 200


@dataclass(frozen=True)
class Figure:
    """One cell of the table: the median, the least and the largest of the repeats."""

    key: str  # "A.lookup"; what a target refers to
    what: str  # for people
    contender: str
    value: float
    unit: str  # us | bytes | x
    low: float
    high: float


@dataclass(frozen=True)
class Line:
    """One row of the table still to be measured."""

    key: str
    what: str
    unit: str = "us"

    def figure(self, contender: str, samples: list[float]) -> Figure:
        middle = statistics.median(samples)
        low, high = min(samples), max(samples)
        return Figure(self.key, self.what, contender, middle, self.unit, low, high)


def micros(operation: Operation, calls: int = 1) -> float:
    """Mean of `calls` calls."""
    start = time.thread_time()
    for _ in range(calls):
        operation()
    return (time.thread_time() - start) / calls * 1e6


def interleaved(line: Line, operations: Mapping[str, Operation], repeats: int) -> list[Figure]:
    """Each contender's operation, all of them once a round, so that a noisy moment of the machine
    meets everyone. Each is called once before."""
    calls = {name: _calls(operation) for name, operation in operations.items()}
    samples: dict[str, list[float]] = {name: [] for name in operations}
    for _ in range(repeats):
        for name, operation in operations.items():
            samples[name].append(micros(operation, calls[name]))
    return [line.figure(name, values) for name, values in samples.items()]


def _calls(operation: Operation) -> int:
    operation()
    return int(min(_MOST_CALLS, max(1.0, _SAMPLE_US / max(micros(operation), 0.1))))
