"""What serving costs, engine beside engine: CPU seconds, time to first token, memory.

    python benchmarks/bench_engine.py [--model tiny|small|gemma3|qwen3-moe|gpt-oss]
        [--dtype float32|bfloat16] [--workload W1,W2] [--arrival burst|sequential|both]
        [--threads N] [--repeats N]
        [--only-engines radix,transformers] [--quick] [--profile] [--json] [--save DIR]

    W1 system prompt   W2 chat   W3 few-shot   W4 nothing shared   W5 branches

Models are shapes of harness/shapes.py with seeded random weights; prompts are token ids;
greedy, fixed lengths.
engine/base.py lists the engines, engine/floor.py says how the floor of each workload is found.
In a burst everything that may be sent is sent at once; sequential is one request after another.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import asdict
from pathlib import Path

from engine.base import DEFAULT, NAMES, Setup
from engine.floor import find_floor, measure_limits
from engine.serving import Case, published, serving
from engine.turns import run_engines
from harness.arguments import RUN, Names, parse
from harness.processes import Processes
from harness.report import Report
from harness.shapes import DTYPES, SHAPES, save_checkpoint
from harness.workloads import FULL, QUICK, make_workload

NOTES = (
    "Medians of the repeats. CPU s: of all threads of the process. first token: from the"
    " submission of each request. prefilled: prompt tokens computed, padding included. peak: most"
    " resident memory of the process while the case ran, with interpreter, libraries and weights."
    " x floor: CPU seconds over the floor. differ: requests whose first token / any token is not"
    " that of the first engine of the table, of those with the same prompt (a chat's prompt holds"
    " its answers). Each engine runs in a process of its own; they take turns."
)
ARRIVALS = ("burst", "sequential")
QUICK_WORKLOADS = ("W1", "W4")
SEED, WARM_UP_SEED = 0, 1


def measure(args: argparse.Namespace, folder: Path) -> None:
    shape, processes = SHAPES[args.model], Processes(args.threads)
    processes.call(save_checkpoint, shape, args.dtype, folder)
    limits = processes.call(measure_limits, shape, args.dtype, 2 if args.quick else 9)
    title = f"Engine, {args.model} model, {args.dtype}, CPU"
    packages = ("torch", "transformers")
    report = Report(title, NOTES, args, packages, [str(limits)], shape=str(shape))
    absent: dict[str, str] = {}
    cases = []
    is_published = not args.quick and args.threads == 1  # with such a run figures can be compared
    for name in args.workload or (QUICK_WORKLOADS if args.quick else FULL):
        size = (QUICK if args.quick else FULL)[name]
        both = (make_workload(name, size, shape.vocab, seed) for seed in (SEED, WARM_UP_SEED))
        workload, warm_up = both
        for arrival in ARRIVALS if args.arrival == "both" else (args.arrival,):
            is_burst = arrival == "burst"
            setup = Setup(folder, args.dtype, serving(workload, warm_up, is_burst=is_burst))
            engines = {name: name for name in args.only_engines if name not in absent}
            records, missing = run_engines(processes, engines, setup, [setup.work] * args.repeats)
            absent.update(missing)
            floor = find_floor(shape, args.dtype, limits, workload, burst=is_burst)
            figures = published(args.model, args.dtype, name, arrival) if is_published else {}
            cases.append(Case(workload, arrival, floor, records, figures))
            report.add(cases[-1].section(with_profile=args.profile))
    documents = [case.document() for case in cases]
    data = {"limits": asdict(limits), "absent": absent, "cases": documents}
    tail = [f"{name}: skipped, {reason}" for name, reason in absent.items()]
    report.finish(f"engine-cpu-{args.model}-{args.dtype}", data, tail=tail)


def main() -> None:
    args = parse(
        __doc__,
        model=tuple(SHAPES),
        dtype=DTYPES,
        workload=Names("workload", FULL, ()),
        arrival=("both", *ARRIVALS),
        only_engines=Names("engine", NAMES, DEFAULT),
        profile=False,
        **RUN,
    )
    with tempfile.TemporaryDirectory(prefix="bench-engine-") as checkpoint:
        measure(args, Path(checkpoint))


if __name__ == "__main__":
    main()
