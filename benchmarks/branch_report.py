"""A run of the branch benchmark as tables for people, as Markdown, and as one JSON document."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from branch_stage import Record

NOTES = (
    "Medians of the repeats. s: wall clock; CPU s: of all threads of the process; x: over the first"
    " row. computed: prompt tokens computed, padding included. peak: most resident memory of the"
    " process while the case ran, with interpreter, libraries and weights. Players run in processes"
    " of their own, in turns, each turn with nothing cached. What begins with ok was checked in"
    " this run; a run in which something is not so ends with an error."
)
BEGIN, END = "<!-- branch-cpu -->", "<!-- end -->"
Cell = str | int | float | None


@dataclass(frozen=True)
class Case:
    """One table. `checks`: what was found true or false of this run."""

    name: str
    title: str
    columns: tuple[str, ...]  # the first is the row's name
    rows: Sequence[tuple[Cell, ...]]
    checks: dict[str, bool]

    def lines(self) -> list[str]:
        """The claims, and whether they hold."""
        return [
            f"{'ok' if is_true else 'FAILED'}: {claim}" for claim, is_true in self.checks.items()
        ]

    def table(self) -> str:
        rows = [self.columns, *(tuple(map(_shown, row)) for row in self.rows)]
        widths = [max(len(row[at]) for row in rows) for at in range(len(self.columns))]
        drawn = [
            "   " + name.ljust(widths[0]) + "".join(
                "  " + cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)
            )
            for name, *cells in rows
        ]  # fmt: skip
        return "\n".join(
            [f"{self.name}  {self.title}", *drawn, *(f"   {x}" for x in self.lines()), ""]
        )

    def markdown(self) -> str:
        rows = [self.columns, *(tuple(map(_shown, row)) for row in self.rows)]
        head, *body = ["| " + " | ".join(row) + " |" for row in rows]
        return "\n".join([head, "|---|" + "---:|" * (len(self.columns) - 1), *body])


def race(name: str, title: str, records: dict[str, Record], checks: dict[str, bool]) -> Case:
    """The table of players that took turns; the first one is what the others are held against."""
    first = next(iter(records.values()))
    rows: list[tuple[Cell, ...]] = [
        (
            record.name,
            record.wall_s,
            record.cpu_s,
            f"{record.wall_s / first.wall_s:.2f}",
            record.played.num_computed,
            None if record.peak_bytes is None else round(record.peak_bytes / 2**20),
        )
        for record in records.values()
    ]
    return Case(name, title, ("", "s", "CPU s", "x", "computed", "peak MiB"), rows, checks)


def _shown(cell: Cell) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, str):
        return cell
    return (
        f"{cell:,}" if isinstance(cell, int) else f"{cell:,.3g}" if cell < 1e3 else f"{cell:,.0f}"
    )


@dataclass(frozen=True)
class Run:
    """All that one call of the command has found out."""

    settings: dict[str, Any]
    cases: list[Case]

    @property
    def failed(self) -> list[str]:
        """Claims that do not hold."""
        checks = [
            (case.name, claim, ok) for case in self.cases for claim, ok in case.checks.items()
        ]
        return [f"{name}: {claim}" for name, claim, is_true in checks if not is_true]

    def header(self) -> list[str]:
        return [", ".join(f"{key} {value}" for key, value in self.settings.items()), NOTES]

    def document(self) -> str:
        parts = {
            "settings": self.settings,
            "notes": NOTES,
            "cases": [asdict(c) for c in self.cases],
        }
        return json.dumps(parts, indent=1)

    def markdown(self) -> str:
        parts = ["# Branches, CPU", *self.header()]
        for case in self.cases:
            checks = "\n".join(f"- {line}" for line in case.lines())
            parts += [f"## {case.name}  {case.title}", case.markdown(), checks]
        return "\n\n".join(parts) + "\n"

    def save(self, folder: Path) -> None:
        """Write branch-cpu.md and .json."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "branch-cpu.json").write_text(self.document() + "\n")
        (folder / "branch-cpu.md").write_text(self.markdown())

    def write_into(self, page: Path) -> None:
        """Put the tables between the two markers of a page. ValueError where it has none."""
        before, begin, rest = page.read_text().partition(BEGIN)
        _, end, after = rest.partition(END)
        if not begin or not end:
            raise ValueError(f"{page} has no place for the tables: {BEGIN} ... {END}")
        names = ("cpu", "cores", "python", "torch", "transformers", "model", "attention", "threads")
        facts = ", ".join(f"{key} {self.settings[key]}" for key in names if key in self.settings)
        tables = [f"**{case.title}**\n\n{case.markdown()}" for case in self.cases]
        text = "\n\n".join([f"Measured with: {facts}.", *tables])
        page.write_text(f"{before}{begin}\n{text}\n{end}{after}")
