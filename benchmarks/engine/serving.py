"""A workload served at one arrival: how engines are asked, and how their records compare."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from engine.base import Answer, Engine, Work
from engine.floor import Floor
from engine.turns import Record
from harness.report import Section, Table
from harness.workloads import Workload

from radixserve.commands.terminal import format_profile

# CPU seconds for W1 to W5, by model and dtype, arrival and engine.
_PUBLISHED = Path(__file__).parents[1] / "results" / "engine-cpu-elsewhere.json"
HEAD = ("", "CPU s", "wall s", "first token ms", "p95", "prefilled", "peak MiB", "x floor",
        "differ")  # fmt: skip


def serving(workload: Workload, warm_up: Workload, *, is_burst: bool) -> Work:
    """All requests of a round at once (burst), or each after the last."""
    run = partial(_serve, workload, is_burst)
    room = workload.num_requests, workload.num_tokens
    return Work(run, partial(_serve, warm_up, is_burst), *room, workload)


def _serve(workload: Workload, is_burst: bool, engine: Engine) -> list[Answer]:
    histories: list[list[int]] = [[] for _ in workload.rounds[0]]
    served, num_new = [], workload.num_new
    for additions in workload.rounds:
        prompts = [[*history, *new] for history, new in zip(histories, additions, strict=True)]
        if is_burst:
            answers = engine.serve(prompts, range(len(prompts)), num_new)
        else:
            answers = [engine.serve([p], [s], num_new)[0] for s, p in enumerate(prompts)]
        outputs = [answer.token_ids for answer in answers]
        histories = [[*prompt, *output] for prompt, output in zip(prompts, outputs, strict=True)]
        served += answers
    return served


def published(model: str, dtype: str, workload: str, arrival: str) -> dict[str, float]:
    """CPU seconds of other engines for the same workload, best first, as they were measured on
    another machine of this kind (two cores with AVX-512), on one thread; none where they were not.

    They show where the field is; what runs here is measured in the same run.
    """
    column = int(workload[1:]) - 1
    rows = json.loads(_PUBLISHED.read_text()).get(f"{model} {dtype}", {}).get(arrival, {})
    seconds = {engine: row[column] for engine, row in rows.items() if column < len(row)}
    return dict(sorted(seconds.items(), key=lambda item: item[1]))


def compare(
    workload: Workload, outputs: list[list[int]], expected: list[list[int]]
) -> dict[str, int]:
    """How many requests differ from the first engine's, of those with the same prompt: a session is
    left out after its first difference."""
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
    return {"first_tokens_differ": first, "outputs_differ": other, "compared": compared}


@dataclass(frozen=True)
class Case:
    """The records of all engines in one workload at one arrival; the first is the reference."""

    workload: Workload
    arrival: str
    floor: Floor
    records: dict[str, Record]
    published: dict[str, float]  # CPU seconds of engines on another machine, best first

    def section(self, *, with_profile: bool) -> Section:
        floor, rows = self.floor, self._rows()
        summary = (
            f"{self._what}. An ideal cache prefills"
            f" {floor.num_prefilled:,}; floor {floor.total_s:.3g} CPU s (prefill"
            f" {floor.prefill_s:.2g}, decode {floor.decode_s:.2g})"
        )
        table = [
            (
                row["engine"],
                *(f"{row[key]:.3g}" for key in ("cpu_s", "wall_s")),
                *(f"{row[key] * 1e3:,.1f}" for key in ("first_mean_s", "first_p95_s")),
                row["num_prefilled"],
                row["peak_mib"],
                f"{row['floor_ratio']:.2f}",
                "{first_tokens_differ}/{outputs_differ} of {compared}".format(**row["agreement"]),
            )
            for row in rows
        ]
        lines = self._comparisons()
        if with_profile:  # where the steps' time went, of the engines that tell
            told = [row for row in rows if row["steps"]]
            lines += [f"{row['engine']}: {format_profile(row['steps'])}" for row in told]
        title = f"{self.workload.name} {self.arrival}"
        return Section(title, Table(HEAD, table), lines, summary)

    def document(self) -> dict[str, Any]:
        return {
            "workload": self.workload.name,
            "arrival": self.arrival,
            "what": self._what,
            "floor": {**asdict(self.floor), "total_s": self.floor.total_s},
            "rows": self._rows(),
            "elsewhere": [{"engine": name, "cpu_s": s} for name, s in self.published.items()],
        }

    @property
    def _what(self) -> str:
        return f"{self.workload.what}, {self.workload.num_new} new each"

    def _rows(self) -> list[dict[str, Any]]:
        """Medians over the samples; the highest peak; steps of the sample with the median time."""
        expected = next(iter(self.records.values())).outputs if self.records else []
        rows = []
        for name, record in self.records.items():
            samples, num_new = record.samples, self.workload.num_new
            assert all(len(output) == num_new for output in record.outputs), "lengths are exact"
            delays = [[answer.first_s for answer in sample.answers] for sample in samples]
            middle = sorted(samples, key=lambda sample: sample.cpu_s)[(len(samples) - 1) // 2]
            rows.append(
                {
                    "engine": name,
                    "cpu_s": record.cpu_s,
                    "wall_s": record.wall_s,
                    "first_mean_s": record.first_s,
                    "first_p95_s": float(np.median(np.percentile(delays, 95, axis=1))),
                    "num_prefilled": record.num_computed,
                    "peak_mib": record.peak_mib,
                    "base_bytes": record.base_bytes,
                    "floor_ratio": record.cpu_s / self.floor.total_s,
                    "agreement": compare(self.workload, record.outputs, expected),
                    "cpu_samples_s": [sample.cpu_s for sample in samples],
                    "wall_samples_s": [sample.wall_s for sample in samples],
                    "steps": middle.steps,
                }
            )
        return rows

    def _comparisons(self) -> list[str]:
        """Costs and savings of the cache, the cost of exactness, and the best published figure."""
        lines = []
        radix = self.records.get("radix")
        for name in ("off", "inexact"):
            other = self.records.get(name)
            if radix is None or other is None:
                continue
            pairs = zip(radix.samples, other.samples, strict=True)
            ratios = [sample.cpu_s / beside.cpu_s for sample, beside in pairs]
            low, middle, high = np.percentile(ratios, (25, 50, 75))
            lines.append(
                f"radix over {name}, {len(ratios)} pairs: median {middle:.3f},"
                f" quartiles {low:.3f} to {high:.3f}"
            )
        for name, seconds in list(self.published.items())[:1]:
            there = self.published.get("transformers")
            beside = "" if there is None else f"; transformers took {there:g} there"
            lines.append(f"best measured on another machine: {name}, {seconds:g} CPU s{beside}")
        return lines
