"""Many cases of one kernel become one row of the table: how many, and the worst of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from gpu_bench import Bench

NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
# |out - truth| over |truth|: of attention, whose inputs are rounded once more on the way, and of
# the rest, of which some round in between as well
ATTENTION = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 2e-5}
ROUNDED = {torch.bfloat16: 6e-3, torch.float16: 1e-3, torch.float32: 1e-5}
TWICE = 2.0  # for kernels that round once more
LSE = {torch.bfloat16: 2e-3, torch.float16: 2e-3, torch.float32: 1e-4}  # differences
EXACT = 0.0


@dataclass
class Tally:
    """Of one kernel."""

    bench: Bench
    kernel: str
    section: str
    num_cases: int = 0
    worst: float = 0.0  # error over what is allowed
    where: str = ""
    failed: str = ""

    def case(self, what: str, allowed: float, run: Callable[[], float]) -> None:
        """One more: `run` returns its error. What it raises is a failure of this kernel; those of
        the device end the job."""
        self.num_cases += 1
        try:
            found = run()
        except torch.AcceleratorError:
            self.failed = self.failed or f"{what}: the device gave up"
            self.tell()
            raise
        except Exception as raised:
            text = f"{type(raised).__name__}: {' '.join(str(raised).split())[:120]}"
            self.failed = self.failed or f"{what}: {text}"
            return
        ratio = math.inf if math.isnan(found) else found / allowed if allowed else math.inf * found
        ratio = 0.0 if math.isnan(ratio) else ratio
        if ratio > self.worst or not self.where:
            self.worst, self.where = ratio, what
        if ratio > 1:
            self.failed = self.failed or f"{what}: error {found:.2g}, allowed {allowed:.2g}"

    def tell(self) -> None:
        """The row, if there was any case."""
        if self.num_cases:
            worst = f"{self.worst:.0%}" if math.isfinite(self.worst) else "inf"
            self.bench.row(
                self.kernel,
                {"cases": self.num_cases, "worst error of what is allowed": worst},
                section=self.section,
                failed=self.failed,
                details={"worst case": self.where},
            )


def same(found: torch.Tensor, expected: torch.Tensor) -> float:
    """0, or inf where a bit differs; NaN equals NaN."""
    found, expected = found.detach().cpu(), expected.detach().cpu()
    both = found.isnan() & expected.isnan() if found.is_floating_point() else None
    equal = found == expected if both is None else (found == expected) | both
    return EXACT if found.shape == expected.shape and bool(equal.all()) else math.inf
