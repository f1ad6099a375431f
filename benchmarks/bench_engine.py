"""What serving costs, engine beside engine: CPU seconds, time to first token, memory.

    python benchmarks/bench_engine.py [--model tiny|small] [--dtype float32|bfloat16]
        [--workload W1,W2] [--arrival burst|sequential|both] [--threads N] [--repeats N]
        [--only-engines radix,transformers] [--quick] [--profile] [--json] [--save DIR]

    W1 system prompt   W2 chat   W3 few-shot   W4 nothing shared   W5 branches

Models are Llama shapes with seeded random weights; prompts are token ids; greedy, fixed lengths.
engine_contenders.py says who takes part, engine_limits.py how the floor of each workload is found.
In a burst everything that may be sent is sent at once; sequential is one request after another.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine_contenders import NAMES, Job
from engine_lanes import Absent, Lane, Lanes, Sample
from engine_limits import Limits, find_floor, measure_limits
from engine_models import DTYPES, SHAPES, Shape, save_checkpoint
from engine_report import Case, Row, Run, compare, describe_run, elsewhere, make_row
from engine_workloads import WORKLOADS, Workload, make_workload

ARRIVALS = ("burst", "sequential")
QUICK_WORKLOADS = ("W1", "W4")
SEED, WARM_UP_SEED = 0, 1


@dataclass(frozen=True)
class Bench:
    """Settings of a run and the means to measure."""

    lanes: Lanes
    shape: Shape
    dtype: str
    folder: Path
    engines: list[str]
    repeats: int
    is_quick: bool
    absent: dict[str, str]  # filled while cases run

    def workload(self, name: str, seed: int) -> Workload:
        return make_workload(name, self.shape.vocab, seed, is_quick=self.is_quick)


def run_case(
    bench: Bench, name: str, arrival: str, limits: Limits, settings: dict[str, object]
) -> Case:
    """Open everyone's lane, let them take turns, compare."""
    burst = arrival == "burst"
    workload = bench.workload(name, SEED)
    lanes = _open_lanes(bench, workload, burst=burst)
    samples: dict[str, list[Sample]] = {lane.name: [] for lane in lanes}
    for turn in range(bench.repeats):
        for lane in lanes if turn % 2 == 0 else reversed(lanes):
            samples[lane.name].append(lane.run())
    for lane in lanes:
        lane.close()
    floor = find_floor(bench.shape, bench.dtype, limits, workload, burst=burst)
    rows: list[Row] = []
    expected = samples[lanes[0].name][0].outputs if lanes else []
    for lane in lanes:
        mine = samples[lane.name]
        agreement = compare(workload, mine[0].outputs, expected)
        rows.append(make_row(lane.name, mine, lane.base_bytes, floor, agreement))
    what = f"{workload.what}, {workload.num_new} new each"
    return Case(name, arrival, what, floor, rows, elsewhere(settings, name, arrival))


def _open_lanes(bench: Bench, workload: Workload, *, burst: bool) -> list[Lane]:
    """Lanes of all engines that can run; the others are noted once."""
    job = Job(bench.folder, bench.dtype, workload)
    warm_up = bench.workload(workload.name, WARM_UP_SEED)
    lanes = []
    for name in bench.engines:
        if name in bench.absent:
            continue
        lane = bench.lanes.open(name, job, warm_up, burst=burst)
        if isinstance(lane, Absent):
            bench.absent[name] = lane.reason
        else:
            lanes.append(lane)
    return lanes


def measure(bench: Bench, args: argparse.Namespace, show: Callable[[str], None]) -> Run:
    """All cases; `show` gets each table when it is there."""
    settings = describe_run(
        bench.shape,
        dtype=bench.dtype,
        threads=args.threads,
        repeats=bench.repeats,
        quick=bench.is_quick,
    )
    num_samples = 2 if bench.is_quick else 9
    limits: Limits = bench.lanes.call(measure_limits, bench.shape, bench.dtype, num_samples)
    run = Run(settings, limits, bench.absent, [])
    show("\n".join(run.header()) + "\n")
    for name in args.workload:
        for arrival in args.arrival:
            case = run_case(bench, name, arrival, limits, settings)
            run.cases.append(case)
            show(case.table(profiles=args.profile))
    show("\n".join(run.skipped()))
    return run


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", choices=SHAPES, default="tiny")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--workload", help="such as W1,W3 (default: all)")
    parser.add_argument("--arrival", choices=(*ARRIVALS, "both"), default="both")
    parser.add_argument("--threads", type=int, default=1, help="for everyone (default: 1)")
    parser.add_argument("--repeats", type=int, help="default: 3, quick: 1")
    parser.add_argument("--only-engines", default=",".join(NAMES), metavar="NAMES")
    parser.add_argument("--quick", action="store_true", help="W1 and W4, shrunk")
    parser.add_argument("--profile", action="store_true", help="show where the steps' time went")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--save", type=Path, metavar="DIR", help="write engine-cpu-*.md and .json")
    args = parser.parse_args()
    default = QUICK_WORKLOADS if args.quick else WORKLOADS
    args.workload = args.workload.split(",") if args.workload else list(default)
    args.only_engines = args.only_engines.split(",")
    args.arrival = ARRIVALS if args.arrival == "both" else (args.arrival,)
    args.repeats = args.repeats or (1 if args.quick else 3)
    for what, given, known in (
        ("workload", args.workload, WORKLOADS),
        ("engine", args.only_engines, NAMES),
    ):
        unknown = sorted(set(given) - set(known))
        if unknown:
            parser.error(f"no such {what}: {', '.join(unknown)}; there are {', '.join(known)}")
    if min(args.threads, args.repeats) < 1:
        parser.error("--threads and --repeats must be at least 1")
    return args


def main() -> None:
    args = arguments()

    def show(text: str) -> None:
        if text.strip():
            print(text, file=sys.stderr if args.json else sys.stdout, flush=True)

    shape = SHAPES[args.model]
    with tempfile.TemporaryDirectory(prefix="bench-engine-") as folder:
        lanes = Lanes(args.threads)
        lanes.call(save_checkpoint, shape, args.dtype, Path(folder))
        bench = Bench(
            lanes=lanes,
            shape=shape,
            dtype=args.dtype,
            folder=Path(folder),
            engines=args.only_engines,
            repeats=args.repeats,
            is_quick=args.quick,
            absent={},
        )
        run = measure(bench, args, show)
    if args.json:
        print(run.document())
    if args.save is not None:
        run.save(args.save)


if __name__ == "__main__":
    main()
