"""A run of the engine benchmark as tables for people, as Markdown, and as one JSON document."""

from __future__ import annotations

import importlib.metadata
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
from cache_report import describe_machine
from engine_lanes import Sample
from engine_limits import Floor, Limits
from engine_models import Shape
from engine_published import Published, published
from engine_workloads import Workload

from radixserve.commands.terminal import format_profile

NOTES = (
    "Medians of the repeats. CPU s: of all threads of the process. first token: from the"
    " submission of each request. prefilled: prompt tokens computed, padding included. peak: most"
    " resident memory of the process while the case ran, with interpreter, libraries and weights."
    " x floor: CPU seconds over the floor. differ: requests whose first token / any token is not"
    " that of the first engine of the table, of those with the same prompt (a chat's prompt holds"
    " its answers). Each engine runs in a process of its own; they take turns."
)
HEAD = (
    "",
    "CPU s",
    "wall s",
    "first token ms",
    "p95",
    "prefilled",
    "peak MiB",
    "x floor",
    "differ",
)


@dataclass(frozen=True)
class Agreement:
    """With the outputs of the first engine; requests whose prompts are the same."""

    first_tokens_differ: int
    outputs_differ: int
    compared: int

    def __str__(self) -> str:
        return f"{self.first_tokens_differ}/{self.outputs_differ} of {self.compared}"


@dataclass(frozen=True)
class Row:
    """One engine in one case."""

    engine: str
    cpu_s: float
    wall_s: float
    first_mean_s: float
    first_p95_s: float
    num_prefilled: int
    peak_bytes: int | None
    base_bytes: int | None  # of the peak, resident before the model was loaded
    floor_ratio: float
    agreement: Agreement
    cpu_samples_s: list[float]
    wall_samples_s: list[float]
    steps: dict[str, float]  # of the sample with the median CPU time

    def cells(self) -> tuple[str, ...]:
        return (
            self.engine,
            f"{self.cpu_s:.3g}",
            f"{self.wall_s:.3g}",
            f"{self.first_mean_s * 1e3:,.1f}",
            f"{self.first_p95_s * 1e3:,.1f}",
            f"{self.num_prefilled:,}",
            "-" if self.peak_bytes is None else f"{self.peak_bytes / 2**20:,.0f}",
            f"{self.floor_ratio:.2f}",
            str(self.agreement),
        )


def make_row(
    engine: str,
    samples: list[Sample],
    base_bytes: int | None,
    floor: Floor,
    agreement: Agreement,
) -> Row:
    """Medians over the samples; the highest peak."""
    cpu = [sample.cpu_s for sample in samples]
    wall = [sample.wall_s for sample in samples]
    peaks = [sample.peak_bytes for sample in samples if sample.peak_bytes is not None]
    middle = sorted(samples, key=lambda sample: sample.cpu_s)[(len(samples) - 1) // 2]
    return Row(
        engine=engine,
        cpu_s=median(cpu),
        wall_s=median(wall),
        first_mean_s=median([fmean(sample.first_s) for sample in samples]),
        first_p95_s=median([float(np.percentile(sample.first_s, 95)) for sample in samples]),
        num_prefilled=int(median([sample.num_prefilled for sample in samples])),
        peak_bytes=max(peaks, default=None),
        base_bytes=base_bytes,
        floor_ratio=median(cpu) / floor.total_s,
        agreement=agreement,
        cpu_samples_s=cpu,
        wall_samples_s=wall,
        steps=middle.steps,
    )


def compare(workload: Workload, outputs: list[list[int]], expected: list[list[int]]) -> Agreement:
    """Request by request; a session is left out after its first difference: its prompts differ."""
    first = other = compared = 0
    astray: set[int] = set()
    sessions = [s for additions in workload.rounds for s in range(len(additions))]
    for session, output, wanted in zip(sessions, outputs, expected, strict=True):
        if session in astray:
            continue
        compared += 1
        if output != wanted:
            other += 1
            first += output[0] != wanted[0]
            astray.add(session)
    return Agreement(first, other, compared)


@dataclass(frozen=True)
class Case:
    """A workload at one arrival, with everyone's rows."""

    workload: str
    arrival: str  # burst | sequential
    what: str
    floor: Floor
    rows: list[Row]
    elsewhere: list[Published]  # best first

    def title(self) -> str:
        floor = self.floor
        return (
            f"{self.workload} {self.arrival}: {self.what}. An ideal cache prefills"
            f" {floor.num_prefilled:,}; floor {floor.total_s:.3g} CPU s (prefill"
            f" {floor.prefill_s:.2g}, decode {floor.decode_s:.2g})"
        )

    def footers(self) -> list[str]:
        """What the cache costs or saves, and the best published figure and ours over it."""
        rows = {row.engine: row for row in self.rows}
        lines = []
        if "radix" in rows and "off" in rows:
            on, off = rows["radix"].cpu_samples_s, rows["off"].cpu_samples_s
            ratios = [a / b for a, b in zip(on, off, strict=True)]
            low, middle, high = np.percentile(ratios, (25, 50, 75))
            lines.append(
                f"radix over off, {len(ratios)} pairs: median {middle:.3f},"
                f" quartiles {low:.3f} to {high:.3f}"
            )
        if self.elsewhere:
            best = self.elsewhere[0]
            found = f"best measured elsewhere: {best.engine}, {best.cpu_s:g} CPU s"
            if "radix" in rows:
                found += f"; radix is {rows['radix'].cpu_s / best.cpu_s:.2f} x that"
            lines.append(found)
        return lines

    def profile(self) -> list[str]:
        """Where the steps' time went, of the engines that tell."""
        told = [row for row in self.rows if row.steps]
        return [f"{row.engine}: {format_profile(row.steps)}" for row in told]

    def table(self, *, profiles: bool = False) -> str:
        rows = [HEAD, *(row.cells() for row in self.rows)]
        widths = [max(len(row[at]) for row in rows) for at in range(len(HEAD))]
        lines = [self.title()]
        for name, *cells in rows:
            rest = "  ".join(cell.rjust(w) for cell, w in zip(cells, widths[1:], strict=True))
            lines.append(f"   {name.ljust(widths[0])}  {rest}")
        below = [*self.footers(), *(self.profile() if profiles else [])]
        return "\n".join([*lines, *(f"   {line}" for line in below), ""])

    def markdown(self) -> str:
        head, *body = ["| " + " | ".join(r) + " |" for r in [HEAD, *(r.cells() for r in self.rows)]]
        table = "\n".join([head, "|---|" + "---:|" * (len(HEAD) - 1), *body])
        parts = [f"## {self.workload} {self.arrival}", self.title(), table]
        return "\n\n".join([*parts, *self.footers(), *self.profile()])


def elsewhere(settings: dict[str, Any], workload: str, arrival: str) -> list[Published]:
    """Published figures that this run can be held against: full size, one thread."""
    if settings["quick"] or settings["threads"] != 1:
        return []
    return published(settings["model"], settings["dtype"], workload, arrival)


@dataclass(frozen=True)
class Run:
    """All that one call of the command has found out."""

    settings: dict[str, Any]
    limits: Limits
    absent: dict[str, str]
    cases: list[Case]

    def header(self) -> list[str]:
        facts = ", ".join(f"{key} {value}" for key, value in self.settings.items())
        flops = ", ".join(f"{k} {v / 1e9:,.0f}" for k, v in self.limits.flops.items())
        copied = ", ".join(f"{k} {v / 1e9:,.0f}" for k, v in self.limits.bandwidth.items())
        limits = f"limits: products {flops} GFLOP/s; copies {copied} GB/s, read and written"
        return [facts, limits, NOTES]

    def skipped(self) -> list[str]:
        return [f"{name}: skipped, {reason}" for name, reason in self.absent.items()]

    def document(self) -> str:
        parts = {
            "settings": self.settings,
            "limits": asdict(self.limits),
            "notes": NOTES,
            "absent": self.absent,
            "cases": [
                {**asdict(case), "floor": {**asdict(case.floor), "total_s": case.floor.total_s}}
                for case in self.cases
            ],
        }
        return json.dumps(parts, indent=1)

    def save(self, folder: Path) -> None:
        """Write engine-cpu-MODEL-DTYPE.md and .json."""
        folder.mkdir(parents=True, exist_ok=True)
        name = f"engine-cpu-{self.settings['model']}-{self.settings['dtype']}"
        (folder / f"{name}.json").write_text(self.document() + "\n")
        title = f"# Engine, {self.settings['model']} model, {self.settings['dtype']}, CPU"
        tables = [case.markdown() for case in self.cases]
        parts = [title, *self.header(), *self.skipped(), *tables]
        (folder / f"{name}.md").write_text("\n\n".join(parts) + "\n")


def describe_run(shape: Shape, **chosen: Any) -> dict[str, Any]:
    """Hardware, versions and what was asked for."""
    versions = {"transformers": importlib.metadata.version("transformers")}
    model = {"model": shape.name, "shape": shape.describe()}
    return {**describe_machine(), **versions, **model, **chosen}
