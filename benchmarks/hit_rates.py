"""Hit rates of the shared traces by cache size and policy: tables, pictures, and all of it as JSON.

    python benchmarks/hit_rates.py --traces DIR [--out docs] [--only NAMES] [--limit N]

Writes hit-rates.json, img/hit-rates-NAME.png for every trace, and the tables in cache.md between
its markers. Then the first requests of each trace go through the scheduler. Everything
but the seconds is deterministic.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from harness.report import Table, replace_block

from radixserve import __version__
from radixserve.replay import CacheSpec, Serving, Study, read_trace, study_trace
from radixserve.replay.caches import DEFAULT_KV_BYTES
from radixserve.replay.pictures import draw
from radixserve.replay.report import format_tokens, study_document
from radixserve.replay.study import best_fits, next_gigabyte, page_losses

K, M = 10**3, 10**6
SIZES = {  # from where little fits to where nearly all does
    "mooncake_conversation": (M // 4, M, 4 * M, 8 * M, 32 * M),
    "agentic_code": (M, 2 * M, 4 * M, 8 * M, 16 * M),
    "tau_airline": (16 * K, 24 * K, 32 * K, 48 * K, 400 * K),
    "bbh_fewshot": (8 * K, 16 * K, 32 * K, 128 * K, M),
}
CACHES: tuple[dict[str, Any], ...] = (
    {"policy": "lru"},
    {"policy": "lru", "use_sessions": True},
    {"policy": "arc"},
    {"policy": "arc", "use_sessions": True},
    {"policy": "slru"},
    {"policy": "lfu"},
    {"policy": "fifo"},
    {"policy": "lru", "page_size": 16},
    {"policy": "lru", "page_size": 256},
    {"index": "hash", "page_size": 16},
    {"index": "hash", "page_size": 256},
)
# The lines that a picture has room for.
DRAWN = {("lru", 1), ("lru+sessions", 1), ("arc", 1), ("lfu", 1), ("hash", 16), ("hash", 256)}
NUM_SCHEDULED = 1_000  # requests of each trace
_LRU = ("lru", 1)  # label and page size


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--traces", type=Path, required=True, metavar="DIR")
    parser.add_argument("--out", type=Path, default=Path("docs"), metavar="DIR")
    parser.add_argument("--only", default=",".join(SIZES), metavar="NAMES")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N requests")
    args = parser.parse_args()
    (args.out / "img").mkdir(parents=True, exist_ok=True)
    for name in args.only.split(","):
        path = args.traces / f"{name}.jsonl.gz"
        if name not in SIZES or not path.exists():
            say(f"{name}: skipped, there is no {path}")
            continue
        start = time.perf_counter()
        study = measure(name, path, args.limit)
        orders = measure_orders(name, path, args.limit)
        seconds = time.perf_counter() - start
        say(f"{name}: {seconds:,.0f} s")
        save(study, orders, name, seconds, args.out)
    return 0


def measure(name: str, path: Path, limit: int | None) -> Study:
    trace = read_trace(path, limit=limit)
    say(f"{name}: {len(trace):,} requests, {trace.prompt_tokens:,} prompt tokens")
    specs = [CacheSpec(size, **cache) for cache in CACHES for size in SIZES[name]]
    return study_trace(trace, specs, watch=watch)


def measure_orders(name: str, path: Path, limit: int | None) -> Study:
    """The first requests through the scheduler: room for a part of them, and for all."""
    trace = read_trace(path, limit=min(NUM_SCHEDULED, limit or NUM_SCHEDULED))
    small, large = SIZES[name][1], SIZES[name][-1]
    specs = [CacheSpec(small), CacheSpec(large), CacheSpec(large, page_size=16, index="hash")]
    return study_trace(trace, specs, [Serving(order="lpm"), Serving(order="fcfs")], watch=watch)


def save(study: Study, orders: Study, name: str, seconds: float, out: Path) -> None:
    """Put one trace's results in place of its older ones."""
    results, page = out / "hit-rates.json", out / "cache.md"
    document = json.loads(results.read_text()) if results.exists() else {"traces": {}}
    document["setting"] = {
        "radixserve": __version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "machine": f"{platform.system()} {platform.machine()}",
    }
    document["traces"][name] = {
        **study_document(study, DEFAULT_KV_BYTES),
        "scheduled": study_document(orders, DEFAULT_KV_BYTES)["scheduled"],
        "scheduled_requests": len(orders.trace),
        "seconds": round(seconds, 1),
        "peak_memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }
    document["traces"] = {
        one: document["traces"][one] for one in SIZES if one in document["traces"]
    }
    results.write_text(json.dumps(document, indent=1) + "\n")
    few = [run for run in study.direct if (run.spec.label, run.spec.page_size) in DRAWN]
    draw([replace(study, direct=few)], out / "img" / f"hit-rates-{name}.png")
    if page.exists():
        text = replace_block(page.read_text(), f"hit-rates {name}", block(study))
        page.write_text(replace_block(text, "hit-rates orders", orders_block(document["traces"])))


def block(study: Study) -> str:
    """A table and its figures in words."""
    lines = [*_best(study), *_gigabyte(study), *_page_losses(study)]
    return "\n".join([_facts(study), "", _table(study), "", *lines])


def orders_block(traces: dict[str, Any]) -> str:
    """One table for all traces of hit-rates.json."""
    columns = (
        *("trace", "cache", "tokens", "order", "hit rate, %", "TTFT mean", "p99", "ratio"),
        "overtaken",
    )
    rows = [
        (
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
        for name, found in traces.items()
        for run in found["scheduled"]
    ]
    return Table(columns, rows).markdown()


def _facts(study: Study) -> str:
    trace, paths = study.trace, study.paths
    sessions = f", {trace.num_sessions:,} sessions" if trace.num_sessions else ""
    inferred = " (inferred)" if trace.sessions_inferred else ""
    return (
        f"{len(trace):,} requests{sessions}{inferred}, {trace.prompt_tokens / 1e6:,.1f} M prompt "
        f"tokens, {paths.distinct_tokens / 1e6:,.2f} M distinct ones; "
        f"**{100 * study.ideal_rate:.2f} %** are reusable at all."
    )


def _table(study: Study) -> str:
    sizes = sorted(study.bounds)
    rates: dict[tuple[str, int], dict[int, str]] = {}
    for run in study.direct:
        row = rates.setdefault((run.spec.label, run.spec.page_size), {})
        row[run.spec.cache_tokens] = f"{100 * run.hit_rate:.2f}"
    rows = [(_name(*kind), *(row.get(size, "") for size in sizes)) for kind, row in rates.items()]
    bounds = (f"**{100 * study.bound_rate(size):.2f}**" for size in sizes)
    rows.append(("**clairvoyant bound**", *bounds))
    return Table(("hit rate, %", *map(format_tokens, sizes)), rows).markdown()


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
    prompts = study.trace.prompt_tokens
    parts = [
        f"{100 * gain.tokens_per_gib / prompts:+.3f} points from"
        f" {format_tokens(gain.from_tokens)} to {format_tokens(gain.to_tokens)}"
        for gain in gains
    ]
    text = "- One more GiB (8,192 tokens of 128 KiB), LRU: " + ", ".join(parts) + "."
    return [text] if parts else []


def _page_losses(study: Study) -> list[str]:
    """In the largest cache only a page or block size still makes a difference."""
    size = max(study.bounds)
    parts = [
        f"{_name(loss.label, loss.page_size)} {100 * loss.rate:.2f} points"
        for loss in page_losses(study)
        if loss.cache_tokens == size
    ]
    text = f"- Lost to pages or blocks at {format_tokens(size)}: " + ", ".join(parts) + "."
    return [text] if parts else []


@contextlib.contextmanager
def watch(title: str, total: int) -> Iterator[Callable[[], object]]:
    """A line for each replay."""
    start = time.perf_counter()
    yield lambda: None
    say(f"  {title}: {total:,} requests in {time.perf_counter() - start:.1f} s")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
