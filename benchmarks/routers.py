"""Routers over replicas on the shared traces: tables, a picture, and all of it as JSON.

    python benchmarks/routers.py --traces DIR [--out docs] [--only NAMES] [--limit N]

Writes routers.json, img/routers.png and the tables in cluster.md between its markers. Caches are
real, times modelled; everything but the seconds is deterministic.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from harness.arguments import Names, parse
from harness.report import replace_block

from radixserve.replay import CacheSpec, Cluster, read_trace
from radixserve.replay.cluster_report import cluster_finding, replay_clusters

SIZES = {  # tokens of each replica: a few of the longest requests
    "mooncake_conversation": 260_000,
    "agentic_code": 520_000,
    "tau_airline": 20_000,
    "bbh_fewshot": 4_000,
}
ROUTERS = ("tree", "approximate", "session", "random", "round-robin")
NUMBERS = (4, 16, 64)
_LOADS = (1, 1.5, 2, 4, 8, 16, 64)  # ticks


def main() -> None:
    only = Names("trace", SIZES)
    options = {"traces": Path, "out": Path("docs"), "only": only, "limit": int}
    args = parse(__doc__, required=("traces",), **options)
    clusters = [Cluster(number, router) for number in NUMBERS for router in ROUTERS]
    results = args.out / "routers.json"
    for name in args.only:
        trace = read_trace(args.traces / f"{name}.jsonl.gz", limit=args.limit)
        rows = replay_clusters(trace, [CacheSpec(SIZES[name])], clusters)
        known = json.loads(results.read_text()) if results.exists() else {}
        known[name] = {"trace": name, "requests": len(trace), "replicas": rows}
        found = {one: known[one] for one in SIZES if one in known}
        results.write_text(json.dumps(found, indent=1) + "\n")
        save(found, args.out)


def save(found: dict[str, Any], out: Path) -> None:
    page = out / "cluster.md"
    tables = [cluster_finding(document).markdown() for document in found.values()]
    page.write_text(replace_block(page.read_text(), "routers", "\n\n".join(tables)))
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, len(found), figsize=(3.2 * len(found), 5.5), squeeze=False)
    for at, (name, document) in enumerate(found.items()):
        top, bottom = axes[:, at]
        for router in ROUTERS:
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
