"""What a run on a GPU found: rows of figures with their checks, as tables, Markdown and JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

DRY = "dry run on the CPU: figures mean nothing"
NOTES = (
    "Times are medians, +- is half the distance of the quartiles over the median. Limits come from"
    " the two ceilings that the part `limits` measured on this card: see gpu_limits.py. met,"
    " MISSED: a figure against its target. FAILED: a result that is wrong, or a part that broke;"
    " only these end the command with an error. skipped: what cannot run here, and why."
)
Cell = str | int | float | None


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

    @property
    def misses(self) -> list[Check]:
        return [check for check in self.checks if check.is_judged and not check.is_met]


@dataclass
class Part:
    """One part of a run, filled while it runs."""

    name: str
    title: str
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    troubles: list[str] = field(default_factory=list)  # why it broke
    skipped: str = ""  # why it did not run
    seconds: float = 0.0
    is_done: bool = False
    is_brief: bool = False  # in a terminal

    @property
    def failures(self) -> list[str]:
        wrong = [f"{row.name}: {row.failed}" for row in self.rows if row.failed]
        nothing = self.is_done and not (self.rows or self.troubles or self.skipped)
        return [*self.troubles, *wrong, *(["it has no results"] if nothing else [])]

    @property
    def state(self) -> str:
        if self.failures:
            return "FAILED"
        if not self.is_done:
            return "unfinished"
        done = [row for row in self.rows if not row.skipped]
        return "skipped" if self.skipped or not done else "ok"

    @property
    def misses(self) -> list[str]:
        return [
            f"{row.name}: {check.what} {shown(check.value)}, target {shown(check.limit)}"
            for row in self.rows
            for check in row.misses
        ]

    def heading(self) -> str:
        return f"{self.name}: {self.title} ({self.state}, {self.seconds:.0f} s)"

    def remarks(self) -> list[str]:
        why = [f"skipped: {self.skipped}"] if self.skipped else []
        return [*why, *(f"FAILED: {one}" for one in self.troubles), *self.notes]

    def table(self) -> str:
        """For a terminal."""
        lines = [self.heading()]
        for section, found in _sections(self.rows):
            rows = [row for row in found if row.verdict] if self.is_brief else found
            if len(rows) < len(found):
                lines.append(f"  {section}: {len(found) - len(rows)} rows as they should be")
            if not rows:
                continue
            cells = _cells(section, rows)
            widths = [max(len(row[at]) for row in cells) for at in range(len(cells[0]))]
            for name, *middle, verdict in cells:
                padded = (cell.rjust(w) for cell, w in zip(middle, widths[1:-1], strict=True))
                parts = [name.ljust(widths[0]), *padded, verdict]
                lines.append("  " + "  ".join(parts).rstrip())
        return "\n".join([*lines, *(f"  {_clipped(line, 300)}" for line in self.remarks()), ""])

    def markdown(self) -> str:
        parts = [f"## {self.heading()}"]
        for section, rows in _sections(self.rows):
            head, *body = [
                "| " + " | ".join(cell.replace("|", "/") for cell in row) + " |"
                for row in _cells(section, rows)
            ]
            rule = "|---|" + "---:|" * (head.count(" | ") - 1) + "---|"
            parts.append("\n".join([head, rule, *body]))
        return "\n\n".join([*parts, *(f"- {line}" for line in self.remarks())])

    def document(self) -> dict[str, Any]:
        rows = [{**asdict(row), "verdict": row.verdict} for row in self.rows]
        checks = [[{**asdict(c), "is_met": c.is_met} for c in row.checks] for row in self.rows]
        for row, found in zip(rows, checks, strict=True):
            row["checks"] = found
        told = {name: getattr(self, name) for name in ("title", "state", "seconds", "skipped")}
        lists = {name: getattr(self, name) for name in ("notes", "troubles", "misses")}
        return {**told, **lists, "rows": rows}


@dataclass
class Report:
    """A run; `save` may be called again and again."""

    settings: dict[str, Any]
    folder: Path
    parts: dict[str, Part] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return DRY if self.settings.get("dry_run") else ""

    def sort(self, specs: Iterable[Any]) -> None:
        """Parts in the order of `specs`."""
        names = [spec.name for spec in specs if spec.name in self.parts]
        self.parts = {name: self.parts[name] for name in names}

    def header(self) -> list[str]:
        facts = ", ".join(f"{key} {value}" for key, value in self.settings.items())
        return [line for line in (self.label, facts) if line]

    def summary(self) -> str:
        """A line for each part, and everything that was missed or failed."""
        lines = ["summary" + (f" ({self.label})" if self.label else "")]
        for part in self.parts.values():
            judged = [c for row in part.rows for c in row.checks if c.is_judged]
            met = sum(check.is_met for check in judged)
            goals = f"{met} of {len(judged)} targets met" if judged else ""
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
    if not path.exists():
        return {}
    document = json.loads(path.read_text())
    if document["settings"] != settings:
        return {}
    return {
        name: _part(name, document["parts"][name]) for name in names if name in document["parts"]
    }


def _part(name: str, found: dict[str, Any]) -> Part:
    rows = []
    for told in found["rows"]:
        checks = tuple(
            Check(**{key: value for key, value in one.items() if key != "is_met"})
            for one in told["checks"]
        )
        fields = {key: value for key, value in told.items() if key not in ("verdict", "checks")}
        rows.append(Row(**fields, checks=checks))
    kept = {key: found[key] for key in ("title", "notes", "troubles", "skipped", "seconds")}
    return Part(name, rows=rows, is_done=found["state"] != "unfinished", **kept)


def shown(cell: Cell) -> str:
    """A figure with as many digits as say something."""
    if cell is None:
        return "-"
    if isinstance(cell, str):
        return cell
    if isinstance(cell, int):
        return f"{cell:,}"
    size = abs(cell)
    return f"{cell:,.0f}" if size >= 1_000 else f"{cell:.3g}" if size < 100 else f"{cell:.4g}"


def _sections(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.section, []).append(row)
    return list(found.items())


def _cells(section: str, rows: Sequence[Row]) -> list[list[str]]:
    """A head, then a line for each row; verdicts last."""
    columns = list(dict.fromkeys(name for row in rows for name in row.cells))
    head = [section, *columns, ""]
    body = [
        [row.name, *(shown(row.cells.get(c)) for c in columns), _clipped(row.verdict, 160)]
        for row in rows
    ]
    return [head, *body]


def _clipped(text: str, length: int) -> str:
    line = " ".join(text.split())
    return line if len(line) <= length else line[: length - 3] + "..."


def _write(path: Path, text: str) -> None:
    """Whole or not at all."""
    draft = path.with_name(path.name + ".draft")
    draft.write_text(text)
    draft.replace(path)
