"""The document of a study as tables and sentences: on a rich console, or in Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, slots=True)
class Finding:
    """A titled table, lines of text after it, or both."""

    title: str
    heads: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    lines: Sequence[str] = ()

    def print(self, console: Console) -> None:
        from rich.table import Table

        console.print()
        console.print(self.title, style="cyan", markup=False)
        if self.rows:
            gap = 2 if len(self.heads) < 10 else 1
            table = Table(box=None, padding=(0, gap, 0, 0), header_style="dim")
            for at, head in enumerate(self.heads):
                table.add_column(head, justify="right" if at else "left", no_wrap=True)
            for row in self.rows:
                table.add_row(*row)
            console.print(table)
        for line in self.lines:
            console.print(line, markup=False)

    def markdown(self) -> str:
        rule = ["---", *["---:"] * (len(self.heads) - 1)]
        table = ["| " + " | ".join(row) + " |" for row in (self.heads, rule, *self.rows)]
        parts = [f"**{self.title}**"]
        parts += ["\n".join(table)] if self.rows else []
        parts += ["\n".join(f"- {line.strip()}" for line in self.lines)] if self.lines else []
        return "\n\n".join(parts)


def format_tokens(count: float) -> str:
    """250000 -> "250k", 1500000 -> "1.5M"."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.4g}{unit}"
    return f"{count:.0f}"


def print_study(console: Console, document: dict[str, Any]) -> None:
    """All findings of a study."""
    console.print(document["trace"], style="bold", markup=False)
    for line in facts(document):
        console.print(line, markup=False)
    for finding in findings(document):
        finding.print(console)


def facts(document: dict[str, Any]) -> list[str]:
    num = document
    sessions = f", {num['sessions']:,} sessions" if num["sessions"] else ""
    if num["sessions_inferred"]:
        sessions += " (inferred from which request continues which)"
    span = f" in {num['span_s']:,.0f} s" if num.get("has_times", True) else ", without times"
    return [
        f"{num['requests']:,} requests{span}{sessions}; the longest keeps"
        f" {num['longest_request']:,} tokens",
        f"{num['prompt_tokens']:,} prompt tokens, {num['output_tokens']:,} output tokens",
        f"reusable at all: {num['reusable_tokens']:,} prompt tokens,"
        f" {100 * num['ideal_hit_rate']:.2f} % (what a cache without end would reuse)",
        f"distinct: {num['distinct_tokens']:,} tokens (what a cache without end would hold)",
    ]


def findings(document: dict[str, Any]) -> Iterator[Finding]:
    """The tables of a study's document, those that it has figures for."""
    answers = document["answers"]
    yield _rates(document)
    if document["scheduled"]:
        yield scheduled_finding(document)
    if gains := answers["next_gigabyte"]:
        size = answers["bytes_per_token"]
        yield _pivot(
            f"what the next GiB is worth: tokens more reused, at {size:,} bytes a token",
            [(one, _span(one), format_tokens(max(0.0, one["tokens_per_gib"]))) for one in gains],
        )
    if losses := answers["page_loss"]:
        yield _pivot(
            "what a page or block size loses, points of hit rate against page 1",
            [(one, (one["cache_tokens"],), f"{100 * one['rate']:+.2f}") for one in losses],
        )
    elif any(run["page_size"] != 1 for run in document["runs"]):
        yield Finding("what pages lose: add page size 1 to see it")
    yield _fits(answers)


def _span(gain: dict[str, Any]) -> tuple[int, ...]:
    return gain["from_tokens"], gain["to_tokens"]


def _rates(document: dict[str, Any]) -> Finding:
    runs = document["runs"]
    limits = [{"label": "clairvoyant bound", "page_size": 1, **one} for one in document["bounds"]]
    cells = [
        (
            one,
            (one["cache_tokens"],),
            f"{100 * one['hit_rate']:.2f}{'*' if one.get('too_large_requests') else ''}",
        )
        for one in (*runs, *limits)
    ]
    note = "* some requests do not fit into this cache; they count as not reused"
    return _pivot(
        "hit rate, % of prompt tokens, by cache size in tokens",
        cells,
        [note] if any(run["too_large_requests"] for run in runs) else [],
    )


def scheduled_finding(document: dict[str, Any]) -> Finding:
    heads = ("cache", "page", "tokens", "order", "hit %", "TTFT mean", "p95", "p99", "ratio")
    rows = [
        (
            run["label"],
            str(run["page_size"]),
            format_tokens(run["cache_tokens"]),
            run["order"],
            f"{100 * run['hit_rate']:.2f}",
            *(_seconds(run[f"ttft_{name}_s"]) for name in ("mean", "p95", "p99")),
            f"{run['compute_once_ratio']:.3f}",
            str(run["max_overtaken"]),
            str(run["preemptions"]),
        )
        for run in document["scheduled"]
    ]
    lines = [
        "ratio: tokens computed to tokens needed, 1.000 when nothing was computed twice "
        "without need; overtaken: most later requests that were admitted before one"
    ]
    title = "through the scheduler, times by the model of a step"
    return Finding(title, (*heads, "overtaken", "preempted"), rows, lines)


def _seconds(value: float | None) -> str:
    return "nan s" if value is None else f"{value:.3f} s"


def _fits(answers: dict[str, Any]) -> Finding:
    lines = [
        f"{format_tokens(fit['cache_tokens']):>6}: {fit['label']}, page {fit['page_size']}: "
        f"{100 * fit['hit_rate']:.2f} %, {100 * fit['gap']:.2f} points below the bound"
        for fit in answers["best"]
    ]
    best, *others = answers["mean_gap"]
    if others:
        lines.append(
            f"over all sizes: {best['label']}, page {best['page_size']}, {100 * best['gap']:.2f} "
            "points below the bound on average"
        )
    return Finding("which policy fits", lines=lines)


def _pivot(
    title: str,
    cells: Sequence[tuple[dict[str, Any], tuple[int, ...], str]],
    lines: Sequence[str] = (),
) -> Finding:
    """A row for each kind of cache and a column for each size or pair of sizes, from (the row's
    document, sizes, text) of each cell."""
    columns = sorted({sizes for _, sizes, _ in cells})
    rows: dict[tuple[str, int], dict[tuple[int, ...], str]] = {}
    for one, sizes, text in cells:
        rows.setdefault((one["label"], one["page_size"]), {})[sizes] = text
    table = [
        (label, str(page_size), *(row.get(column, "") for column in columns))
        for (label, page_size), row in rows.items()
    ]
    heads = (" to ".join(map(format_tokens, sizes)) for sizes in columns)
    return Finding(title, ("cache", "page", *heads), table, lines)
