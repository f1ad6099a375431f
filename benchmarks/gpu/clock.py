"""Time on the device: events in its queue, and the spread of many samples.

On the CPU, for dry runs, the same calls read the host's clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

import torch

from radixserve.runner.cuda_graph import GraphCapturer

CYCLES_PER_S = 2e9  # of a card's clock, about
Event = Any  # a torch.cuda.Event, or seconds


@dataclass(frozen=True)
class Times:
    """Of many samples, in seconds."""

    median: float
    spread: float  # half the distance of the quartiles over the median
    num_samples: int

    @staticmethod
    def of(samples: Sequence[float]) -> Times:
        """At least one."""
        middle = median(samples)
        if len(samples) < 2:
            return Times(middle, 0.0, len(samples))
        low, _, high = quantiles(samples, n=4)
        return Times(middle, (high - low) / 2 / max(middle, 1e-12), len(samples))

    @property
    def ms(self) -> float:
        return self.median * 1e3

    def cells(self, name: str = "ms") -> dict[str, float | str]:
        return {name: self.ms, "+-": f"{self.spread:.1%}"}


class Clock:
    """Of one device; everything runs on its current stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_cuda = device.type == "cuda"

    def record(self) -> Event:
        """An event after everything that is queued."""
        if not self.is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def has_passed(self, event: Event) -> bool:
        """Whether the device has got there."""
        return bool(event.query()) if self.is_cuda else True

    def seconds(self, first: Event, second: Event) -> float:
        """Between two events that the device has passed."""
        return float(first.elapsed_time(second)) / 1e3 if self.is_cuda else float(second - first)

    def hold(self, seconds: float) -> None:
        """Keep the device busy with nothing for about so long, after what is queued."""
        if self.is_cuda:
            torch.cuda._sleep(int(seconds * CYCLES_PER_S))

    def wait(self) -> None:
        """Until the device has done everything that was queued."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def samples(self, operation: Callable[[], object], count: int, warm_up: int = 3) -> list[float]:
        """Seconds on the device of `count` calls, one after the other."""
        for _ in range(warm_up):
            operation()
        self.wait()
        events = []
        for _ in range(count):
            first = self.record()
            operation()
            events.append((first, self.record()))
        self.wait()
        return [self.seconds(first, second) for first, second in events]


def captured(run: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """A function that repeats `run` over the same memory, as a CUDA graph where there is one."""
    return run if device.type != "cuda" else GraphCapturer(device).capture(run)
