"""The results of a run on a GPU: rows of figures with checks, as tables, Markdown and JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from harness.report import Cell, Table, format_cell, format_settings

DRY = "dry run on the CPU: figures mean nothing"
NOTES = (
    "Times are medians, +- is half the distance of the quartiles over the median. Limits come from"
    " the two ceilings that the part `limits` measured on this card: see gpu/limits.py. met,"
    " MISSED: a figure against its target. FAILED: a result that is wrong, or a part that broke;"
    " only these end the command with an error. skipped: what cannot run here, and why."
)


@dataclass(frozen=True)
class Check:
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
        sign = "<=" if self.at_most else ">="
        return f"{word}: {self.what} {sign} {self.limit:g}"


@dataclass(frozen=True)
class Row:
    """One line of a table."""

    name: str
    cells: dict[str, Cell] = field(default_factory=dict)
    checks: tuple[Check, ...] = ()
    section: str = ""  # the table it belongs to
    failed: str = ""  # what is wrong
    skipped: str = ""  # why there is nothing
    details: dict[str, Any] = field(default_factory=dict)  # for the JSON document alone

    @property
    def verdict(self) -> str:
        if self.failed:
            return f"FAILED: {self.failed}"
        if self.skipped:
            return f"skipped: {self.skipped}"
        return "; ".join(map(str, self.checks))


@dataclass
class Part:
    """One part of a run, filled while it runs."""

    name: str
    title: str
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    troubles: list[str] = field(default_factory=list)  # why it broke
    seconds: float = 0.0
    is_done: bool = False

    @property
    def judged(self) -> list[tuple[Row, Check]]:
        return [(row, check) for row in self.rows for check in row.checks if check.is_judged]

    @property
    def failures(self) -> list[str]:
        wrong = [f"{row.name}: {row.failed}" for row in self.rows if row.failed]
        has_nothing = self.is_done and not (self.rows or self.troubles)
        return [*self.troubles, *wrong, *(["it has no results"] if has_nothing else [])]

    @property
    def state(self) -> str:
        if self.failures:
            return "FAILED"
        if not self.is_done:
            return "unfinished"
        return "skipped" if all(row.skipped for row in self.rows) else "ok"

    @property
    def misses(self) -> list[str]:
        return [
            f"{row.name}: {check.what} {format_cell(check.value)},"
            f" target {format_cell(check.limit)}"
            for row, check in self.judged
            if not check.is_met
        ]

    def heading(self) -> str:
        return f"{self.name}: {self.title} ({self.state}, {self.seconds:.0f} s)"

    def remarks(self) -> list[str]:
        return [*(f"FAILED: {one}" for one in self.troubles), *self.notes]

    def table(self) -> str:
        """For a terminal."""
        lines = [self.heading()]
        lines += [_table(*one).text("  ") for one in self._sections().items()]
        return "\n".join([*lines, *(f"  {_clipped(line, 300)}" for line in self.remarks()), ""])

    def markdown(self) -> str:
        tables = [_table(*one).markdown() for one in self._sections().items()]
        remarks = (f"- {line}" for line in self.remarks())
        return "\n\n".join([f"## {self.heading()}", *tables, *remarks])

    def document(self) -> dict[str, Any]:
        rows = []
        for row in self.rows:
            checks = [{**asdict(check), "is_met": check.is_met} for check in row.checks]
            rows.append({**asdict(row), "verdict": row.verdict, "checks": checks})
        names = ("title", "state", "seconds", "notes", "troubles", "misses")
        return {**{name: getattr(self, name) for name in names}, "rows": rows}

    @staticmethod
    def of(name: str, document: dict[str, Any]) -> Part:
        """The part that `document` was made from."""
        rows = []
        for told in document["rows"]:
            checks = tuple(
                Check(**{key: value for key, value in one.items() if key != "is_met"})
                for one in told["checks"]
            )
            fields = {key: value for key, value in told.items() if key != "verdict"}
            rows.append(Row(**{**fields, "checks": checks}))
        kept = {key: document[key] for key in ("title", "notes", "troubles", "seconds")}
        return Part(name, rows=rows, is_done=document["state"] != "unfinished", **kept)

    def _sections(self) -> dict[str, list[Row]]:
        found: dict[str, list[Row]] = {}
        for row in self.rows:
            found.setdefault(row.section, []).append(row)
        return found


@dataclass
class Report:
    """A run; `save` may be called again and again."""

    settings: dict[str, Any]
    folder: Path
    parts: dict[str, Part] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return DRY if self.settings.get("dry_run") else ""

    def sort(self, names: Iterable[str]) -> None:
        """Parts in the order of `names`."""
        self.parts = {name: self.parts[name] for name in names if name in self.parts}

    def header(self) -> list[str]:
        return [line for line in (self.label, format_settings(self.settings)) if line]

    def summary(self) -> str:
        """A line for each part, and everything that was missed or failed."""
        lines = ["summary" + (f" ({self.label})" if self.label else "")]
        for part in self.parts.values():
            met = sum(check.is_met for _, check in part.judged)
            goals = f"{met} of {len(part.judged)} targets met" if part.judged else ""
            counted = f"{len(part.rows):3} rows  {part.seconds:4.0f} s"
            lines.append(f"  {part.name:<11} {part.state:<10} {counted}  {goals}".rstrip())
        for part in self.parts.values():
            lines += [f"  FAILED {part.name}: {_clipped(one, 200)}" for one in part.failures]
            lines += [f"  MISSED {part.name}: {_clipped(one, 200)}" for one in part.misses]
        return "\n".join(lines)

    def save(self) -> None:
        """Write results.json and results.md."""
        self.folder.mkdir(parents=True, exist_ok=True)
        parts = {name: part.document() for name, part in self.parts.items()}
        document = {"settings": self.settings, "notes": NOTES, "parts": parts}
        _write(self.folder / "results.json", json.dumps(document, indent=1) + "\n")
        tables = [part.markdown() for part in self.parts.values()]
        summary = f"```\n{self.summary()}\n```"
        text = ["# On a GPU", *self.header(), NOTES, summary, *tables]
        _write(self.folder / "results.md", "\n\n".join(text) + "\n")


def load_parts(folder: Path, settings: dict[str, Any], names: Iterable[str]) -> dict[str, Part]:
    """Parts of an earlier run of the same command into the same folder, on the same machine."""
    path = folder / "results.json"
    document = json.loads(path.read_text()) if path.exists() else {}
    if document.get("settings") != settings:
        return {}
    parts = document["parts"]
    return {name: Part.of(name, parts[name]) for name in names if name in parts}


def _table(section: str, rows: list[Row]) -> Table:
    columns = list(dict.fromkeys(name for row in rows for name in row.cells))
    body = [
        [row.name, *(row.cells.get(column) for column in columns), _clipped(row.verdict, 160)]
        for row in rows
    ]
    return Table([section, *columns, ""], body, has_verdict=True)


def _clipped(text: str, length: int) -> str:
    line = " ".join(text.split())
    return line if len(line) <= length else line[: length - 3] + "..."


def _write(path: Path, text: str) -> None:
    """Whole or not at all."""
    draft = path.with_name(path.name + ".draft")
    draft.write_text(text)
    draft.replace(path)
