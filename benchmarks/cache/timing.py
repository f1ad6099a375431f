"""Timing: repeats of all contenders in turn, each reduced to its median.

The clock is the thread's own CPU time, user and system. Nothing measured here waits, so on an idle
machine it agrees with the wall clock; on a shared one the wall clock also counts other processes,
and more of them the longer an operation takes, which would favour the faster side.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

Operation = Callable[[], object]

_SAMPLE_US = 2_000.0  # a sample repeats short operations for about so long
_MAX_CALLS = 200


@dataclass(frozen=True)
class Figure:
    """One cell of the table: median, minimum and maximum of the repeats."""

    key: str  # "A.lookup": case and operation
    what: str  # the row's title
    contender: str
    value: float
    unit: str  # us | bytes | x
    low: float
    high: float

    @staticmethod
    def of(key: str, what: str, contender: str, samples: list[float], unit: str = "us") -> Figure:
        middle = statistics.median(samples)
        return Figure(key, what, contender, middle, unit, min(samples), max(samples))


def micros(operation: Operation, calls: int = 1) -> float:
    """Microseconds of a call, mean of `calls`."""
    start = time.thread_time()
    for _ in range(calls):
        operation()
    return (time.thread_time() - start) / calls * 1e6


def interleaved(
    key: str, what: str, operations: Mapping[str, Operation], repeats: int
) -> list[Figure]:
    """Each contender's operation, all of them once a round, so that noise of the machine reaches
    all of them alike. Each is called once before."""
    calls = {name: _num_calls(operation) for name, operation in operations.items()}
    samples: dict[str, list[float]] = {name: [] for name in operations}
    for _ in range(repeats):
        for name, operation in operations.items():
            samples[name].append(micros(operation, calls[name]))
    return [Figure.of(key, what, name, values) for name, values in samples.items()]


def _num_calls(operation: Operation) -> int:
    operation()
    return int(min(_MAX_CALLS, max(1.0, _SAMPLE_US / max(micros(operation), 0.1))))
