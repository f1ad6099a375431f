"""A run as a table for people, as Markdown, and as one JSON document."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from cache_targets import REFERENCE, Verdict, judge
from stopwatch import Figure

from radixserve import __version__

TITLES = {
    "r": "reference: numpy compares 4,096 tokens and copies as many page ids",
    "A": "A  miss: 4,096 unknown tokens among cached prompts",
    "B": "B  hit: 4,096 tokens in one edge",
    "C": "C  chat: all operations of a request",
    "D": "D  churn: all operations of a request",
    "E": "E  eviction",
    "F": "F  bytes kept, payload included",
    "G": "G  larger pages, as a ratio to page size 1",
    "H": "H  a long prompt",
    "I": "I  a scheduling pass",
}
NOTES = (
    "Medians of the thread's CPU time; all contenders take turns in one process. The garbage"
    " collector is off while a case runs and has run before it. look-up: ours says why a match"
    " ends, SGLang's is match_prefix. Every column but radix keeps its own page size (SGLang: 1)."
)


@dataclass(frozen=True)
class Run:
    """All that one call of the command has found out."""

    settings: dict[str, Any]
    absent: list[str]  # contenders that could not be had, and why
    figures: list[Figure]

    def document(self) -> str:
        reference = next(f.value for f in self.figures if f.key == REFERENCE)
        rows = [
            {**asdict(f), "ratio": f.value / reference if f.unit == "us" else None}
            for f in self.figures
        ]
        verdicts = [{**asdict(v), "is_reached": v.is_reached} for v in self._verdicts()]
        parts = {"settings": self.settings, "absent": self.absent, "notes": NOTES}
        return json.dumps({**parts, "figures": rows, "targets": verdicts}, indent=1)

    def save(self, folder: Path) -> None:
        """Write cache-cpu.md and cache-cpu.json."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cache-cpu.json").write_text(self.document() + "\n")
        (folder / "cache-cpu.md").write_text(self._markdown())

    def header(self) -> list[str]:
        facts = ", ".join(f"{key} {value}" for key, value in self.settings.items())
        return [facts, *self.absent, NOTES]

    def summary(self) -> str:
        verdicts = self._verdicts()
        reached = sum(verdict.is_reached for verdict in verdicts)
        return f"{reached} of {len(verdicts)} targets reached"

    def _verdicts(self) -> list[Verdict]:
        return judge(self.figures, is_quick=self.settings["quick"])

    def _markdown(self) -> str:
        parts = ["# Cache and scheduling pass, CPU", *self.header()]
        verdicts = self._verdicts()
        for case, title in TITLES.items():
            figures = [figure for figure in self.figures if figure.key[0] == case]
            if figures:
                rows = _rows(figures, verdicts)
                head, *body = ["| " + " | ".join(row) + " |" for row in rows]
                rule = "|---|" + "---:|" * (len(rows[0]) - 2) + "---|"
                parts += [f"## {title}", "\n".join([head, rule, *body])]
        return "\n\n".join([*parts, self.summary()]) + "\n"


def section(figures: Sequence[Figure], verdicts: Sequence[Verdict]) -> str:
    """The table of one case."""
    rows = _rows(figures, verdicts)
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    lines = [TITLES[figures[0].key[0]]]
    for what, *cells, verdict in rows:
        middle = "  ".join(cell.rjust(w) for cell, w in zip(cells, widths[1:-1], strict=True))
        lines.append(f"   {what.ljust(widths[0])}  {middle}   {verdict}".rstrip())
    return "\n".join(lines)


def _rows(figures: Sequence[Figure], verdicts: Sequence[Verdict]) -> list[tuple[str, ...]]:
    """A head, then a row for each key: what, a cell for each contender, the verdicts."""
    columns = list(dict.fromkeys(figure.contender for figure in figures))
    cells = {(figure.key, figure.contender): figure for figure in figures}
    rows = [(figures[0].unit, *columns, "target")]
    for key, what in dict.fromkeys((figure.key, figure.what) for figure in figures):
        found = [cells.get((key, column)) for column in columns]
        mine = [verdict for verdict in verdicts if verdict.key == key]
        values = ("" if figure is None else _number(figure) for figure in found)
        rows.append((what, *values, _spoken(mine)))
    return rows


def _spoken(verdicts: Sequence[Verdict]) -> str:
    """The verdicts in words; of several contenders with one goal, the worst one's."""
    worst: dict[str, Verdict] = {}
    for verdict in verdicts:
        other = worst.get(verdict.goal)
        if other is None or verdict.measured > other.measured:
            worst[verdict.goal] = verdict
    return "; ".join(str(verdict) for verdict in worst.values())


def _number(figure: Figure) -> str:
    if figure.unit == "x":
        return f"{figure.value:.2f}"
    return f"{figure.value:,.1f}" if figure.value < 1_000 else f"{figure.value:,.0f}"


def describe_machine() -> dict[str, Any]:
    """Hardware and versions."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    facts: dict[str, Any] = {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "memory_gib": round(memory / 2**30, 1),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "radixserve": __version__,
    }
    for package in ("sglang", "torch"):
        try:
            facts[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return facts


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
