"""Routers over replicas on the shared traces: tables, a picture, and all of it as JSON.

    python benchmarks/routers.py --traces DIR [--out docs] [--only NAMES] [--limit N]
        [--replicas 4,16,64] [--router NAMES] [--failures SECONDS] [--autoscaling SETTINGS]

Writes routers.json, img/routers.png and the tables in cluster.md between its markers; with options
of the second line it prints tables instead. Caches are real, times modelled; everything but the
seconds is deterministic.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from harness.arguments import Names, parse
from harness.report import replace_block
from rival_routers import ROUTERS, rival

from radixserve.replay import Autoscaling, CacheSpec, Failures, read_trace
from radixserve.replay.report import changes_finding, cluster_finding, replay_clusters

SIZES = {  # tokens of each replica: a few of the longest requests
    "mooncake_conversation": 260_000,
    "agentic_code": 520_000,
    "tau_airline": 20_000,
    "bbh_fewshot": 4_000,
}
DRAWN = ("tree", "approximate", "session", "random", "round-robin")
NUMBERS = (4, 16, 64)
_LOADS = (1, 1.5, 2, 4, 8, 16, 64)  # ticks


def main() -> None:
    options = {"traces": Path, "out": Path("docs"), "only": Names("trace", SIZES), "limit": int}
    args = parse(
        __doc__,
        required=("traces",),
        replicas=list(NUMBERS),
        router=Names("router", ROUTERS, DRAWN),
        failures=float,
        autoscaling=str,
        **options,
    )
    changes: dict[str, Any] = {}
    if args.failures is not None:
        changes["failures"] = Failures(mean_s=args.failures)
    if args.autoscaling is not None:
        changes["autoscaling"] = Autoscaling.read("--autoscaling", args.autoscaling)
    clusters = [
        rival(number, router, **changes) for number in args.replicas for router in args.router
    ]
    is_published = not changes and args.replicas == list(NUMBERS) and args.router == list(DRAWN)
    for name in args.only:
        trace = read_trace(args.traces / f"{name}.jsonl.gz", limit=args.limit)
        rows = replay_clusters(trace, [CacheSpec(SIZES[name])], clusters)
        document = {"trace": name, "requests": len(trace), "replicas": rows}
        if is_published:
            save(add_to_results(args.out / "routers.json", document), args.out)
            continue
        print(cluster_finding(document).markdown())
        if (table := changes_finding(document)) is not None:
            print(table.markdown())


def add_to_results(path: Path, document: dict[str, Any]) -> dict[str, Any]:
    """Put a trace's rows into the file of results; returns those of all traces."""
    results = json.loads(path.read_text()) if path.exists() else {}
    results[document["trace"]] = document
    results = {name: results[name] for name in SIZES if name in results}
    path.write_text(json.dumps(results, indent=1) + "\n")
    return results


def save(results: dict[str, Any], out: Path) -> None:
    page = out / "cluster.md"
    tables = [cluster_finding(document).markdown() for document in results.values()]
    page.write_text(replace_block(page.read_text(), "routers", "\n\n".join(tables)))
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        2, len(results), figsize=(3.2 * len(results), 5.5), squeeze=False
    )
    for column, (name, document) in enumerate(results.items()):
        top, bottom = axes[:, column]
        for router in DRAWN:
            rows = [row for row in document["replicas"] if row["router"] == router]
            numbers = [row["replicas"] for row in rows]
            ratios = [row["hit_rate"] / row["one_cache_hit_rate"] for row in rows]
            top.plot(numbers, ratios, "o-", label=router)
            bottom.plot(numbers, [row["max_load"] for row in rows], "o-", label=router)
        bottom.set(xlabel="replicas", yscale="log", ylim=(0.95, 70))
        top.set(title=name, ylim=(0, 1.1))
        bottom.set_yticks(_LOADS, [f"{load:g}" for load in _LOADS])
        for axis in (top, bottom):
            axis.set_xscale("log")
            axis.set_xticks(NUMBERS, [str(number) for number in NUMBERS])
            axis.minorticks_off()
            axis.grid(visible=True, alpha=0.3)
    axes[0, 0].set_ylabel("hit rate / that of one cache")
    axes[1, 0].set_ylabel("max / mean load")
    axes[0, 0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(out / "img" / "routers.png", dpi=110)


if __name__ == "__main__":
    main()
