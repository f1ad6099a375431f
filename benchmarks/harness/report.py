"""What a command prints: tables while it runs, one JSON document, Markdown."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.machine import describe_machine

Cell = str | int | float | None


def format_cell(cell: Cell) -> str:
    """A figure with three significant digits, whole numbers in full."""
    if cell is None:
        return "-"
    if isinstance(cell, str):
        return cell
    if isinstance(cell, int):
        return f"{cell:,}"
    return f"{cell:,.0f}" if abs(cell) >= 1_000 else f"{cell:.3g}"


@dataclass(frozen=True)
class Table:
    """`columns`: the first one names the rows. has_verdict: the last column holds text."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    has_verdict: bool = False

    def text(self, indent: str = "   ") -> str:
        """For a terminal: names and verdicts to the left, figures to the right."""
        rows = self._cells()
        widths = [max(len(row[column]) for row in rows) for column in range(len(self.columns))]
        lines = []
        for row in rows:
            padded = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
            padded[0] = row[0].ljust(widths[0])
            if self.has_verdict:
                padded[-1] = row[-1]
            lines.append((indent + "  ".join(padded)).rstrip())
        return "\n".join(lines)

    def markdown(self) -> str:
        head, *body = [
            "| " + " | ".join(cell.replace("|", "/") for cell in row) + " |"
            for row in self._cells()
        ]
        figures = len(self.columns) - 1 - self.has_verdict
        rule = "|---|" + "---:|" * figures + "---|" * self.has_verdict
        return "\n".join([head, rule, *body])

    def _cells(self) -> list[list[str]]:
        return [list(self.columns), *([format_cell(cell) for cell in row] for row in self.rows)]


@dataclass(frozen=True)
class Section:
    """A titled table with lines of text after it; `summary` stands between title and table."""

    title: str
    table: Table
    lines: Sequence[str] = ()
    summary: str = ""

    def text(self) -> str:
        head = [self.title, *([f"   {self.summary}"] if self.summary else [])]
        return "\n".join([*head, self.table.text(), *(f"   {line}" for line in self.lines)])

    def markdown(self) -> str:
        head = [f"## {self.title}", *([self.summary] if self.summary else [])]
        return "\n\n".join([*head, self.table.markdown(), *(f"- {line}" for line in self.lines)])


class Report:
    """One run of a command. Sections are printed as they are added; with --json to stderr."""

    def __init__(
        self,
        title: str,
        notes: str,
        args: argparse.Namespace,
        packages: Sequence[str] = ("torch",),
        head: Sequence[str] = (),
        **settings: Any,
    ) -> None:
        """args: with those of `arguments.REPORT`. head: lines after the settings, which are the
        machine, the versions of `packages`, the arguments and `settings`."""
        self.settings = {**describe_run(args, packages), **settings}
        self.sections: list[Section] = []
        self._title, self._notes, self._args = title, notes, args
        self._head = [format_settings(self.settings), *head, notes]
        self.show("\n".join([*self._head, ""]))

    def add(self, section: Section) -> None:
        self.sections.append(section)
        self.show(section.text() + "\n")

    def show(self, text: str) -> None:
        print(text, file=sys.stderr if self._args.json else sys.stdout, flush=True)

    def finish(self, name: str, data: dict[str, Any], *, tail: Sequence[str] = ()) -> None:
        """Print `tail`; with --json the document, with --save write NAME.md and NAME.json."""
        for line in tail:
            self.show(line)
        text = json.dumps({"settings": self.settings, "notes": self._notes, **data}, indent=1)
        if self._args.json:
            print(text)
        if self._args.save is not None:
            self._args.save.mkdir(parents=True, exist_ok=True)
            (self._args.save / f"{name}.json").write_text(text + "\n")
            head = [f"# {self._title}", format_settings(self.settings), *self._head[1:]]
            body = [section.markdown() for section in self.sections]
            markdown = "\n\n".join([*head, *body, *tail]) + "\n"
            (self._args.save / f"{name}.md").write_text(markdown)


def print_table(
    args: argparse.Namespace,
    columns: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    packages: Sequence[str] = (),
) -> None:
    """Hardware, versions and arguments, then the rows; with --json as one document."""
    settings = describe_run(args, packages)
    if args.json:
        print(json.dumps({"settings": settings, "columns": columns, "rows": rows}))
    else:
        print(format_settings(settings), Table(columns, rows).text(""), sep="\n")


class TablePrinter:
    """The output of `print_table`, a row at a time: a long run can be read, or ended, before it is
    complete. With --json the rows go to stderr, and `finish` prints the document."""

    def __init__(
        self,
        args: argparse.Namespace,
        columns: Sequence[str],
        widest: Sequence[Cell],
        packages: Sequence[str] = (),
    ) -> None:
        """widest: a row whose cells are as wide as any of their columns."""
        self._columns, self._rows = columns, list[Sequence[Cell]]()
        self._is_json, self._settings = args.json, describe_run(args, packages)
        self._widths = [
            max(len(column), len(format_cell(cell)))
            for column, cell in zip(columns, widest, strict=True)
        ]
        self._show(format_settings(self._settings))
        self._show(self._line(columns))

    def add(self, rows: Sequence[Sequence[Cell]]) -> None:
        self._rows += rows
        for row in rows:
            self._show(self._line(row))

    def finish(self) -> None:
        if self._is_json:
            document = {"settings": self._settings, "columns": self._columns, "rows": self._rows}
            print(json.dumps(document))

    def _line(self, row: Sequence[Cell]) -> str:
        first, *others = map(format_cell, row)
        widths = self._widths[1:]
        padded = [cell.rjust(width) for cell, width in zip(others, widths, strict=True)]
        return "  ".join([first.ljust(self._widths[0]), *padded]).rstrip()

    def _show(self, text: str) -> None:
        print(text, file=sys.stderr if self._is_json else sys.stdout, flush=True)


def print_tables(args: argparse.Namespace, tables: Sequence[Table]) -> None:
    """As `print_table`, for several tables; the JSON document lists them under "tables"."""
    settings = describe_run(args, ())
    if args.json:
        listed = [{"columns": table.columns, "rows": table.rows} for table in tables]
        print(json.dumps({"settings": settings, "tables": listed}))
    else:
        print(format_settings(settings), *(table.text("") for table in tables), sep="\n\n")


def describe_run(args: argparse.Namespace, packages: Sequence[str]) -> dict[str, Any]:
    """Hardware, versions, and what was asked for."""
    given = {
        name: ",".join(map(str, value)) if isinstance(value, list) else value
        for name, value in vars(args).items()
        if value is not None and not isinstance(value, Path) and name != "json"
    }
    return {**describe_machine(packages), **given}


def format_settings(settings: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in settings.items())


def replace_block(page: str, name: str, text: str) -> str:
    """`page` with `text` between the markers <!-- NAME --> and <!-- end -->.

    Raises ValueError where it has no such markers.
    """
    begin, end = f"<!-- {name} -->", "<!-- end -->"
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    new, count = pattern.subn(lambda _: f"{begin}\n{text}\n{end}", page)
    if not count:
        raise ValueError(f"no place for the tables: {begin} ... {end}")
    return new
