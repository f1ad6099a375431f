"""A run on a GPU: its parts in their order, each in jobs of its own, and their report."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpu.jobs import METHODS, Job, Settings, run_jobs
from gpu.limits import H200, Ceilings
from gpu.report import NOTES, Part, Report, Row, load_parts
from harness.report import parse_names

END_S = 8.0  # kept before the deadline, to end the jobs and to write the report
ROOT = Path(__file__).resolve().parents[2]
KERNEL_CHOICE = ROOT / "kernels/radixserve_kernels/gpu/kernel_choice.json"
FACTS = Job("gpu.bench", "machine", 180.0)
BACKENDS = ("", "triton")  # the run's own, and Triton's beside FlashInfer's


@dataclass(frozen=True)
class Spec:
    """`run(bench, group)` of the module gpu.part_NAME does it."""

    name: str
    title: str
    limit_s: float  # of each group
    groups: tuple[str, ...] = ("",)
    width: int = 1  # groups at a time; what is timed has the card for itself


PARTS = (
    Spec("limits", "copy bandwidth and bf16 product of this card", 60),
    Spec("choose", "which attention kernels are fastest on this card", 240, ("decode", "extend")),
    Spec(
        "tests",
        "the tests that run on a CUDA device",
        400,
        ("kernels", "attention", "engine", "flashinfer", "triton", "torch"),
        width=6,
    ),
    Spec(
        "host",
        "CPU time of the host in a decode step, bf16, random weights",
        180,
        ("qwen3-0.6b", "llama-3.1-8b"),
    ),
    Spec("decode", "decode step, Llama-3-8B shapes, bf16, random weights", 180, BACKENDS),
    Spec("prefill", "time to first token, Llama-3-8B shapes, bf16, one request", 120, BACKENDS),
    Spec(
        "shared",
        "shared prefix: cascade against flat, Llama-3-8B shapes, bf16",
        240,
        ("attention", "step", "crossover"),
    ),
    Spec(
        "throughput",
        "throughput, Qwen3-0.6B shapes, bf16, cache on and off",
        240,
        ("lengths", "workloads"),
    ),
    Spec("sharegpt", "1,000 requests as long as ShareGPT's, Llama-3-8B shapes, bf16", 240),
    Spec("beam", "beam search, width 4, Llama-3-8B shapes, bf16", 300),
)


def run_part(
    spec: Spec,
    settings: Settings,
    report: Report,
    method: str,
    until: float = math.inf,
    patience: float = 1.0,
) -> Part:
    """One part; its rows are in the report as soon as they are told. patience: how many times its
    time limits it may take."""
    part = Part(spec.name, spec.title)
    report.parts[spec.name] = part
    report.sort([spec.name for spec in PARTS])
    rows: dict[str, list[Row]] = {group: [] for group in spec.groups}
    began = time.monotonic()

    def save() -> None:
        part.rows = [row for found in rows.values() for row in found]
        part.seconds = time.monotonic() - began
        report.save()

    def tell(group: str, kind: str, value: Any) -> None:
        if kind == "row":
            rows[group].append(value)
        elif kind == "note":
            part.notes.append(value)
        save()

    limit_s = spec.limit_s * patience
    jobs = [Job(f"gpu.part_{spec.name}", group, limit_s) for group in spec.groups]
    width = 1 if settings.is_dry else spec.width
    log = report.folder / "log.txt"
    ended = run_jobs(jobs, settings, log, tell, width=width, method=method, until=until)
    for group in spec.groups:
        end = ended[group]
        if end.trouble:
            part.troubles.append(end.trouble)
        elif end.skipped and (group or len(spec.groups) == 1):
            rows[group].append(Row(group or spec.name, section="skipped", skipped=end.skipped))
    part.is_done = True
    save()
    return part


def find_machine(settings: Settings, log: Path) -> tuple[dict[str, Any], str, str]:
    """Hardware and versions, why there are none, and the method of starting jobs that works."""
    facts: dict[str, Any] = {}
    why = ""
    for method in METHODS:
        ended = run_jobs(
            [FACTS], settings, log, lambda _, __, told: facts.update(told), method=method
        )
        end = ended[FACTS.group]
        if not end.trouble:
            return facts, end.skipped, method
        why = why or end.trouble
    return facts, why, METHODS[0]


def run_all(args: argparse.Namespace) -> int:
    """The exit code."""
    if args.kernel_cache is not None:  # of the jobs, which inherit it
        os.environ["TRITON_CACHE_DIR"] = str(args.kernel_cache.resolve() / "triton")
        os.environ["FLASHINFER_WORKSPACE_BASE"] = str(args.kernel_cache.resolve())
    until = time.monotonic() + (args.deadline or math.inf) - END_S
    args.out.mkdir(parents=True, exist_ok=True)
    log = args.out / "log.txt"
    log.write_bytes(b"")
    settings = Settings(args.dry_run, args.quick, args.backend, args.page_size)
    facts, why, method = find_machine(settings, log)
    if why:
        print(f"nothing can be run: {why}", file=sys.stderr)
        return 2
    chosen = {name: getattr(args, name) for name in ("backend", "page_size", "quick", "dry_run")}
    report = Report({**facts, **chosen}, args.out)
    report.parts = load_parts(args.out, report.settings, [spec.name for spec in PARTS])
    print("\n".join([*report.header(), NOTES, ""]), flush=True)
    wanted = [spec for spec in PARTS if spec.name in args.parts]
    if wanted[0].name != "limits" and find_ceilings(report) is None:
        wanted.insert(0, PARTS[0])
    for spec in wanted:
        is_assumed = False
        if spec.name != "limits" and settings.ceilings is None:
            found = find_ceilings(report)
            settings, is_assumed = replace(settings, ceilings=found or H200), found is None
        part = run_part(spec, settings, report, method, until, args.patience)
        if is_assumed:
            part.notes.append("no ceilings were measured: those of an H200 are assumed")
        print(part.table(), flush=True)
    write_choice(report)
    print(report.summary(), flush=True)
    report.save()
    return int(any(part.failures for part in report.parts.values()))


def write_choice(report: Report) -> None:
    """The table of kernels with what the part `choose` found for this card."""
    found: dict[str, Any] = {}
    for row in report.parts["choose"].rows if "choose" in report.parts else ():
        found |= row.details.get("choice", {})
    if found and "gpu" in report.settings:
        table = json.loads(KERNEL_CHOICE.read_text()) | {report.settings["gpu"]: found}
        text = json.dumps(table, indent=1) + "\n"
        (report.folder / KERNEL_CHOICE.name).write_text(text)


def find_ceilings(report: Report) -> Ceilings | None:
    """As the part `limits` told them."""
    part = report.parts.get("limits")
    for row in part.rows if part is not None else ():
        if "bandwidth" in row.details:
            return Ceilings(row.details["bandwidth"], row.details["flops"])
    return None


def parse_arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="correctness and speed on a GPU, see gpu/run.py")
    names = [spec.name for spec in PARTS]
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="for the results")
    parser.add_argument("--parts", default=",".join(names), metavar="A,B", help="default: all")
    parser.add_argument("--deadline", type=float, metavar="S", help="end after so many seconds")
    parser.add_argument(
        "--patience", type=float, default=1.0, metavar="F", help="times the parts' time limits"
    )
    parser.add_argument("--kernel-cache", type=Path, metavar="DIR", help="of compiled kernels")
    parser.add_argument("--quick", action="store_true", help="fewer cases and repeats")
    parser.add_argument("--dry-run", action="store_true", help="walk through on the CPU")
    parser.add_argument("--backend", choices=("auto", "flashinfer", "triton"), default="auto")
    parser.add_argument("--page-size", type=int, default=1, help="of the engines (default: 1)")
    args = parser.parse_args(given)
    args.parts = parse_names(parser, "part", args.parts, names)
    if args.deadline is not None and args.deadline <= END_S:
        parser.error(f"--deadline must be more than {END_S:g} seconds")
    if not args.patience > 0:
        parser.error("--patience must be more than 0")
    if not 1 <= args.page_size <= 64:
        parser.error("--page-size must be from 1 to 64")
    return args
