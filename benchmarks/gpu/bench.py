"""The first argument of every part: the settings of the run, its engines, and where rows go."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from gpu.clock import Clock
from gpu.jobs import Settings, Skip, describe_error
from gpu.limits import Ceilings, kv_bytes, weight_bytes
from gpu.report import Check, Row
from harness.machine import describe_gpu, describe_machine
from harness.shapes import Shape

from radixserve import Runtime
from radixserve.attention.choice import choose_backend, unsupported_reason
from radixserve.models.sizes import SIZES
from radixserve.runner.cuda_runner import CudaModelRunner

LLAMA, QWEN = "llama-3.1-8b", "qwen3-0.6b"
SMALLER = {LLAMA: "tiny-llama", QWEN: "tiny-qwen3"}  # in a dry run
DTYPE = torch.bfloat16
SPARE_BYTES = 4 << 30  # of an engine, besides matrices and pool
PACKAGES = ("torch", "triton", "flashinfer-python", "transformers")


def run(bench: Bench, group: str) -> None:
    """The job that tells the hardware and versions."""
    facts = describe_gpu() if bench.device.type == "cuda" else {}
    bench.tell(group, {**facts, **describe_machine(PACKAGES)})


class DryRuntime(Runtime):
    """Takes a CUDA device's path over CPU tensors, with the kernels' torch references."""

    def _make_runner(self, model_path: str) -> CudaModelRunner:
        return CudaModelRunner(model_path, self.config)


class Bench:
    """One job of a part: its settings, and where its results go."""

    def __init__(self, settings: Settings, tell: Callable[[str, Any], None]) -> None:
        """`tell(kind, value)`: kinds are "row", "note" and "machine"."""
        self.settings, self.tell = settings, tell
        self.is_dry, self.is_quick = settings.is_dry, settings.is_quick
        if not self.is_dry and not torch.cuda.is_available():
            raise Skip("PyTorch finds no CUDA device; --dry-run walks through on the CPU")
        self.device = torch.device("cpu") if self.is_dry else torch.device("cuda", 0)
        self.clock = Clock(self.device)
        if settings.backend != "auto" and (reason := self.unsupported_reason(settings.backend)):
            raise Skip(f"no {settings.backend}: {reason}")
        torch.manual_seed(settings.seed)
        if self.is_dry:
            torch.set_num_threads(1)

    @property
    def ceilings(self) -> Ceilings:
        assert self.settings.ceilings is not None, "the limits come first"
        return self.settings.ceilings

    def pick(self, full: Any, quick: Any, dry: Any) -> Any:
        """The value for the size of this run."""
        return dry if self.is_dry else quick if self.is_quick else full

    def model(self, name: str) -> str:
        """The path of that size with random weights; in a dry run of a tiny one like it."""
        return f"random:{SMALLER[name] if self.is_dry else name}"

    def shape(self, name: str) -> Shape:
        return Shape.of(SIZES[SMALLER[name] if self.is_dry else name])

    @property
    def engine_settings(self) -> dict[str, Any]:
        """Fields of EngineConfig for every engine of the run."""
        return {
            "device": str(self.device),
            "dtype": "bfloat16",
            "attention_backend": self.settings.backend,
            "page_size": self.settings.page_size,
            "seed": self.settings.seed,
        }

    def open_runtime(self, model: str, *, engines: int = 1, **settings: Any) -> Runtime:
        """A Runtime of a size with random weights and a pool of settings["num_pages"] pages.

        Raises Skip where `engines` like this have no room on the card.
        """
        chosen = {**self.engine_settings, **settings}
        self.check_memory(model, chosen["num_pages"], engines)
        return (DryRuntime if self.is_dry else Runtime)(self.model(model), **chosen)

    def check_memory(self, model: str, num_pages: int, count: int = 1) -> None:
        """Raise Skip where `count` engines of a model and pools of their own have no room."""
        if self.device.type != "cuda":
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

    def unsupported_reason(
        self, backend: str, dtype: torch.dtype = DTYPE, head_dim: int = 128
    ) -> str:
        """Why a backend cannot be had here; "" if it can."""
        return unsupported_reason(backend, dtype, self.device, head_dim)

    def check_group(self, backend: str) -> dict[str, Any]:
        """Settings of an engine of a group: with this backend, "" for the run's own. Raises Skip
        where the backend is not available or is the run's own."""
        if not backend:
            return {}
        if (name := self.backend_name()) == backend:
            raise Skip(f"{name} is the run's backend already")
        if reason := self.unsupported_reason(backend):
            raise Skip(f"no {backend}: {reason}")
        return {"attention_backend": backend}

    def row(
        self,
        name: str,
        cells: Mapping[str, Any] | None = None,
        *,
        checks: tuple[Check, ...] = (),
        section: str = "",
        failed: str = "",
        details: dict[str, Any] | None = None,
    ) -> None:
        """A line of the part's table."""
        self.tell("row", Row(name, dict(cells or {}), checks, section, failed, "", details or {}))

    @contextmanager
    def case(self, name: str, section: str = "") -> Iterator[None]:
        """What makes a line of the table: where it cannot be had, or fails, its line says so, and
        the part goes on, unless the device is out of order."""
        try:
            yield
        except Skip as reason:
            self.tell("row", Row(name, section=section, skipped=str(reason)))
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
