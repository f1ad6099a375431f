"""Many cases of one kernel become one row of the table: how many, and the worst of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from gpu.bench import Bench

NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
# |out - truth| over |truth|: of attention, whose inputs are rounded once more on the way, and of
# the rest, of which some round in between as well
ATTENTION = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 2e-5}
ROUNDED = {torch.bfloat16: 6e-3, torch.float16: 1e-3, torch.float32: 1e-5}
TWICE = 2.0  # for kernels that round once more
LSE = {torch.bfloat16: 2e-3, torch.float16: 2e-3, torch.float32: 1e-4}  # differences
EXACT = 0.0


@dataclass
class Cases:
    """Of one kernel."""

    count: int = 0
    worst: float = 0.0  # error over what is allowed
    where: str = ""
    failed: str = ""


class Tally:
    """A section of the table."""

    def __init__(self, bench: Bench, section: str) -> None:
        self._bench, self._section = bench, section
        self._kernels: dict[str, Cases] = {}

    def case(
        self, kernel: str, what: str, allowed: float, error: Callable[..., float], *args: object
    ) -> None:
        """One more case; `error(bench, *args)` is its error. An exception is a failure of this
        kernel; one of the device ends the job."""
        cases = self._kernels.setdefault(kernel, Cases())
        cases.count += 1
        try:
            found = error(self._bench, *args)
        except torch.AcceleratorError:
            cases.failed = cases.failed or f"{what}: the device gave up"
            self.tell()
            raise
        except Exception as raised:
            text = f"{type(raised).__name__}: {' '.join(str(raised).split())[:120]}"
            cases.failed = cases.failed or f"{what}: {text}"
            return
        ratio = found / (allowed or 1e-300) if found else 0.0
        ratio = math.inf if math.isnan(ratio) else ratio
        if ratio > cases.worst or not cases.where:
            cases.worst, cases.where = ratio, what
        if ratio > 1:
            cases.failed = cases.failed or f"{what}: error {found:.2g}, allowed {allowed:.2g}"

    def tell(self) -> None:
        """A row for each kernel."""
        for kernel, cases in self._kernels.items():
            worst = f"{cases.worst:.0%}" if math.isfinite(cases.worst) else "inf"
            self._bench.row(
                kernel,
                {"cases": cases.count, "worst error of what is allowed": worst},
                section=self._section,
                failed=cases.failed,
                details={"worst case": cases.where},
            )


def same(found: torch.Tensor, expected: torch.Tensor) -> float:
    """0, or inf where a bit differs; NaN equals NaN."""
    found, expected = found.detach().cpu(), expected.detach().cpu()
    if found.shape != expected.shape:
        return math.inf
    equal = (found == expected) | (found.isnan() & expected.isnan())
    return EXACT if bool(equal.all()) else math.inf
