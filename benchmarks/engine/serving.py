"""A workload served at one arrival: how engines are asked, and how their records compare."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

import numpy as np
from engine.base import Answer, Engine
from engine.floor import Floor
from engine.published import Published
from engine.turns import Record
from harness.report import Section, Table
from harness.workloads import Conversation, Workload

from radixserve.commands.terminal import format_profile

HEAD = ("", "CPU s", "wall s", "first token ms", "p95", "prefilled", "peak MiB", "x floor",
        "differ")  # fmt: skip


@dataclass(frozen=True)
class Serving:
    """A `Work`: all requests of a round at once (burst), or each after the last."""

    workload: Workload
    warm_up_workload: Workload
    is_burst: bool

    @property
    def num_requests(self) -> int:
        return self.workload.num_requests

    @property
    def num_tokens(self) -> int:
        return self.workload.num_tokens

    def warm_up(self) -> Serving:
        return Serving(self.warm_up_workload, self.warm_up_workload, self.is_burst)

    def run(self, engine: Engine) -> list[Answer]:
        talk, num_new = Conversation.start(self.workload), self.workload.num_new
        found = []
        for additions in self.workload.rounds:
            prompts = talk.ask(additions)
            if self.is_burst:
                answers = engine.serve(prompts, range(len(prompts)), num_new)
            else:
                answers = [engine.serve([p], [s], num_new)[0] for s, p in enumerate(prompts)]
            for answer in answers:
                assert len(answer.token_ids) == num_new, "every answer has its exact length"
            talk.answer([answer.token_ids for answer in answers])
            found += answers
        return found


@dataclass(frozen=True)
class Agreement:
    """With the outputs of the first engine; requests whose prompts are the same."""

    first_tokens_differ: int
    outputs_differ: int
    compared: int

    def __str__(self) -> str:
        return f"{self.first_tokens_differ}/{self.outputs_differ} of {self.compared}"


def compare(workload: Workload, outputs: list[list[int]], expected: list[list[int]]) -> Agreement:
    """Request by request; a session is left out after its first difference: its prompts differ."""
    first = other = compared = 0
    diverged: set[int] = set()
    sessions = [s for additions in workload.rounds for s in range(len(additions))]
    for session, output, wanted in zip(sessions, outputs, expected, strict=True):
        if session in diverged:
            continue
        compared += 1
        if output != wanted:
            other += 1
            first += output[0] != wanted[0]
            diverged.add(session)
    return Agreement(first, other, compared)


@dataclass(frozen=True)
class Case:
    """The records of all engines in one workload at one arrival; the first is the reference."""

    work: Serving
    floor: Floor
    records: dict[str, Record]
    published: list[Published]  # best first

    def section(self, *, with_profile: bool) -> Section:
        floor, workload = self.floor, self.work.workload
        summary = (
            f"{workload.what}, {workload.num_new} new each. An ideal cache prefills"
            f" {floor.num_prefilled:,}; floor {floor.total_s:.3g} CPU s (prefill"
            f" {floor.prefill_s:.2g}, decode {floor.decode_s:.2g})"
        )
        rows = []
        for row in self._rows():
            peak = row["peak_bytes"]
            times = (f"{row[key] * 1e3:,.1f}" for key in ("first_mean_s", "first_p95_s"))
            rows.append(
                (
                    row["engine"],
                    f"{row['cpu_s']:.3g}",
                    f"{row['wall_s']:.3g}",
                    *times,
                    row["num_prefilled"],
                    None if peak is None else round(peak / 2**20),
                    f"{row['floor_ratio']:.2f}",
                    str(Agreement(**row["agreement"])),
                )
            )
        lines = [*self._comparisons(), *(self._profiles() if with_profile else [])]
        return Section(self.name, Table(HEAD, rows), lines, summary)

    @property
    def name(self) -> str:
        return f"{self.work.workload.name} {'burst' if self.work.is_burst else 'sequential'}"

    def document(self) -> dict[str, Any]:
        workload, arrival = self.name.split()
        return {
            "workload": workload,
            "arrival": arrival,
            "what": f"{self.work.workload.what}, {self.work.workload.num_new} new each",
            "floor": {**asdict(self.floor), "total_s": self.floor.total_s},
            "rows": self._rows(),
            "elsewhere": [asdict(one) for one in self.published],
        }

    def _rows(self) -> list[dict[str, Any]]:
        """Medians over the samples; the highest peak; steps of the sample with the median time."""
        expected = next(iter(self.records.values())).outputs if self.records else []
        rows = []
        for name, record in self.records.items():
            samples = record.samples
            first = [[answer.first_s for answer in sample.answers] for sample in samples]
            middle = sorted(samples, key=lambda one: one.cpu_s)[(len(samples) - 1) // 2]
            agreement = compare(self.work.workload, record.outputs, expected)
            rows.append(
                {
                    "engine": name,
                    "cpu_s": record.cpu_s,
                    "wall_s": record.wall_s,
                    "first_mean_s": median(map(fmean, first)),
                    "first_p95_s": median(float(np.percentile(one, 95)) for one in first),
                    "num_prefilled": record.num_computed,
                    "peak_bytes": record.peak_bytes,
                    "base_bytes": record.base_bytes,
                    "floor_ratio": record.cpu_s / self.floor.total_s,
                    "agreement": asdict(agreement),
                    "cpu_samples_s": [sample.cpu_s for sample in samples],
                    "wall_samples_s": [sample.wall_s for sample in samples],
                    "steps": middle.steps,
                }
            )
        return rows

    def _comparisons(self) -> list[str]:
        """What the cache costs or saves, and the best published figure."""
        lines = []
        radix, off = self.records.get("radix"), self.records.get("off")
        if radix is not None and off is not None:
            pairs = zip(radix.samples, off.samples, strict=True)
            ratios = [on.cpu_s / without.cpu_s for on, without in pairs]
            low, middle, high = np.percentile(ratios, (25, 50, 75))
            lines.append(
                f"radix over off, {len(ratios)} pairs: median {middle:.3f},"
                f" quartiles {low:.3f} to {high:.3f}"
            )
        if self.published:
            best = self.published[0]
            found = f"best measured elsewhere: {best.engine}, {best.cpu_s:g} CPU s"
            if radix is not None:
                found += f"; radix is {radix.cpu_s / best.cpu_s:.2f} x that"
            lines.append(found)
        return lines

    def _profiles(self) -> list[str]:
        """Where the steps' time went, of the engines that tell."""
        rows = [row for row in self._rows() if row["steps"]]
        return [f"{row['engine']}: {format_profile(row['steps'])}" for row in rows]
