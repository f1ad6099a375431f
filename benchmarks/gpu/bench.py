"""The first argument of every part: the settings of the run, its engines, and where rows go."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import median, quantiles
from typing import Any, NamedTuple

import torch
from gpu.jobs import Settings, Skip, describe_error
from gpu.limits import Ceilings, kv_bytes, weight_bytes
from gpu.report import Check
from harness.machine import describe_gpu, describe_machine
from harness.shapes import Shape

from radixserve import Runtime
from radixserve.attention.choice import choose_backend, unusable_reason
from radixserve.models.sizes import SIZES
from radixserve.runner.cuda_runner import CudaModelRunner

LLAMA, QWEN = "llama-3.1-8b", "qwen3-0.6b"
SMALLER = {LLAMA: "tiny-llama", QWEN: "tiny-qwen3"}  # in a dry run
DTYPE = torch.bfloat16
SEED = 0
WARM_UP = 3  # calls before those that are timed
SPARE_BYTES = 4 << 30  # of an engine, besides matrices and pool
PACKAGES = ("torch", "triton", "flashinfer-python", "transformers")
CYCLES_PER_S = 2e9  # of a card's clock, about
Event = Any  # a torch.cuda.Event, or seconds


def run(bench: Bench, group: str) -> None:
    """The job that tells the hardware and versions."""
    facts = describe_gpu() if bench.is_cuda else {}
    bench.tell(group, {**facts, **describe_machine(PACKAGES)})


class DryRuntime(Runtime):
    """Takes a CUDA device's path over CPU tensors, with the kernels' torch references."""

    def _make_runner(self, model_path: str) -> CudaModelRunner:
        return CudaModelRunner(model_path, self.config)


class Times(NamedTuple):
    """Median and spread of many samples, in seconds."""

    median: float
    spread: float  # half the distance of the quartiles over the median

    @staticmethod
    def of(samples: Sequence[float]) -> Times:
        """At least one."""
        middle = median(samples)
        low, _, high = quantiles(samples, n=4) if len(samples) > 1 else (0.0, 0.0, 0.0)
        return Times(middle, (high - low) / 2 / max(middle, 1e-12))

    @property
    def ms(self) -> float:
        return self.median * 1e3

    def cells(self, name: str = "ms") -> dict[str, float | str]:
        return {name: self.ms, "+-": f"{self.spread:.1%}"}


class Clock:
    """Time on a device: events in its current stream. On the CPU, for dry runs, the host's."""

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

    def times(self, operation: Callable[[], object], count: int) -> Times:
        """On the device, of `count` calls, one after the other."""
        for _ in range(WARM_UP):
            operation()
        self.wait()
        events = []
        for _ in range(count):
            first = self.record()
            operation()
            events.append((first, self.record()))
        self.wait()
        return Times.of([self.seconds(first, second) for first, second in events])


class Bench:
    """One job of a part: its settings, and where its results go."""

    def __init__(self, settings: Settings, tell: Callable[[str, Any], None]) -> None:
        """`tell(kind, value)`: kinds are "row", "note" and "machine"."""
        self.settings, self.tell, self.is_dry = settings, tell, settings.is_dry
        if not self.is_dry and not torch.cuda.is_available():
            raise Skip("PyTorch finds no CUDA device; --dry-run walks through on the CPU")
        self.device = torch.device("cpu") if self.is_dry else torch.device("cuda", 0)
        self.clock = Clock(self.device)
        if settings.backend != "auto":
            self._check_backend(settings.backend)
        torch.manual_seed(SEED)
        if self.is_dry:
            torch.set_num_threads(1)

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def ceilings(self) -> Ceilings:
        assert self.settings.ceilings is not None, "the limits come first"
        return self.settings.ceilings

    def pick(self, full: Any, dry: Any) -> Any:
        """The value for the size of this run."""
        return dry if self.is_dry else full

    def model(self, name: str) -> str:
        """The path of that size with random weights; in a dry run of a tiny one like it."""
        return f"random:{SMALLER[name] if self.is_dry else name}"

    def shape(self, name: str) -> Shape:
        return Shape.of(SIZES[SMALLER[name] if self.is_dry else name])

    def engine_settings(self, **settings: Any) -> dict[str, Any]:
        """Fields of EngineConfig for an engine of the run. pool: tokens of the K/V memory."""
        page_size, pool = self.settings.page_size, settings.pop("pool", None)
        return {
            "device": str(self.device),
            "dtype": "bfloat16",
            "attention_backend": self.settings.backend,
            "page_size": page_size,
            "seed": SEED,
            "chunked_prefill_size": self.pick(8_192, 64),
            "num_pages": None if pool is None else -(-pool // page_size),
            **settings,
        }

    def open_runtime(self, model: str, *, engines: int = 1, **settings: Any) -> Runtime:
        """A Runtime of a size with random weights; settings: see `engine_settings`.

        Raises Skip where `engines` like this have no room on the card.
        """
        chosen = self.engine_settings(**settings)
        self.check_memory(model, chosen["num_pages"], engines)
        return (DryRuntime if self.is_dry else Runtime)(self.model(model), **chosen)

    def check_memory(self, model: str, num_pages: int, count: int = 1) -> None:
        """Raise Skip where `count` engines of a model and pools of their own have no room."""
        if not self.is_cuda:
            return
        shape = self.shape(model)
        pool = num_pages * self.settings.page_size * kv_bytes(shape)
        wanted = count * (weight_bytes(shape) * 5 // 4 + pool + SPARE_BYTES)
        free, total = torch.cuda.mem_get_info(self.device)
        if wanted > free:
            wants, has, whole = (f"{size / 2**30:.0f} GiB" for size in (wanted, free, total))
            raise Skip(f"needs {wants}, {has} of {whole} are free")

    def backend_name(self, head_dim: int = 128) -> str:
        """The run's backend, "auto" resolved."""
        if self.is_dry and self.settings.backend == "auto":
            return "triton"
        return choose_backend(self.settings.backend, DTYPE, self.device, head_dim)

    def of_group(self, backend: str) -> dict[str, Any]:
        """Settings of an engine of a group: with this backend, "" for the run's own. Raises Skip
        where the backend is not available or is the run's own."""
        if not backend:
            return {}
        if (name := self.backend_name()) == backend:
            raise Skip(f"{name} is the run's backend already")
        self._check_backend(backend)
        return {"attention_backend": backend}

    def _check_backend(self, backend: str) -> None:
        if reason := unusable_reason(backend, DTYPE, self.device, 128):
            raise Skip(f"no {backend}: {reason}")

    def row(
        self,
        name: str,
        cells: Mapping[str, Any] | None = None,
        *checks: Check,
        section: str = "",
        **more: Any,
    ) -> None:
        """A line of the part's table. more: `failed`, what is wrong; `skipped`, why there is
        nothing; `details` for the JSON document alone."""
        judged = [check._asdict() for check in checks]
        self.tell("row", {"name": name, "section": section, "cells": dict(cells or {}),
                          "checks": judged, **more})  # fmt: skip

    @contextmanager
    def case(self, name: str, section: str = "") -> Iterator[None]:
        """What makes a line of the table: where it cannot be had, or fails, its line says so, and
        the part goes on, unless the device is out of order."""
        try:
            yield
        except Skip as reason:
            self.row(name, section=section, skipped=str(reason))
        except Exception as error:
            traceback.print_exc()
            self.row(name, section=section, failed=describe_error(error))
            self.clock.wait()

    def note(self, text: str) -> None:
        """A line after the table."""
        self.tell("note", text)

    def at_least(self, what: str, value: float, limit: float) -> Check:
        return Check(what, value, limit, is_judged=not self.is_dry)

    def at_most(self, what: str, value: float, limit: float) -> Check:
        return Check(what, value, limit, at_most=True, is_judged=not self.is_dry)
