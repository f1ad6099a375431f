"""A study for people: tables on a rich console, and the answers in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from radixserve.replay.answers import best_fits, mean_gaps, next_gigabyte, page_losses
from radixserve.replay.study import Study

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
    """Everything that the study found out."""
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
    table = _table("cache", "page", *map(format_tokens, sizes))
    kinds: dict[tuple[str, int], dict[int, str]] = {}
    for result in study.direct:
        row = kinds.setdefault((result.spec.label, result.spec.page_size), {})
        mark = "*" if result.num_too_large else ""
        row[result.spec.cache_tokens] = f"{100 * result.hit_rate:.2f}{mark}"
    for (label, page_size), row in kinds.items():
        table.add_row(label, str(page_size), *(row.get(size, "") for size in sizes))
    bounds = [f"{100 * study.bound_rate(size):.2f}" for size in sizes]
    table.add_row("clairvoyant bound", "1", *bounds, style="bold")
    _section(console, "hit rate, % of prompt tokens, by cache size in tokens", table)
    if any(result.num_too_large for result in study.direct):
        _say(console, "* some requests do not fit into this cache; they count as not reused")


def _print_scheduled(console: Console, study: Study) -> None:
    if not study.scheduled:
        return
    heads = ("hit %", "TTFT mean", "p95", "p99", "ratio", "overtaken", "preempted")
    table = _table("cache", "page", "tokens", "order", *heads)
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
    gains = next_gigabyte(study, bytes_per_token)
    spans = sorted({(gain.from_tokens, gain.to_tokens) for gain in gains})
    if not spans:
        return
    heads = [f"{format_tokens(low)} to {format_tokens(high)}" for low, high in spans]
    table = _table("cache", "page", *heads)
    kinds: dict[tuple[str, int], dict[tuple[int, int], str]] = {}
    for gain in gains:
        row = kinds.setdefault((gain.label, gain.page_size), {})
        row[gain.from_tokens, gain.to_tokens] = format_tokens(max(0.0, gain.tokens_per_gib))
    for (label, page_size), row in kinds.items():
        table.add_row(label, str(page_size), *(row.get(span, "") for span in spans))
    title = f"what the next GiB is worth: tokens more reused, at {bytes_per_token:,} bytes a token"
    _section(console, title, table)


def _print_losses(console: Console, study: Study) -> None:
    losses = page_losses(study)
    pages = {result.spec.page_size for result in study.direct}
    if not losses:
        if pages != {1}:
            _say(console, "what pages lose: add page size 1 to see it")
        return
    sizes = sorted({loss.cache_tokens for loss in losses})
    table = _table("cache", "page", *map(format_tokens, sizes))
    kinds: dict[tuple[str, int], dict[int, str]] = {}
    for loss in losses:
        row = kinds.setdefault((loss.label, loss.page_size), {})
        row[loss.cache_tokens] = f"{100 * loss.rate:+.2f}"
    for (label, page_size), row in kinds.items():
        table.add_row(label, str(page_size), *(row.get(size, "") for size in sizes))
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


def _percent(rate: float) -> str:
    return f"{100 * rate:.2f} %"


def _table(*heads: str) -> Table:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
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
