"""What hit_rates.py puts into a Markdown page: a table and its figures in words, for each trace."""

from __future__ import annotations

import re
from typing import Any

from radixserve.replay import Study
from radixserve.replay.caches import DEFAULT_KV_BYTES
from radixserve.replay.report import format_tokens
from radixserve.replay.study import Gain, best_fits, next_gigabyte, page_losses

_LRU = ("lru", 1)  # label and page size


def with_block(page: str, name: str, text: str) -> str:
    """`page` with `text` between the markers of that trace; unchanged when it has none."""
    begin, end = f"<!-- hit-rates {name} -->", "<!-- end -->"
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    return pattern.sub(lambda _: f"{begin}\n{text}\n{end}", page)


def block(study: Study) -> str:
    return "\n".join(
        [
            *_facts(study),
            "",
            *_table(study),
            "",
            *_best(study),
            *_gigabyte(study),
            *_blocks(study),
        ]
    )


def orders_block(traces: dict[str, Any]) -> str:
    """One table for all traces of hit-rates.json."""
    lines = [
        "| trace | cache | tokens | order | hit rate, % | TTFT mean | p99 | ratio | overtaken |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, found in traces.items():
        for run in found["scheduled"]:
            fields = (
                name,
                _name(run["label"], run["page_size"]),
                format_tokens(run["cache_tokens"]),
                run["order"],
                f"{100 * run['hit_rate']:.2f}",
                f"{run['ttft_mean_s']:.2f} s",
                f"{run['ttft_p99_s']:.2f} s",
                f"{run['compute_once_ratio']:.3f}",
                str(run["max_overtaken"]),
            )
            lines.append("| " + " | ".join(fields) + " |")
    return "\n".join(lines)


def _facts(study: Study) -> list[str]:
    trace, paths = study.trace, study.paths
    sessions = f", {trace.num_sessions:,} sessions" if trace.num_sessions else ""
    inferred = " (inferred)" if trace.sessions_inferred else ""
    return [
        f"{len(trace):,} requests{sessions}{inferred}, {trace.prompt_tokens / 1e6:,.1f} M prompt "
        f"tokens, {paths.distinct_tokens / 1e6:,.2f} M distinct ones; "
        f"**{100 * study.ideal_rate:.2f} %** are reusable at all."
    ]


def _table(study: Study) -> list[str]:
    sizes = sorted(study.bounds)
    kinds: dict[tuple[str, int], dict[int, float]] = {}
    for run in study.direct:
        row = kinds.setdefault((run.spec.label, run.spec.page_size), {})
        row[run.spec.cache_tokens] = 100 * run.hit_rate
    lines = [
        "| hit rate, % | " + " | ".join(format_tokens(size) for size in sizes) + " |",
        "|---" * (len(sizes) + 1) + "|",
    ]
    for (label, page_size), row in kinds.items():
        rates = " | ".join(f"{row[size]:.2f}" if size in row else "" for size in sizes)
        lines.append(f"| {_name(label, page_size)} | {rates} |")
    bounds = " | ".join(f"**{100 * study.bound_rate(size):.2f}**" for size in sizes)
    return [*lines, f"| **clairvoyant bound** | {bounds} |"]


def _name(label: str, page_size: int) -> str:
    name = label.replace("+", " + ").replace("lru", "LRU").replace("arc", "ARC")
    name = {"slru": "SLRU", "sLRU": "SLRU", "lfu": "LFU", "fifo": "FIFO"}.get(name, name)
    if label == "hash":
        return f"hash, blocks of {page_size}"
    return name if page_size == 1 else f"{name}, pages of {page_size}"


def _best(study: Study) -> list[str]:
    fits = best_fits(study)
    parts = [
        f"{_name(fit.label, fit.page_size)} at {format_tokens(fit.cache_tokens)} "
        f"({100 * fit.gap:.1f} points below the bound)"
        for fit in fits
    ]
    return ["- Best: " + ", ".join(parts) + "."]


def _gigabyte(study: Study) -> list[str]:
    gains = [g for g in next_gigabyte(study, DEFAULT_KV_BYTES) if (g.label, g.page_size) == _LRU]
    if not gains:
        return []
    prompts = study.trace.prompt_tokens
    parts = [f"{_slope(gain, prompts)} from {_span(gain)}" for gain in gains]
    return ["- One more GiB (8,192 tokens of 128 KiB), LRU: " + ", ".join(parts) + "."]


def _slope(gain: Gain, prompt_tokens: int) -> str:
    return f"{100 * gain.tokens_per_gib / prompt_tokens:+.3f} points"


def _span(gain: Gain) -> str:
    return f"{format_tokens(gain.from_tokens)} to {format_tokens(gain.to_tokens)}"


def _blocks(study: Study) -> list[str]:
    """Where the cache is roomy, a page or block size is all that makes a difference."""
    size = max(study.bounds)
    parts = [
        f"{_name(loss.label, loss.page_size)} {100 * loss.rate:.2f} points"
        for loss in page_losses(study)
        if loss.cache_tokens == size
    ]
    if not parts:
        return []
    return [f"- Lost to pages or blocks at {format_tokens(size)}: " + ", ".join(parts) + "."]
