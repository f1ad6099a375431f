"""Hit rates of the shared traces by cache size and policy: tables, pictures, and all of it as JSON.

    python benchmarks/hit_rates.py --traces DIR [--out docs] [--only NAMES] [--limit N]

Writes hit-rates.json, img/hit-rates-NAME.png for every trace, and the tables of `radixserve replay`
in cache.md between its markers. Then the first requests of each trace go through the scheduler.
Everything but the seconds is deterministic.
"""

from __future__ import annotations

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
from harness.arguments import Names, parse
from harness.report import replace_block

from radixserve import __version__
from radixserve.replay import (
    CacheSpec,
    Serving,
    Study,
    cross,
    read_trace,
    study_document,
    study_trace,
)
from radixserve.replay.caches import DEFAULT_KV_BYTES
from radixserve.replay.plots import draw
from radixserve.replay.report import facts, findings, scheduled_finding

K, M = 10**3, 10**6
SIZES = {  # from where little fits to where nearly all does
    "mooncake_conversation": (M // 4, M, 4 * M, 8 * M, 32 * M),
    "agentic_code": (M, 2 * M, 4 * M, 8 * M, 16 * M),
    "tau_airline": (16 * K, 24 * K, 32 * K, 48 * K, 400 * K),
    "bbh_fewshot": (8 * K, 16 * K, 32 * K, 128 * K, M),
}
# The lines that a picture has room for.
DRAWN = {("lru", 1), ("lru+sessions", 1), ("arc", 1), ("lfu", 1), ("hash", 16), ("hash", 256)}
NUM_SCHEDULED = 1_000  # requests of each trace


def main() -> None:
    only = Names("trace", SIZES)
    options = {"traces": Path, "out": Path("docs"), "only": only, "limit": int}
    args = parse(__doc__, required=("traces",), **options)
    (args.out / "img").mkdir(parents=True, exist_ok=True)
    for name in args.only:
        path = args.traces / f"{name}.jsonl.gz"
        if not path.exists():
            say(f"{name}: skipped, there is no {path}")
            continue
        start = time.perf_counter()
        study, orders = measure(name, path, args.limit)
        seconds = time.perf_counter() - start
        say(f"{name}: {seconds:,.0f} s")
        save(study, orders, name, seconds, args.out)


def measure(name: str, path: Path, limit: int | None) -> tuple[Study, Study]:
    """All requests one after another; the first ones through the scheduler, with room for a part of
    them and for all."""
    trace = read_trace(path, limit=limit)
    say(f"{name}: {len(trace):,} requests, {trace.prompt_tokens:,} prompt tokens")
    sizes = SIZES[name]
    specs = [
        *cross(sizes, ["lru", "arc"], [1], ["radix"], use_sessions=True),
        *cross(sizes, ["slru", "lfu", "fifo"], [1], ["radix"], use_sessions=False),
        *cross(sizes, ["lru"], [16, 256], ["radix"], use_sessions=False),
        *cross(sizes, ["lru"], [16, 256], ["hash"], use_sessions=False),
    ]
    study = study_trace(trace, specs, watch=watch)
    few = read_trace(path, limit=min(NUM_SCHEDULED, limit or NUM_SCHEDULED))
    large = sizes[-1]
    specs = [CacheSpec(sizes[1]), CacheSpec(large), CacheSpec(large, page_size=16, index="hash")]
    servings = [Serving(order="lpm"), Serving(order="fcfs")]
    return study, study_trace(few, specs, servings, watch=watch)


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
    traces = document["traces"] | {
        name: {
            **study_document(study, DEFAULT_KV_BYTES),
            "scheduled": study_document(orders, DEFAULT_KV_BYTES)["scheduled"],
            "scheduled_requests": len(orders.trace),
            "seconds": round(seconds, 1),
            "peak_memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        }
    }
    document["traces"] = {name: traces[name] for name in SIZES if name in traces}
    results.write_text(json.dumps(document, indent=1) + "\n")
    few = [run for run in study.direct if (run.spec.label, run.spec.page_size) in DRAWN]
    draw([replace(study, direct=few)], out / "img" / f"hit-rates-{name}.png")
    if page.exists():
        page.write_text(with_tables(page.read_text(), document["traces"], name))


def with_tables(page: str, traces: dict[str, Any], name: str) -> str:
    """The page with the tables of one trace, and those of the scheduler for all of them."""
    direct = {**traces[name], "scheduled": []}
    lines = "\n".join(f"- {line}" for line in facts(direct))
    tables = [finding.markdown() for finding in findings(direct)]
    page = replace_block(page, f"hit-rates {name}", "\n\n".join([lines, *tables]))
    orders = [(name, scheduled_finding(results)) for name, results in traces.items()]
    tables = [replace(table, title=name, lines=()).markdown() for name, table in orders]
    legend = "\n".join(orders[-1][1].lines)
    return replace_block(page, "hit-rates orders", "\n\n".join([*tables, legend]))


@contextlib.contextmanager
def watch(title: str, total: int) -> Iterator[Callable[[], object]]:
    """A line for each replay."""
    start = time.perf_counter()
    yield lambda: None
    say(f"  {title}: {total:,} requests in {time.perf_counter() - start:.1f} s")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
