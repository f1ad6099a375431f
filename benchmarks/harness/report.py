"""The report of a command: tables in the terminal while it runs, one JSON document, Markdown."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
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
        widths = [max(len(row[at]) for row in rows) for at in range(len(self.columns))]
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


@dataclass
class Report:
    """One run of a command. Sections are printed as they are added; with --json to stderr."""

    title: str
    settings: dict[str, Any]  # hardware, versions, what was asked for
    notes: str
    args: argparse.Namespace  # --json and --save, see `add_report_arguments`
    head: list[str] = field(default_factory=list)  # lines after the settings
    sections: list[Section] = field(default_factory=list)

    def begin(self) -> None:
        self.show("\n".join([*self._head(), ""]))

    def add(self, section: Section) -> None:
        self.sections.append(section)
        self.show(section.text() + "\n")

    def show(self, text: str) -> None:
        print(text, file=sys.stderr if self.args.json else sys.stdout, flush=True)

    def finish(self, name: str, data: dict[str, Any], *, tail: Sequence[str] = ()) -> None:
        """Print `tail`; with --json the document, with --save write NAME.md and NAME.json."""
        for line in tail:
            self.show(line)
        text = json.dumps({"settings": self.settings, "notes": self.notes, **data}, indent=1)
        if self.args.json:
            print(text)
        if self.args.save is not None:
            self.args.save.mkdir(parents=True, exist_ok=True)
            (self.args.save / f"{name}.json").write_text(text + "\n")
            body = [section.markdown() for section in self.sections]
            markdown = "\n\n".join([f"# {self.title}", *self._head(), *body, *tail]) + "\n"
            (self.args.save / f"{name}.md").write_text(markdown)

    def _head(self) -> list[str]:
        return [format_settings(self.settings), *self.head, self.notes]


def format_settings(settings: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in settings.items())


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of benchmarks that open engines."""
    parser.add_argument("--threads", type=int, default=1, help="of each engine (default: 1)")
    parser.add_argument("--repeats", type=int, help="default: 3, quick: 1")
    parser.add_argument("--quick", action="store_true", help="shrunk")
    add_report_arguments(parser)


def parse_run(parser: argparse.ArgumentParser) -> argparse.Namespace:
    args = parser.parse_args()
    args.repeats = (1 if args.quick else 3) if args.repeats is None else args.repeats
    if min(args.threads, args.repeats) < 1:
        parser.error("--threads and --repeats must be at least 1")
    return args


def parse_sizes(doc: str | None, **defaults: Any) -> argparse.Namespace:
    """The arguments of a benchmark with one table: an option for each default, and --json."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    for name, default in defaults.items():
        flag, kind = "--" + name.replace("_", "-"), type(default)
        parser.add_argument(flag, type=kind, default=default, help=f"default: {default}")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    return parser.parse_args()


def parse_traces(doc: str | None, names: Iterable[str]) -> argparse.Namespace:
    """The arguments of benchmarks over recorded traces."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--traces", type=Path, required=True, metavar="DIR")
    parser.add_argument("--out", type=Path, default=Path("docs"), metavar="DIR")
    parser.add_argument("--only", default=",".join(names), metavar="NAMES")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N requests")
    return parser.parse_args()


def print_table(
    args: argparse.Namespace,
    columns: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    packages: Sequence[str] = (),
) -> None:
    """Hardware, versions and arguments, then the rows; with --json as one document."""
    given = {name: value for name, value in vars(args).items() if name != "json"}
    settings = {**describe_machine(packages), **given}
    if args.json:
        print(json.dumps({"settings": settings, "columns": columns, "rows": rows}))
    else:
        print(format_settings(settings), Table(columns, rows).text(""), sep="\n")


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--save", type=Path, metavar="DIR", help="write .md and .json there")


def parse_names(parser: argparse.ArgumentParser, what: str, given: str, known: Any) -> list[str]:
    """Names between commas; a usage error where one is unknown."""
    names = given.split(",")
    if unknown := sorted(set(names) - set(known)):
        parser.error(f"no such {what}: {', '.join(unknown)}; there are {', '.join(known)}")
    return names


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
