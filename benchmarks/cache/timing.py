"""Timing: repeats of all contenders in turn, each reduced to its median.

The clock is the thread's own CPU time, user and system. Nothing measured here waits, so on an idle
machine it agrees with the wall clock; on a shared one the wall clock also counts other processes,
and more of them the longer an operation takes, which would favour the faster side.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from harness.processes import take_turns

Operation = Callable[[], object]
Samples = dict[str, list[float]]  # by contender

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


def figures(key: str, what: str, samples: Samples, unit: str = "us") -> Iterator[Figure]:
    """One for each contender."""
    for name, values in samples.items():
        middle = statistics.median(values)
        yield Figure(key, what, name, middle, unit, min(values), max(values))


def micros(operation: Operation, calls: int = 1) -> float:
    """Microseconds of a call, mean of `calls`."""
    start = time.thread_time()
    for _ in range(calls):
        operation()
    return (time.thread_time() - start) / calls * 1e6


def interleaved(
    key: str, what: str, operations: Mapping[str, Operation], repeats: int
) -> Iterator[Figure]:
    """Each contender's operation, all of them once a round, so that noise of the machine reaches
    all of them alike. Each is called twice before."""
    timers = {name: _timer(operation) for name, operation in operations.items()}
    yield from figures(key, what, take_turns(timers, repeats))


def _timer(operation: Operation) -> Callable[[int], float]:
    """Microseconds of a call: the mean of as many as a sample has time for."""
    operation()
    calls = int(min(_MAX_CALLS, max(1.0, _SAMPLE_US / max(micros(operation), 0.1))))
    return lambda _: micros(operation, calls)
