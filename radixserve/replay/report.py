"""Renders a study's results as tables and sentences, on a rich console or in Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any

from radixserve.replay.caches import CacheSpec, none_if_nan
from radixserve.replay.closed_loop import (
    bound_closed_loop,
    infer_closed_loop,
    replay_closed_loop,
)
from radixserve.replay.direct import replay_direct
from radixserve.replay.paths import PathTable
from radixserve.replay.replicas import Cluster, ClusterResult, replay_replicas
from radixserve.replay.scheduled import Serving
from radixserve.replay.study import Watch, unwatched
from radixserve.replay.trace import Trace

if TYPE_CHECKING:
    from rich.console import Console

_MAX_WIDTH = 10_000  # columns of a table


@dataclass(frozen=True, slots=True)
class Finding:
    """A title with a table, lines of text, or both."""

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
            for column, head in enumerate(self.heads):
                table.add_column(head, justify="right" if column else "left", no_wrap=True)
            for row in self.rows:
                table.add_row(*row)
            whole = console.measure(table, options=console.options.update(max_width=_MAX_WIDTH))
            if whole.maximum > console.width:  # rather lines that wrap than figures cut short
                table.width = whole.maximum
            console.print(table, soft_wrap=True)
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
    """Print all findings of a study. `document`: from `study_document`."""
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
        f" {100 * num['ideal_hit_rate']:.2f} % (what an unlimited cache would reuse)",
        f"distinct: {num['distinct_tokens']:,} tokens (what an unlimited cache would hold)",
    ]


def findings(document: dict[str, Any]) -> Iterator[Finding]:
    """The tables for which a study's document has figures."""
    answers = document["answers"]
    yield _rates(document)
    if document["scheduled"]:
        yield scheduled_finding(document)
    if gains := answers["next_gigabyte"]:
        size = answers["bytes_per_token"]
        yield _pivot(
            f"what the next GiB is worth: tokens more reused, at {size:,} bytes a token",
            [(row, _span(row), format_tokens(max(0.0, row["tokens_per_gib"]))) for row in gains],
        )
    if losses := answers["page_loss"]:
        yield _pivot(
            "what a page or block size loses, points of hit rate against page 1",
            [(row, (row["cache_tokens"],), f"{100 * row['rate']:+.2f}") for row in losses],
        )
    elif any(run["page_size"] != 1 for run in document["runs"]):
        yield Finding("what pages lose: add page size 1 to see it")
    yield _fits(answers)


def _span(gain: dict[str, Any]) -> tuple[int, ...]:
    return gain["from_tokens"], gain["to_tokens"]


def _rates(document: dict[str, Any]) -> Finding:
    runs = document["runs"]
    limits = [{"label": "clairvoyant bound", "page_size": 1, **run} for run in document["bounds"]]
    cells = [
        (
            run,
            (run["cache_tokens"],),
            _hit_percent(run),
        )
        for run in (*runs, *limits)
    ]
    title = "hit rate, % of prompt tokens, by cache size in tokens"
    return _pivot(title, cells, _notes(runs))


def _hit_percent(run: dict[str, Any]) -> str:
    return f"{100 * run['hit_rate']:.2f}{'*' if run.get('too_large_requests') else ''}"


def _notes(runs: Sequence[dict[str, Any]]) -> list[str]:
    """What the star of `_hit_percent` means, if there is one."""
    note = "* some requests do not fit into this cache; they count as not reused"
    return [note] if any(run["too_large_requests"] for run in runs) else []


def scheduled_finding(document: dict[str, Any]) -> Finding:
    heads = ("cache", "page", "tokens", "order", "hit %", "TTFT mean", "p95", "p99", "ratio")
    rows = [
        (
            run["label"],
            str(run["page_size"]),
            format_tokens(run["cache_tokens"]),
            run["order"],
            _hit_percent(run),
            *(_seconds(run[f"ttft_{name}_s"]) for name in ("mean", "p95", "p99")),
            f"{run['compute_once_ratio']:.3f}",
            str(run["max_overtaken"]),
            str(run["preemptions"]),
        )
        for run in document["scheduled"]
    ]
    lines = [
        "ratio: tokens computed to tokens needed, 1.000 when nothing was computed twice "
        "without need; overtaken: most later requests that were admitted before one",
        *_notes(document["scheduled"]),
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
    for run, sizes, text in cells:
        rows.setdefault((run["label"], run["page_size"]), {})[sizes] = text
    table = [
        (label, str(page_size), *(row.get(column, "") for column in columns))
        for (label, page_size), row in rows.items()
    ]
    heads = (" to ".join(map(format_tokens, sizes)) for sizes in columns)
    return Finding(title, ("cache", "page", *heads), table, lines)


def replay_closed_loops(
    trace: Trace,
    paths: PathTable,
    specs: Sequence[CacheSpec],
    servings: Sequence[Serving],
    *,
    lease_s: float | None = None,
    watch: Watch = unwatched,
) -> list[dict[str, Any]]:
    """A row for each cache and way of serving, and the bound of each size. Priced admission takes
    the eviction order "expected-return" in place of "lru"."""
    rows = []
    for spec, serving in product(specs, servings):
        is_priced = serving.admission == "priced" and (spec.index, spec.policy) == ("radix", "lru")
        used = replace(spec, policy="expected-return") if is_priced else spec
        loop = infer_closed_loop(trace, serving)
        with watch(f"{serving.order}, {serving.admission}", len(trace)) as step:
            result = replay_closed_loop(
                trace, loop, used, serving, lease_s=lease_s, on_request=step
            )
        bound = bound_closed_loop(trace, paths, loop, spec.cache_tokens, serving)
        rows.append(
            {
                **result.document(),
                "bound_computed_tokens": bound.computed_tokens,
                "bound_makespan_s": bound.makespan_s,
            }
        )
    return rows


def loop_finding(document: dict[str, Any]) -> Finding:
    """The rows of `replay_closed_loops` as a table."""
    heads = ["cache", "tokens", "order", "admission", "hit %", "computed", "makespan"]
    heads += ["first token", "session", "p50", "p95", "p99", "worst", "fair"]
    rows = []
    for row in document["closed_loops"]:
        names = ["makespan_s", "ttft_mean_s", "session_mean_s", "session_p50_s"]
        names += ["session_p95_s", "session_p99_s", "session_worst_s"]
        rows.append(
            (
                row["cache"],
                format_tokens(row["cache_tokens"]),
                row["order"],
                row["admission"],
                _hit_percent(row),
                format_tokens(row["computed_tokens"]),
                *("nan" if row[name] is None else f"{row[name]:.4g}" for name in names),
                f"{row['fairness']:.2f}",
            )
        )
    bounds = {
        row["cache_tokens"]: f"{format_tokens(row['cache_tokens'])} tokens, in hindsight: at least "
        f"{format_tokens(row['bound_computed_tokens'])} computed, {row['bound_makespan_s']:.4g} s"
        for row in document["closed_loops"]
    }
    lines = [
        "times in modelled seconds; a session's are from its first request to its last answer",
        *_notes(document["closed_loops"]),
        *bounds.values(),
    ]
    title = f"{document['trace']}, {document['requests']:,} requests in closed loops"
    return Finding(title, heads, rows, lines)


def replay_clusters(
    trace: Trace,
    specs: Sequence[CacheSpec],
    clusters: Sequence[Cluster],
    *,
    watch: Watch = unwatched,
) -> list[dict[str, Any]]:
    """A row for each cluster with each cache, and for comparison the hit rate of one cache of the
    size of all replicas together. With autoscaling, their mean number counts."""
    rows: list[dict[str, Any]] = []
    whole: dict[int, float] = {}  # hit rate of one cache, by its size
    for spec, cluster in product(specs, clusters):
        with watch(f"{cluster.router}, {cluster.num_replicas} replicas", len(trace)) as step:
            result = replay_replicas(trace, spec, cluster, on_request=step)
        number = cluster.num_replicas
        if cluster.autoscaling is not None:
            number = max(1, round(result.mean_replicas))
        size = spec.cache_tokens * number
        if size not in whole:
            whole_spec = replace(spec, cache_tokens=size)
            with watch(f"one cache, {size:,} tokens", len(trace)) as step:
                whole[size] = replay_direct(trace, whole_spec, on_request=step).hit_rate
        rows.append(
            {
                "cache_tokens": spec.cache_tokens,
                "replicas": cluster.num_replicas,
                "router": cluster.router,
                "event_delay_s": cluster.event_delay_s,
                "hit_rate": result.hit_rate,
                "one_cache_hit_rate": whole[size],
                "max_load": result.max_load,
                "too_large_requests": result.num_too_large,
                "seconds": result.seconds,
            }
        )
        if not cluster.is_fixed:
            rows[-1] |= _changes(result)
    return rows


def _changes(result: ClusterResult) -> dict[str, Any]:
    """The figures of a row that are of interest only with failures or autoscaling."""
    return {
        "mean_replicas": result.mean_replicas,
        "failures": result.num_failures,
        "moved_requests": result.num_moved,
        "failed_requests": result.num_failed,
        "recomputed_tokens": result.recomputed_tokens,
        "lost_tokens": result.lost_tokens,
        "ttft_p95_s": none_if_nan(result.ttft_p95_s),
    }


def cluster_finding(document: dict[str, Any]) -> Finding:
    heads = ("router", "replicas", "tokens each", "hit %", "one cache %", "ratio", "max/mean load")
    rows = [
        (
            row["router"],
            str(row["replicas"]),
            format_tokens(row["cache_tokens"]),
            _hit_percent(row),
            f"{100 * row['one_cache_hit_rate']:.2f}",
            f"{row['hit_rate'] / max(row['one_cache_hit_rate'], 1e-9):.3f}",
            f"{row['max_load']:.2f}",
        )
        for row in document["replicas"]
    ]
    lines = ["load: modelled seconds of prefill and decode over the whole trace"]
    lines += _notes(document["replicas"])
    title = f"{document['trace']}, {document['requests']:,} requests"
    return Finding(title, heads, rows, lines)


def changes_finding(document: dict[str, Any]) -> Finding | None:
    """A table of the effects of failures and autoscaling; None without either."""
    heads = ("router", "replicas", "mean", "failures", "moved", "failed", "again", "lost", "TTFT")
    rows = [
        (
            row["router"],
            str(row["replicas"]),
            f"{row['mean_replicas']:.2f}",
            *(str(row[name]) for name in ("failures", "moved_requests", "failed_requests")),
            *(format_tokens(row[name]) for name in ("recomputed_tokens", "lost_tokens")),
            "nan s" if row["ttft_p95_s"] is None else f"{row['ttft_p95_s']:.2f} s",
        )
        for row in document["replicas"]
        if "mean_replicas" in row
    ]
    lines = [
        "replicas, mean: at the beginning, over the trace; TTFT: modelled, 95 % are less",
        "moved: requests lost their replica and went on elsewhere; failed: they lost three, or "
        "waited too long",
        "again: tokens that these had computed and computed again, taken off the hits above; "
        "lost: tokens cached in lost replicas",
        "load above: over an equal part of the work that came while the replica was there",
    ]
    return Finding("replicas come and go", heads, rows, lines) if rows else None
