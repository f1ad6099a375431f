"""A study as tables and sentences on a rich console, and as plain data for JSON."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from radixserve.replay.caches import ReplayResult
from radixserve.replay.serving import ScheduledResult
from radixserve.replay.study import (
    Kind,
    Study,
    best_fits,
    mean_gaps,
    next_gigabyte,
    page_losses,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def format_tokens(count: float) -> str:
    """250000 -> "250k", 1500000 -> "1.5M"."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.4g}{unit}"
    return f"{count:.0f}"


def print_study(console: Console, study: Study, bytes_per_token: int) -> None:
    """All findings of a study."""
    _say(console, f"{study.trace.name}", style="bold")
    for line in _facts(study):
        _say(console, line)
    _print_rates(console, study)
    _print_scheduled(console, study)
    _print_gains(console, study, bytes_per_token)
    _print_losses(console, study)
    _print_fits(console, study)


def _facts(study: Study) -> list[str]:
    trace, paths = study.trace, study.paths
    sessions = f", {trace.num_sessions:,} sessions" if trace.num_sessions else ""
    if trace.sessions_inferred:
        sessions += " (inferred from which request continues which)"
    span = f" in {trace.times[-1]:,.0f} s" if trace.has_times else ", without times"
    return [
        f"{len(trace):,} requests{span}{sessions}; the longest keeps {trace.longest:,} tokens",
        f"{trace.prompt_tokens:,} prompt tokens, {int(trace.num_output.sum()):,} output tokens",
        f"reusable at all: {paths.reusable_tokens:,} prompt tokens, {_percent(study.ideal_rate)} "
        f"(what a cache without end would reuse)",
        f"distinct: {paths.distinct_tokens:,} tokens (what a cache without end would hold)",
    ]


def _print_rates(console: Console, study: Study) -> None:
    sizes = sorted(study.bounds)
    cells = [
        (kind, size, f"{100 * result.hit_rate:.2f}{'*' if result.num_too_large else ''}")
        for kind, by_size in study.by_kind().items()
        for size, result in by_size.items()
    ]
    table = _pivot(sizes, [format_tokens(size) for size in sizes], cells)
    bounds = [f"{100 * study.bound_rate(size):.2f}" for size in sizes]
    table.add_row("clairvoyant bound", "1", *bounds, style="bold")
    _section(console, "hit rate, % of prompt tokens, by cache size in tokens", table)
    if any(result.num_too_large for result in study.direct):
        _say(console, "* some requests do not fit into this cache; they count as not reused")


def _print_scheduled(console: Console, study: Study) -> None:
    if not study.scheduled:
        return
    heads = ("hit %", "TTFT mean", "p95", "p99", "ratio", "overtaken", "preempted")
    table = _table("cache", "page", "tokens", "order", *heads, gap=1)
    for result in study.scheduled:
        times = (result.mean_ttft_s, result.ttft_at(95), result.ttft_at(99))
        table.add_row(
            result.spec.label,
            str(result.spec.page_size),
            format_tokens(result.spec.cache_tokens),
            result.serving.order,
            f"{100 * result.hit_rate:.2f}",
            *(f"{seconds:.3f} s" for seconds in times),
            f"{result.compute_ratio:.3f}",
            str(result.max_overtaken),
            str(result.preemptions),
        )
    _section(console, "through the scheduler, times by the model of a step", table)
    _say(
        console,
        "ratio: tokens computed to tokens needed, 1.000 when nothing was computed twice "
        "without need; overtaken: most later requests that were admitted before one",
    )


def _print_gains(console: Console, study: Study, bytes_per_token: int) -> None:
    cells = [
        (
            (gain.label, gain.page_size),
            (gain.from_tokens, gain.to_tokens),
            format_tokens(max(0.0, gain.tokens_per_gib)),
        )
        for gain in next_gigabyte(study, bytes_per_token)
    ]
    spans = sorted({span for _, span, _ in cells})
    if spans:
        heads = [f"{format_tokens(low)} to {format_tokens(high)}" for low, high in spans]
        title = f"what the next GiB is worth: tokens more reused, at {bytes_per_token:,} bytes"
        _section(console, f"{title} a token", _pivot(spans, heads, cells))


def _print_losses(console: Console, study: Study) -> None:
    losses = page_losses(study)
    if not losses:
        if any(result.spec.page_size != 1 for result in study.direct):
            _say(console, "what pages lose: add page size 1 to see it")
        return
    sizes = sorted({loss.cache_tokens for loss in losses})
    cells = [
        ((loss.label, loss.page_size), loss.cache_tokens, f"{100 * loss.rate:+.2f}")
        for loss in losses
    ]
    table = _pivot(sizes, [format_tokens(size) for size in sizes], cells)
    _section(console, "what a page or block size loses, points of hit rate against page 1", table)


def _print_fits(console: Console, study: Study) -> None:
    _section(console, "which policy fits", None)
    for fit in best_fits(study):
        _say(
            console,
            f"{format_tokens(fit.cache_tokens):>6}: {fit.label}, page {fit.page_size}: "
            f"{_percent(fit.hit_rate)}, {100 * fit.gap:.2f} points below the bound",
        )
    gaps = mean_gaps(study)
    if len(gaps) > 1:
        (label, page_size), gap = next(iter(gaps.items()))
        _say(
            console,
            f"over all sizes: {label}, page {page_size}, {100 * gap:.2f} points below the bound "
            "on average",
        )


def _pivot(
    columns: Sequence[Any], heads: Sequence[str], cells: Iterable[tuple[Kind, Any, str]]
) -> Table:
    """A row for each kind of cache, from (kind, column, text) of each cell."""
    rows: dict[Kind, dict[Any, str]] = {}
    for kind, column, text in cells:
        rows.setdefault(kind, {})[column] = text
    table = _table("cache", "page", *heads)
    for (label, page_size), row in rows.items():
        table.add_row(label, str(page_size), *(row.get(column, "") for column in columns))
    return table


def _table(*heads: str, gap: int = 2) -> Table:
    from rich.table import Table

    table = Table(box=None, padding=(0, gap, 0, 0), header_style="dim")
    for at, head in enumerate(heads):
        table.add_column(head, justify="left" if at == 0 else "right", no_wrap=True)
    return table


def _section(console: Console, title: str, table: Table | None) -> None:
    console.print()
    _say(console, title, style="cyan")
    if table is not None:
        console.print(table)


def _say(console: Console, text: str, style: str | None = None) -> None:
    console.print(text, style=style, markup=False)


def _percent(rate: float) -> str:
    return f"{100 * rate:.2f} %"


# -- as plain data --------------------------------------------------------------------------------


def study_document(study: Study, bytes_per_token: int) -> dict[str, Any]:
    """Counts are tokens of prompts unless the name says otherwise; rates are 0.0 to 1.0."""
    trace, paths = study.trace, study.paths
    return {
        "trace": trace.name,
        "requests": len(trace),
        "sessions": trace.num_sessions,
        "sessions_inferred": trace.sessions_inferred,
        "span_s": float(trace.times[-1]),
        "prompt_tokens": trace.prompt_tokens,
        "output_tokens": int(trace.num_output.sum()),
        "longest_request": trace.longest,
        "distinct_tokens": paths.distinct_tokens,
        "reusable_tokens": paths.reusable_tokens,
        "ideal_hit_rate": study.ideal_rate,
        "bounds": [
            {"cache_tokens": size, "hit_tokens": hits, "hit_rate": study.bound_rate(size)}
            for size, hits in sorted(study.bounds.items())
        ],
        "runs": [_run(result) for result in study.direct],
        "scheduled": [_scheduled(result) for result in study.scheduled],
        "reusable_share_percentiles": study.reusable_shares().tolist(),
        "reuse_distance": {
            "tokens": study.reuse.edges[1:].tolist(),
            "reused_within": study.reuse.tokens.cumsum().tolist(),
        },
        "answers": {
            "bytes_per_token": bytes_per_token,
            "next_gigabyte": [
                {**asdict(gain), "tokens_per_gib": gain.tokens_per_gib}
                for gain in next_gigabyte(study, bytes_per_token)
            ],
            "page_loss": [asdict(loss) for loss in page_losses(study)],
            "best": [{**asdict(fit), "gap": fit.gap} for fit in best_fits(study)],
            "mean_gap": [
                {"label": label, "page_size": page_size, "gap": gap}
                for (label, page_size), gap in mean_gaps(study).items()
            ],
        },
    }


def _run(result: ReplayResult) -> dict[str, Any]:
    return {
        "label": result.spec.label,
        **asdict(result.spec),
        "hit_tokens": result.hit_tokens,
        "hit_rate": result.hit_rate,
        "too_large_requests": result.num_too_large,
        "evicted_tokens": result.evicted_tokens,
        "seconds": result.seconds,
    }


def _scheduled(result: ScheduledResult) -> dict[str, Any]:
    times = {f"ttft_p{at}_s": result.ttft_at(at) for at in (50, 95, 99)}
    times["ttft_mean_s"] = result.mean_ttft_s
    counts = ("computed_tokens", "needed_tokens", "repeated_tokens", "max_overtaken")
    return {
        **_run(result),
        **asdict(result.serving),
        **{name: None if math.isnan(value) else value for name, value in times.items()},
        **{name: getattr(result, name) for name in (*counts, "preemptions", "steps", "span_s")},
        "compute_once_ratio": result.compute_ratio,
    }
