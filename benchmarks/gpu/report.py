"""The results of a run on a GPU: rows of figures with checks, as tables, Markdown and JSON.

A row is {"name", "section", "cells", "checks", "failed", "skipped", "details"}; the last three only
where there are such.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from harness.report import Table, format_cell, format_settings

DRY = "dry run on the CPU: figures mean nothing"
NOTES = (
    "Times are medians, +- is half the distance of the quartiles over the median. Limits come from"
    " the two ceilings that the part `limits` measured on this card: see gpu/limits.py. met,"
    " MISSED: a figure against its target. FAILED: a result that is wrong, or a part that broke;"
    " only these end the command with an error. skipped: what cannot run here, and why."
)


class Check(NamedTuple):
    """A figure and its target."""

    what: str
    value: float
    limit: float
    at_most: bool = False  # else at least
    is_judged: bool = True  # a dry run's are not

    @property
    def is_met(self) -> bool:
        return self.value <= self.limit if self.at_most else self.value >= self.limit

    def __str__(self) -> str:
        word = ("met" if self.is_met else "MISSED") if self.is_judged else "not judged"
        return f"{word}: {self.what} {'<=' if self.at_most else '>='} {self.limit:g}"


def verdict(row: dict[str, Any]) -> str:
    for key, word in (("failed", "FAILED"), ("skipped", "skipped")):
        if row.get(key):
            return f"{word}: {row[key]}"
    return "; ".join(str(Check(**check)) for check in row["checks"])


@dataclass
class Part:
    """One part of a run, filled while it runs."""

    title: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    troubles: list[str] = field(default_factory=list)  # why it broke
    seconds: float = 0.0
    is_done: bool = False

    @property
    def judged(self) -> list[tuple[str, Check]]:
        """(row, check)."""
        found = [(row["name"], Check(**item)) for row in self.rows for item in row["checks"]]
        return [(name, check) for name, check in found if check.is_judged]

    @property
    def failures(self) -> list[str]:
        wrong = [f"{row['name']}: {row['failed']}" for row in self.rows if row.get("failed")]
        has_nothing = self.is_done and not (self.rows or self.troubles)
        return [*self.troubles, *wrong, *(["it has no results"] if has_nothing else [])]

    @property
    def misses(self) -> list[str]:
        return [
            f"{name}: {check.what} {format_cell(check.value)}, target {format_cell(check.limit)}"
            for name, check in self.judged
            if not check.is_met
        ]

    @property
    def state(self) -> str:
        if self.failures:
            return "FAILED"
        if not self.is_done:
            return "unfinished"
        return "skipped" if all(row.get("skipped") for row in self.rows) else "ok"

    def heading(self, name: str) -> str:
        return f"{name}: {self.title} ({self.state}, {self.seconds:.0f} s)"

    def remarks(self) -> list[str]:
        return [*(f"FAILED: {item}" for item in self.troubles), *self.notes]

    def tables(self) -> list[Table]:
        """One a section."""
        sections: dict[str, list[dict[str, Any]]] = {}
        for row in self.rows:
            sections.setdefault(row["section"], []).append(row)
        found = []
        for section, rows in sections.items():
            names = list(dict.fromkeys(name for row in rows for name in row["cells"]))
            body = [
                [row["name"], *map(row["cells"].get, names), clipped(verdict(row), 160)]
                for row in rows
            ]
            found.append(Table([section, *names, ""], body, has_verdict=True))
        return found


@dataclass
class Report:
    """A run; `save` may be called again and again."""

    settings: dict[str, Any]
    folder: Path
    parts: dict[str, Part] = field(default_factory=dict)

    def header(self) -> list[str]:
        label = [DRY] if self.settings.get("dry_run") else []
        return [*label, format_settings(self.settings)]

    def text(self, name: str) -> str:
        """A part for a terminal."""
        part = self.parts[name]
        tables = [table.text("  ") for table in part.tables()]
        remarks = [f"  {clipped(line, 300)}" for line in part.remarks()]
        return "\n".join([part.heading(name), *tables, *remarks, ""])

    def summary(self) -> str:
        """A line for each part, and everything that was missed or failed."""
        lines = ["summary" + (f" ({DRY})" if self.settings.get("dry_run") else "")]
        for name, part in self.parts.items():
            met = sum(check.is_met for _, check in part.judged)
            goals = f"{met} of {len(part.judged)} targets met" if part.judged else ""
            counted = f"{len(part.rows):3} rows  {part.seconds:4.0f} s"
            lines.append(f"  {name:<11} {part.state:<10} {counted}  {goals}".rstrip())
        for name, part in self.parts.items():
            for word, told in (("FAILED", part.failures), ("MISSED", part.misses)):
                lines += [f"  {word} {name}: {clipped(item, 200)}" for item in told]
        return "\n".join(lines)

    def save(self) -> None:
        """Write results.json and results.md."""
        parts = {name: {"state": item.state, **asdict(item)} for name, item in self.parts.items()}
        document = {"settings": self.settings, "notes": NOTES, "parts": parts}
        _write(self.folder / "results.json", json.dumps(document, indent=1) + "\n")
        text = ["# On a GPU", *self.header(), NOTES, f"```\n{self.summary()}\n```"]
        for name, part in self.parts.items():
            tables = [table.markdown() for table in part.tables()]
            text += [f"## {part.heading(name)}", *tables, *(f"- {item}" for item in part.remarks())]
        _write(self.folder / "results.md", "\n\n".join(text) + "\n")


def load_parts(folder: Path, settings: dict[str, Any], names: Iterable[str]) -> dict[str, Part]:
    """Parts of an earlier run of the same command into the same folder, on the same machine."""
    path = folder / "results.json"
    document = json.loads(path.read_text()) if path.exists() else {}
    found = document["parts"] if document.get("settings") == settings else {}
    for part in found.values():
        del part["state"]
    return {name: Part(**found[name]) for name in names if name in found}


def clipped(text: str, length: int) -> str:
    line = " ".join(text.split())
    return line if len(line) <= length else line[: length - 3] + "..."


def _write(path: Path, text: str) -> None:
    """Whole or not at all."""
    draft = path.with_name(path.name + ".draft")
    draft.write_text(text)
    draft.replace(path)
